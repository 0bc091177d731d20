"""The program of one process of an application that writes invoices while it leads.

`python -m tests.verification.guards.writer '{"name": "a", "framework": "django", "fenced": false}'`, the database in
TENURE_URL. Each unit of work looks once, at its start, whether its term is valid. Then it thinks. Then it writes. Every
term begins with a fenced invoice: on that path nobody forgot the fence.

What it does goes out on stdout, a JSON line each: `thinking`, `wrote` with the moment and the fate of each write of a
batch, and `over`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import tenure
from tests.support.node_process import die_with_parent
from tests.verification.guards.applications import application

ROLE = "billing"
PENDING = 50
"""How many units of work think at the same time."""
THINK_S = 0.3


def say(what: str, token: int, **more: Any) -> None:
    print(json.dumps({"what": what, "token": token, **more}), flush=True)


def attempt(write: Callable[[], None]) -> tuple[int, str]:
    """Write, and return when the write began and what became of it."""
    began = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    try:
        with tenure.translate_unfenced():
            write()
    except tenure.NotLeader:  # Fenced and Unfenced
        return began, "refused"
    except Exception as error:  # noqa: BLE001 - the drivers have errors of their own for a connection that is gone
        return began, f"failed: {type(error).__name__}: {error}"
    return began, "landed"


def main(options: dict[str, Any]) -> None:
    die_with_parent()
    app = application(options["framework"])

    def write(term: tenure.Term) -> tuple[int, str]:
        return attempt(lambda: app.fence(term) if options["fenced"] else app.forget(term.token))

    with tenure.Node(os.environ["TENURE_URL"], name=options["name"], ttl=options["ttl"]) as node:
        for term in node.terms(ROLE):
            with term:
                attempt(lambda term=term: app.fence(term))
                while term.valid:
                    units = [term for _ in range(PENDING) if term.valid]
                    say("thinking", term.token)
                    time.sleep(THINK_S)
                    fates = [write(unit) for unit in units]
                    say("wrote", term.token, fates=fates, leads=term.valid)
            say("over", term.token)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
