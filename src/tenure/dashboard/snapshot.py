"""What the pages show: read by one thread, at most once a second, however many requests arrive.

The thread runs while requests arrive, and ends when none has arrived for a while. It is not a member and holds no lock:
it reads, with the statements of a :class:`~tenure.Registry`, outside of transactions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from tenure import Overview, Registry, StoreUnavailable, TenureError
from tenure.dashboard.threads import Threads

log = logging.getLogger("tenure.dashboard")

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
    """What one kind of page needs beyond the overview. It is read only while requests for it arrive."""

    read: Read
    wanted: float
    value: Any = None
    taken: float = 0.0
    """When it was read, on the monotonic clock; 0 if it was not."""
    tried: float = 0.0
    """When it was last asked for, whether the database answered or not."""
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
        self.threads = Threads("the database does not answer, and many requests wait for it already")
        """In which requests wait for this reader."""
        self._connect = connect
        self._changed = threading.Condition()
        self._subjects: dict[Hashable, Subject] = {}
        self._latest = Snapshot(0, None, 0.0, None)
        self._looked = 0.0
        self._wanted_now = False
        self._next = 0.0
        self._before = 0
        """The number of the last snapshot of an earlier thread."""
        self._begun = self._ended = 0
        """How many rounds of reading have begun, and ended."""
        self._begun_at = 0.0
        self._thread: threading.Thread | None = None

    @property
    def next_in(self) -> float:
        """In how many seconds there may be something new.

        While a round is under way, that is soon; if it takes longer, the browser is told to wait for longer.
        """
        now = time.monotonic()
        if self._begun > self._ended:
            return min(now - self._begun_at, EVERY_S)
        return max(0.0, self._next - now)

    def fresh(self) -> Snapshot | None:
        """Return the latest snapshot if the request need not wait for a newer one; else None. Never blocks for long."""
        with self._changed:
            self._look()
            return self._latest if self._latest.number > self._before else None

    def snapshot(self) -> Snapshot:
        """Return the latest snapshot; wait for one if no request has arrived for a while."""
        with self._changed:
            self._look()
            self._changed.wait_for(lambda: self._latest.number > self._before, FIRST_ANSWER_S)
            return self._latest

    def known(self, key: Hashable, read: Read) -> Subject | None:
        """Return a subject if it was just read; from now on it is read with every snapshot. Never blocks for long."""
        with self._changed:
            self._look()
            subject = self._want(key, read)
            return subject if self._fits(subject) else None

    def subject(self, key: Hashable, read: Read) -> Subject:
        """Return a subject; wait until it was read.

        While the database does not answer, this is what was read before, as on every page then; if there is nothing,
        it raises StoreUnavailable.
        """
        with self._changed:
            self._look()
            subject = self._want(key, read)
            self._read_soon()
            self._changed.wait_for(lambda: self._fits(subject) or self._current_problem, FIRST_ANSWER_S)
            if not self._fits(subject):
                raise StoreUnavailable(self._current_problem or "the database does not answer")
            return subject

    @property
    def _current_problem(self) -> str | None:
        """Why the running thread could not read; not why an earlier one could not."""
        return self._latest.problem if self._latest.number > self._before else None

    def _fits(self, subject: Subject) -> bool:
        """Whether a subject may be shown with the latest snapshot: it is as new, or the page says that all is old."""
        says_so = self._latest.number > self._before and self._latest.stale
        return bool(subject.taken) and (says_so or time.monotonic() - subject.taken <= STALE_S)

    def read_again(self) -> Snapshot:
        """Read everything again now, because this process has changed something."""
        with self._changed:
            self._look()
            for subject in self._subjects.values():
                subject.tried = 0.0
            self._next = 0.0
            self._read_soon()
            # A round that has begun already may have read what was there before.
            later = self._begun + 1
            self._changed.wait_for(lambda: self._ended >= later, FIRST_ANSWER_S)
            return self._latest

    def _look(self) -> None:
        """Note a request, and start the thread if it is not running. A forked child has no such thread."""
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
                with self._changed:
                    self._begun += 1
                    self._begun_at = time.monotonic()
                    this = self._begun
                registry = self._round(registry)
                with self._changed:
                    self._ended = this
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._wanted_now, self.next_in)
                    self._wanted_now = False
                    if time.monotonic() - self._looked > UNWATCHED_S:
                        self._thread = None
                        return
        finally:
            _close(registry)

    def _round(self, registry: Registry | None) -> Registry | None:
        """Read what is due. Return the connection, or None if it is lost."""
        now = time.monotonic()
        if registry is None and now < self._next:
            # The dashboard tries the database once a second, however many requests arrive.
            return None
        try:
            if registry is None:
                registry = self._connect()
                registry.connect()
            if now >= self._next:
                self._next = now + EVERY_S
                self._publish(registry.overview(), now, None)
        except Exception as error:  # noqa: BLE001 - without this thread, every page would wait
            self._next = time.monotonic() + EVERY_S
            self._publish(None, 0.0, _problem(error))
            _close(registry)
            return None
        try:
            self._read_subjects(registry)
        except StoreUnavailable:
            # One subject may be at fault. If the database is, the next overview says so.
            _close(registry)
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
            wanted = [subject for subject in self._subjects.values() if now - subject.wanted <= WANTED_S]
            due = [subject for subject in wanted if now - subject.tried >= 0.9 * EVERY_S]
        for subject in sorted(due, key=lambda subject: subject.tried)[:SUBJECTS]:
            value = failure = None
            subject.tried = taken = time.monotonic()
            try:
                value = subject.read(registry)
            except StoreUnavailable:
                raise
            except TenureError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - it is one page's trouble
                failure = StoreUnavailable(_problem(error))
            with self._changed:
                subject.value, subject.failure, subject.taken = value, failure, taken
                # A page that was made of this overview and the subject before it is not sent again.
                self._latest = replace(self._latest, number=self._latest.number + 1)
                self._changed.notify_all()


def _problem(error: Exception) -> str:
    """Return what a page says about an error. One that is none of Tenure's is logged, as a defect is."""
    if isinstance(error, TenureError):
        return str(error)
    log.error("the dashboard could not read", exc_info=error)
    return f"reading failed with {type(error).__name__}: the log of this process says more"


def _close(registry: Registry | None) -> None:
    if registry is not None:
        registry.close()
