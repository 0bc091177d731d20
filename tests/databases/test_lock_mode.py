"""Mode `lock`: the advisory lock is the authority.

It creates nothing, and shares its lock with programs that take it by hand. What it does not promise, docs/guarantees.md
says.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time

import psycopg
import pytest
from typing_extensions import Self

import tenure
from tenure.core import messages
from tenure.errors import ConfigError, NotLeader, StoreUnavailable
from tenure.store.session import Failed
from tests.support.cluster import ROOT
from tests.support.store_by_hand import Desk, Nodes, connected, execute, until

LOCK_ID = 0x434944585F4C4452
EXTREMES = (LOCK_ID, -1, 0, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63))
FAR_BELOW_THE_TTL_S = 15
TTL_S = 30

BY_HAND = """
import sys, time, psycopg
with psycopg.connect(sys.argv[1], autocommit=True) as connection:
    while not connection.execute("select pg_try_advisory_lock(%s)", [int(sys.argv[2])]).fetchone()[0]:
        time.sleep(0.01)
    print("mine", flush=True)
    time.sleep(600)
"""
BY_NODE = """
import sys, tenure
with tenure.Node(sys.argv[1], mode="lock", ttl=float(sys.argv[3])) as node:
    term = node.election("r", lock_id=sys.argv[2]).wait()
    print("mine", flush=True)
    while sys.stdin.readline():
        print(node.election("r").is_leader, term.valid, flush=True)
"""


class Holder:
    """A process that wants the lock, by hand or by a node; `mine()` waits until it has it."""

    def __init__(self, program: str, url: str, lock_id: int, ttl: float = TTL_S) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, url, str(lock_id), str(ttl)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            cwd=ROOT,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def say(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def mine(self) -> None:
        assert self.say() == "mine"


def held_by_hand(url: str, lock_id: int) -> bool:
    """Whether somebody has the lock, as a program finds out that knows nothing of Tenure."""
    with connected(url) as connection:
        return not connection.execute("select pg_try_advisory_lock(%s)", [lock_id]).fetchone()[0]


def catalog(url: str) -> list[tuple[object, ...]]:
    return execute(
        url,
        "select 'class', oid::text from pg_class union all select 'schema', oid::text from pg_namespace "
        "union all select 'function', oid::text from pg_proc order by 1, 2",
    )


def test_lock_mode_creates_nothing_and_needs_no_privilege(postgres_server, postgres_url):
    database = postgres_url.rpartition("/")[2]
    execute(
        postgres_url,
        "drop role if exists nobody_at_all",
        "create role nobody_at_all login",
        f'revoke all on database "{database}" from public',
        f'grant connect on database "{database}" to nobody_at_all',
        "revoke all on schema public from public",
    )
    before = catalog(postgres_url)
    with Nodes(postgres_server.url(database, user="nobody_at_all"), mode="lock") as nodes:
        first, second = nodes("a").election("r"), nodes("b").election("r")
        first.wait(20)
        first.resign()
        assert second.wait(20).valid
        assert nodes("c").mode == "lock"
        assert catalog(postgres_url) == before


@pytest.mark.parametrize("lock_id", EXTREMES)
def test_node_and_a_lock_taken_by_hand_exclude_each_other(postgres_url, lock_id):
    with Nodes(postgres_url, mode="lock", ttl=TTL_S) as nodes, connected(postgres_url, autocommit=True) as by_hand:
        taken = by_hand.execute("select pg_try_advisory_lock(%s)", [lock_id]).fetchone()
        assert taken == (True,)
        election = nodes("a").election("r", lock_id=lock_id)
        with pytest.raises(tenure.WaitTimeout):
            election.wait(0.3)
        by_hand.execute("select pg_advisory_unlock(%s)", [lock_id])
        term = election.wait(FAR_BELOW_THE_TTL_S)
        assert held_by_hand(postgres_url, lock_id)
        assert nodes("b").election("r", lock_id=hex(lock_id)).is_leader is False
        election.withdraw()
        assert not term.valid


@pytest.mark.parametrize(("first", "second"), [(BY_HAND, BY_NODE), (BY_NODE, BY_HAND), (BY_NODE, BY_NODE)])
def test_process_that_is_killed_is_succeeded_at_once_by_hand_or_by_node(postgres_url, first, second):
    with Holder(first, postgres_url, LOCK_ID) as one:
        one.mine()
        with Holder(second, postgres_url, LOCK_ID) as other:
            until(lambda: len(execute(postgres_url, BACKENDS)) >= 2, "both connected")
            at = time.monotonic()
            one.process.kill()
            other.mine()
            assert time.monotonic() - at < FAR_BELOW_THE_TTL_S


BACKENDS = "select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
CONTROL = "from pg_stat_activity where datname = current_database() and application_name like 'tenure control%/{}'"


def test_cut_connection_ends_the_term_and_another_leads(postgres_url):
    with Nodes(postgres_url, mode="lock", ttl=TTL_S) as nodes:
        leads = nodes("leader").election("r")
        term = leads.wait(20)
        stands = nodes("standby").election("r")
        execute(postgres_url, "select pg_terminate_backend(pid) " + CONTROL.format("leader"))
        assert term.wait_lost(20)
        until(lambda: stands.is_leader or leads.is_leader, "somebody leads again", FAR_BELOW_THE_TTL_S)
        assert not (stands.is_leader and leads.is_leader)


def test_restarted_server_has_one_leader_again(make_postgres_server):
    server = make_postgres_server(fsync=False)
    with Nodes(server.url(), mode="lock", ttl=TTL_S) as nodes:
        elections = [nodes(name).election("r") for name in "ab"]
        until(lambda: any(election.is_leader for election in elections), "a leader")
        server.restart()
        until(lambda: any(election.is_leader for election in elections), "a leader after the restart")
        assert sum(election.is_leader for election in elections) == 1


def test_paused_process_keeps_the_lock_and_its_term_is_over_when_it_wakes(postgres_url):
    """No lease here, so nobody can end it; but it does not lie to itself."""
    with Holder(BY_NODE, postgres_url, LOCK_ID, ttl=1) as holder:
        holder.mine()
        holder.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, holder.process.pid, os.WSTOPPED | os.WNOWAIT)
        with Nodes(postgres_url, mode="lock", ttl=1) as nodes:
            election = nodes("a").election("r", lock_id=LOCK_ID)
            with pytest.raises(tenure.WaitTimeout):
                election.wait(2)
            assert holder.process.stdin is not None
            holder.process.stdin.write("\n")  # what it is asked first when it wakes
            holder.process.send_signal(signal.SIGCONT)
            _, valid = holder.say().split()  # it may have begun another term already: the lock is still its own
            assert valid == "False"


def test_many_roles_are_led_and_left_together(postgres_url):
    roles = [f"role {number}" for number in range(30)]
    with Nodes(postgres_url, mode="lock", ttl=TTL_S) as nodes:
        leader = nodes("a")
        terms = [leader.election(role).wait(20) for role in roles]
        standby = nodes("b")
        elections = [standby.election(role) for role in roles]
        assert not any(election.is_leader for election in elections)
        leader.close()
        assert {term.lost_reason for term in terms} == {"left"}
        for election in elections:
            election.wait(FAR_BELOW_THE_TTL_S)


def test_a_statement_that_fails_leaves_no_lock_by_which_nobody_leads(postgres_url):
    """Cancelled by somebody, say; here by a number that the server does not take."""
    with Desk(postgres_url, mode="lock") as desk:
        role_locks = desk.backend._locks
        role_locks.assign("a", LOCK_ID)
        role_locks.assign("b", 2**63)
        desk.ask(messages.Stand(desk.id, ("a", "b"), ()))
        with pytest.raises(Failed):
            desk.ask(messages.Acquire(desk.id, "desk", ("a", "b"), 0))
        [held] = desk.ask(messages.Renew(desk.id, ())).held
        assert held.role == "a"

        vacate = messages.Vacate(desk.id, "a", held.token, None)
        role_locks._ids["a"] = 2**63
        with pytest.raises(Failed):
            desk.ask(vacate)
        role_locks._ids["a"] = LOCK_ID
        assert held_by_hand(postgres_url, LOCK_ID)
        desk.ask(vacate)
        assert not held_by_hand(postgres_url, LOCK_ID)


def test_namespaces_and_roles_have_locks_of_their_own(postgres_url):
    with Nodes(postgres_url, mode="lock") as nodes:
        nodes("a", namespace="one").election("r").wait(20)
        nodes("b", namespace="two").election("r").wait(20)
        nodes("c", namespace="one").election("other").wait(20)


def test_role_handed_over_is_free_for_others_and_comes_back_where_nobody_wants_it(postgres_url):
    with Nodes(postgres_url, mode="lock", ttl=TTL_S) as nodes:
        node = nodes("a")
        with node.lead("r", timeout=20):
            pass
        with node.lead("r", timeout=FAR_BELOW_THE_TTL_S):
            pass


def test_what_needs_tables_or_tokens_is_refused(postgres_url):
    with Nodes(postgres_url, mode="lock") as nodes:
        node = nodes("a")
        election = node.election("r")
        term = election.wait(20)
        assert (term.token, term.role) == (0, "r")
        with connected(postgres_url) as connection, pytest.raises(ConfigError, match="no fencing token"):
            term.fence(connection)
        with pytest.raises(ConfigError, match="no fencing token"), term.transaction():
            pass
        for call in (election.leader, election.candidates, election.history, lambda: election.resign(to="b")):
            with pytest.raises(ConfigError, match="keeps no record"):
                call()
        assert term.valid


def test_lock_id_must_be_a_signed_64_bit_number_of_its_own(postgres_url):
    with Nodes(postgres_url, mode="lock") as nodes:
        node = nodes("a")
        for wrong in (2**63, -(2**63) - 1, "0xFFFFFFFFFFFFFFFFF", "twelve", "", 1.0, True, b"1"):
            with pytest.raises(ConfigError, match="lock_id="):
                node.election("r", lock_id=wrong)
        node.election("r", lock_id="0x434944585F4C4452")
        assert node.election("r") is node.election("r", lock_id=LOCK_ID)
        with pytest.raises(ConfigError, match=r"has lock_id=\d+ in this node"):
            node.election("r", lock_id=1)
        with pytest.raises(ConfigError, match="is the lock of role 'r'"):
            node.election("other", lock_id=LOCK_ID)
        with node.lead("by lead", timeout=20, lock_id=7):
            assert held_by_hand(postgres_url, 7)


def test_lock_mode_is_refused_where_it_cannot_work(sqlite_url, postgres_url):
    with pytest.raises(ConfigError, match="needs PostgreSQL"):
        tenure.Node(sqlite_url, mode="lock")
    with pytest.raises(ConfigError, match="no lease to wait for"):
        tenure.Node(postgres_url, mode="lock", takeover="strict")


def test_resigning_without_leading_is_refused(postgres_url):
    with Nodes(postgres_url, mode="lock") as nodes:
        nodes("a").election("r").wait(20)
        with pytest.raises(NotLeader):
            nodes("b").election("r").resign()


# --- servers whose advisory locks have no effect ----------------------------------------------------------------


@pytest.fixture
def lockless_url(postgres_url):
    """A look-alike: the functions are there and say yes to everybody, as on some databases that speak PostgreSQL."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("set allow_system_table_mods = on")
        for name in ("pg_try_advisory_lock", "pg_advisory_unlock"):
            connection.execute(f"alter function pg_catalog.{name}(integer, integer) rename to real_{name}")
            connection.execute(
                f"create function pg_catalog.{name}(integer, integer) returns boolean language sql as 'select true'"
            )
    return postgres_url


def test_auto_picks_the_lease_where_advisory_locks_lock_nothing(lockless_url, caplog):
    with caplog.at_level(logging.INFO, "tenure"), Nodes(lockless_url) as nodes:
        nodes("a").election("r").wait(20)
        assert nodes("b").mode == "lease"
        keys = "select sentinel_key from tenure.members"
        until(lambda: len(execute(lockless_url, keys)) == 2, "two members")
        assert execute(lockless_url, keys) == [(None,), (None,)]
    said = [record for record in caplog.records if "mode lease" in record.message]
    assert len(said) == 2
    assert {record.levelname for record in said} == {"WARNING"}
    assert "advisory locks have no effect" in said[0].message


@pytest.mark.parametrize("mode", ["hybrid", "lock"])
def test_modes_that_need_locks_refuse_a_server_whose_locks_lock_nothing(lockless_url, mode):
    with pytest.raises(StoreUnavailable, match="have no effect"):
        tenure.Node(lockless_url, mode=mode).start()


def test_picked_mode_is_told_once_with_its_reason(postgres_url, caplog):
    with caplog.at_level(logging.INFO, "tenure"), Nodes(postgres_url) as nodes:
        assert nodes("a").mode == "hybrid"
    assert len([record for record in caplog.records if "mode hybrid: the connection is direct" in record.message]) == 1
