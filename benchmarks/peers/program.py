"""The process of one candidate: python -m benchmarks.peers.program MODULE URL NAME OPTIONS-AS-JSON.

It says what happens on its output, with the nanosecond of a clock that all processes share; and takes commands on its
input: `resign`; `check N`, which times N checks; and `calm`, so that looking at it all the time costs nothing at rest.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from typing import Any


def say(word: str, *more: object) -> None:
    print(word, time.clock_gettime_ns(time.CLOCK_BOOTTIME), *more, flush=True)


def obey(candidate: Any, resigned: threading.Event, calm: threading.Event) -> None:
    for line in sys.stdin:
        word, *arguments = line.split()
        if word == "resign":
            say("resigning")
            resigned.set()
            candidate.resign()
        elif word == "calm":
            calm.set()
        elif word == "check":
            count = int(arguments[0])
            began = time.perf_counter_ns()
            for _ in range(count):
                candidate.check()
            say("checked", (time.perf_counter_ns() - began) / count)


def main() -> None:
    module, url, name, options = sys.argv[1:]
    home = importlib.import_module(f"benchmarks.peers.{module}")
    candidate = home.Candidate(url, name, **json.loads(options))
    resigned, calm = threading.Event(), threading.Event()
    say("ready")
    threading.Thread(target=obey, args=(candidate, resigned, calm), daemon=True).start()
    candidate.wait()
    say("lead")
    asked = believed = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    while candidate.believes() and not resigned.is_set():
        believed = asked
        time.sleep(0.1 if calm.is_set() else 0.001)
        asked = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    print("lost", believed, flush=True)  # not now: when it last asked and the answer was yes
    threading.Event().wait()  # who has resigned, or lost, stands no more: the others are measured


if __name__ == "__main__":
    main()
