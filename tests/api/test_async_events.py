"""The async facade, on asyncio and trio: events, and waiting for them."""

from __future__ import annotations

import functools
import threading

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from tenure import ConfigError, Deposed, Elected, LeadershipLost, WaitTimeout
from tests.api.loops import LOOPS, eventually, looped, node, raises, stand

pytestmark = pytest.mark.usefixtures("_no_thread_is_left", "_nothing_is_left_to_the_garbage_collector")


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

    async with (
        anyio.create_task_group() as readers,
        node(sqlite_url, name="first") as first,
        node(sqlite_url, name="leader") as leader,
    ):
        await first.election("r").wait(20)  # so that the readers are there before the other node is elected
        election = leader.election("r")
        shared = election.events()
        for events in (election.events(), shared, shared):
            readers.start_soon(reader, events)
        await first.close()
        for _ in range(3):
            await election.wait(20)
            await election.resign()
        await election.wait(20)
    told = [event for token in (2, 3, 4) for event in (Elected("r", token), Deposed("r", token, "resigned"))]
    told += [Elected("r", 5), Deposed("r", 5, "left")]
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
