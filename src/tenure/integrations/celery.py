"""Celery's beat: run any number of beat processes; only the leader sends.

    celery -A app beat -S tenure.integrations.celery:LeaderScheduler

Every beat stands for a role. The leader sends what is due; the others wait. The database, and not a file beside each
beat, keeps what was sent last. So the next leader continues where the previous one stopped:

* A run is named by the moment at which it is due. The beat claims the run under the fence, in a transaction, before it
  sends the message. No run is claimed twice, and none by a beat whose term is over. So a message is sent at most once.
  If the beat dies between claim and message, or the broker refuses the message, that run is left out.
* The next run is counted from the run that was claimed last, not from the election, so intervals keep their phase.
  Runs that were missed while no beat led are sent once, for the latest time at which they were due, as Celery does.
* An entry that was never sent is counted from the moment at which a leader first saw it.

A beat that cannot reach its database sends nothing: it cannot know whether another beat has sent the run.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any

from tenure import ConfigError, Election, JobRecord, Node, NotLeader, StoreUnavailable, TenureError, Term, WaitTimeout
from tenure.base.tracebacks import without_locals
from tenure.events import EndReason
from tenure.integrations import extra, job_name
from tenure.settings import check_lock_id

with extra("celery"):
    from celery import schedules
    from celery.beat import PersistentScheduler
    from celery.utils.time import maybe_make_aware

__all__ = ["LeaderScheduler", "LeadingMixin"]

log = logging.getLogger("tenure.services")

DEFAULT_ROLE = "beat"
SETTINGS = ("url", "direct_url", "password", "name", "namespace", "ttl", "takeover", "schema")
"""The settings of a node that Celery's configuration may have, as ``tenure_url`` and so on, besides ``tenure_role``
and ``tenure_lock_id``."""
WAIT_S = 1.0
"""How long one tick of a beat that does not lead waits to be elected."""
RETRY_S = 1.0
HAND_OVER_S = 5.0
KEPT = timedelta(days=7)
"""How long the database keeps the last run of an entry that is no longer in the schedule."""
AHEAD = timedelta(seconds=5)
"""A last run that is further in the future than this causes a warning: the clocks of two beats differ."""


class LeadingMixin:
    """Makes a scheduler class of Celery send only while this beat leads. List it before that class.

    ``class MyScheduler(LeadingMixin, TheirScheduler)`` finds the entries as ``TheirScheduler`` does, and reads from the
    database when each of them was last sent.
    """

    app: Any
    schedule: Any
    _node: Node | None = None
    _election: Election | None = None
    _term: Term | None = None
    _role = DEFAULT_ROLE
    _lock_id: int | None = None
    _closer: threading.Thread | None = None
    _said: str | None = None

    def setup_schedule(self) -> None:
        """Check the settings, and create the node. The first tick starts it."""
        self._role = self.app.conf.get("tenure_role") or DEFAULT_ROLE
        lock_id = self.app.conf.get("tenure_lock_id")
        self._lock_id = None if lock_id is None else check_lock_id(lock_id)
        self._node = Node(**self.node_settings(), start="wait")
        self._last: dict[str, datetime] = {}
        """When the last claimed run of each entry was due, or when its first interval began."""
        self._due: dict[str, datetime] = {}
        """The runs that this tick has found to be due."""
        super().setup_schedule()  # type: ignore[misc]

    @without_locals
    def node_settings(self) -> dict[str, Any]:
        """Return the settings of the node that are in Celery's configuration. The rest come from the environment."""
        conf = self.app.conf
        known = {f"tenure_{name}" for name in (*SETTINGS, "role", "lock_id")}
        unknown = sorted(name for name in conf if name.startswith("tenure_") and name not in known)
        if unknown:
            raise ConfigError(f"unknown settings {', '.join(unknown)}: use only {', '.join(sorted(known))}")
        return {name: conf.get(f"tenure_{name}") for name in SETTINGS if conf.get(f"tenure_{name}") is not None}

    # The beat ----------------------------------------------------------------------------------------------------

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send what is due if this beat leads; return the seconds until the next tick."""
        if self._election is None:
            assert self._node is not None
            self._election = self._node.start().election(self._role, lock_id=self._lock_id)
        try:
            term = self._election.wait(WAIT_S)
        except WaitTimeout:
            self._stand_by(self._election)
            return 0.0
        try:
            if term is not self._term:
                self._take_over(term)
            delay: float = super().tick(*args, **kwargs)  # type: ignore[misc]
        except NotLeader:
            self._begin_anew()
            return 0.0
        except StoreUnavailable as error:
            return self._wait_for_database(error)
        self._say("Acquired leadership, starting beat")
        return delay

    def _stand_by(self, election: Election) -> None:
        self._lost()
        # The database may be restarting, and the term may continue.
        in_doubt = self._term is not None
        if in_doubt or (self._said or "").startswith("Not leader"):
            return
        with contextlib.suppress(TenureError):
            leader = election.leader()
            self._say(f"Not leader, beat not started: {leader.name if leader else 'no beat'} leads")

    def _lost(self) -> None:
        """Log the end of a term that is over, and drop it."""
        reason = None if self._term is None else self._term.lost_reason
        if reason is not None:
            verb = "Gave up" if reason == EndReason.RESIGNED else "Lost"
            self._say(f"{verb} leadership ({reason}), stopping beat", reason=reason)
            self._term = None

    def _wait_for_database(self, error: Exception) -> float:
        self._begin_anew()
        self._say(f"Beat waits for its database: {error}", logging.WARNING, reason=str(error))
        return RETRY_S

    def _take_over(self, term: Term) -> None:
        """Begin a term: drop what this beat remembers of earlier ones."""
        self._lost()
        self._begin_anew()
        self._term = term
        self._last.clear()

    def _begin_anew(self) -> None:
        """Have the next tick check all entries: an entry that was taken off the heap may not have been put back."""
        self._heap = None
        self._due.clear()

    # When an entry is due ------------------------------------------------------------------------------------------

    def populate_heap(self, *args: Any, **kwargs: Any) -> None:
        """Set the last run of each entry, whichever beat sent it."""
        entries: Mapping[str, Any] = self.schedule
        new = [entry for name, entry in entries.items() if name not in self._last]
        if new:
            self._learn(new, entries)
        for name, entry in entries.items():
            self._remind(entry, self._last[name])
        super().populate_heap(*args, **kwargs)  # type: ignore[misc]

    def _learn(self, new: list[Any], entries: Mapping[str, Any]) -> None:
        """Read when the new entries were last sent; for those that were never sent, begin to count now."""
        assert self._election is not None
        assert self._term is not None
        with _database():
            records = {record.job: record for record in self._election.jobs()}
        jobs = {job_name(name) for name in entries}
        gone = [job for job, record in records.items() if job not in jobs and _is_old(record)]
        unseen = [entry for entry in new if _last_of(records.get(job_name(entry.name))) is None]
        anchors: dict[str, datetime] = {}
        if gone or unseen:
            with _database(), self._term.transaction() as transaction:
                for job in gone:
                    transaction.forget(job)
                for entry in unseen:
                    anchors[entry.name] = transaction.anchor(job_name(entry.name), self.first_seen(entry))
        self._last.update(anchors)
        for entry in new:
            record = records.get(job_name(entry.name))
            last = _last_of(record)
            if record is not None and last is not None:
                self.resume(entry, record)
                self._last[entry.name] = last
                ahead = last - _now()
                if ahead > AHEAD:
                    self._log(
                        f"the last run of {entry.name} is {ahead} ahead of this host's clock, and no run is sent "
                        "until then: compare the clocks of the beats",
                        logging.WARNING,
                    )

    def first_seen(self, entry: Any) -> datetime:  # noqa: ARG002
        """Return the moment from which an entry that was never sent is counted."""
        return _now()

    def resume(self, entry: Any, record: JobRecord) -> None:
        """Update an entry from its record in the database, in schedulers that keep more than the last run."""

    @staticmethod
    def _remind(entry: Any, last: datetime) -> None:
        entry.last_run_at = last.astimezone(_zone_of(entry.schedule))

    def is_due(self, entry: Any) -> Any:
        """Return whether an entry is due, and when it is due next; note which run is due."""
        last = self._last[entry.name]
        self._remind(entry, last)
        state = super().is_due(entry)  # type: ignore[misc]
        if not state[0]:
            return state
        at = _now()
        due = self._due[entry.name] = latest_due(entry.schedule, last, at)
        wait_s = (next_due(entry.schedule, due, at) - at).total_seconds()
        return schedules.schedstate(is_due=True, next=wait_s if wait_s > 0 else state[1])

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Claim the run, and send it if it was not claimed before."""
        term, due = self._term, self._due.pop(entry.name)
        assert term is not None
        with _database(), term.transaction() as transaction:
            claimed = transaction.claim(job_name(entry.name), due)
        self._last[entry.name] = due
        if not claimed:
            self._log(f"the run of {entry.name} that was due at {due} was claimed before: not sent")
            return
        if not term.valid:
            # This process was paused in between. The run may be very late, so it is left out.
            self._log(f"the run of {entry.name} that was due at {due} is left out: the term is over", logging.WARNING)
            return
        options = entry.options
        headers = {**(options.get("headers") or {}), "tenure_due": due.isoformat(), "tenure_token": term.token}
        entry.options = {**options, "headers": headers}
        try:
            super().apply_entry(entry, producer=producer)  # type: ignore[misc]
        finally:
            entry.options = options

    # The end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the node, which hands over. May be called twice: by the handler of a signal, and at the end."""
        try:
            super().close()  # type: ignore[misc]
        finally:
            if self._node is not None:
                # Close in a thread: a signal handler may have interrupted code that holds a lock which closing needs.
                # The process does not end before the thread has ended.
                if self._closer is None:
                    self._closer = threading.Thread(target=self._node.close, name="tenure-close")
                    self._closer.start()
                self._closer.join(HAND_OVER_S)

    @property
    def info(self) -> str:
        """The line in beat's banner."""
        return f"    . role -> {self.app.conf.get('tenure_role') or DEFAULT_ROLE} (one beat at a time sends)"

    def _say(self, text: str, level: int = logging.INFO, reason: str | None = None) -> None:
        """Log a text, unless it is the same as the last one."""
        if text != self._said:
            self._said = text
            self._log(text, level, reason)

    def _log(self, text: str, level: int = logging.INFO, reason: str | None = None) -> None:
        assert self._node is not None
        fields = {
            "tenure_node": self._node.name,
            "tenure_namespace": self._node.namespace,
            "tenure_role": self._role,
            "tenure_service": "beat",
            "tenure_token": None if self._term is None else self._term.token,
            "tenure_reason": reason,
        }
        log.log(level, "%s: %s", self._node.name, text, extra=fields)


class LeaderScheduler(LeadingMixin, PersistentScheduler):  # type: ignore[misc]
    """The entries of ``beat_schedule``, sent by one beat at a time. The database keeps what was sent last.

    There is no schedule file: ``--schedule`` has no effect.
    """

    def _open_schedule(self) -> Any:
        return _Memory()


class _Memory(dict[str, Any]):
    """A shelf in memory instead of a file, which several beats in one directory would compete for."""

    def sync(self) -> None:
        """Do nothing: there is no file."""

    def close(self) -> None:
        """Do nothing: there is no file."""


# --- due times ------------------------------------------------------------------------------------------------


def next_due(schedule: Any, after: datetime, now: datetime) -> datetime:
    """Return when a schedule of Celery is first due after ``after``."""
    zone, kept = _zone_of(schedule), schedule.nowfun
    # The answer must not depend on the time that the call takes.
    schedule.nowfun = lambda: now.astimezone(zone)
    try:
        due: datetime = now + schedule.remaining_estimate(after.astimezone(zone))
    except NotImplementedError:
        # A custom schedule may have is_due() only.
        return now
    finally:
        schedule.nowfun = kept
    if isinstance(schedule, (schedules.crontab, schedules.schedule)) or not due.microsecond:
        return due
    # Solar times vary by fractions of a second, depending on the moment from which they are computed.
    return due.replace(microsecond=0) + timedelta(seconds=1)


def latest_due(schedule: Any, last: datetime, now: datetime) -> datetime:
    """Return the latest moment up to ``now`` at which a schedule was due; if none since ``last``, its next due time.

    Runs that were missed before that moment are not made up for.
    """
    if isinstance(schedule, schedules.schedule):
        if schedule.run_every <= timedelta(0):
            return now
        missed = max(0, (now - last) // schedule.run_every - 1)
        due = next_due(schedule, last + missed * schedule.run_every, now)
        # The times are rounded, so one more run may be due.
        while due < (following := next_due(schedule, due, now)) <= now:
            due = following
        return due
    due = next_due(schedule, last, now)
    if due > now or next_due(schedule, due, now) > now:
        return due
    early, late = due, now
    while late - early > timedelta(milliseconds=1):
        middle = early + (late - early) / 2
        if next_due(schedule, middle, now) <= now:
            early = middle
        else:
            late = middle
    return next_due(schedule, early, now)


def _zone_of(schedule: Any) -> tzinfo | None:
    """Return the time zone in which a schedule counts days and hours."""
    zone: tzinfo | None = maybe_make_aware(schedule.now()).tzinfo
    return zone


# --- insides --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _database() -> Iterator[None]:
    """Turn the errors of a driver into StoreUnavailable."""
    try:
        yield
    except TenureError:
        raise
    except Exception as error:
        raise StoreUnavailable(f"{type(error).__name__}: {error}") from error


def _last_of(record: JobRecord | None) -> datetime | None:
    return None if record is None else record.claimed or record.anchor


def _is_old(record: JobRecord) -> bool:
    last = _last_of(record)
    return last is None or last < _now() - KEPT


def _now() -> datetime:
    return datetime.now(timezone.utc)
