"""A namespace as its tables show it, for people and programs that are not members of it: read and administer it."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tenure.base.moments import microseconds, moment
from tenure.base.tracebacks import without_locals
from tenure.core import messages, timing
from tenure.databases import guards
from tenure.databases.backend import LOOK_TIMEOUT_S, backend_for
from tenure.databases.connecting import time_limit
from tenure.errors import ConfigError, NodeClosed, NotLeader, StoreUnavailable, WaitTimeout
from tenure.settings import Password, check_limit, check_name, check_promotion, check_ttl, node_settings, some_names
from tenure.store import forgetting, job_statements, migrations, namespaces, records, statements
from tenure.store.namespaces import WaitInfo
from tenure.store.records import (
    Candidate,
    GuardedTable,
    JobRecord,
    LeaderInfo,
    MemberInfo,
    Overview,
    RoleInfo,
    RunRecord,
    TermRecord,
)
from tenure.store.session import Failed, Gone, Step

if TYPE_CHECKING:
    from typing_extensions import Self

LOOK_EVERY_S = 0.02
FIRST_LOOKS_S = (0.002, 0.004, 0.008)
"""The pauses before the first looks for the outcome of a hand-over, which mostly takes milliseconds."""
LOCK_NOT_AVAILABLE = "55P03"
LOCK_WAITED_IN_VAIN = ((1205,), (1213,))
"""MariaDB's errors for a lock that was not free in time, and for a deadlock that it ended."""
WAITS_FOR_A_REPLICA = (
    ": if the server is alive, the commit waits for a synchronous replica, and the change may still take effect; "
    "check with `tenure doctor`"
)
OVERDUE_S = 60.0
"""How long after its due time a run that has not begun is overdue."""


class _Busy(StoreUnavailable):
    """Another transaction holds a lock on the row."""


class Registry:
    """Reads and administers a namespace through its tables. Use it as a context manager.

    The settings are those of a node. Only :meth:`create` creates anything.
    """

    @without_locals
    def __init__(
        self,
        url: str | None = None,
        *,
        namespace: str | None = None,
        schema: str = "tenure",
        password: Password | None = None,
    ) -> None:
        """Check the settings; do not connect yet."""
        self._settings = node_settings(url, password=password, name="registry", namespace=namespace, schema=schema)
        self._backend = backend_for(self._settings)
        self._backend.joins = False
        self._session: Any = None

    @property
    def namespace(self) -> str:
        """The namespace that this registry is for."""
        return self._settings.namespace

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        """Connect to existing tables; connect again if the connection was lost."""
        self.close()
        self._session = self._backend.open_session()
        try:
            with self._asking():
                migrations.require(self.session)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Disconnect."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def create(
        self, max_ttl: float | None = None, waits: Callable[[float], object] = time.sleep, promotion: str | None = None
    ) -> int:
        """Create the tables, or bring them up to date; set the namespace's largest TTL. Return the tables' version.

        ``promotion`` says whether a promoted replica has every commit that was acknowledged: ``"loses-nothing"`` or
        ``"may-lose"``.

        If the namespace is new on a server that was promoted, this waits so that the first node need not (R15):
        ``waits`` is called with a number of seconds, and must return after that time.
        """
        largest = None if max_ttl is None else check_ttl("max_ttl", max_ttl)
        word = None if promotion is None else check_promotion(promotion, self._settings.database)
        store, self._session, opened = self._backend.open_control()
        if opened.confirmed.made_on_a_promoted_server:
            self.close()
            waits(timing.silence(opened.confirmed.longest_lease))
            store, self._session, again = self._backend.open_control()
            if again.confirmed.made_on_a_promoted_server and again.server.line == opened.server.line:
                with self._asking():
                    store.perform(messages.Confirm(again.confirmed, again.server))
        try:
            if largest is not None:
                self._limit_ttl(largest)
            if word is not None:
                with self._asking(WAITS_FOR_A_REPLICA if opened.confirmed.replicated else ""):
                    namespaces.set_promotion(self, word)
            with self._asking():
                store.release()
                return migrations.require(self.session)
        finally:
            self.close()

    def _limit_ttl(self, largest: float) -> None:
        longer = [f"{member.name!r} ({member.ttl:g})" for member in self.members() if member.ttl > largest]
        if longer:
            raise ConfigError(
                f"max_ttl={largest:g} is below the TTL of living members: stop them first ({', '.join(longer)})"
            )
        with self._asking():
            namespaces.limit_ttl(self, largest)

    def namespaces(self) -> list[str]:
        """Return the names of all namespaces that these tables hold."""
        return [name for (name,) in self._read(statements.NAMESPACES)]

    def overview(self) -> Overview:
        """Return every role and every living member, read in one round trip."""
        with self._asking():
            return records.overview(self)

    def roles(self) -> list[RoleInfo]:
        """Return every role of the namespace, sorted by name."""
        return self.overview().roles

    def role(self, role: str) -> RoleInfo:
        """Return a role; raise ConfigError with the names that are most like it if the namespace has no such role."""
        found = {info.role: info for info in self.roles()}
        if (info := found.get(check_name("role", role))) is not None:
            return info
        import difflib  # noqa: PLC0415 - only needed here

        near = difflib.get_close_matches(role, found)
        known = f"known roles: {some_names(found)}" if found else "it has no roles"
        if near:
            known = ("the nearest name is " if len(near) == 1 else "the nearest names are ") + some_names(near)
        raise ConfigError(f"namespace {self.namespace!r} has no role {role!r}; {known}")

    def members(self) -> list[MemberInfo]:
        """Return the living members, in the order in which they joined."""
        return self.overview().members

    def candidates(self, role: str) -> list[Candidate]:
        """Return the living members that stand for a role, in the order in which they joined."""
        with self._asking():
            return records.candidates(self, check_name("role", role))

    def waits(self) -> list[WaitInfo]:
        """Return what the nodes are waiting for at this moment, each with its reason and its end."""
        with self._asking():
            return namespaces.waits(self)

    def history(self, role: str, limit: int = 20) -> list[TermRecord]:
        """Return the last terms of a role, newest first."""
        with self._asking():
            return records.history(self, check_name("role", role), check_limit(limit))

    def jobs(self, role: str | None = None) -> list[JobRecord]:
        """Return the jobs of a role, or of all roles, sorted by role and name, each with its next and its last run."""
        with self._asking():
            found = records.all_jobs(self) if role is None else records.jobs(self, check_name("role", role))
            last = records.last_runs(self) if found else {}
        return [_with_next(replace(job, last=last.get((job.role, job.job)))) for job in found]

    def runs(self, job: str | None = None, limit: int = 20, *, role: str | None = None) -> list[RunRecord]:
        """Return the last runs of a job, or of all jobs, newest first, by their due times."""
        limit = check_limit(limit)
        if job is None:
            with self._asking():
                return records.latest_runs(self, limit)
        where, job = self._find_job(job, role, scheduled=False)
        with self._asking():
            return records.runs(self, where, job, limit)

    def trigger(self, job: str, *, role: str | None = None) -> bool:
        """Ask the leader's schedule to run a job now, beside its due times. Raises ConfigError for an unknown job.

        False if that was asked for before, and the run has not begun yet: then there is one run.
        """
        where, job = self._find_job(job, role)
        with self._asking():
            self.session.notify(self.namespace, "vacant registry")
            steps = self._job_steps(where, job, job_statements.REQUEST_RUN, job_statements.CALL)
            asked, _ = self.session.run(*steps)
            return bool(asked.count)

    def pause(self, job: str, reason: str = "", *, role: str | None = None) -> None:
        """Let no run of a job begin until :meth:`resume`. Its due times are recorded as skipped."""
        where, job = self._find_job(job, role)
        text = check_name("reason", reason) if reason else None
        with self._asking():
            self.session.run(*self._job_steps(where, job, job_statements.PAUSE, reason=text))

    def resume(self, job: str, *, role: str | None = None) -> None:
        """Let a job that was paused run again, from its next due time on."""
        where, job = self._find_job(job, role)
        with self._asking():
            self.session.notify(self.namespace, "vacant registry")
            self.session.run(*self._job_steps(where, job, job_statements.RESUME_JOB, job_statements.CALL))

    def reset(self, job: str, *, role: str | None = None) -> bool:
        """Let a job continue from now whose last run is in the future; False if it is not.

        That happens if the database's clock was ahead and was set right.
        """
        where, job = self._find_job(job, role, scheduled=False)
        with self._asking():
            self.session.notify(self.namespace, "vacant registry")
            steps = self._job_steps(where, job, job_statements.RESET_MARKS, job_statements.CALL)
            changed, _ = self.session.run(*steps)
            return bool(changed.count)

    def _find_job(self, job: str, role: str | None, *, scheduled: bool = True) -> tuple[str, str]:
        """Return the role that has the job, and the job's name; raise ConfigError if there is none, or more than one.

        ``scheduled`` means that it must be a job of a schedule, and not one whose runs are claimed by hand.
        """
        job = check_name("job", job)
        found = self.jobs(role)
        known = [record for record in found if record.spec is not None or not scheduled]
        roles = [record.role for record in known if record.job == job]
        if len(roles) == 1:
            return roles[0], job
        if roles:
            raise ConfigError(f"job {job!r} exists in the roles {', '.join(map(repr, roles))}: say which one")
        of_role = "" if role is None else f" of role {role!r}"
        if any(record.job == job for record in found):
            raise ConfigError(f"job {job!r}{of_role} is in no schedule: its runs are claimed by hand")
        if role is not None:
            self.role(role)
        names = some_names(record.job for record in known) if known else "none"
        raise ConfigError(f"no schedule{of_role} has a job {job!r}; known jobs: {names}")

    def _job_steps(self, role: str, job: str, *texts: str, **parameters: Any) -> list[Step]:
        return [Step(text, {"namespace": self.namespace, "role": role, "job": job, **parameters}) for text in texts]

    def resign(
        self, role: str, to: str | None = None, timeout: float = 2 * timing.DEFAULT_TTL_S, *, token: int | None = None
    ) -> LeaderInfo | None:
        """Ask the leader of ``role`` to hand over, to the candidate ``to`` if one is named; wait until it has.

        With ``token``, only the term that has this token is ended. Return the new leader; None if there is no other
        candidate. Raises NotLeader if the role has no leader, or if its term is not the one that ``token`` says,
        ConfigError if ``to`` is not a candidate, and WaitTimeout if the leader does not answer, or if a transaction
        under its term keeps the request from being written.
        """
        role = check_name("role", role)
        deadline = time.monotonic() + timeout
        before = self._leader(role)
        if before is None:
            raise NotLeader(f"role {role!r} has no leader that could resign")
        if token not in (None, before.token):
            raise NotLeader(
                f"nothing was done: the leader of role {role!r} has changed meanwhile, and {before.name!r} leads, "
                f"token {before.token}"
            )
        with self._asking():
            others = [other for other in records.candidates(self, role) if other.member_id != before.member_id]
        member_id = None if to is None else records.candidate_id(role, check_name("to", to), others, before)
        self._request(role, before, member_id, deadline)
        pauses = itertools.chain(FIRST_LOOKS_S, itertools.repeat(LOOK_EVERY_S))
        while (after := self._leader(role)) is not None and after.token == before.token:
            if time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"role {role!r}: {before.name!r} was asked to resign and has not done so within {timeout:g} s; the "
                    "request remains; if the leader is paused, its lease will run out"
                )
            time.sleep(next(pauses))
        while after is None and others and time.monotonic() < deadline:
            time.sleep(next(pauses))
            after = self._leader(role)
        return after

    def _leader(self, role: str) -> LeaderInfo | None:
        with self._asking():
            return records.leader(self, role)

    def _request(self, role: str, before: LeaderInfo, member_id: str | None, deadline: float) -> None:
        """Write the request; try again while a fenced transaction locks the role's row."""
        request = {"namespace": self.namespace, "role": role, "token": before.token, "to": member_id}
        while True:
            try:
                with self._asking():
                    self.session.notify(self.namespace, f"vacant registry>{before.member_id}")
                    self.session.run(Step(statements.REQUEST, request))
            except _Busy:
                if time.monotonic() >= deadline:
                    raise WaitTimeout(
                        f"role {role!r}: {before.name!r} could not be asked to resign: a transaction under its term "
                        "keeps the role locked and is still open; try again, or use a longer timeout"
                    ) from None
            else:
                return

    def guard(self, table: str, role: str) -> None:
        """Guard one of your tables: only the leader of ``role`` can write to it then. See :func:`tenure.guard_sql`.

        Raises ConfigError if the table cannot be guarded.
        """
        with self._asking():
            guards.guard(self.session, self.namespace, table, role)

    def unguard(self, table: str) -> None:
        """Remove the guard of a table. Raises ConfigError if the table is not guarded."""
        with self._asking():
            guards.unguard(self.session, table)

    def guarded_tables(self) -> list[GuardedTable]:
        """Return the tables that are guarded by a role, in all namespaces, each with the ways around its guard."""
        with self._asking():
            return guards.guarded_tables(self.session)

    def forget(self) -> None:
        """Delete everything about the namespace. Tokens begin again at 1: do it only if nothing uses the old ones.

        Raises ConfigError if the namespace has living members, or if its roles guard tables.
        """
        known = self.namespaces()
        if self.namespace not in known:
            names = ", ".join(map(repr, known)) or "none"
            raise ConfigError(f"namespace {self.namespace!r} does not exist; existing namespaces: {names}")
        self._refuse_guarded(f"roles of namespace {self.namespace!r} guard", lambda _: True)
        self._when_free(lambda: forgetting.forget_namespace(self))

    def forget_role(self, role: str) -> None:
        """Delete what is recorded about a role that is not used any more: its history, its jobs and their runs.

        Its last token is kept, so tokens go on growing if the role comes back. Raises ConfigError if there is no such
        role, if a living member leads it or stands for it, or if it guards tables.
        """
        self.role(role)
        self._refuse_guarded(f"role {role!r} of namespace {self.namespace!r} guards", lambda guard: guard.role == role)
        self._when_free(lambda: forgetting.forget_role(self, role))

    def _refuse_guarded(self, guards_tables: str, concerned: Callable[[GuardedTable], bool]) -> None:
        """Raise ConfigError if roles that are to be forgotten guard tables, or if a guard's role is not known."""
        guarded = [
            guard.table
            for guard in self.guarded_tables()
            if guard.namespace == guards.UNKNOWN or (guard.namespace == self.namespace and concerned(guard))
        ]
        if guarded:
            raise ConfigError(
                f"{guards_tables} tables, which could not be written to any more: remove the guards first "
                f"(`tenure guard TABLE --remove`): {', '.join(guarded)}"
            )

    def _when_free(self, act: Callable[[], None]) -> None:
        """Do something; try again while another transaction locks the rows."""
        deadline = time.monotonic() + LOOK_TIMEOUT_S
        while True:
            try:
                with self._asking():
                    return act()
            except _Busy:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(LOOK_EVERY_S)

    # What ``store.records`` needs -------------------------------------------------------------------------------

    @property
    def session(self) -> Any:
        """The connection; raises NodeClosed if there is none."""
        if self._session is None:
            raise NodeClosed(
                f"the registry of namespace {self.namespace!r} is not connected: use it inside `with` or call connect()"
            )
        return self._session

    @contextlib.contextmanager
    def _asking(self, hint: str = "") -> Iterator[None]:
        """Limit the time of a call, because a server may freeze; turn driver errors into StoreUnavailable.

        ``hint`` says what else may be the cause if there is no answer.
        """
        try:
            with time_limit(self.session.abort, LOOK_TIMEOUT_S, "the database: ", hint):
                yield
        except Gone as error:
            raise StoreUnavailable(str(error)) from None
        except Failed as error:
            cause: Any = error.__cause__
            if (
                getattr(cause, "sqlstate", None) == LOCK_NOT_AVAILABLE
                or getattr(cause, "args", ())[:1] in LOCK_WAITED_IN_VAIN
            ):
                raise _Busy("another transaction locks the rows: try again") from None
            raise StoreUnavailable(f"{str(error).splitlines()[0]} (`tenure doctor` may say what to do)") from None

    def _read(self, text: str) -> Any:
        with self._asking():
            return self.session.read(Step(text, {"namespace": self.namespace}))[0].rows


def _with_next(job: JobRecord) -> JobRecord:
    """Return a job's record together with its next due time, as far as this host knows its definition."""
    if job.spec is None or job.as_of is None or job.since is None:
        return job
    from tenure.schedule import due_times  # noqa: PLC0415 - only needed here

    known = due_times.from_text(job.spec)
    mark = max(job.since, job.claimed or job.since)
    following = None if known is None else known.after(microseconds(mark))
    if known is None or following is None:
        return job
    due = moment(following)
    late = job.as_of > due + timedelta(seconds=job.jitter + OVERDUE_S)
    runs = job.last is not None and job.last.outcome == "begun"
    if job.paused is not None or runs:
        # The scheduler skips due times that pass meanwhile.
        now = known.after(microseconds(max(job.as_of, mark)))
        return replace(job, next_due=None if now is None else moment(now))
    return replace(job, next_due=due, overdue=late)
