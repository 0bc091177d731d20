"""Commits a bare insert every 25 ms by each of the URLs that it is told, and writes down each commit.

`python -m tests.verification.failovers.prober RECORD URL…`: the longest time between two commits is the database's own
gap. One thread for each URL, so that a server that does not answer keeps nobody from another.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Any

import psycopg

from tests.support.history import Recorder
from tests.support.node_process import die_with_parent

EVERY_S = 0.025


def probe(recorder: Recorder, url: str) -> None:
    """Insert for ever, over connections that are given up after 2 s of silence."""
    connection: psycopg.Connection[Any] | None = None
    while True:
        began = time.monotonic()
        try:
            if connection is None:
                connection = psycopg.connect(url, autocommit=True)
            connection.execute("insert into probes default values")
            recorder.note("probe")
        except psycopg.Error:
            if connection is not None and connection.broken:
                with contextlib.suppress(psycopg.Error):
                    connection.close()
                connection = None
        time.sleep(max(0.0, began + EVERY_S - time.monotonic()))


def main() -> None:
    die_with_parent()
    record, *urls = sys.argv[1:]
    recorder = Recorder(record, "prober")
    threads = [threading.Thread(target=probe, args=(recorder, url)) for url in urls]
    for thread in threads:
        thread.start()


if __name__ == "__main__":
    main()
