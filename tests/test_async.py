"""The async facade, on asyncio and trio: what it adds to the one that tests/facades.py shows to be the same.

A loss cancels, a cancellation hands over, a blocked event loop costs nothing; and nothing that a task does wrong leaves
a thread, a waiter or an open transaction behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import sys
import threading
import time

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import trio

import tenure
from tenure import ConfigError, Deposed, Elected, Fenced, LeadershipLost, WaitTimeout
from tests.desk import QUICK, Desk, execute, until

LOOPS = ["asyncio", "trio"]
PATIENCE_S = 30


def looped(test=None, *, on=LOOPS):
    """Run an async test on each of the event loops; a hang is a failure."""
    if test is None:
        return functools.partial(looped, on=on)

    @pytest.mark.parametrize("loop", on)
    def run_test(loop, **fixtures):
        async def guarded():
            with anyio.fail_after(PATIENCE_S):
                await test(**fixtures)

        anyio.run(guarded, backend=loop)

    parameters = [*inspect.signature(test).parameters.values(), *list(inspect.signature(run_test).parameters.values())[:1]]
    run_test.__signature__ = inspect.Signature(parameters)
    run_test.__name__ = test.__name__
    run_test.__doc__ = test.__doc__
    return run_test


native = looped(on=["asyncio"])
"""For what only asyncio has: tasks that anybody may cancel, drivers of its own."""


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    until(lambda: not tenures_threads(), "the end of all threads")


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left_to_the_garbage_collector():
    """What was never awaited, or never closed, warns when it is collected; and warnings are errors."""
    yield
    gc.collect()


def tenures_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tenure-")]


def node(url, name="a", **settings):
    return tenure.AsyncNode(url, name=name, **(QUICK | settings))


async def eventually(condition, what=""):
    """Look again and again until the condition holds, shielded from whatever was cancelled."""
    with anyio.CancelScope(shield=True), anyio.fail_after(20):
        while not condition():
            await anyio.sleep(0.005)


@contextlib.asynccontextmanager
async def standby(url, role="r"):
    """Another node's candidacy, which the database knows."""
    async with node(url, "standby") as other:
        election = other.election(role)
        with anyio.fail_after(20):
            while "standby" not in [candidate.name for candidate in await election.candidates()]:
                await anyio.sleep(0.005)
        yield election


def depose(url, term):
    """End a term from outside: its connection is cut, or its membership ended."""
    if url.startswith("postgres"):
        cut = "select pg_terminate_backend(pid) from pg_stat_activity where application_name ~ '^tenure control .*/a$'"
        assert execute(url, cut) == [(True,)]
    else:
        with Desk(url) as desk:
            until(lambda: desk.end(term.member_id), "ended")


REASONS = {"sqlite": "the membership was ended", "postgresql": "the connection was cut"}


# --- lead() -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgres"])
def one_url(request):
    return request.getfixturevalue(f"{request.param}_url")


@looped
async def test_loss_cancels_the_block_and_is_raised_outside(one_url):
    async with node(one_url) as leader:
        tidied = False
        with pytest.raises(LeadershipLost, match=REASONS[one_url.partition(":")[0]]):
            async with leader.lead("r") as term:
                await anyio.to_thread.run_sync(depose, one_url, term)
                try:
                    await anyio.sleep_forever()
                finally:
                    with anyio.CancelScope(shield=True):
                        await anyio.lowlevel.checkpoint()
                    tidied = True
        assert tidied
        assert not term.valid
        await anyio.lowlevel.checkpoint()  # nothing of the cancellation is left
        async with leader.lead("r", timeout=20) as again:
            assert again.token == 2
            await anyio.lowlevel.checkpoint()


@looped
async def test_block_that_swallows_its_cancellation_has_lost_all_the_same(one_url):
    async with node(one_url) as leader, standby(one_url) as other:
        with pytest.raises(LeadershipLost):
            async with leader.lead("r") as term:
                await anyio.to_thread.run_sync(depose, one_url, term)
                with contextlib.suppress(BaseException):
                    await anyio.sleep_forever()
                with anyio.CancelScope(shield=True):  # or every await would be cancelled anew
                    assert (await other.wait(20)).token == 2
                    assert not term.valid
                    assert not leader.election("r").is_leader
                    with pytest.raises(Fenced):
                        async with term.transaction():
                            pytest.fail("fenced")
        assert other.is_leader


@looped
async def test_exception_of_the_block_is_the_one_that_is_raised(sqlite_url):
    async with node(sqlite_url) as leader:
        with pytest.raises(ZeroDivisionError):
            async with leader.lead("r") as term:
                await term.resign()
                try:
                    await anyio.sleep_forever()
                finally:
                    1 / 0  # noqa: B018
        async with leader.lead("r", timeout=20) as term:
            assert term.token == 2


@looped
async def test_block_that_ends_by_itself_after_the_loss_hears_of_it(sqlite_url):
    async with node(sqlite_url) as leader:
        with pytest.raises(LeadershipLost, match="resigned"):
            async with leader.lead("r") as term:
                leader.election("r").give_up(withdraw=False)
        assert term.lost_reason == "resigned"


@looped
async def test_cancellation_from_outside_passes_through_and_hands_over(sqlite_url):
    async with node(sqlite_url) as leader, standby(sqlite_url) as other:
        with anyio.CancelScope() as scope:
            async with leader.lead("r") as term:
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert term.lost_reason == "resigned"
        assert (await other.wait(20)).token == 2


@pytest.mark.parametrize("how", ["cancel", "timeout", "wait_for"])
@native
async def test_asyncios_own_cancellations_pass_through_and_hand_over(sqlite_url, how):
    terms = []

    async def lead():
        async with leader.lead("r") as term:
            terms.append(term)
            await anyio.sleep_forever()

    async with node(sqlite_url) as leader, standby(sqlite_url) as other:
        if how == "cancel":
            task = asyncio.create_task(lead())
            await eventually(lambda: terms)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelled()
        else:
            if how == "timeout" and sys.version_info < (3, 11):
                pytest.skip("asyncio.timeout() is new in Python 3.11")
            with pytest.raises(TimeoutError if how == "timeout" else asyncio.TimeoutError):
                if how == "timeout":
                    async with asyncio.timeout(0.5):
                        await lead()
                else:
                    await asyncio.wait_for(lead(), 0.5)
        assert terms[0].lost_reason == "resigned"
        assert (await other.wait(20)).token == 2


@looped
async def test_cancellation_from_outside_is_not_lost_in_a_loss(sqlite_url):
    """A loss and a cancellation at once: whoever cancelled must be obeyed."""
    async with node(sqlite_url) as leader:
        with anyio.CancelScope() as scope:
            async with leader.lead("r") as term:
                leader.election("r").give_up(withdraw=False)
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert term.lost_reason == "resigned"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older ones do not count cancellations")
@pytest.mark.parametrize("lost_first", [True, False])
@native
async def test_asyncios_own_cancellation_is_not_lost_in_a_loss(sqlite_url, lost_first):
    entered = asyncio.Event()

    async def lead():
        async with leader.lead("r"):
            entered.set()
            await anyio.sleep_forever()

    async with node(sqlite_url) as leader:
        task = asyncio.create_task(lead())
        await entered.wait()
        lose = functools.partial(leader.election("r").give_up, withdraw=False)
        for strike in (lose, task.cancel) if lost_first else (task.cancel, lose):
            strike()
        with pytest.raises(asyncio.CancelledError):
            await task


@looped
async def test_loss_leaves_the_roles_around_it_alone_and_takes_along_those_within(sqlite_url):
    async with node(sqlite_url) as leader:
        async with leader.lead("outer") as outer:
            with pytest.raises(LeadershipLost, match="'inner'"):
                async with leader.lead("inner"):
                    leader.election("inner").give_up(withdraw=False)
                    await anyio.sleep_forever()
            await anyio.lowlevel.checkpoint()
            outer_term = outer
            assert outer.valid
        with pytest.raises(LeadershipLost, match="'outer'"):
            async with leader.lead("outer"), leader.lead("inner") as inner:
                leader.election("outer").give_up(withdraw=False)
                await anyio.sleep_forever()
        assert inner.lost_reason == "resigned", "handed over"
        assert outer_term.lost_reason == "resigned"


@pytest.mark.parametrize("group", ["anyio", "own"])
@looped
async def test_loss_ends_the_tasks_that_the_block_has_started(sqlite_url, group):
    if group == "own" and sys.version_info < (3, 11):
        pytest.skip("asyncio.TaskGroup is new in Python 3.11")
    ended = []

    async def work():
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    async with node(sqlite_url) as leader:
        own = asyncio.TaskGroup if asyncio_runs() else trio.open_nursery
        with pytest.raises(LeadershipLost):
            async with leader.lead("r"), (anyio.create_task_group if group == "anyio" else own)() as tasks:
                for _ in range(2):
                    if hasattr(tasks, "start_soon"):
                        tasks.start_soon(work)
                    else:
                        tasks.create_task(work())
                await anyio.sleep(0.01)
                leader.election("r").give_up(withdraw=False)
        assert ended == [True, True]


def asyncio_runs():
    with contextlib.suppress(RuntimeError):
        return bool(asyncio.get_running_loop())
    return False


def block(loop, url, led):
    async def main():
        async with node(url, loop, ttl=2, renew_every=0.2) as leader, leader.lead(loop) as term:
            time.sleep(2.5)  # noqa: ASYNC251 - the offence
            led[loop] = term.valid, leader.election(loop).is_leader
            await anyio.lowlevel.checkpoint()
            assert (await leader.election(loop).leader()).token == term.token == 1

    anyio.run(main, backend=loop)


def test_event_loop_that_is_blocked_for_longer_than_the_ttl_does_not_cost_the_leadership(sqlite_url):
    """Both at once, to save time."""
    led = {}
    threads = [threading.Thread(target=block, args=(loop, sqlite_url, led)) for loop in LOOPS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert led == {"asyncio": (True, True), "trio": (True, True)}


# --- terms() ------------------------------------------------------------------------------------------------


@looped
async def test_lost_term_ends_its_block_and_the_loop_campaigns_again(one_url):
    async with node(one_url) as leader:
        tokens, reasons = [], []
        async for term in leader.terms("r"):
            async with term:
                tokens.append(term.token)
                if term.token == 1:
                    await anyio.to_thread.run_sync(depose, one_url, term)
                elif term.token == 2:
                    await term.resign()
                else:
                    break
                await anyio.sleep_forever()
            reasons.append(term.lost_reason)
        assert tokens == [1, 2, 3]
        assert reasons == [REASONS[one_url.partition(":")[0]], "resigned"]
        assert term.lost_reason == "resigned", "on leaving the loop"


@looped
async def test_term_block_swallows_its_own_loss_and_nothing_else(sqlite_url):
    async with node(sqlite_url) as leader:
        terms = leader.terms("r")
        async with await anext(terms) as term:
            leader.election("r").give_up(withdraw=False)
            await term.ensure()
        with pytest.raises(ZeroDivisionError):
            async with await anext(terms) as term:
                term.token / 0
        assert term.lost_reason == "resigned"
        with anyio.CancelScope() as scope:
            async with await anext(terms) as term:
                leader.election("r").give_up(withdraw=False)
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        async with await anext(terms) as term:
            with pytest.raises(ConfigError, match="token 4 has a block already: use one at a time"):
                async with term:
                    pytest.fail("one too many")
            assert term.valid


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
@pytest.mark.parametrize("stood_before", [False, True])
@looped
async def test_leaving_the_loop_hands_over(sqlite_url, error, stood_before):
    async with node(sqlite_url) as leader, standby(sqlite_url) as other:
        if stood_before:
            leader.election("r")
        with pytest.raises(error) if error else contextlib.nullcontext():
            async for term in leader.terms("r"):
                if error is not None:
                    raise error
                break
        assert term.lost_reason == "resigned", "at once"
        assert (await other.wait(20)).token == 2
        names = {candidate.name for candidate in await other.candidates()}
        assert names == ({"a", "standby"} if stood_before else {"standby"})


@looped
async def test_loop_that_is_collected_under_the_engines_lock_hands_over_later(sqlite_url):
    """Garbage is collected in any thread, in the midst of anything; and a lock of ours lets its own thread in."""
    async with node(sqlite_url) as leader:
        terms = leader.terms("r")
        term = await anext(terms)
        with leader._engine.lock:
            del terms
            assert term.valid, "not in the midst of a decision"
        await eventually(lambda: term.lost_reason == "resigned")


# --- hearing of it ------------------------------------------------------------------------------------------


@looped
async def test_callbacks_are_called_on_the_event_loop_and_one_that_fails_hurts_nobody(sqlite_url, caplog):
    heard = []

    def fail(_):
        raise RuntimeError("a callback of the application's")

    async with node(sqlite_url) as leader:
        election = leader.election("r")
        election.on_event(fail)
        election.on_event(lambda event: heard.append((threading.get_ident(), event)))
        term = await election.wait(20)
        term.on_lost(fail)
        term.on_lost(lambda term: heard.append((threading.get_ident(), term)))
        await election.resign()
        await eventually(lambda: (threading.get_ident(), term) in heard)
        await eventually(lambda: (threading.get_ident(), Elected("r", 2)) in heard)
        assert {thread for thread, _ in heard} == {threading.get_ident()}
        events = [event for _, event in heard if isinstance(event, (Elected, Deposed))]
        assert events == [Elected("r", 1), Deposed("r", 1, "resigned"), Elected("r", 2)]
    assert caplog.text.count("a callback failed") >= 4
    assert "RuntimeError: a callback of the application's" in caplog.text


@looped
async def test_events_come_in_order_to_every_reader_and_end_with_the_node(sqlite_url):
    read = []

    async def reader(events):
        async for event in events:
            if isinstance(event, (Elected, Deposed)):
                read.append(event)

    async with anyio.create_task_group() as readers, node(sqlite_url) as leader:
        election = leader.election("r")
        events = election.events()
        for iterator in (events, events, election.events()):  # two share one
            readers.start_soon(reader, iterator)
        for _ in range(3):
            await election.wait(20)
            await election.resign()
        await election.wait(20)
    told = [event for token in (1, 2, 3) for event in (Elected("r", token), Deposed("r", token, "resigned"))]
    told += [Elected("r", 4), Deposed("r", 4, "left")]
    assert len(read) == 16
    assert list(dict.fromkeys(read)) == told
    with pytest.raises(StopAsyncIteration):
        await anext(events)


@looped
async def test_reader_who_breaks_off_is_forgotten(sqlite_url):
    async with node(sqlite_url) as leader:
        election = leader.election("r")
        for _ in range(5):
            async for _ in election.events():
                break
            await election.resign()
        with anyio.move_on_after(0.05):
            async for _ in election.events():
                pass
        assert election._readers == []


# --- waiting ------------------------------------------------------------------------------------------------


@looped
async def test_wait_that_ends_without_success_leaves_no_waiter_behind(sqlite_url):
    async with standby(sqlite_url) as other, node(sqlite_url) as second:
        await other.wait(20)
        election = second.election("r")
        with pytest.raises(WaitTimeout, match=r"role 'r': not elected within 0\.05 s"):
            await election.wait(0.05)
        with pytest.raises(WaitTimeout):
            await election.wait(0)
        for wait in (election.wait, second.lead("s").__aenter__, other.term.wait_lost, anext(election.events()).__await__):
            with anyio.move_on_after(0.05) as scope:
                if wait is other.term.wait_lost:
                    assert not await wait(0.01)
                    await wait()
                elif inspect.ismethod(wait) and wait.__name__ == "__aenter__":
                    async with other_lead(second):
                        await anyio.sleep_forever()
                else:
                    await wait()
            assert scope.cancelled_caught
        assert second._engine._waiters == other._engine._waiters == []
