"""The process of one candidate: python -m benchmarks.peers.program MODULE URL NAME OPTIONS-AS-JSON.

It says what happens on its output, with the nanosecond of a clock that all processes share; and takes commands on its
input: `resign`, perhaps with the name of a successor; `check N`, which times N checks; `calm`, so that looking at it
all the time costs nothing at rest; and `trace`, on which a candidate that keeps a record says what is in it.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from typing import Any


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def say(word: str, at_ns: int, *more: object) -> None:
    sys.stdout.write(" ".join(map(str, (word, at_ns, *more))) + "\n")  # in one piece: two threads say something
    sys.stdout.flush()


def obey(candidate: Any, resigned: threading.Event, calm: threading.Event) -> None:
    for line in sys.stdin:
        word, *arguments = line.split()
        if word == "resign":
            say("resigning", now_ns())
            resigned.set()
            candidate.resign(*arguments)
        elif word == "calm":
            calm.set()
        elif word == "check":
            count = int(arguments[0])
            began = time.perf_counter_ns()
            for _ in range(count):
                candidate.check()
            say("checked", now_ns(), (time.perf_counter_ns() - began) / count)
        elif word == "trace":
            for began, ended, lane, what in candidate.spans():
                say("span", began, ended, lane, what)
            say("traced", now_ns())


def main() -> None:
    module, url, name, options = sys.argv[1:]
    home = importlib.import_module(f"benchmarks.peers.{module}")
    candidate = home.Candidate(url, name, **json.loads(options))
    resigned, calm = threading.Event(), threading.Event()
    say("ready", now_ns())
    threading.Thread(target=obey, args=(candidate, resigned, calm), daemon=True).start()
    candidate.wait()
    say("lead", now_ns())
    # At rest nobody asks, except where asking is what renews.
    calm_s = 0.1 if hasattr(candidate, "renews_when_asked") else 3600.0
    asked = believed = now_ns()
    while candidate.believes() and not resigned.is_set():
        believed = asked
        time.sleep(calm_s if calm.is_set() else 0.001)
        asked = now_ns()
    say("lost", believed)  # not now: when it last asked and the answer was yes
    threading.Event().wait()  # who has resigned, or lost, stands no more: the others are measured


if __name__ == "__main__":
    main()
