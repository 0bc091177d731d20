"""The async facade, on asyncio and trio: ``lead()`` and ``terms()``. A loss cancels, and a cancellation hands over."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

import tenure
from tenure import ConfigError, Fenced, LeadershipLost
from tests.api.loops import LOOPS, eventually, looped, native, node, only, raises, stand
from tests.support.store_by_hand import QUICK, Desk, execute, until

pytestmark = pytest.mark.usefixtures("_no_thread_is_left", "_nothing_is_left_to_the_garbage_collector")


# --- lead() -------------------------------------------------------------------------------------------------


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
