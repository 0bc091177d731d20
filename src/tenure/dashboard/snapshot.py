"""What the pages show: read by one thread, at most once a second, however many people look.

The thread runs while somebody looks and ends when nobody has looked for a while. It is no member and holds no lock: it
reads, with the statements of a :class:`~tenure.Registry`, outside of transactions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tenure import Overview, Registry, StoreUnavailable, TenureError

EVERY_S = 1.0
"""How often the namespace is read."""
STALE_S = 3.0
"""How old a reading may be before the page says that it is old."""
UNWATCHED_S = 10.0
"""How long after the last request the thread ends."""
WANTED_S = 3.0
"""How long after the last request for a subject it is still read."""
SUBJECTS = 8
"""How many subjects (a role's history, the jobs) are read in one go, those that were read longest ago first."""
KEPT_SUBJECTS = 64
"""How many subjects are remembered."""
FIRST_ANSWER_S = 2.5
"""How long the first request waits for the database."""

Read = Callable[[Registry], Any]


@dataclass
class Subject:
    """What one kind of page needs beyond the overview. It is read only while somebody looks at it."""

    read: Read
    wanted: float
    value: Any = None
    taken: float = 0.0
    """When it was read, on the monotonic clock; 0 if it was not."""
    failure: TenureError | None = None


@dataclass(frozen=True)
class Snapshot:
    """What a page is made of."""

    number: int
    overview: Overview | None
    taken: float
    problem: str | None
    """Why there is nothing newer; None if the database answered."""

    @property
    def age(self) -> float:
        """Seconds since it was read."""
        return time.monotonic() - self.taken

    @property
    def stale(self) -> bool:
        """Whether the page has to say that what it shows may no longer be true."""
        return self.problem is not None or self.age > STALE_S

    @property
    def as_of(self) -> datetime | None:
        """When it was read, by the database's clock."""
        return None if self.overview is None else self.overview.as_of


class Reader:
    """Reads for all pages. Every method may be called from any thread."""

    def __init__(self, connect: Callable[[], Registry]) -> None:
        self.waiting = 0
        """How many requests wait for this reader."""
        self._connect = connect
        self._changed = threading.Condition()
        self._subjects: dict[Hashable, Subject] = {}
        self._latest = Snapshot(0, None, 0.0, None)
        self._looked = 0.0
        self._wanted_now = False
        self._next = 0.0
        self._before = 0
        """The number of the last snapshot of an earlier thread."""
        self._thread: threading.Thread | None = None

    @property
    def next_in(self) -> float:
        """In how many seconds the next reading is due."""
        return max(0.0, self._next - time.monotonic())

    def fresh(self) -> Snapshot | None:
        """Return the latest snapshot if nobody has to wait for a newer one; else None. Never blocks for long."""
        with self._changed:
            self._look()
            return self._latest if self._latest.number > self._before else None

    def snapshot(self) -> Snapshot:
        """Return the latest snapshot; wait for one if nobody has looked for a while."""
        with self._changed:
            self._look()
            self._changed.wait_for(lambda: self._latest.number > self._before, FIRST_ANSWER_S)
            return self._latest

    def known(self, key: Hashable, read: Read) -> Subject | None:
        """Return a subject if it was read before; from now on it is read with every snapshot. Never blocks for long."""
        with self._changed:
            self._look()
            subject = self._want(key, read)
            return subject if subject.taken else None

    def subject(self, key: Hashable, read: Read) -> Subject:
        """Return a subject; wait until it was read. Raises StoreUnavailable if the database does not answer."""
        with self._changed:
            self._look()
            subject = self._want(key, read)
            self._read_soon()
            self._changed.wait_for(lambda: subject.taken or self._latest.problem, FIRST_ANSWER_S)
            if not subject.taken:
                raise StoreUnavailable(self._latest.problem or "the database does not answer")
            return subject

    def read_again(self) -> Snapshot:
        """Read everything again now, because this process has changed something."""
        with self._changed:
            self._look()
            number, now = self._latest.number, time.monotonic()
            for subject in self._subjects.values():
                subject.taken = min(subject.taken, now - EVERY_S)
            self._next = 0.0
            self._read_soon()
            self._changed.wait_for(lambda: self._latest.number > number, FIRST_ANSWER_S)
            return self._latest

    def _look(self) -> None:
        """Note that somebody looks, and start the thread if it is not running. After a fork it is not, either."""
        self._looked = time.monotonic()
        if self._thread is None or not self._thread.is_alive():
            self._next, self._before = 0.0, self._latest.number
            self._thread = threading.Thread(target=self._run, name="tenure-dashboard", daemon=True)
            self._thread.start()

    def _want(self, key: Hashable, read: Read) -> Subject:
        now = time.monotonic()
        if key not in self._subjects and len(self._subjects) >= KEPT_SUBJECTS:
            del self._subjects[min(self._subjects, key=lambda old: self._subjects[old].wanted)]
        subject = self._subjects.setdefault(key, Subject(read, now))
        subject.wanted = now
        return subject

    def _read_soon(self) -> None:
        self._wanted_now = True
        self._changed.notify_all()

    # In the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        registry: Registry | None = None
        try:
            while True:
                registry = self._round(registry)
                with self._changed:
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._wanted_now, self.next_in)
                    self._wanted_now = False
                    if time.monotonic() - self._looked > UNWATCHED_S:
                        self._thread = None
                        return
        finally:
            if registry is not None:
                registry.close()

    def _round(self, registry: Registry | None) -> Registry | None:
        """Read what is due. Return the connection, or None if it is lost."""
        try:
            if registry is None:
                registry = self._connect()
                registry.connect()
            overview, taken = None, time.monotonic()
            if taken >= self._next:
                self._next = taken + EVERY_S
                overview = registry.overview()
            self._read_subjects(registry)
            if overview is not None:
                self._publish(overview, taken, None)
        except TenureError as error:
            self._next = time.monotonic() + EVERY_S
            self._publish(None, 0.0, str(error))
            if registry is not None:
                registry.close()
            return None
        return registry

    def _publish(self, overview: Overview | None, taken: float, problem: str | None) -> None:
        with self._changed:
            number, old = self._latest.number + 1, self._latest
            known = (old.overview, old.taken) if overview is None else (overview, taken)
            self._latest = Snapshot(number, *known, problem)
            self._changed.notify_all()

    def _read_subjects(self, registry: Registry) -> None:
        with self._changed:
            now = time.monotonic()
            wanted = [one for one in self._subjects.values() if now - one.wanted <= WANTED_S]
            due = [one for one in wanted if now - one.taken >= 0.9 * EVERY_S]
        for subject in sorted(due, key=lambda one: one.taken)[:SUBJECTS]:
            value = failure = None
            try:
                value = subject.read(registry)
            except StoreUnavailable:
                raise
            except TenureError as error:
                failure = error
            with self._changed:
                subject.value, subject.failure, subject.taken = value, failure, time.monotonic()
                self._changed.notify_all()
