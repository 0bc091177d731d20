"""Rolling upgrades: nodes of this release and of the next on the same tables. See docs/how-to/upgrade.md."""

from __future__ import annotations

import threading

import pytest

from tenure import StoreUnavailable
from tenure.store import migrations
from tenure.store.tables import MIGRATIONS, Migration
from tests.support.cluster import Cluster
from tests.support.store_by_hand import QUICK, Desk, Nodes, connected, execute, renewals, until

pytestmark = pytest.mark.long

PRESENT = MIGRATIONS[-1].version
NEXT = {
    "version": PRESENT + 1,
    "tables": (
        "alter table {members} add column mood text default 'fine'",
        "alter table {roles} add column weight integer not null default 1",
        "create table {schema}weather (day {text} primary key)",
    ),
    "functions": ("create function {schema}fence2() returns void language sql as ''",),
}
"""What the next release adds."""


def test_replicas_are_upgraded_one_after_the_other_and_back(one_url, tmp_path):
    """All the time somebody leads and writes; whoever it is, the others read the same."""
    with Cluster(one_url, tmp_path, ttl=30) as cluster:
        cluster.make_ledger()
        old = cluster.start(2)
        leader, token = cluster.wait_for_leader()
        new = cluster.load("new-0", "new-1", migration=NEXT)
        (rolled_back,) = cluster.load("rolled-back")
        for node in old:
            node.tell("writes")
        (follower,) = set(old) - {leader}

        for leaves, joins in ((leader, new[0]), (follower, new[1])):
            joins.tell("start")
            joins.tell("writes")
            cluster.wait_for_candidates(leaves, joins)
            assert leaves.tell("leader") == joins.tell("leader")
            leaves.tell("leave")
            if leaves is leader:
                leader, token = cluster.wait_for_leader(above=token)
            leader.tell("write")
        assert leader in new, "all the old ones are gone"

        rolled_back.tell("start")
        cluster.wait_for_candidates(leader, rolled_back)
        leader.tell("resign rolled-back")
        assert cluster.wait_for_leader(above=token) == (rolled_back, token + 1)
        rolled_back.tell("write")
        seen = rolled_back.tell("leader")
        assert seen == new[0].tell("leader") == new[1].tell("leader")
        assert [number for number, _ in seen["history"]] == list(range(token + 1, 0, -1))


def test_leader_of_the_release_before_goes_on_beside_this_one_and_is_succeeded_by_it(
    one_url, tmp_path, earlier_release
):
    """The tables change under it; it leads and writes on, and so it does when it is started on them again."""
    with Cluster(one_url, tmp_path, ttl=10) as cluster:
        cluster.make_ledger()
        (old,) = cluster.spawn("old", source=earlier_release)
        _, token = cluster.wait_for_leader()
        old.tell("write")
        (new,) = cluster.spawn("new")
        cluster.wait_for_candidates(old, new)
        assert old.tell("status")["leader"]
        old.tell("write")
        old.tell("resign new")
        assert cluster.wait_for_leader(above=token) == (new, token + 1)
        new.tell("write")
        (again,) = cluster.spawn("again", source=earlier_release)
        cluster.wait_for_candidates(new, again)
        new.kill()
        successor, latest = cluster.wait_for_leader(above=token + 1)
        successor.tell("write")
        assert latest == token + 2


def test_older_node_lets_go_when_a_release_starts_that_cannot_work_beside_it(one_url, tmp_path):
    with Cluster(one_url, tmp_path, **QUICK) as cluster:
        cluster.make_ledger()
        (old,) = cluster.start(1)
        cluster.wait_for_leader()
        (new,) = cluster.spawn("new", migration=NEXT | {"oldest": PRESENT + 1})
        assert cluster.wait_for_leader(above=1) == (new, 2)
        new.tell("write")
        old.wait_event("suspended", token=1)
        assert not old.tell("status")["leader"]
        old.assert_fenced()
        assert new.tell("leader")["candidates"] == ["new"]
        until(lambda: f"this one knows {PRESENT}: upgrade Tenure here" in old.log.read_text(), "a warning")


# --- waiting for the tables ---------------------------------------------------------------------------------


def migrate(url, errors):
    """Bring the tables up to date, as a node of the next release does when it starts."""
    with Desk(url, join=False) as desk:
        try:
            migrations.prepare(desk.session, (*MIGRATIONS, Migration(**NEXT)))
        except Exception as error:  # noqa: BLE001 - whatever it is
            errors.append(error)


WAITS = "select 1 from pg_locks where not granted and mode = 'AccessExclusiveLock'"


def test_migration_that_has_to_wait_does_not_stop_the_leader(postgres_url):
    """A forgotten transaction that has read the members keeps a change of the table waiting, and all that follows."""
    with Nodes(postgres_url, **QUICK) as nodes, connected(postgres_url) as forgotten:
        term = nodes("leader").election("r").wait(20)
        forgotten.execute("select * from tenure.members")
        errors = []
        starting = [threading.Thread(target=migrate, args=(postgres_url, errors)) for _ in range(3)]
        for thread in starting:
            thread.start()
        until(lambda: execute(postgres_url, WAITS), "a migration that waits")
        seen = renewals(postgres_url)[0]
        until(lambda: renewals(postgres_url)[0] > seen + 5, "renewals")
        assert all(thread.is_alive() for thread in starting)
        forgotten.rollback()
        for thread in starting:
            thread.join()
        assert errors == []
        assert execute(postgres_url, "select mood from tenure.members") == [("fine",)]
        assert term.valid


def test_migration_that_waits_for_too_long_says_for_what(postgres_url, monkeypatch):
    with Desk(postgres_url), connected(postgres_url) as forgotten:
        forgotten.execute("select * from tenure.members")
        monkeypatch.setattr(migrations, "PATIENCE_S", 0.5)
        errors = []
        migrate(postgres_url, errors)
        (error,) = errors
        assert isinstance(error, StoreUnavailable)
        assert f"to version {PRESENT + 1} within 0.5 s (canceling statement due to lock timeout)" in str(error)
        assert "end the transactions that keep the tables locked (pg_stat_activity shows them)" in str(error)
        assert execute(postgres_url, "select value from tenure.meta where name = 'version'") == [(PRESENT,)]
