"""The async facade, on asyncio and trio: a node from its start to its end, and what people do with it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import anyio
import anyio.to_thread
import pytest

import tenure
from tenure import ConfigError, Deposed, LeadershipLost, NodeClosed, StoreUnavailable
from tests.api.loops import LOOPS, eventually, looped, native, node, raises, stand, tenures_threads
from tests.support.servers import free_port
from tests.support.store_by_hand import Desk, fork

pytestmark = pytest.mark.usefixtures("_no_thread_is_left", "_nothing_is_left_to_the_garbage_collector")


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
