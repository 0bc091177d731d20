"""The file under the nodes is deleted, replaced, linked or moved: never two leaders, and never a stale write.

A node trusts what it reads in one file, and that file is what its path names. So it compares the two before it
extends its trust, and a node that comes to another file of the same name waits until no node can trust the first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tenure
from tenure.databases.sqlite.connect import SqliteConnector
from tenure.databases.sqlite.sentinel import LockedFiles
from tenure.store.session import Step
from tests.support import history
from tests.support.cluster import Cluster, NodeProcess
from tests.support.store_by_hand import Nodes, put_copy_in_place, until

TTL_S = 2.0
BOTH = pytest.mark.parametrize("takeover", ["strict", "instant"])


class FileCluster(Cluster):
    """Tokens begin anew in another file; that there is one leader at a time is what is asked here."""

    def check(self) -> None:
        found = history.overlaps(self.history)
        assert not found, "\n".join(found)

    def agree(self, *nodes: NodeProcess) -> None:
        """Wait until all of these nodes stand, in one file, and the one that leads there believes so, alone."""

        def agreed() -> bool:
            told = [node.ask("leader") for node in nodes]
            leading = [node.name for node in nodes if node.tell("status")["leader"]]
            names = {node.name for node in nodes}
            return all([each.get("name")] == leading and names <= set(each["candidates"]) for each in told)

        until(agreed, "one file, one leader")


def file_of(url: str) -> Path:
    return Path(url.partition(":///")[2])


# --- what happens to a file ---------------------------------------------------------------------------------


def delete(path: Path) -> None:
    for file in path.parent.glob(path.name + "*"):
        if file.is_file():
            file.unlink()


def delete_the_database_alone(path: Path) -> None:
    path.unlink()


def replace_by_an_empty_one(path: Path) -> None:
    empty = path.with_name("empty.db")
    empty.touch()
    delete(path)
    empty.rename(path)


def restore_a_copy(path: Path) -> None:
    """With the leader's membership in it, and its token."""
    put_copy_in_place(path)


def move_away(path: Path) -> None:
    for file in path.parent.glob(path.name + "*"):
        if file.is_file():
            file.rename(file.with_name("moved-" + file.name))


REPLACEMENTS = (delete, replace_by_an_empty_one, restore_a_copy, move_away)


def rename_another_over_it(path: Path) -> None:
    """As in `mv backup.db app.db`: the old log stays, and SQLite would take it for the new file's."""
    copy = path.with_name("copy.db")
    with contextlib.closing(sqlite3.connect(path)) as one, contextlib.closing(sqlite3.connect(copy)) as other:
        one.backup(other)
    copy.rename(path)


def delete_the_log(path: Path) -> None:
    Path(f"{path}-wal").unlink()


def delete_the_log_and_its_index(path: Path) -> None:
    delete_the_log(path)
    Path(f"{path}-shm").unlink()


HALF_REPLACEMENTS = (delete_the_database_alone, rename_another_over_it, delete_the_log, delete_the_log_and_its_index)


@BOTH
@pytest.mark.parametrize("replace", REPLACEMENTS, ids=lambda one: one.__name__)
@pytest.mark.twin("instant")
def test_another_file_of_the_same_name_has_no_leader_beside_the_first(replace, takeover, sqlite_url, tmp_path):
    with FileCluster(sqlite_url, tmp_path, ttl=TTL_S, takeover=takeover, start="wait") as cluster:
        old, other = cluster.spawn("old"), cluster.spawn("other")
        (new,) = cluster.load("new")
        cluster.wait_for_leader()
        replace(file_of(sqlite_url))
        new.tell("start")
        cluster.agree(new, *old, *other)
        assert old[0].events("deposed")


def test_leader_that_is_woken_all_the_time_notices_that_its_file_is_gone(sqlite_url):
    """Long before its next renewal, which would show it as well."""
    with Nodes(sqlite_url, ttl=60, renew_every=15) as nodes:
        node = nodes("busy")
        election = node.election("r")
        term = election.wait(20)
        restore_a_copy(file_of(sqlite_url))

        def is_lost() -> bool:
            node._engine.candidacy("r").begin_work()  # anything that wakes the node's thread
            return term.wait_lost(0.02)

        until(is_lost, "the loss of the term", timeout=10)


@BOTH
def test_leader_that_is_paused_while_its_file_is_replaced_is_waited_for(takeover, sqlite_url, tmp_path):
    """It cannot say that it has given up, so its trust has to run out."""
    with FileCluster(sqlite_url, tmp_path, ttl=TTL_S, takeover=takeover, start="wait") as cluster:
        (old,) = cluster.spawn("old")
        (new,) = cluster.load("new")
        cluster.wait_for_leader()
        while True:
            old.stop()
            with contextlib.suppress(sqlite3.OperationalError):
                cluster.execute("begin immediate", "rollback", timeout=1)
                break
            old.cont()
        delete(file_of(sqlite_url))
        at = history.now_ns()
        new.tell("start")
        elected = new.wait_event("elected", since=at)
        assert elected["at"] - at > TTL_S * 1e9, "no other process can know when the trust of a paused one has ended"
        woken = old.cont()
        old.wait_event("deposed")
        cluster.agree(new, old)
        reads = [read for read in cluster.history.of_kind("read") if read.node == "old" and read.at_before >= woken]
        assert reads


@BOTH
@pytest.mark.parametrize("replace", HALF_REPLACEMENTS, ids=lambda one: one.__name__)
@pytest.mark.twin("strict")
def test_file_and_log_that_do_not_belong_together_have_no_leader_beside_the_first(
    replace, takeover, sqlite_url, tmp_path
):
    """Who opens them has neither the leader's locks nor all that it wrote. Processes that had them open must end."""
    with FileCluster(sqlite_url, tmp_path, ttl=TTL_S, takeover=takeover, start="wait") as cluster:
        old, other = cluster.spawn("old") + cluster.spawn("other")
        (new,) = cluster.load("new")
        cluster.wait_for_leader()
        replace(file_of(sqlite_url))
        start = new.send("start")  # which may have to wait until the others have ended
        old.wait_event("deposed")
        for node in (old, other, new):
            until(lambda node=node: "stop every process that uses the file" in node.log.read_text(), "what to do")
            assert node.running
        for node in (old, other):
            node.kill()
        delete(file_of(sqlite_url))
        new.reply(start)
        new.wait_event("elected")


@pytest.mark.parametrize("replace", HALF_REPLACEMENTS, ids=lambda one: one.__name__)
def test_process_does_not_open_a_file_beside_the_log_of_another(replace, sqlite_url):
    """Closing one of two indexes that are one file drops the locks of both, and a truncated one ends the process."""
    connector = SqliteConnector(str(file_of(sqlite_url)), renew_every=1)
    with contextlib.closing(connector.open()) as session:
        session.run(Step("create table t (x integer)", {}))
        replace(file_of(sqlite_url))
        with pytest.raises(tenure.StoreUnavailable, match="stop every process that uses the file"):
            connector.open()
    delete(file_of(sqlite_url))
    connector.open().close()


def test_threads_that_open_and_close_the_same_file_do_not_refuse_each_other(sqlite_url):
    connector = SqliteConnector(sqlite_url.removeprefix("sqlite:///"), 1.0)

    def open_and_close(_):
        for _ in range(25):
            connector.open().close()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(open_and_close, range(8))) == [None] * 8


def test_free_lock_of_another_file_delays_no_node(sqlite_url, tmp_path):
    with FileCluster(sqlite_url, tmp_path, ttl=60) as cluster:
        (old,) = cluster.spawn("old")
        cluster.wait_for_leader()
        old.kill()
        delete(file_of(sqlite_url))
        (new,) = cluster.spawn("new")
        new.wait_event("elected", timeout=20)
        assert len(list(sentinels(sqlite_url).glob("*.use"))) == 1, "and what the dead left behind is removed"


# --- fenced writes ------------------------------------------------------------------------------------------


def test_fenced_write_does_not_meet_a_copy_in_the_place_of_the_file(sqlite_url):
    """The copy has the leader's membership and token: nothing in it tells that they are of another file."""
    with Nodes(sqlite_url, ttl=60, takeover="strict") as nodes:
        term = nodes("a").election("r").wait(20)
        with term.transaction() as transaction:
            transaction.execute("create table ledger (token integer)")
        put_copy_in_place(file_of(sqlite_url))
        with pytest.raises(tenure.Fenced), term.transaction() as transaction:
            transaction.execute("insert into ledger values (?)", (term.token,))
        assert term.wait_lost(20)
        assert term.lost_reason == "the file was replaced"
        # The term's row stands in the copy until the node has joined there; after that it is over there, too.
        until(lambda: nodes("b").election("r").candidates(), "a node on the new file")
        with pytest.raises(tenure.Fenced), term.transaction():
            pass


# --- links --------------------------------------------------------------------------------------------------


def test_file_with_two_names_is_refused(sqlite_url):
    with Nodes(sqlite_url) as nodes:
        nodes("a").election("r").wait(20)
    file = file_of(sqlite_url)
    os.link(file, file.with_name("other.db"))
    for name in (file, file.with_name("other.db")):
        with pytest.raises(tenure.StoreUnavailable, match=r"has 2 hard links.*remove the other"):
            tenure.Node(f"sqlite:///{name}").start()


@BOTH
def test_leader_whose_file_gets_a_second_name_gives_up_until_it_is_removed(takeover, sqlite_url):
    with Nodes(sqlite_url, ttl=3, takeover=takeover) as nodes:
        election = nodes("a").election("r")
        term = election.wait(20)
        other = file_of(sqlite_url).with_name("other.db")
        os.link(file_of(sqlite_url), other)
        assert term.wait_lost(20)
        other.unlink()
        assert election.wait(20).token == term.token + 1


def test_nodes_by_a_symbolic_link_see_each_others_death(sqlite_url, tmp_path):
    """By two directories of sentinels they would not, and wait for the TTL."""
    link = tmp_path / "link.db"
    link.symlink_to(file_of(sqlite_url))
    with Cluster(sqlite_url, tmp_path, ttl=60) as cluster:
        (direct,) = cluster.spawn("direct")
        _, token = cluster.wait_for_leader()
        (by_link,) = cluster.spawn("by-link", url=f"sqlite:///{link}")
        cluster.wait_for_candidates(by_link, direct)
        direct.kill()
        cluster.wait_for_leader(token, timeout=30)
    assert not link.with_name("link.db.sentinels").exists()


@BOTH
def test_symbolic_link_that_leads_elsewhere_from_now_on_is_followed(takeover, tmp_path):
    link, first, second = (tmp_path / name for name in ("link.db", "first.db", "second.db"))
    link.symlink_to(first)
    with Nodes(f"sqlite:///{link}", ttl=3, takeover=takeover) as nodes:
        election = nodes("a").election("r")
        term = election.wait(20)
        (tmp_path / "other").symlink_to(second)
        (tmp_path / "other").rename(link)
        assert term.wait_lost(20)
        election.wait(20)
        assert second.exists()


# --- directories --------------------------------------------------------------------------------------------


@BOTH
def test_nodes_follow_when_the_directory_is_another_one(takeover, tmp_path):
    """The locks went with the old directory, so for the look between two renewals there may be two leaders."""
    place, moved = tmp_path / "place", tmp_path / "moved"
    place.mkdir()
    with Nodes(f"sqlite:///{place}/tenure.db", ttl=3, takeover=takeover) as nodes:
        election = nodes("a").election("r")
        term = election.wait(20)
        place.rename(moved)
        assert term.wait_lost(20)
        place.mkdir(exist_ok=True)  # the node may have made it again, for its locks
        election.wait(20)
        assert (place / "tenure.db").exists()


def sentinels(url: str) -> Path:
    return Path(url.partition(":///")[2] + ".sentinels")


def test_removed_lock_is_there_again_after_a_renewal(sqlite_url):
    with Nodes(sqlite_url, ttl=10, renew_every=0.2, takeover="strict") as nodes:
        term = nodes("a").election("r").wait(20)
        shutil.rmtree(sentinels(sqlite_url))
        until(lambda: list(sentinels(sqlite_url).glob("*.use")), "a new lock")
        assert term.valid


@pytest.mark.parametrize("name", ["notes.use", ".use", "1-2.3.use", "x-y-z-w.10.ab.use"])
def test_foreign_locked_file_among_the_locks_does_no_harm(sqlite_url, name):
    files = LockedFiles()
    assert files.lock(sentinels(sqlite_url) / name)
    with Nodes(sqlite_url) as nodes, nodes("a").election("r").wait(20).transaction() as transaction:
        transaction.execute("create table ledger (token integer)")
    files.abandon()


def test_nothing_is_left_behind_by_a_node_that_was_closed(sqlite_url):
    with Nodes(sqlite_url) as nodes:
        nodes("a").election("r").wait(20)
        assert list(sentinels(sqlite_url).glob("*.use"))
    assert not list(sentinels(sqlite_url).iterdir())
