"""The async facade, on asyncio and trio: what it adds to the one that tests/support/async_as_sync.py shows to be the
same.

A loss cancels, a cancellation hands over, a blocked event loop costs nothing; and nothing that a task does wrong leaves
a thread, a waiter or an open transaction behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time

import anyio
import anyio.lowlevel
import anyio.to_thread
import asyncpg
import psycopg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

import tenure
from tenure import (
    ConfigError,
    Deposed,
    Elected,
    Fenced,
    LeadershipLost,
    NodeClosed,
    NotCommitted,
    StoreUnavailable,
    WaitTimeout,
)
from tenure.aio.bridge import run_in_thread
from tenure.node import Node
from tests.support.servers import free_port
from tests.support.store_by_hand import QUICK, Desk, execute, fork, until

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

    parameters = [
        *inspect.signature(test).parameters.values(),
        *list(inspect.signature(run_test).parameters.values())[:1],
    ]
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


@contextlib.asynccontextmanager
async def raises(error, match=None):
    """As pytest.raises, to stand in one line with the block that raises."""
    with pytest.raises(error, match=match):
        yield


async def eventually(condition):
    """Look again and again until the condition holds, shielded from whatever was cancelled."""
    with anyio.CancelScope(shield=True), anyio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - for what sends no signal
            await anyio.sleep(0.005)


async def stand(candidate):
    """Stand for role r beside node a, and wait until the database knows."""
    election = candidate.election("r")
    await only(election, "a", candidate.name)
    return election


async def only(election, *names):
    """Wait until exactly these stand."""
    with anyio.fail_after(20):
        while {candidate.name for candidate in await election.candidates()} != set(names):  # noqa: ASYNC110 - as above
            await anyio.sleep(0.005)


@contextlib.asynccontextmanager
async def pair(url):
    """A node that leads role r, and the candidacy of another that stands by."""
    async with node(url) as leader, node(url, "standby") as other:
        await leader.election("r").wait(20)
        yield leader, await stand(other)


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


@pytest.mark.twin("postgres-trio")
@looped
async def test_loss_cancels_the_block_and_is_raised_outside(one_url):
    async with node(one_url) as leader:
        tidied = False
        async with raises(LeadershipLost, match=REASONS[one_url.partition(":")[0]]), leader.lead("r") as term:
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
            assert again.token > term.token
            await anyio.lowlevel.checkpoint()


@pytest.mark.twin("postgres-trio")
@looped
async def test_block_that_swallows_its_cancellation_has_lost_all_the_same(one_url):
    """And its node stands no more: it would hold the role, and do nothing."""
    async with node(one_url) as leader, node(one_url, "standby") as standby:
        async with raises(LeadershipLost), leader.lead("r") as term:
            other = await stand(standby)
            await anyio.to_thread.run_sync(depose, one_url, term)
            with contextlib.suppress(BaseException):
                await anyio.sleep_forever()
            with anyio.CancelScope(shield=True):  # or every await would be cancelled anew
                assert (await other.wait(20)).token > term.token
                assert not term.valid
                assert not term._election.is_leader
                await eventually(lambda: leader.member_id not in (None, term.member_id))
                await only(other, "standby")
                with pytest.raises(Fenced):
                    async with term.transaction():
                        pytest.fail("fenced")
        assert other.is_leader


@looped
async def test_exception_of_the_block_is_the_one_that_is_raised(sqlite_url):
    async with node(sqlite_url) as leader:
        async with raises(ZeroDivisionError), leader.lead("r") as term:
            leader._engine.candidacy("r").resign()
            try:
                await anyio.sleep_forever()
            finally:
                1 / 0  # noqa: B018
        async with leader.lead("r", timeout=20) as again:
            assert again.token > term.token


@looped
async def test_block_that_ends_by_itself_after_the_loss_hears_of_it(sqlite_url):
    async with node(sqlite_url) as leader:
        async with raises(LeadershipLost, match="resigned"), leader.lead("r") as term:
            leader._engine.candidacy("r").resign()
        assert term.lost_reason == "resigned"


@looped
async def test_cancellation_from_outside_passes_through_and_hands_over(sqlite_url):
    async with pair(sqlite_url) as (leader, other):
        with anyio.CancelScope() as scope:
            async with leader.lead("r") as term:
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert term.lost_reason == "resigned"
        assert (await other.wait(20)).token == 2


async def cancel(work, begun):
    task = asyncio.create_task(work())
    await eventually(begun)
    task.cancel()
    await task


async def time_out(work, begun):
    if sys.version_info < (3, 11):
        pytest.skip("asyncio.timeout() is new in Python 3.11")
    async with asyncio.timeout(0.5):
        await work()


async def wait_for(work, begun):
    await asyncio.wait_for(work(), 0.5)


@pytest.mark.parametrize("interrupt", [cancel, time_out, wait_for])
@native
async def test_asyncios_own_cancellations_pass_through_and_hand_over(sqlite_url, interrupt):
    terms = []

    async def lead():
        async with leader.lead("r") as term:
            terms.append(term)
            await anyio.sleep_forever()

    async with pair(sqlite_url) as (leader, other):
        with pytest.raises(asyncio.CancelledError if interrupt is cancel else asyncio.TimeoutError):
            await interrupt(lead, lambda: terms)
        assert terms[0].lost_reason == "resigned"
        assert (await other.wait(20)).token == 2


@looped
async def test_cancellation_from_outside_is_not_lost_in_a_loss(sqlite_url):
    """A loss and a cancellation at once: whoever cancelled must be obeyed."""
    async with node(sqlite_url) as leader:
        with anyio.CancelScope() as scope:
            async with leader.lead("r") as term:
                leader._engine.candidacy("r").resign()
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
        lose = leader._engine.candidacy("r").resign
        for strike in (lose, task.cancel) if lost_first else (task.cancel, lose):
            strike()
        with pytest.raises(asyncio.CancelledError):
            await task


@looped
async def test_loss_leaves_the_roles_around_it_alone_and_takes_along_those_within(sqlite_url):
    async with node(sqlite_url) as leader:
        async with leader.lead("outer") as outer:
            async with raises(LeadershipLost, match="'inner'"), leader.lead("inner"):
                leader._engine.candidacy("inner").resign()
                await anyio.sleep_forever()
            await anyio.lowlevel.checkpoint()
            outer_term = outer
            assert outer.valid
        async with raises(LeadershipLost, match="'outer'"), leader.lead("outer"), leader.lead("inner") as inner:
            leader._engine.candidacy("outer").resign()
            await anyio.sleep_forever()
        assert inner.lost_reason == "resigned", "handed over"
        assert outer_term.lost_reason == "resigned"


async def work(ended):
    try:
        await anyio.sleep_forever()
    finally:
        ended.append(True)


@looped
async def test_loss_ends_the_tasks_that_the_block_has_started(sqlite_url):
    ended = []
    async with node(sqlite_url) as leader:
        async with raises(LeadershipLost), leader.lead("r"), anyio.create_task_group() as tasks:
            tasks.start_soon(work, ended)
            tasks.start_soon(work, ended)
            await anyio.wait_all_tasks_blocked()
            leader._engine.candidacy("r").resign()
        assert ended == [True, True]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.TaskGroup is new in Python 3.11")
@native
async def test_loss_ends_the_tasks_of_a_group_of_asyncios_own(sqlite_url):
    ended = []
    async with node(sqlite_url) as leader:
        async with raises(LeadershipLost), leader.lead("r"), asyncio.TaskGroup() as tasks:
            tasks.create_task(work(ended))
            tasks.create_task(work(ended))
            await anyio.wait_all_tasks_blocked()
            leader._engine.candidacy("r").resign()
        assert ended == [True, True]
        assert not asyncio.current_task().cancelling()


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
            leader._engine.candidacy("r").resign()
            await term.ensure()
        async with raises(ZeroDivisionError), await anext(terms) as term:
            term.token / 0
        assert term.lost_reason == "resigned"
        with anyio.CancelScope() as scope:
            async with await anext(terms) as term:
                leader._engine.candidacy("r").resign()
                scope.cancel()
                await anyio.sleep_forever()
            await anyio.lowlevel.checkpoint()
            pytest.fail("cancelled from outside, too")
        async with await anext(terms) as term:
            async with raises(ConfigError, match="token 4 already has a block: use one at a time"), term:
                pytest.fail("one too many")
            assert term.valid


@looped
async def test_refused_write_ends_the_term_and_the_loop_campaigns_again(one_url):
    async with node(one_url) as leader:
        tokens = []
        async for term in leader.terms("r"):
            tokens.append(term.token)
            if len(tokens) == 2:
                break
            async with term:
                with anyio.CancelScope(shield=True):
                    await leader.election("r").resign()
                    async with term.transaction():
                        pytest.fail("the term is over")
        assert tokens == [1, 2]


@looped
async def test_refusal_of_another_term_is_not_taken_for_the_end_of_this_one(sqlite_url):
    async with node(sqlite_url) as leader:
        other = await leader.election("other").wait(20)
        await other.resign()
        async with raises(Fenced), await anext(leader.terms("r")), other.transaction():
            pytest.fail("the other term is over")


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
@pytest.mark.parametrize("stood_before", [False, True])
@looped
async def test_leaving_the_loop_hands_over(sqlite_url, error, stood_before):
    async with node(sqlite_url) as leader, node(sqlite_url, "standby") as other:
        if stood_before:
            leader.election("r")
        with pytest.raises(error) if error else contextlib.nullcontext():
            async for term in leader.terms("r"):
                await stand(other)
                led = term
                if error is not None:
                    raise error
                break
        assert led.lost_reason == "resigned", "at once"
        assert (await other.election("r").wait(20)).token == 2
        await only(other.election("r"), *(["a"] if stood_before else []), "standby")


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


@looped
async def test_terms_skips_a_term_that_is_lost_while_the_event_loop_is_blocked(sqlite_url):
    got = []

    async def wait(terms):
        got.append(await anext(terms))

    with tenure.Node(sqlite_url, name="other", **QUICK) as other, tenure.Registry(sqlite_url) as registry:
        election = other.election("r")
        election.wait(20)
        async with node(sqlite_url) as blocked, anyio.create_task_group() as tasks:
            tasks.start_soon(wait, blocked.terms("r"))
            await eventually(lambda: len(election.candidates()) == 2)
            election.resign()  # from here on nothing lets the event loop run
            until(lambda: (leader := election.leader()) and leader.name == "a", "the blocked node leads")
            registry.resign("r")
            until(lambda: election.is_leader, "the other leads again")
            await anyio.sleep(0.1)
            assert got == []
            election.resign()
            await eventually(lambda: got)
            assert got[0].token == 4


# --- hearing of it ------------------------------------------------------------------------------------------


@looped
async def test_callbacks_are_called_on_the_event_loop_and_one_that_fails_hurts_nobody(sqlite_url, caplog):
    heard = []

    def fail(_):
        raise RuntimeError("a callback of the application's")

    async with node(sqlite_url, name="first") as first, node(sqlite_url, name="leader") as leader:
        await first.election("r").wait(20)  # so that the callbacks are there before the other node is elected
        election = leader.election("r")
        election.on_event(fail)
        election.on_event(lambda event: heard.append((threading.get_ident(), event)))
        await first.close()
        term = await election.wait(20)
        term.on_lost(fail)
        term.on_lost(lambda term: heard.append((threading.get_ident(), term)))
        await election.resign()
        await eventually(lambda: (threading.get_ident(), term) in heard)
        await eventually(lambda: (threading.get_ident(), Elected("r", 3)) in heard)
        assert {thread for thread, _ in heard} == {threading.get_ident()}
        events = [event for _, event in heard if isinstance(event, (Elected, Deposed))]
        assert events == [Elected("r", 2), Deposed("r", 2, "resigned"), Elected("r", 3)]
    assert caplog.text.count("a callback failed") >= 4
    assert "RuntimeError: a callback of the application's" in caplog.text


@looped
async def test_callback_must_be_a_plain_function(sqlite_url):
    class Callback:
        async def __call__(self, _):
            pytest.fail("nobody awaits it")

    async with node(sqlite_url) as leader:
        election = leader.election("r")
        term = await election.wait(20)
        for callback in (Callback(), Callback().__call__, functools.partial(Callback().__call__)):
            for hear in (election.on_event, term.on_lost):
                with pytest.raises(
                    ConfigError, match=r"must be a plain function.*: read election\.events\(\) in your own task"
                ):
                    hear(callback)
        with pytest.raises(ConfigError, match="callback=None must be a function"):
            election.on_event(None)


@looped
async def test_events_come_in_order_to_every_reader_and_end_with_the_node(sqlite_url):
    read = []

    async def reader(events):
        read.append([event async for event in events if isinstance(event, (Elected, Deposed))])

    async with anyio.create_task_group() as readers, node(sqlite_url) as leader:
        election = leader.election("r")
        shared = election.events()
        for events in (election.events(), shared, shared):
            readers.start_soon(reader, events)
        for _ in range(3):
            await election.wait(20)
            await election.resign()
        await election.wait(20)
    told = [event for token in (1, 2, 3) for event in (Elected("r", token), Deposed("r", token, "resigned"))]
    told += [Elected("r", 4), Deposed("r", 4, "left")]
    own = max(read, key=len)
    read.remove(own)
    assert own == told
    assert sorted(map(told.index, [*read[0], *read[1]])) == list(range(8)), "each event to one of the two"
    with pytest.raises(StopAsyncIteration):
        await anext(shared)


@looped
async def test_reader_who_breaks_off_is_forgotten(sqlite_url):
    async with node(sqlite_url) as leader:
        election = leader.election("r")
        for _ in range(5):
            await election.wait(20)
            events = election.events()
            await election.resign()
            async for _ in events:
                break
        del events
        assert leader._engine.candidacy("r").listeners == []
        with anyio.move_on_after(0.05):
            async for _ in election.events():
                pass
        await anyio.lowlevel.checkpoint()  # until then the event loop keeps the cancellation's traceback
        assert leader._engine.candidacy("r").listeners == []


# --- waiting ------------------------------------------------------------------------------------------------


@looped
async def test_wait_that_ends_without_success_leaves_no_waiter_behind(sqlite_url):
    async with node(sqlite_url) as first, node(sqlite_url, "standby") as second:
        term = await first.election("r").wait(20)
        election = await stand(second)

        async def lead():
            async with second.lead("r"):
                pytest.fail("the role is taken")

        for timeout in (0, 0.05):
            with pytest.raises(WaitTimeout, match=f"role 'r': not elected within {timeout:g} s"):
                await election.wait(timeout)
        assert not await term.wait_lost(0.01)
        for wait in (election.wait, lead, term.wait_lost, lambda: anext(second.terms("r"))):
            with anyio.move_on_after(0.02) as scope:
                await wait()
            assert scope.cancelled_caught
        assert second._engine._waiters == first._engine._waiters == []
        assert second._campaigns == set()


@looped
async def test_doubt_is_waited_for_and_a_lost_term_says_so(sqlite_url):
    async with node(sqlite_url) as leader:
        term = await leader.election("r").wait(20)
        await term.ensure()
        await term.resign()
        await term.resign()
        assert await term.wait_lost(0)
        with pytest.raises(LeadershipLost, match=r"token 1 is over \(resigned\)"):
            await term.ensure()


@looped
async def test_node_may_be_used_from_other_event_loops_than_its_own(sqlite_url):
    """Who waits is woken where it waits; only callbacks go to the loop on which the node was started."""
    heard = []

    async def elsewhere():
        election = leader.election("r")
        events = election.events()
        await election.wait(20)
        await election.resign()
        async with leader.lead("r", timeout=20) as term, term.transaction() as transaction:
            await transaction.execute("select 1")
        async for event in events:
            if isinstance(event, Deposed):
                break
        assert [candidate.name for candidate in await election.candidates()] == ["a"]
        async with raises(LeadershipLost), leader.lead("r", timeout=20):
            leader._engine.candidacy("r").resign()
            await anyio.sleep_forever()

    async with node(sqlite_url) as leader:
        leader.election("r").on_event(lambda event: heard.append((threading.get_ident(), event)))
        for loop in LOOPS:
            await anyio.to_thread.run_sync(functools.partial(anyio.run, elsewhere, backend=loop))
        await eventually(lambda: sum(isinstance(event, Deposed) for _, event in heard) >= 6)
        assert {thread for thread, _ in heard} == {threading.get_ident()}


@pytest.mark.parametrize("second", LOOPS)
@pytest.mark.parametrize("first", LOOPS)
def test_node_that_outlives_its_event_loop_can_be_used_and_closed_from_another(sqlite_url, first, second):
    leader = node(sqlite_url)

    async def begin():
        await leader.start()
        (await leader.election("r").wait(20)).on_lost(lambda _: pytest.fail("its loop has ended"))

    async def finish():
        async with leader.lead("other", timeout=20) as term:
            assert term.token == 1
        assert leader.election("r").is_leader
        await leader.close()

    anyio.run(begin, backend=first)
    anyio.run(finish, backend=second)


# --- starting and closing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0, 0.001, 0.05])
@looped
async def test_cancelled_start_leaves_nothing_running(after_s):
    waiting = node(f"postgresql://127.0.0.1:{free_port()}/app", start="wait")
    with anyio.move_on_after(after_s) as scope:
        await waiting.start()
    assert scope.cancelled_caught
    await eventually(lambda: not tenures_threads())
    with pytest.raises(NodeClosed, match="was already started once: make a new one"):
        await waiting.start()


@native
async def test_start_that_asyncio_cancels_leaves_nothing_running():
    starting = asyncio.create_task(node(f"postgresql://127.0.0.1:{free_port()}/app", start="wait").start())
    await asyncio.sleep(0)
    assert tenures_threads()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await eventually(lambda: not tenures_threads())


@looped
async def test_start_that_fails_says_why_and_leaves_nothing_running():
    with pytest.raises(StoreUnavailable):
        await node(f"postgresql://127.0.0.1:{free_port()}/app").start()
    await eventually(lambda: not tenures_threads())


@looped
async def test_node_that_waits_for_its_database_can_be_closed():
    waiting = node(f"postgresql://127.0.0.1:{free_port()}/app", start="wait")

    async def start():
        with pytest.raises(NodeClosed):
            await waiting.start()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start)
        await eventually(lambda: waiting._engine.running)
        await waiting.close()


@looped
async def test_closing_in_a_cancelled_scope_still_leaves_cleanly(sqlite_url):
    async with node(sqlite_url, "standby") as other:
        with anyio.CancelScope() as scope:
            async with node(sqlite_url) as leader:
                await leader.election("r").wait(20)
                await stand(other)
                scope.cancel()
        assert not leader._engine.running
        assert (await other.election("r").wait(20)).token == 2
        assert (await other.election("r").history())[1].reason == "left"


@native
async def test_closing_that_asyncio_cancels_is_seen_through(sqlite_url):
    async with node(sqlite_url, "other") as other:
        leader = await node(sqlite_url).start()
        await leader.election("r").wait(20)
        events = leader.election("r").events()
        closing = asyncio.create_task(leader.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert not [name for name in tenures_threads() if name.endswith("-a")]
        assert Deposed("r", 1, "left") in [event async for event in events]
        assert (await other.election("r").wait(20)).token == 2
        assert (await other.election("r").history())[1].reason == "left"


@looped
async def test_node_may_be_closed_twice_at_once_and_from_its_own_callback(sqlite_url):
    leader = await node(sqlite_url).start()
    async with anyio.create_task_group() as tasks:
        leader.election("r").on_event(lambda _: tasks.start_soon(leader.close))  # in its own task group, even
        await eventually(lambda: not leader._engine.running)
        for _ in range(2):
            tasks.start_soon(leader.close)
    await leader.close()


@looped
async def test_closing_ends_the_blocks_and_the_waits_of_other_tasks(sqlite_url):
    raised = []

    async def catch(work):
        try:
            await work()
        except tenure.TenureError as error:
            raised.append(type(error))

    async def lead():
        async with leader.lead("r"):
            await anyio.sleep_forever()

    async def follow():
        async for term in leader.terms("s"):
            async with term:
                await anyio.sleep_forever()

    async with node(sqlite_url, "standby") as other, anyio.create_task_group() as tasks:
        await other.election("t").wait(20)
        leader = await node(sqlite_url).start()
        for work in (lead, follow, leader.election("t").wait):
            tasks.start_soon(catch, work)
        await leader.election("r").wait(20)
        await leader.election("s").wait(20)
        await anyio.sleep(0.01)
        await leader.close()
    assert sorted(raised, key=str) == [LeadershipLost, NodeClosed]


@looped
async def test_node_needs_none_of_the_applications_threads(sqlite_url):
    limiter = anyio.to_thread.current_default_thread_limiter()
    for number in range(int(limiter.total_tokens)):
        limiter.acquire_on_behalf_of_nowait(number)
    try:
        async with node(sqlite_url) as leader:
            term = await leader.election("r").wait(20)
            async with term.transaction() as transaction:
                await transaction.execute("select 1")
            await leader.election("r").resign()
            assert len(await leader.election("r").history()) >= 1
    finally:
        for number in range(int(limiter.total_tokens)):
            limiter.release_on_behalf_of(number)


# --- transactions -------------------------------------------------------------------------------------------


@looped
async def test_transaction_commits_or_rolls_back_and_an_old_term_is_refused(one_url):
    execute(one_url, "create table ledger (token bigint)")
    insert = f"insert into ledger values ({'?' if one_url.startswith('sqlite') else '%s'})"
    async with node(one_url) as leader:
        async with leader.lead("r") as term:
            async with term.transaction() as transaction:
                await transaction.execute(insert, (term.token,))
                assert (await transaction.execute("select count(*) from ledger")).fetchone() == (1,)
            async with raises(ZeroDivisionError), term.transaction() as transaction:
                await transaction.execute(insert, (term.token,))
                1 / 0  # noqa: B018
            async with raises(NotCommitted, match="ended inside its block"), term.transaction() as transaction:
                await transaction.execute("commit")
                await transaction.execute("select 1")
        async with raises(Fenced), term.transaction():
            pytest.fail("fenced")
    assert execute(one_url, "select * from ledger") == [(1,)]


ENDLESS = {
    "sqlite": "with recursive n(i) as (select 1 union all select i + 1 from n limit 200000000) select count(*) from n",
    "postgresql": "select pg_sleep(60)",
}


async def write_endlessly(url, term, begun):
    async with term.transaction() as transaction:
        await transaction.execute("insert into ledger values (1)")
        begun.set()
        await transaction.execute(ENDLESS[url.partition(":")[0]])


async def assert_nothing_is_written_or_locked(url, term):
    assert execute(url, "select * from ledger") == []
    if url.startswith("postgres"):
        execute(url, "select * from tenure.roles for update nowait")
    async with term.transaction() as transaction:
        await transaction.execute("insert into ledger values (2)")
    assert execute(url, "select * from ledger") == [(2,)]


@pytest.mark.parametrize("after_s", [0, 0.1])
@looped
async def test_cancellation_cuts_a_statement_short_and_nothing_commits(one_url, after_s):
    execute(one_url, "create table ledger (token bigint)")
    async with node(one_url, ttl=30) as leader, leader.lead("r") as term:
        begun = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write_endlessly, one_url, term, begun)
            await begun.wait()
            await anyio.sleep(after_s)
            tasks.cancel_scope.cancel()
        await assert_nothing_is_written_or_locked(one_url, term)


@native
async def test_asyncios_own_cancellation_cuts_a_statement_short_and_nothing_commits(one_url):
    execute(one_url, "create table ledger (token bigint)")
    async with node(one_url, ttl=30) as leader, leader.lead("r") as term:
        begun = anyio.Event()
        task = asyncio.create_task(write_endlessly(one_url, term, begun))
        await begun.wait()
        for _ in range(3):
            await asyncio.sleep(0.03)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await assert_nothing_is_written_or_locked(one_url, term)


@native
async def test_statement_is_cut_short_although_its_server_does_not_hear(postgres_url, postgres_server):
    execute(postgres_url, "create table ledger (token bigint)")
    async with node(postgres_url, ttl=30) as leader, leader.lead("r") as term:
        begun = anyio.Event()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(write_endlessly, postgres_url, term, begun)
                await begun.wait()
                os.kill(postgres_server.pid, signal.SIGSTOP)  # who takes requests to cancel
                tasks.cancel_scope.cancel()
        finally:
            os.kill(postgres_server.pid, signal.SIGCONT)
        assert execute(postgres_url, "select * from ledger") == []


@looped
async def test_transactions_that_wait_for_each_other_do_not_run_out_of_threads(sqlite_url):
    """Each writer on SQLite waits for the one before it: who holds the file must be able to commit."""
    execute(sqlite_url, "create table ledger (n integer)")
    async with node(sqlite_url, ttl=10) as leader, leader.lead("r") as term:

        async def write(number):
            async with term.transaction() as transaction:
                await transaction.execute("insert into ledger values (?)", (number,))

        async with anyio.create_task_group() as tasks:
            for number in range(16):
                tasks.start_soon(write, number)
        await term.ensure()
    assert sorted(execute(sqlite_url, "select n from ledger")) == [(number,) for number in range(16)]


@native
async def test_call_that_must_end_is_waited_for_whoever_cancels():
    """A commit that was sent, a connection that is being opened: asyncio's own cancel() knows no shield."""
    go, ended = threading.Event(), threading.Event()

    def call():
        go.wait(20)
        ended.set()

    task = asyncio.create_task(run_in_thread(call))
    for _ in range(3):
        await asyncio.sleep(0.01)
        task.cancel()
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


OPEN_TRANSACTIONS = "select count(*) from pg_stat_activity where application_name ~ '^tenure transaction'"


@native
async def test_transaction_that_was_opened_for_a_cancelled_task_is_closed(postgres_url):
    async with node(postgres_url) as leader, leader.lead("r") as term:

        async def write():
            async with term.transaction():
                await anyio.sleep_forever()

        for _ in range(3):
            task = asyncio.create_task(write())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await eventually(lambda: execute(postgres_url, OPEN_TRANSACTIONS) == [(0,)])


# --- fences -------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def psycopg_connection(url):
    async with await psycopg.AsyncConnection.connect(url) as connection:
        yield connection


@contextlib.asynccontextmanager
async def asyncpg_connection(url):
    connection = await asyncpg.connect(url)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(connection.close)
        await stack.enter_async_context(connection.transaction())
        yield connection


@contextlib.asynccontextmanager
async def sqlalchemy_connection(url):
    engine = create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:"))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.dispose)
        yield await stack.enter_async_context(engine.begin())


@native
async def test_fence_is_awaited_on_connections_of_async_drivers(postgres_url):
    async with node(postgres_url) as leader:
        async with leader.lead("r") as term:
            for connect in (psycopg_connection, asyncpg_connection, sqlalchemy_connection):
                async with connect(postgres_url) as connection:
                    await term.fence(connection)
            async with sqlalchemy_connection(postgres_url) as connection:
                await connection.run_sync(term.fence)
        for connect in (psycopg_connection, asyncpg_connection, sqlalchemy_connection):
            async with raises(Fenced), connect(postgres_url) as connection:
                await term.fence(connection)
        async with raises(Fenced), sqlalchemy_connection(postgres_url) as connection:
            await connection.run_sync(term.fence)


@looped
async def test_fence_of_a_connection_that_is_not_async_holds_before_it_is_awaited(sqlite_url):
    async with node(sqlite_url) as leader, leader.lead("r") as term:
        with contextlib.closing(sqlite3.connect(sqlite_url.partition(":///")[2])) as connection:
            fenced = term.fence(connection)
            assert connection.in_transaction
            await fenced
            connection.rollback()
        with pytest.raises(ConfigError, match=r"cannot fence builtins\.object"):
            term.fence(object())


@native
async def test_sync_term_refuses_an_async_connection_with_a_remedy(postgres_url):
    def lead():
        with Node(postgres_url) as leader:
            return leader.election("r").wait(20)

    term = await anyio.to_thread.run_sync(lead)
    async with psycopg_connection(postgres_url) as connection:
        with pytest.raises(ConfigError, match=r"use an AsyncNode and `await term\.fence\(connection\)`"):
            term.fence(connection)


# --- what people do -----------------------------------------------------------------------------------------


@looped
async def test_node_that_does_not_run_says_so(sqlite_url):
    leader = node(sqlite_url)
    await leader.close()
    for use in (lambda: leader.election("r"), lambda: leader.terms("r"), leader.lead("r").__aenter__):
        with pytest.raises(NodeClosed, match="not running: use it inside `with` or `async with`"):
            await use()
    async with leader:
        election = leader.election("r")
        term = await election.wait(20)
        with pytest.raises(NodeClosed, match="was already started once: make a new one"):
            await leader.start()
        assert election.is_leader, "the second start hurt nobody"
    for use in (election.wait, election.leader, election.withdraw, leader.lead("r").__aenter__, leader.start):
        with pytest.raises(NodeClosed, match="make a new one"):
            await use()
    with pytest.raises(NodeClosed):
        election.events()
    with pytest.raises(LeadershipLost):
        await term.ensure()


@looped
async def test_role_is_led_in_one_place_at_a_time(sqlite_url):
    async with node(sqlite_url) as leader, leader.lead("r") as term:
        async with raises(ConfigError, match=r"use one lead\(\) or terms\(\) at a time"), leader.lead("r"):
            pytest.fail("one too many")
        with pytest.raises(ConfigError):
            leader.terms("r")
        assert term.valid


def test_node_may_be_made_before_its_event_loop_runs(sqlite_url):
    for loop in LOOPS:
        leader = node(sqlite_url)

        async def main(leader=leader):
            async with leader, leader.lead("r") as term:
                return term.token

        assert anyio.run(main, backend=loop) >= 1


@native
async def test_block_that_is_left_in_another_task_hands_over_and_says_what_is_wrong(sqlite_url):
    """As some frameworks' fixtures do it."""
    async with node(sqlite_url) as leader:
        block = leader.lead("r")
        term = await asyncio.create_task(block.__aenter__())
        with pytest.raises(RuntimeError, match="different task than it was entered in"):
            await block.__aexit__(None, None, None)
        assert term.lost_reason == "resigned"
        async with leader.lead("r", timeout=20) as term:
            assert term.token == 2


@looped
async def test_forked_child_is_never_leader_and_is_told_why(sqlite_url):
    async with node(sqlite_url, ttl=30) as leader, leader.lead("r") as term:
        election = leader.election("r")
        events, terms = election.events(), leader.terms("s")
        async with await anext(terms) as other:
            pid = fork()
            if pid == 0:
                status = 1
                try:
                    status = await in_child(leader, term, events, terms)
                finally:
                    os._exit(status)
            ended = await anyio.to_thread.run_sync(os.waitpid, pid, 0)
            assert os.waitstatus_to_exitcode(ended[1]) == 0
            assert other.valid
        assert (await election.leader()).token == term.token == 1
        await term.ensure()


async def in_child(leader, term, events, terms):
    """The number of the first use that does not say why; 0 if all do."""
    election = term._election
    if election.is_leader or term.valid or election.term is not None or term.remaining:
        return 100
    uses = (
        *(leader.start, leader.lead("t").__aenter__, election.wait, election.leader, election.candidates),
        *(election.history, election.resign, election.withdraw, term.ensure, term.wait_lost, term.resign),
        *(lambda: anext(events), lambda: anext(terms), lambda: leader.terms("u"), lambda: leader.election("r")),
        *(election.events, lambda: election.on_event(print), lambda: term.on_lost(print)),
    )
    for number, use in enumerate(uses, start=2):
        try:
            await use()
        except NodeClosed as error:
            if "belongs to the parent process" in str(error):
                continue
        return number
    await leader.close()
    return 0


PROGRAM = """
    import asyncio, sys, anyio, tenure, trio

    async def interrupted():
        async with tenure.AsyncNode(sys.argv[1], name="program", ttl=30) as node:
            async with node.lead("r") as term:
                print(term.token, flush=True)
                await anyio.sleep_forever()

    async def left_open():
        node = await tenure.AsyncNode(sys.argv[1], name="program", ttl=30).start()
        await node.election("r").wait(20)
        block = node.lead("s")
        await block.__aenter__()
        print(1, flush=True)

    main = globals()[sys.argv[2]]
    asyncio.run(main()) if sys.argv[3] == "asyncio" else trio.run(main)
"""


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("how", ["interrupted", "left_open"])
@pytest.mark.twin("trio")
def test_program_ends_when_it_should_and_another_leads_at_once(sqlite_url, how, loop):
    """By Ctrl-C, and without having closed its node."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), sqlite_url, how, loop]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as program, Desk(sqlite_url):
        assert program.stdout.readline() == "1\n"
        if how == "interrupted":
            program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=20)

    async def succeed():
        async with node(sqlite_url, "successor", ttl=30) as successor:
            began = time.monotonic()
            assert (await successor.election("r").wait(20)).token == 2
            assert time.monotonic() - began < 10
            return (await successor.election("r").history())[1].reason

    reason = anyio.run(succeed, backend=loop)
    if how == "interrupted":
        assert errors.splitlines()[-1] == "KeyboardInterrupt"
        assert "Exception ignored" not in errors
        assert reason in ("left", "resigned")
    else:
        assert program.returncode == 0
        assert reason == "death"
