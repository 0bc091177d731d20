"""A role with a `lock_id`, in the modes that have a lease: the node needs the lease and the lock (R21).

So a program that takes the lock by hand and the nodes exclude each other, and one can replace the other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typing_extensions import Self

import tenure
from tenure.core import messages
from tenure.databases.postgres import role_locks
from tenure.databases.postgres.lock_mode import LockStore, LockWatch
from tenure.databases.postgres.role_locks import LockingStore, LockingWatch
from tenure.errors import ConfigError, PoolerDetected, StoreUnavailable
from tenure.events import Deposed, LeaderChanged, Resumed, Suspended
from tenure.fence.fence import fence
from tenure.store.session import Failed
from tests.support.cluster import ROOT
from tests.support.store_by_hand import Desk, Nodes, TermIdentity, connected, execute, until

LOCK_ID = 0x434944585F4C4452
TTL_S = 30.0
FAR_BELOW_THE_TTL_S = 15
CUT = "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'tenure control%/{}'"
HOLDERS = f"select pid from pg_locks where locktype = 'advisory' and granted and objid = {LOCK_ID & 0xFFFFFFFF}"

BY_NODE = """
import sys, tenure
with tenure.Node(sys.argv[1], name="paused", ttl=float(sys.argv[3])) as node:
    term = node.election("r", lock_id=sys.argv[2]).wait()
    print("mine", flush=True)
    while sys.stdin.readline():
        print(node.election("r").is_leader, term.valid, flush=True)
"""


class ByHand:
    """A program that waits for the lock, and says when it has it."""

    def __init__(self, url: str) -> None:
        self._opened = connected(url, autocommit=True)
        self.connection = self._opened.__enter__()
        self.has_it = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.__exit__(None, None, None)

    def try_it(self) -> bool:
        if self.connection.execute("select pg_try_advisory_lock(%s)", [LOCK_ID]).fetchone()[0]:
            self.has_it.set()
        return self.has_it.is_set()

    def wait(self) -> None:
        """Wait for the lock in the background, on the server, in the queue of those that wait."""

        def waits() -> None:
            self.connection.execute("select pg_advisory_lock(%s)", [LOCK_ID])
            self.has_it.set()

        threading.Thread(target=waits, daemon=True).start()
        pid = self.connection.info.backend_pid
        queued = f"select 1 from pg_locks where pid = {pid} and not granted"
        until(lambda: execute(self.url_of(), queued), "in the queue")

    def url_of(self) -> str:
        info = self.connection.info
        return f"postgresql://{info.user}@{info.host}:{info.port}/{info.dbname}"

    def release(self) -> None:
        self.has_it.clear()
        self.connection.execute("select pg_advisory_unlock(%s)", [LOCK_ID])


def idle(term: tenure.Term) -> None:
    term.wait_lost()


def is_free(url: str) -> bool:
    with ByHand(url) as other:
        if free := other.try_it():
            other.release()
        return free


def events_of(election: tenure.Election) -> list[Any]:
    """What happens to the node's own terms from now on."""
    seen: list[Any] = []
    election.on_event(lambda event: None if isinstance(event, LeaderChanged) else seen.append(event))
    return seen


def happened(seen: list[Any], *kinds: type) -> Callable[[], bool]:
    return lambda: [type(event) for event in seen if type(event) in kinds][-len(kinds) :] == list(kinds)


@contextlib.contextmanager
def locked_desk(url: str, **settings: Any) -> Iterator[Desk]:
    with Desk(url, namespace="default", **settings) as desk:
        desk.backend.assign_lock("r", LOCK_ID)
        yield desk


# --- with a program that takes the lock by hand -------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"mode": "hybrid"}, {"takeover": "strict"}, {"mode": "lock"}], ids=str)
def test_program_with_the_lock_keeps_nodes_from_leading_and_nodes_keep_the_program(postgres_url, settings):
    with Nodes(postgres_url, ttl=TTL_S, **settings) as nodes, ByHand(postgres_url) as by_hand:
        assert by_hand.try_it()
        elections = [nodes(name).election("r", lock_id=LOCK_ID) for name in "ab"]
        with pytest.raises(tenure.WaitTimeout):
            elections[0].wait(1.5)
        assert not elections[1].is_leader
        by_hand.release()
        until(lambda: any(election.is_leader for election in elections), "a node leads", FAR_BELOW_THE_TTL_S)
        assert not by_hand.try_it()


def test_node_leads_as_soon_as_the_program_with_the_lock_is_gone(postgres_url):
    """It waits for the lock as it waits for a sentinel. The bound is coarse: a look takes a second."""
    with Nodes(postgres_url, ttl=TTL_S) as nodes:
        with ByHand(postgres_url) as by_hand:
            assert by_hand.try_it()
            elections = [nodes(name).election("r", lock_id=LOCK_ID) for name in "ab"]
            waiting = f"select 1 from pg_locks where not granted and objid = {LOCK_ID & 0xFFFFFFFF}"
            until(lambda: len(execute(postgres_url, waiting)) == 2, "both wait for the lock on the server")
            began = time.monotonic()
        until(lambda: any(election.is_leader for election in elections), "a node leads", FAR_BELOW_THE_TTL_S)
        took = time.monotonic() - began
        assert took < 1.5, took
        assert sum(election.is_leader for election in elections) == 1


@pytest.mark.parametrize(
    ("mode", "store", "watch"), [("hybrid", LockingStore, LockingWatch), ("lock", LockStore, LockWatch)]
)
def test_lock_that_programs_share_is_tried_less_and_less(postgres_url, monkeypatch, mode, store, watch):
    """A wait for such a lock ends at once. The tries must not follow it at the pace of the looks."""
    calls = {"look": 0, "_acquire": 0}

    def count(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def counted(*given: Any) -> Any:
            calls[name] += 1
            return original(*given)

        monkeypatch.setattr(owner, name, counted)

    count(store, "_acquire")
    count(watch, "look")
    with connected(postgres_url, autocommit=True) as program, Nodes(postgres_url, mode=mode, ttl=TTL_S) as nodes:
        program.execute("select pg_advisory_lock_shared(%s)", [LOCK_ID])
        election = nodes("a").election("r", lock_id=LOCK_ID)
        until(lambda: calls["look"] >= 10, "the pauses are long by now")
        calls.update(look=0, _acquire=0)
        until(lambda: calls["look"] >= 10, "looks")
        # One try may belong to a look that came before the counters were set back.
        assert 0 < calls["_acquire"] <= calls["look"] / 2 + 1, calls
        assert not election.is_leader
        program.execute("select pg_advisory_unlock_shared(%s)", [LOCK_ID])
        until(lambda: election.is_leader, "the node leads", FAR_BELOW_THE_TTL_S)


def test_nodes_hand_over_among_each_other_with_the_lock(postgres_url):
    with Nodes(postgres_url, ttl=TTL_S) as nodes:
        first, second = (nodes(name).election("r", lock_id=LOCK_ID) for name in "ab")
        until(lambda: first.is_leader or second.is_leader, "a leader")
        until(lambda: len(first.candidates()) == 2, "both standing")
        leads, stands = (first, second) if first.is_leader else (second, first)
        for _ in range(3):
            leads.resign()
            stands.wait(FAR_BELOW_THE_TTL_S)
            assert not leads.is_leader
            assert not is_free(postgres_url)
            leads, stands = stands, leads
        leads.withdraw()
        until(lambda: stands.is_leader, "the last one", FAR_BELOW_THE_TTL_S)
        stands.withdraw()
        until(lambda: is_free(postgres_url), "the lock is free")


def test_node_in_mode_lock_and_node_with_a_lease_exclude_each_other(postgres_url):
    with Nodes(postgres_url, ttl=TTL_S) as nodes:
        old = nodes("old", mode="lock").election("r", lock_id=LOCK_ID)
        old.wait(20)
        new = nodes("new").election("r", lock_id=LOCK_ID)
        with pytest.raises(tenure.WaitTimeout):
            new.wait(1.5)
        old.withdraw()
        assert new.wait(FAR_BELOW_THE_TTL_S).token > 0
        again = nodes("again", mode="lock").election("r", lock_id=LOCK_ID)
        with pytest.raises(tenure.WaitTimeout):
            again.wait(1.5)


# --- the connection breaks ----------------------------------------------------------------------------------------


def test_strict_leader_that_is_cut_resumes_the_same_term_with_lock_and_lease(postgres_url):
    with Nodes(postgres_url, ttl=TTL_S, takeover="strict") as nodes:
        election = nodes("leader").election("r", lock_id=LOCK_ID)
        seen = events_of(election)
        term = election.wait(20)
        before = execute(postgres_url, HOLDERS)
        execute(postgres_url, CUT.format("leader"))
        until(happened(seen, Suspended, Resumed), "suspended, then resumed")
        assert term.valid
        assert len(execute(postgres_url, HOLDERS)) == 1
        assert execute(postgres_url, HOLDERS) != before


@pytest.mark.parametrize(
    ("takeover", "reason"), [("strict", "the lock was taken"), ("instant", "the connection was cut")]
)
def test_leader_that_is_cut_stops_for_a_program_that_waits_for_the_lock(postgres_url, takeover, reason):
    with Nodes(postgres_url, ttl=TTL_S, takeover=takeover) as nodes, ByHand(postgres_url) as by_hand:
        election = nodes("leader").election("r", lock_id=LOCK_ID)
        seen = events_of(election)
        term = election.wait(20)
        by_hand.wait()
        execute(postgres_url, CUT.format("leader"))
        assert by_hand.has_it.wait(20)
        assert term.wait_lost(20)
        assert term.lost_reason == reason
        until(happened(seen, Suspended, Deposed), "suspended, then lost")
        with pytest.raises(tenure.WaitTimeout):
            election.wait(1.5)
        # The role was given up as well, so another node can have it.
        assert execute(postgres_url, "select 1 from tenure.roles r join tenure.members m on m.id = r.holder "
                       "where m.ended_at is null") == []  # fmt: skip
        by_hand.release()
        assert election.wait(FAR_BELOW_THE_TTL_S).token > term.token


def test_strict_leader_without_its_connection_does_not_lead_beside_the_program(postgres_server, postgres_url):
    """The node cannot reach the server, so only its own broken connection can tell it."""
    database = postgres_url.rpartition("/")[2]
    permit = f'alter database "{database}" allow_connections '
    with Nodes(postgres_url, ttl=TTL_S, takeover="strict") as nodes, ByHand(postgres_url) as by_hand:
        election = nodes("leader").election("r", lock_id=LOCK_ID)
        seen = events_of(election)
        term = election.wait(20)
        by_hand.wait()
        try:
            # Committed before the cut: the node connects again at once.
            execute(postgres_server.url(), permit + "false")
            execute(postgres_server.url(), CUT.format("leader"))
            assert by_hand.has_it.wait(20)
            until(lambda: not election.is_leader, "the node has stopped", 5)
            until(lambda: seen[-1:] == [Suspended("r", term.token)], "suspended, and not lost")
        finally:
            execute(postgres_server.url(), permit + "true")
        until(happened(seen, Suspended, Deposed), "lost")
        assert seen[-1].reason == "the lock was taken"


@pytest.mark.parametrize("takeover", ["instant", "strict"])
def test_restart_of_the_server_keeps_the_term_with_its_lock(make_postgres_server, takeover):
    server = make_postgres_server(fsync=False)
    with Nodes(server.url(), ttl=TTL_S, takeover=takeover) as nodes:
        election = nodes("leader").election("r", lock_id=LOCK_ID)
        term = election.wait(20)
        stands = nodes("standby").election("r", lock_id=LOCK_ID)
        seen = events_of(election)
        server.restart()
        until(happened(seen, Suspended, Resumed), "suspended, then resumed")
        assert term.valid
        assert not stands.is_leader
        assert not is_free(server.url())


def test_leader_that_is_paused_is_succeeded_although_its_connection_has_the_lock(postgres_url):
    arguments = [sys.executable, "-c", BY_NODE, postgres_url, str(LOCK_ID), "2"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline().strip() == "mine"
            with Nodes(postgres_url, ttl=2) as nodes:
                election = nodes("successor").election("r", lock_id=LOCK_ID)
                process.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
                election.wait(FAR_BELOW_THE_TTL_S)
                assert not is_free(postgres_url)
                process.stdin.write("\n")
                process.stdin.flush()
                process.send_signal(signal.SIGCONT)
                assert process.stdout.readline().split() == ["False", "False"]
                assert election.is_leader
        finally:
            process.kill()


# --- in which order -----------------------------------------------------------------------------------------------


def test_lock_comes_before_the_row_and_goes_after_it(postgres_url):
    role = "select holder from tenure.roles"
    with locked_desk(postgres_url) as desk, ByHand(postgres_url) as by_hand:
        assert by_hand.try_it()
        assert desk.acquire("r") == {}
        assert execute(postgres_url, role) == [(None,)]
        by_hand.release()
        token = desk.acquire("r")["r"]
        assert not by_hand.try_it()
        with connected(postgres_url) as working:
            fence(working, TermIdentity("r", token, desk.id), 20)
            assert not desk.ask(messages.Vacate(desk.id, "r", token)).done
            assert not by_hand.try_it()
            working.rollback()
        assert desk.ask(messages.Vacate(desk.id, "r", token)).done
        assert execute(postgres_url, role) == [(None,)]
        assert by_hand.try_it()


def desk_term(desk: Desk, token: int) -> Any:
    from tests.support.store_by_hand import TermIdentity

    return TermIdentity("r", token, desk.id)


def test_candidate_leaves_the_lock_alone_while_a_node_leads_and_warns_if_that_node_lacks_it(postgres_url, caplog):
    with Desk(postgres_url, namespace="default", name="former") as leads, locked_desk(postgres_url) as desk:
        leads.lead("r")
        for _ in range(2):
            assert desk.acquire("r") == {}
        assert is_free(postgres_url)
    [said] = [record for record in caplog.records if "leads it without that lock" in record.message]
    assert said.levelno == logging.WARNING
    assert "former" in said.message


def test_candidate_does_not_warn_about_a_leader_with_the_lock(postgres_url, caplog):
    with locked_desk(postgres_url) as leads, locked_desk(postgres_url) as desk:
        leads.lead("r")
        assert desk.acquire("r") == {}
    assert not [record for record in caplog.records if "without that lock" in record.message]


def test_lock_that_was_taken_for_nothing_is_released(postgres_url, monkeypatch):
    """The row is busy, or a statement fails: the node must not keep the lock from others."""
    with locked_desk(postgres_url) as desk, connected(postgres_url) as busy:
        desk.stand("r")
        busy.execute("select 1 from tenure.roles for update")
        assert desk.acquire("r") == {}
        assert is_free(postgres_url)
        busy.rollback()
        monkeypatch.setattr("tenure.store.statements.TAKE", "select 1 / 0")
        with pytest.raises(Exception, match="division by zero"):
            desk.acquire("r")
        assert is_free(postgres_url)


def test_lock_that_was_granted_before_a_statement_failed_is_released(postgres_url, monkeypatch):
    """An operator cancelled the second of two tries, say."""
    divides = "'refused' end, 1 / (case when r.name = 's' then 0 else 1 end)"
    monkeypatch.setattr(role_locks, "_TAKE", role_locks._TAKE.replace("'refused' end", divides))
    with locked_desk(postgres_url) as desk:
        desk.backend.assign_lock("s", 1)
        with pytest.raises(Failed, match="division by zero"):
            desk.acquire("r", "s")
        assert is_free(postgres_url)


def test_row_without_its_lock_is_reported_and_not_taken_up(postgres_url):
    """The answer to an acquisition was lost with the connection, and the lock with it."""
    with locked_desk(postgres_url) as desk:
        desk.lead("r")
        store, session, _ = desk.backend.open_control()
        with contextlib.closing(session):
            [held] = store.perform(messages.Renew(desk.id)).held
            assert held.unlocked


def test_member_that_resumes_ends_its_own_earlier_connection_for_the_lock(postgres_url):
    """The client's side is broken, and the server has not noticed."""
    with locked_desk(postgres_url, takeover="strict") as desk:
        desk.lead("r")
        store, session, opened = desk.backend.open_control()
        with contextlib.closing(session):
            member = messages.Member(desk.id, desk.settings.name, TTL_S, "strict", None)
            incarnation = opened.server.incarnation
            [held] = store.perform(messages.Resume(member, opened.server, 1, incarnation, ("r",))).held
            assert not held.unlocked
            assert not is_free(postgres_url)


def test_member_that_joins_again_gives_its_locks_back(postgres_url):
    with locked_desk(postgres_url) as desk:
        desk.lead("r")
        desk.join()
        assert is_free(postgres_url)


# --- services -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "lock"])
def test_lock_is_free_after_the_services_have_stopped(postgres_url, mode):
    node = tenure.Node(postgres_url, ttl=TTL_S, mode=mode)
    started, may_stop = threading.Event(), threading.Event()

    @node.leader_only("r", lock_id=LOCK_ID)
    def service(term: tenure.Term) -> None:
        started.set()
        term.wait_lost()
        may_stop.wait(20)

    with node, ByHand(postgres_url) as by_hand:
        assert started.wait(20)
        closing = threading.Thread(target=node.close)
        closing.start()
        until(lambda: not node.election("r").is_leader if node._engine.running else True, "given up")
        assert not by_hand.try_it()
        may_stop.set()
        until(by_hand.try_it, "the lock is free")
        closing.join()


# --- what is refused ----------------------------------------------------------------------------------------------


def test_lock_id_that_cannot_work_is_refused_with_its_remedy(postgres_url):
    with Nodes(postgres_url) as nodes:
        node = nodes("a")
        for wrong in (2**63, "twelve", 1.0, True):
            with pytest.raises(ConfigError, match="signed 64-bit integer"):
                node.election("r", lock_id=wrong)
        node.election("r", lock_id=1)
        with pytest.raises(ConfigError, match="already has lock_id=1 in this node: give that, not 2"):
            node.election("r", lock_id=2)
        with pytest.raises(ConfigError, match="lock_id=1 is the lock of role 'r'"):
            node.election("other", lock_id=1)
        assert node.election("r") is node.election("r", lock_id="0x1")
        node.election("third")
        with pytest.raises(ConfigError, match="already stands for it without lock_id=3"):
            node.election("third", lock_id=3)


def test_lock_id_is_refused_where_no_session_can_hold_a_lock(postgres_url, sqlite_url):
    for url, settings, said in (
        (sqlite_url, {}, "advisory lock of PostgreSQL, and this node's database is sqlite"),
        (postgres_url, {"mode": "lease"}, "mode 'lease'.*direct_url="),
    ):
        node = tenure.Node(url, **settings)
        with pytest.raises(ConfigError, match=said):
            node.leader_only("r", idle, lock_id=7)


def test_lock_id_on_mariadb_is_refused(mariadb_url):
    with pytest.raises(ConfigError, match="this node's database is mysql: leave it out"):
        tenure.Node(mariadb_url).leader_only("r", idle, lock_id=7)


@pytest.mark.long
def test_lock_id_behind_a_pooler_is_refused(postgres_server, postgres_url, make_pgbouncer):
    url = make_pgbouncer(postgres_server).through(postgres_url)
    node = tenure.Node(url)
    node.leader_only("r", idle, lock_id=7)
    with pytest.raises(PoolerDetected, match=r"lock_id= needs a direct connection.*direct_url="):
        node.start()
    with Nodes(url) as nodes, pytest.raises(ConfigError, match=r"mode 'lease'.*direct_url="):
        nodes("b").election("r", lock_id=7)
    with Nodes(url, direct_url=postgres_url, ttl=TTL_S) as nodes:
        nodes("c").election("r", lock_id=LOCK_ID).wait(20)
        assert not is_free(postgres_url)


def test_node_that_gets_its_name_at_the_start_keeps_its_locks(postgres_url):
    """A node that was made before a fork is named again in the child."""
    node = tenure.Node(postgres_url)
    node.leader_only("r", idle, lock_id=7)
    node._engine._rename("another name")
    with pytest.raises(ConfigError, match="lock_id=7 is the lock of role 'r'"):
        node.leader_only("other", idle, lock_id=7)


def test_server_whose_locks_lock_nothing_is_refused(postgres_url, monkeypatch):
    monkeypatch.setattr("tenure.databases.postgres.sentinel.AdvisorySentinel.holds", lambda _: False)
    node = tenure.Node(postgres_url)
    node.leader_only("r", idle, lock_id=7)
    with pytest.raises(StoreUnavailable, match="lock_id= needs advisory locks"):
        node.start()


def test_roles_without_a_lock_id_cost_no_statement_more(postgres_url, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(LockingStore, "_each", lambda *given: calls.append(given[1]))
    with Desk(postgres_url, namespace="default") as desk:
        term = desk.lead("r")
        desk.ask(messages.Renew(desk.id))
        desk.ask(messages.Vacate(desk.id, "r", term.token))
        desk.join()
    assert calls == []
