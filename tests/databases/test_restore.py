"""Dump and restore on one server: the copy is another place, whatever the server's identity says.

What the dump holds is the past. The copy must not let through a term that was superseded since, nor issue a token that
was issued since, nor trust itself before every lease that the original gave is over.
"""

from __future__ import annotations

import subprocess

import pytest

import tenure
from tenure import manual
from tenure.fence.fence import fence
from tenure.registry import Registry
from tests.support.servers import PostgresServer
from tests.support.store_by_hand import Desk, connected, execute, until

pytestmark = pytest.mark.long

TTL_S = 1.0


class Original:
    """A database with a term in it, and a dump of that moment; then it went on."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.url = server.create_database()
        Registry(self.url).create(max_ttl=TTL_S)
        with Desk(self.url, ttl=TTL_S) as old, Desk(self.url, ttl=TTL_S) as new:
            self.superseded = old.lead("r")
            self.dump = self._run("pg_dump", "--schema", "tenure", self.url)
            self.latest = new.succeed(old, "r")

    def restore(self, how: str) -> str:
        """Make the copy; return its URL."""
        if how == "in place":
            # In one transaction: a node that runs would create the tables again in between.
            return self._load(self.url, "drop schema tenure cascade;\n")
        if how == "into another database":
            return self._load(self.server.create_database())
        name = self.url.rpartition("/")[2]
        self.server.execute(f"create database {name}_copy template {name}")
        return f"{self.url}_copy"

    def _load(self, url: str, before: str = "") -> str:
        self._run("psql", "--single-transaction", "-v", "ON_ERROR_STOP=1", url, stdin=before + self.dump)
        return url

    def _run(self, program: str, *arguments: str, stdin: str | None = None) -> str:
        command = [str(self.server.installation.bindir / program), *arguments]
        return subprocess.run(command, input=stdin, text=True, capture_output=True, check=True).stdout


@pytest.fixture
def original(postgres_server):
    return Original(postgres_server)


def refuses(url, claim) -> bool:
    with connected(url) as connection:
        try:
            fence(connection, claim, 10)
        except tenure.Fenced:
            return True
    return False


@pytest.mark.parametrize("how", ["in place", "into another database", "by template"])
def test_a_copy_takes_no_write_of_the_original_and_issues_none_of_its_tokens(original, how):
    copy = original.restore(how)
    assert refuses(copy, original.superseded)
    assert refuses(copy, original.latest)
    with tenure.Node(copy, ttl=TTL_S) as node:
        term = node.election("r").wait(20)
        assert term.token > original.latest.token
        with term.transaction():
            pass
    assert refuses(copy, original.latest)


def test_two_restores_of_one_dump_do_not_issue_the_same_tokens(original):
    tokens = [original.latest.token]
    for _ in range(2):
        original.restore("in place")
        with tenure.Node(original.url, ttl=TTL_S) as node:
            for _ in range(3):
                tokens.append(node.election("r").wait(20).token)
                node.election("r").resign()
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("takeover", ["instant", "strict"])
def test_a_running_leader_finds_that_the_tables_were_replaced_under_its_connection(original, takeover):
    with tenure.Node(original.url, ttl=TTL_S, takeover=takeover) as node:
        election = node.election("r")
        term = election.wait(20)
        original.restore("in place")
        assert term.wait_lost(20)
        assert election.wait(20).token > term.token
        assert refuses(original.url, original.superseded)


def test_a_candidate_step_by_step_waits_in_a_copy_and_gets_a_token_of_its_own(original):
    manual.use(original.url)
    try:
        assert manual.elect("me", role="mine", expire=TTL_S).mine
        original.restore("in place")
        assert not manual.is_leader("me", role="r")
        assert not getattr(manual.elect("me", expire=TTL_S, role="r"), "mine", False), "the copy is not confirmed yet"
        until(lambda: getattr(manual.elect("me", expire=TTL_S, role="r"), "mine", False), "its turn")
        assert manual.leader(role="r").token > original.latest.token
    finally:
        manual.close()


def test_what_rewrites_a_table_leaves_the_fence_alone(original):
    execute(original.url, "alter table tenure.roles add column padding integer not null default random() * 10")
    with connected(original.url, autocommit=True) as connection:
        connection.execute("vacuum full tenure.roles")
        connection.execute("cluster tenure.roles using roles_pkey")
    assert not refuses(original.url, original.latest)


def test_a_copy_in_another_database_of_the_same_mariadb_takes_no_write_of_the_original(mariadb_server, mariadb_url):
    with Desk(mariadb_url) as desk:
        claim = desk.lead("r")
        copy = mariadb_server.create_database()
        here, there = mariadb_url.rpartition("/")[2], copy.rpartition("/")[2]
        for (name,) in execute(mariadb_url, "show tables"):
            execute(copy, f"create table {there}.{name} like {here}.{name}")
            execute(copy, f"insert into {there}.{name} select * from {here}.{name}")
        assert refuses(copy, claim)
        assert not refuses(mariadb_url, claim)
        with Desk(copy, join=False) as other:
            assert other.opened.confirmed.line != other.opened.server.line, "not trusted yet"
