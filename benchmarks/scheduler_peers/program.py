"""The process of one peer: python -m benchmarks.scheduler_peers.program MODULE URL OPTIONS-AS-JSON."""

from __future__ import annotations

import importlib
import json
import sys

from tests.support.node_process import die_with_parent


def main() -> None:
    module, url, options = sys.argv[1:]
    die_with_parent()
    importlib.import_module(f"benchmarks.scheduler_peers.{module}").run(url, **json.loads(options))


if __name__ == "__main__":
    main()
