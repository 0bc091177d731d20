"""The hosts of a URL, and in which order they are dialled.

The host that answered last is dialled first. While a host is silent, the next one is dialled beside it, so that a dead
host costs a moment instead of its time limit. The first host that a connector accepts is used. A connector refuses
servers that take no writes.

A host is kept as it is in the URL: each attempt resolves its name anew, because a managed failover may move it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tenure.base import clock
from tenure.base.tracebacks import without_locals
from tenure.core import timing
from tenure.errors import StoreUnavailable

Host = dict[str, Any]
"""The arguments of the driver that name one host."""
Dial = Callable[[Host], Any]
"""Opens a connection to a host; returns it, or the reason why there is none."""

HEAD_START_S = 0.25
"""How long a host may be silent before the next one is dialled beside it."""
LONGEST_S = 2.0
ABORTED = -1


def time_limit_s(ttl: float) -> float:
    """Return how long each of several hosts has to answer: as long as a renewal has, and at most 2 s."""
    return min(LONGEST_S, timing.renewal_interval(ttl))


class Hosts:
    """The hosts of one URL."""

    def __init__(self, hosts: Sequence[Host], names: Sequence[str], limit_s: float) -> None:
        """``names`` are for messages. ``limit_s`` is how long each host has to answer, if there are several."""
        self._hosts = list(hosts)
        self._names = list(names)
        self._limit_s = limit_s
        self._answered = 0
        """The position of the host that answered last."""
        self._races: set[_Race] = set()

    def __len__(self) -> int:
        return len(self._hosts)

    def named(self) -> list[tuple[str, Host]]:
        """Return each host and its name, as the URL lists them."""
        return list(zip(self._names, self._hosts, strict=True))

    @without_locals
    def dial(self, dial: Dial) -> Any:
        """Return the first connection, or the reasons why there is none."""
        if len(self) == 1:
            return dial(self._hosts[0])
        first = self._answered
        order = [first, *(number for number in range(len(self)) if number != first)]
        with contextlib.closing(_Race(dial, self._limit_s)) as race:
            self._races.add(race)
            try:
                won, outcome = race.run([(number, self._hosts[number]) for number in order])
            finally:
                self._races.discard(race)
        if won is None:
            return "; ".join(f"{self._names[number]}: {outcome[number]}" for number in range(len(self)))
        self._answered = won
        return outcome

    def abort(self) -> None:
        """Make every call of :meth:`dial` that waits for one of several hosts fail at once, from any thread."""
        for race in list(self._races):
            race.abort()


class _Race:
    """One round of attempts at several hosts, each in a thread: no driver dials several hosts at once."""

    def __init__(self, dial: Dial, limit_s: float) -> None:
        self._dial = dial
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._over = False
        self._outcomes: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def run(self, order: list[tuple[int, Host]]) -> tuple[int | None, Any]:
        """Return the number of the host that won, and the connection; or None, and the reason of each host."""
        reasons: dict[int, str] = {number: f"no answer within {self._limit_s:g} s" for number, _ in order}
        refusals: list[BaseException] = []
        waiting, silent = list(order), set(reasons)
        until = clock.now()
        while silent:
            if waiting:
                threading.Thread(target=self._attempt, args=waiting.pop(0), name="tenure-dial", daemon=True).start()
                until = clock.now() + (HEAD_START_S if waiting else self._limit_s)
            try:
                number, outcome = self._outcomes.get(timeout=max(0.0, until - clock.now()))
            except queue.Empty:
                if waiting:
                    continue
                break
            if number == ABORTED:
                raise outcome
            if isinstance(outcome, BaseException):
                refusals.append(outcome)
            elif isinstance(outcome, str):
                reasons[number] = outcome
            else:
                return number, outcome
            silent.discard(number)
        # Another host might have been the right one, so a refusal counts only if no host has won.
        for refusal in refusals:
            raise refusal
        return None, reasons

    def _attempt(self, number: int, host: Host) -> None:
        try:
            outcome = self._dial(host)
        except StoreUnavailable as error:
            outcome = str(error)
        except BaseException as error:  # noqa: BLE001 - run() raises it
            outcome = error
        with self._lock:
            if not self._over:
                self._outcomes.put((number, outcome))
                return
        _discard(outcome)

    def abort(self) -> None:
        """Make :meth:`run` fail."""
        self._outcomes.put((ABORTED, StoreUnavailable("the connection is not needed any more")))

    def close(self) -> None:
        """Close the connections that came too late, and those that are still to come."""
        with self._lock:
            self._over = True
        with contextlib.suppress(queue.Empty):
            while True:
                _discard(self._outcomes.get_nowait()[1])


def _discard(outcome: Any) -> None:
    if not isinstance(outcome, (str, BaseException)):
        with contextlib.suppress(Exception):
            outcome.close()
