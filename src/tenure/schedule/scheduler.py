"""The jobs of a schedule under one term: waits for due times, starts runs, records how they end, and stops them.

It works on the event loop of the node's services. Plain functions, and everything that talks to the database, run in
threads.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio

from tenure.aio import bridge
from tenure.aio.call import Call, is_async
from tenure.aio.term import AsyncTerm
from tenure.base import clock
from tenure.base.moments import microseconds
from tenure.core.backoff import Backoff
from tenure.election import Election
from tenure.engine.callbacks import CallbackThread
from tenure.errors import NodeClosed, NotLeader, TenureError
from tenure.fence import job_runs
from tenure.fence.job_runs import Claimed
from tenure.internals import engine_of, holding_of
from tenure.schedule import claims, plan
from tenure.schedule.claims import mark_of, us_of
from tenure.schedule.due_times import SECOND_US
from tenure.schedule.jobs import Job
from tenure.schedule.run import (
    NotDone,
    Run,
    described,
    interrupt,
    is_committed,
    is_interrupted,
    is_now_over,
    lost,
    marks_itself,
    record_end,
    write,
)
from tenure.store import records
from tenure.store.records import JobRecord
from tenure.term import Term, Transaction, ask

T = TypeVar("T")

log = logging.getLogger("tenure.schedule")

LOOK_EVERY_S = 1.0
"""How often the schedule compares its clock with the database's: that clock may be set."""
LOOK_EVERY_US = 100_000
"""How soon a job is looked at again while the term is in doubt."""
PAUSED_LOOK_US = 5_000_000
"""How soon a paused job is looked at again that has a run to repeat."""
DRAIN_LOOK_S = 0.1
MOST_LOST = 10
"""How many times a run is repeated that did not end: a job that ends its process would end one node after another."""


class Interrupted(Exception):
    """A run was stopped because its node handed over."""


@dataclass
class JobState:
    """What the leader knows about a job."""

    job: Job
    mark: int
    """All due times up to this one are accounted for."""
    since: int = 0
    """When the definition was first seen, or an operator reset the job."""
    repeat: int | None = None
    """The due time of a run that did not end, and has to be run again."""
    requested: int | None = None
    """When an operator asked for a run that was not made yet."""
    busy: plan.Busy | None = None
    """When the last runs of this term were under way."""
    waited: bool = True
    """Whether there was a pause since the last run."""
    wake_at: int | None = 0
    """When to decide again what to do; None for never."""
    unrecorded: Backoff = field(default_factory=Backoff)
    """The pauses after runs that could not be recorded."""
    call: Call | None = None
    """What makes the run that is under way, from its claim to its record."""
    run: Run | None = None
    function: Call | None = None
    """The function of that run."""


class Scheduler:
    """The jobs of one schedule, under one term."""

    def __init__(self, jobs: Sequence[Job], workers: int, term: AsyncTerm) -> None:
        """Work under a term; plain functions run in ``workers`` threads at most."""
        self._term = term
        self._engine = engine_of(term)
        self._callbacks = CallbackThread(f"schedule-{term.role}")
        election = Election(self._engine.candidacy(term.role), self._callbacks.call)
        self._blocking = Term(election, holding_of(term))
        self._jobs = {job.name: job for job in jobs}
        self._states: list[JobState] = []
        self._requests = 0
        self._threads = anyio.Semaphore(workers)
        self._wake: Callable[[], object] = bool
        self._stopping = False

    async def run(self) -> None:
        """Make the runs that are due, until the task is cancelled. Then stop those under way."""
        recorder, role = self._engine.recorder, self._term.role
        try:
            await self._open()
            recorder.overdue |= {(role, name): functools.partial(self._overdue, name) for name in self._jobs}
            while True:
                now = self._engine.database_clock.now_us()
                for state in self._states:
                    if state.call is None and state.wake_at is not None and state.wake_at <= now:
                        self._advance(state, now)
                await self._rest()
        finally:
            self._stopping = True
            for name in self._jobs:
                recorder.overdue.pop((role, name), None)
            await self._drain()
            self._callbacks.close(timeout=0)

    def _overdue(self, job: str) -> float:
        """Return for how many seconds a job has been due whose run has not begun. Any thread may call it."""
        wake_at = next((state.wake_at for state in self._states if state.job.name == job and not state.call), None)
        return max(0.0, (self._engine.database_clock.now_us() - wake_at) / SECOND_US) if wake_at else 0.0

    def _count(self, job: str, outcome: str, number: int = 1) -> None:
        self._engine.recorder.ran(self._term.role, job, outcome, number)

    # The beginning of a term ----------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Read where the last leader stopped, and write the definitions that are new."""
        self._requests = self._engine.database_clock.requests
        term, jobs = holding_of(self._term), self._jobs.values()
        lost_jobs: set[str] = set()

        def begin(transaction: Transaction) -> tuple[int, dict[str, JobRecord]]:
            now, newly_lost, found = claims.begin_term(transaction, term, jobs)
            # An earlier try may have been committed: then this one finds no run that is lost.
            lost_jobs.update(newly_lost)
            return now, found

        now, found = await self._write(begin)
        self._engine.database_clock.heard(now)
        for name, job in self._jobs.items():
            record = found[name]
            self._engine.recorder.scheduled(self._term.role, name)
            state = JobState(job, mark_of(record), us_of(record.since), requested=us_of(record.requested) or None)
            if job.repeats and us_of(record.claimed) > us_of(record.done):
                state.repeat = us_of(record.claimed)
            if name in lost_jobs:
                self._count(name, "lost")
                fate = "is run again" if state.repeat else "is not run again: delivery was 'at-most-once'"
                log.warning("job %r: the run due %s was begun and did not end; it %s", name, record.claimed, fate)
            if record.ahead:
                log.warning(
                    "job %r: its last run is in the future (%s): the database's clock was ahead. Nothing runs before "
                    "that; `tenure jobs --reset %s` continues from now",
                    *(name, record.claimed, name),
                )
            self._states.append(state)

    # Waiting ------------------------------------------------------------------------------------------------------

    async def _rest(self) -> None:
        """Wait until something is due, a run ends, or an operator asks for something."""
        now = self._engine.database_clock.now_us()
        due = [state.wake_at for state in self._states if state.call is None and state.wake_at is not None]
        seconds = min(LOOK_EVERY_S, max(0.0, (min(due) - now) / SECOND_US)) if due else LOOK_EVERY_S
        woken = anyio.Event()
        loop = bridge.Loop()
        self._wake = woken.set

        def asked() -> bool:
            return self._engine.database_clock.requests != self._requests

        forget = self._engine.call_when(asked, lambda: loop.call(woken.set))
        try:
            with anyio.move_on_after(seconds):
                await woken.wait()
        finally:
            forget()
        if asked():
            await self._read_requests()

    async def _read_requests(self) -> None:
        """Read which runs operators have asked for. If that fails, it is tried again."""
        seen, role = self._engine.database_clock.requests, self._term.role
        try:
            found = await bridge.run_in_thread(lambda: self._engine.query(lambda store: records.jobs(store, role)))
        except TenureError as error:
            log.info("role %r: the requests of operators could not be read yet: %s", role, error)
            await anyio.sleep(LOOK_EVERY_S)
            return
        self._requests = seen
        by_name = {record.job: record for record in found}
        for state in self._states:
            record = by_name.get(state.job.name)
            if record is None:
                continue
            if record.requested is not None:
                state.requested, state.wake_at = microseconds(record.requested), 0
            # Only a reset changes this. The marks may be old: a run may have been claimed since they were read.
            if state.call is None and us_of(record.since) > state.since:
                state.mark, state.since, state.wake_at = mark_of(record), us_of(record.since), 0

    # Deciding -----------------------------------------------------------------------------------------------------

    def _advance(self, state: JobState, now: int) -> None:
        """Start the run of a job that is due, or set when to look again."""
        if not self._term.valid:
            # The term is in doubt, or over. If it is over, the node stops this service.
            state.wake_at = now + LOOK_EVERY_US
            return
        # A run that an operator asked for comes first: while a job is paused, it is made, and a repetition waits.
        if state.requested is not None:
            self._begin_run(state, functools.partial(self._make_requested, state, state.requested))
        elif state.repeat is not None:
            self._begin_run(state, functools.partial(self._repeat, state, state.repeat))
        else:
            decision = plan.decide(state.job, state.mark, now, state.busy)
            if isinstance(decision, plan.Wait):
                state.wake_at, state.waited = decision.until, True
            else:
                self._begin_run(state, functools.partial(self._make, state, decision))

    def _begin_run(self, state: JobState, work: Callable[[], Any]) -> None:
        async def run() -> None:
            try:
                async with self._slot(state.job):
                    if not self._stopping:
                        await work()
                state.unrecorded.worked()
            except (NotLeader, NodeClosed) as error:
                log.info("job %r: the term is over: %s", state.job.name, error)
            except Exception:
                log.exception("job %r: the run could not be recorded", state.job.name)
                if state.job.repeats and state.run is not None and not state.run.requested:
                    state.repeat = microseconds(state.run.due)
                # The function may be called again each time, so this must not go on without longer and longer pauses.
                now = self._engine.database_clock.now_us() / SECOND_US
                state.wake_at = round(state.unrecorded.failed(now) * SECOND_US)
            finally:
                state.call = state.run = state.function = None
                self._wake()

        # The job is looked at again as soon as the run is over.
        state.wake_at = 0
        state.call = Call(run)

    @contextlib.asynccontextmanager
    async def _slot(self, job: Job) -> Any:
        """Wait for a thread, if the function needs one."""
        if is_async(job.function):
            yield
        else:
            async with self._threads:
                yield

    # Runs ---------------------------------------------------------------------------------------------------------

    async def _make(self, state: JobState, decision: plan.Make) -> None:
        """Claim a run, and make it."""
        job, term = state.job, holding_of(self._term)

        def claim(transaction: Transaction, again: bool) -> Claimed:
            return claims.claim(transaction, term, job, state.mark, decision, again=again)

        claimed = await self._write_again(claim)
        self._engine.database_clock.heard(claimed.now_us)
        skipped = decision.missed if claimed.mine else claimed.skipped
        if skipped:
            self._count(job.name, "skipped", skipped)
        if claimed.mine or claimed.paused:
            state.mark = max(state.mark, decision.due)
        elif claimed.mark_us is not None and claimed.mark_us > state.mark:
            # Another program has claimed a run by hand.
            state.mark = claimed.mark_us
        if claimed.mine:
            run = self._run(job, decision.due, missed=decision.missed)
            if not job.repeats:
                is_now_over(run)
            await self._perform(state, run, decision.due)

    async def _repeat(self, state: JobState, due: int) -> None:
        """Make the run again that was begun under an earlier term, and did not end. A paused job waits."""
        term, job = holding_of(self._term), state.job
        attempt = await self._write(lambda transaction: claims.repeat(transaction, term, job, due))
        if attempt is None:
            state.wake_at = self._engine.database_clock.now_us() + PAUSED_LOOK_US
            return
        state.repeat = None
        run = self._run(job, due, attempt=attempt)
        if attempt >= MOST_LOST + job.attempts:
            log.error("job %r: the run due %s did not end %d times; it is given up", job.name, run.due, attempt - 1)
            await self._end(run, "failed", f"did not end {attempt - 1} times", over=True)
            return
        await self._perform(state, run, due)

    async def _make_requested(self, state: JobState, at: int) -> None:
        """Make the run that an operator asked for."""
        term, job = holding_of(self._term), state.job

        def take(transaction: Transaction, again: bool) -> bool:
            return claims.take_request(transaction, term, job, at, again=again)

        state.requested = None
        if await self._write_again(take):
            await self._perform(state, self._run(job, at, requested=True), at)

    def _run(self, job: Job, us: int, **details: Any) -> Run:
        view = self._term if is_async(job.function) else self._blocking
        return Run(job.name, job.local(us), self._blocking, view, **details)

    async def _perform(self, state: JobState, run: Run, us: int) -> None:
        """Call the function, in as many attempts as the job has, and record how the run ended."""
        job, term = state.job, holding_of(self._term)
        began = self._engine.database_clock.now_us() if state.waited or state.busy is None else state.busy.since
        state.waited = False
        pauses = Backoff()
        left = 1 if run.requested else job.attempts
        while True:
            left -= 1
            state.run = run
            error = await self._outcome(state, run)
            if error is None:
                if run.requested or not marks_itself(run):
                    await self._end(run, "done", None, over=not run.requested)
                else:
                    self._count(job.name, "done")
                break
            if lost(error, self._blocking):
                # The next leader records the end of the run.
                break
            if isinstance(error, Interrupted):
                await self._end(run, "interrupted", str(error), over=False)
                break
            log.error("job %r: attempt %d at the run due %s failed", job.name, run.attempt, run.due, exc_info=error)
            await self._end(run, "failed", described(error), over=not left and not run.requested)
            if not left or await self._stopped_within(pauses.failed(clock.now())):
                break
            attempt = await self._write(lambda transaction: ask(transaction, job_runs.repeat(term, job.name, us)))
            run = self._run(job, us, missed=run.missed, attempt=attempt)
            if not job.repeats:
                is_now_over(run)
        state.busy = plan.Busy(began, self._engine.database_clock.now_us())

    async def _outcome(self, state: JobState, run: Run) -> BaseException | None:
        """Call the function; return why the run is not done, or None if it is."""
        job = state.job
        call = state.function = Call(job.function, run)
        in_time = await call.wait(job.timeout)
        if not in_time:
            log.error("job %r: the run due %s takes longer than %g s and is stopped", job.name, run.due, job.timeout)
            self._interrupt(state)
            await call.wait()
        if marks_itself(run):
            if await bridge.run_in_thread(lambda: is_committed(run)):
                if call.error is not None:
                    text = "job %r: the run due %s raised after its transaction was committed, so it is done"
                    log.error(text, job.name, run.due, exc_info=call.error)
                return None
            if call.error is None:
                return NotDone("the transaction that marks the run was not committed; the job ignored the error")
        if not in_time:
            return TimeoutError(f"it took longer than {job.timeout:g} s")
        if is_interrupted(run) and not (call.error and lost(call.error, self._blocking)):
            return Interrupted("the node handed over")
        return call.error or _unfinished(call.answer.result())

    async def _stopped_within(self, until: float) -> bool:
        """Wait until a moment of this process's clock; True as soon as the schedule is stopped."""
        while not self._stopping and (left := until - clock.now()) > 0:  # noqa: ASYNC110 - the pause may end early
            await anyio.sleep(min(DRAIN_LOOK_S, left))
        return self._stopping

    async def _end(self, run: Run, outcome: str, detail: str | None, *, over: bool) -> None:
        self._count(run.job, outcome)
        await bridge.run_in_thread(lambda: record_end(run, outcome, detail, over=over))

    async def _write(self, action: Callable[[Transaction], T]) -> T:
        return await bridge.run_in_thread(lambda: write(self._blocking, action))

    async def _write_again(self, action: Callable[[Transaction, bool], T]) -> T:
        """Do the same, and tell the action whether an earlier try may have been committed."""
        tries = itertools.count()
        return await self._write(lambda transaction: action(transaction, next(tries) > 0))

    # The end ------------------------------------------------------------------------------------------------------

    def _interrupt(self, state: JobState) -> None:
        """Cancel the run of a coroutine function; ask a plain function to return."""
        if state.run is not None:
            interrupt(state.run)
        if state.function is not None:
            state.function.cancel()

    async def _drain(self) -> None:
        """Interrupt the runs under way, or let them finish, as their jobs say; wait for all of them.

        When trust ends, every run is interrupted: another node may lead.
        """
        while running := [state for state in self._states if state.call is not None]:
            over = clock.now() >= holding_of(self._term).lease.deadline
            for state in running:
                if state.run and not is_interrupted(state.run) and (over or state.job.on_handover == "interrupt"):
                    self._interrupt(state)
            # asyncio's own cancel() ignores a shield, and the service is cancelled again after a while.
            with anyio.CancelScope(shield=True), contextlib.suppress(anyio.get_cancelled_exc_class()):
                await running[0].call.wait(DRAIN_LOOK_S)  # type: ignore[union-attr]


def _unfinished(result: object) -> BaseException | None:
    """Return an error if a plain function returned a coroutine, which does not run."""
    if not inspect.iscoroutine(result):
        return None
    result.close()
    return TypeError("it returned a coroutine, which does not run: make the job a coroutine function")
