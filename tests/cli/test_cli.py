"""The commands that look and keep house, as an operator types them: what they print, and what they leave with."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import tenure
from tenure.base.durations import exact
from tenure.cli import COMMANDS, main
from tenure.core import messages
from tenure.fence.fence import fence
from tenure.store import tables
from tenure.store.session import Step
from tests.support import starter
from tests.support.cluster import ROOT
from tests.support.store_by_hand import Desk, Nodes, connected, execute, table, until

LIVES = "select count(*) from {members} where id = :id and ended_at is null"
TENURE = Path(sys.executable).with_name("tenure")
PASSWORD = "canary-7f3a"


class Answer:
    """What a command printed and left with."""

    def __init__(self, *arguments: str, url: str | None = None, text: str | None = None) -> None:
        told = [*arguments, "--url", url] if url is not None else arguments
        result = CliRunner().invoke(main, told, input=text)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr

    @property
    def lines(self) -> list[list[str]]:
        """The printed columns."""
        return [re.split(r"  +", line) for line in self.out.splitlines()]


def tell(*arguments: str, url: str) -> Answer:
    """Run a command that must work."""
    answer = Answer(*arguments, url=url)
    assert (answer.code, answer.err) == (0, ""), answer.err
    return answer


@pytest.mark.twin("postgres")
def test_word_about_promotions_is_refused_where_it_cannot_be_true(store_url):
    answer = Answer("init", "--promotion", "loses-nothing", url=store_url)
    if store_url.startswith("postgresql"):
        assert "has promotion=loses-nothing" in answer.out
        assert answer.code == 0
        assert answer.err.startswith("warning: synchronous_standby_names is empty: ")
        tell("init", "--promotion", "may-lose", url=store_url)
        tell("init", url=store_url)
    else:
        assert (answer.code, answer.out) == (2, "")
        why = "SQLite does not have" if store_url.startswith("sqlite") else "does not tell the client"
        assert "promotion= is for" in answer.err
        assert why in answer.err


@pytest.mark.twin("postgres")
def test_status_shows_what_is_waited_for_and_until_when(store_url):
    with Desk(store_url, ttl=10.0) as desk, Desk(store_url, ttl=10.0):
        desk.lead("r")
        namespaces, members = table(store_url, "namespaces"), table(store_url, "members")
        execute(store_url, f"update {namespaces} set incarnation = 'elsewhere:1', max_ttl_ms = 30000")
        execute(store_url, f"update {members} set renewed_at = joined_at, ttl_ms = 1 where id = '{desk.id}'")
        told = tell("status", url=store_url).out
        assert re.search(r"waiting: no node is elected before .* is over \([\d.]+ s more, until .*\d\)", told)
        assert re.search(r"waiting: role r: leader 'desk-\d+' has not renewed .* \(it ends at any moment\)", told)
        waits = json.loads(tell("status", "--json", url=store_url).out)["waits"]
        assert {wait["role"] for wait in waits} == {None, "r"}
        assert all(wait["ends"] for wait in waits)


def test_status_shows_who_leads_what(store_url):
    with Nodes(store_url) as nodes:
        leads, _ = nodes.pair("scheduler")
        nodes("third").election("other").wait(20)
        header, *rows, blank, other_header, _, _, third, _, _ = tell("status", url=store_url).lines
        assert header == ["ROLE", "LEADER", "TOKEN", "SINCE", "RENEWED", "STANDBY"]
        assert [(row[0], row[1], row[2], row[5]) for row in rows] == [
            ("other", "third", "1", "0"),
            ("scheduler", "leader", "1", "1"),
        ]
        assert blank == [""]
        assert other_header == ["MEMBER", "HOST", "PID", "VERSION", "MODE", "TTL", "RENEWED"]
        assert third[0] == "third"
        assert third[2:5] == [str(os.getpid()), tenure.__version__, "hybrid, instant"]
        leads.withdraw()
        until(lambda: tell("status", url=store_url).lines[2][1] == "standby", "the standby leads")


@pytest.mark.twin("postgres")
def test_leader_that_has_not_renewed_within_its_ttl_is_overdue(store_url):
    with Desk(store_url, ttl=1) as desk:
        desk.acquire("r")
        until(lambda: "overdue" in tell("status", url=store_url).lines[1][4], "the leader is overdue")
        assert "overdue" in tell("members", url=store_url).out
        assert tell("watch", "--count", "1", url=store_url).out.endswith(
            f" led by {desk.settings.name}, which is overdue\n"
        )


WITHOUT_URL = {
    "cron": ["--name", "x", "not cron", "--", "true"],
    "doctor": [],
    "forget": ["default", "--yes"],
    "guard": ["invoices", "--role", "r"],
    "guards": [],
    "history": ["r"],
    "init": [],
    "jobs": [],
    "members": [],
    "pause": ["x"],
    "resign": ["r"],
    "resume": ["x"],
    "run": ["--role", "r", "--", "true"],
    "runs": [],
    "status": [],
    "trigger": ["x"],
    "ui": ["--bind", "nowhere"],
    "watch": ["--count", "1"],
}
"""The commands that use the default file, with arguments. `demo` makes its own database, and `sql` uses none."""


def cron(*arguments: str | Path, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as cron would: with nearly nothing in its environment."""
    told = {"HOME": str(home), "PATH": os.defpath, **environment}
    return subprocess.run([TENURE, *arguments], env=told, capture_output=True, text=True, timeout=60, check=False)


def test_every_command_that_elects_or_looks_in_the_default_file_says_so(tmp_path):
    takes_url = [name for name in COMMANDS if "--url" in Answer(name, "--help").out]
    assert sorted([*WITHOUT_URL, "demo"]) == sorted(takes_url)
    file = tmp_path / ".local/state/tenure/tenure.db"
    told = f"tenure: no URL given: only processes on this machine take part, through the file {file}; "
    assert cron("init", home=tmp_path).stderr.startswith(told)
    environment = {"HOME": str(tmp_path), "PATH": os.defpath}
    for command, arguments in WITHOUT_URL.items():
        said = starter.run("tenure", command, *arguments, env=environment).stderr.decode()
        assert said.startswith(told), (command, said)
        assert "TENURE_URL" in said.splitlines()[0]
    given = f"sqlite:///{file}"
    assert cron("status", "--url", given, home=tmp_path).stderr == ""
    assert cron("init", home=tmp_path, TENURE_URL=given).stderr == ""


@pytest.mark.parametrize("command", WITHOUT_URL)
def test_required_url_that_is_missing_stops_every_command(tmp_path, command):
    environment = {"HOME": str(tmp_path), "PATH": os.defpath, "TENURE_REQUIRE_URL": "1"}
    done = starter.run("tenure", command, *WITHOUT_URL[command], env=environment)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"tenure: no URL given, and TENURE_REQUIRE_URL=1 ")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_empty_namespace_names_those_that_are_not(sqlite_url):
    with Nodes(sqlite_url, namespace="blue") as nodes:
        nodes("a").election("r").wait(20)
        said = "namespace 'default' has no roles and no members; other namespaces: 'blue'\n"
        assert Answer("status", url=sqlite_url).err == said
        assert "PID" in tell("status", "--namespace", "blue", url=sqlite_url).out


@pytest.mark.twin("postgres")
def test_json_has_the_documented_shape(store_url):
    with Nodes(store_url, ttl=30) as nodes:
        nodes.pair("scheduler")
        status = json.loads(tell("status", "--json", url=store_url).out)
        assert set(status) == {"namespace", "as_of", "roles", "members", "waits", "unattended"}
        (role,) = status["roles"]
        assert set(role) == {"role", "token", "leader", "overdue", "candidates"}
        assert set(role["leader"]) == {"role", "token", "member_id", "name", "since", "renewed_ago"}
        members = json.loads(tell("members", "--json", url=store_url).out)
        assert [(member["name"], member["leads"], member["mode"], member["ttl"]) for member in members] == [
            ("leader", ["scheduler"], "hybrid", 30.0),
            ("standby", [], "hybrid", 30.0),
        ]
        assert set(members[0]) == {field.name for field in dataclasses.fields(tenure.MemberInfo)}
        assert members[0]["pid"] == os.getpid()
        assert [member["member_id"] for member in status["members"]] == [member["member_id"] for member in members]
        (term,) = json.loads(tell("history", "scheduler", "--json", url=store_url).out)
        assert set(term) == {"token", "name", "member_id", "began", "ended", "reason", "gap", "last_seen", "silence"}
        assert (term["token"], term["ended"], term["gap"]) == (1, None, None)


def documented(what: str) -> set[str]:
    """The fields that the page lists for a command's JSON."""
    page = (ROOT / "docs" / "cli.md").read_text()
    (row,) = re.findall(rf"^\| {re.escape(what)} \|.*\| (.*) \|$", page, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", row))


@pytest.mark.twin("postgres")
def test_role_in_detail_shows_its_leader_its_candidates_and_its_last_terms(store_url):
    with Nodes(store_url, ttl=30) as nodes:
        leads, stands = nodes.pair("scheduler")
        leads.resign()
        stands.wait(20)
        nodes("third").election("other").wait(20)
        told = tell("status", "scheduler", url=store_url)
        facts = {line[0]: line[1:] for line in told.lines if len(line) == 2}
        assert facts["role"] == ["scheduler"]
        assert facts["state"] == ["led"]
        assert facts["leader"] == ["standby"]
        assert facts["token"] == ["2"]
        assert re.search(r"^since    \d{4}-.*, for \d+(\.\d)? m?s$", told.out, re.MULTILINE)
        assert re.search(r"^renewed  .* ago$", told.out, re.MULTILINE)
        assert [line[0] for line in told.lines if line[-1].endswith(" ago") and len(line) == 5] == ["leader", "standby"]
        assert [line[:2] for line in told.lines if line[0] in ("1", "2")] == [["2", "standby"], ["1", "leader"]]
        detail = json.loads(tell("status", "scheduler", "--json", url=store_url).out)
        assert set(detail) == documented("`status ROLE`")
        assert set(detail["role"]) == documented("`roles` of it")
        assert set(detail["role"]["leader"]) == documented("`leader` of a role")
        assert [set(one) for one in detail["candidates"]] == [documented("`candidates` of it")] * 2
        assert [set(one) for one in detail["terms"]] == [documented("`history`, and `terms` of `status ROLE`")] * 2
        assert detail["role"]["role"] == "scheduler"


@pytest.mark.twin("postgres")
def test_unknown_role_is_an_error_with_the_nearest_names(store_url):
    with Desk(store_url) as desk:
        for role in ("scheduler", "schedule-eu", "billing"):
            desk.acquire(role)
        answer = Answer("status", "shceduler", url=store_url)
        said = "namespace 'default' has no role 'shceduler'; the nearest names are 'scheduler', 'schedule-eu'"
        assert (answer.code, answer.out, answer.err) == (2, "", f"tenure: {said}\n")
        answer = Answer("status", "xyz", "--json", url=store_url)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.endswith("has no role 'xyz'; known roles: 'billing', 'schedule-eu', 'scheduler'\n")
    answer = Answer("status", f"postgresql://u:{PASSWORD}@h/db")
    said = "ROLE looks like a URL: give the database with --url, and the role by its name"
    assert (answer.code, said in answer.err) == (2, True)


@pytest.mark.twin("postgres")
def test_role_may_have_a_url_in_its_name(store_url):
    role = "[link=http://localhost]sync[/link]"
    with Desk(store_url) as desk:
        desk.acquire(role)
        assert role in tell("status", role, url=store_url).out


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("statsu", ": did you mean `tenure status`?"),
        ("run-s", ": did you mean `tenure runs` or `tenure run`?"),
        ("x", ""),
    ],
)
def test_mistyped_command_is_answered_with_the_nearest_ones(word, remedy):
    answer = Answer(word)
    assert (answer.code, answer.err.splitlines()[-1]) == (2, f"Error: there is no command {word!r}{remedy}")


def test_history_of_an_unknown_role_is_an_error_with_the_nearest_name(sqlite_url):
    with Desk(sqlite_url) as desk:
        desk.acquire("scheduler")
        desk.acquire("billing")
    for options in ([], ["--json"]):
        answer = Answer("history", "shceduler", *options, url=sqlite_url)
        said = "namespace 'default' has no role 'shceduler'; the nearest name is 'scheduler'"
        assert (answer.code, answer.out, answer.err) == (2, "", f"tenure: {said}\n")


@pytest.mark.twin("postgres")
def test_history_shows_reasons_and_gaps(store_url):
    with Nodes(store_url) as nodes:
        leads, stands = nodes.pair("r")
        leads.resign()
        stands.wait(20)
        header, newest, oldest, *_ = tell("history", "r", url=store_url).lines
        assert header == ["TOKEN", "LEADER", "BEGAN", "LASTED", "ENDED", "GAP BEFORE"]
        assert (newest[:2], newest[4]) == (["2", "standby"], "goes on")
        assert re.fullmatch(r"\d+ ms|\d\.\d ms|\d+\.\d s", newest[5])
        assert (oldest[:2], oldest[4:]) == (["1", "leader"], ["resigned", "-"])
        (only,) = json.loads(tell("history", "r", "--limit", "1", "--json", url=store_url).out)
        assert (only["token"], only["gap"] is not None) == (2, True)


@pytest.mark.twin("postgres")
def test_term_that_lapsed_ended_with_the_next_of_the_same_member(store_url):
    with Desk(store_url) as desk:
        assert [desk.acquire("r"), desk.acquire("r")] == [{"r": 1}, {"r": 2}]
        desk.ask(messages.Leave(desk.id))
    newest, oldest = json.loads(tell("history", "r", "--json", url=store_url).out)
    assert (newest["reason"], newest["gap"]) == ("left", None)  # the end of the term before it is unknown
    assert (oldest["reason"], oldest["ended"]) == ("lapsed", newest["began"])
    _, newest, oldest, _, said, _ = tell("history", "r", url=store_url).lines
    assert (newest[5], oldest[5]) == ("unknown", "-"), "`-` is for the first term only"
    assert said[0].startswith("GAP BEFORE is unknown if the term before lapsed")


# --- resign -------------------------------------------------------------------------------------------------


def test_resign_moves_the_role_to_the_one_named(store_url):
    with Nodes(store_url, renew_every=0.3) as nodes:
        nodes.pair("r")
        nodes("third").election("r")
        until(lambda: tell("status", url=store_url).lines[1][5] == "2", "two that stand by")
        assert tell("resign", "r", "--to", "third", url=store_url).out == "r: third leads now, with token 2\n"
        row = tell("status", url=store_url).lines[1]
        assert row[1] == "third"


@pytest.mark.twin("postgres")
def test_resign_prints_what_came_of_it_as_json(store_url):
    with Nodes(store_url, renew_every=0.3) as nodes:
        nodes.pair("r")
        done = json.loads(tell("resign", "r", "--json", url=store_url).out)
        assert set(done) == documented("`resign`")
        assert set(done["before"]) == documented("`before` of it")
        assert set(done["after"]) == documented("`leader` of a role")
        assert (done["role"], done["before"]["name"], done["before"]["token"]) == ("r", "leader", 1)
        assert (done["before"]["reason"], done["after"]["name"], done["after"]["token"]) == ("resigned", "standby", 2)
        assert 0 < done["seconds"] < 20
    with Nodes(store_url, renew_every=0.3) as nodes:
        nodes("alone").election("r").wait(20)
        done = json.loads(tell("resign", "r", "--json", url=store_url).out)
        assert done["before"]["name"] == "alone"
        answer = Answer("resign", "no such role", "--json", url=store_url)
        assert (answer.code, answer.out) == (2, "")


@pytest.mark.twin("postgres")
def test_resign_without_a_name_moves_the_role_to_another(store_url):
    with Nodes(store_url, renew_every=0.3) as nodes:
        leads, stands = nodes.pair("r")
        assert tell("resign", "r", url=store_url).out == "r: standby leads now, with token 2\n"
        assert not leads.is_leader
        until(lambda: stands.is_leader, "it has heard what the command read in the database")


@pytest.mark.twin("postgres")
def test_resign_says_why_not(store_url):
    with Nodes(store_url, renew_every=0.3) as nodes:
        leads, _ = nodes.pair("r")
        elsewhere = nodes("elsewhere")
        until(lambda: elsewhere.member_id, "it joined")
        assert "role 'r': 'leader' leads already" in Answer("resign", "r", "--to", "leader", url=store_url).err
        for to in ("nobody", "elsewhere"):
            answer = Answer("resign", "r", "--to", to, url=store_url)
            assert answer.code == 2
            assert f"no other candidate is named {to!r}; the other candidates are 'standby'" in answer.err
        elsewhere.election("scheduler").wait(20)
        answer = Answer("resign", "shceduler", url=store_url)
        said = "namespace 'default' has no role 'shceduler'; the nearest name is 'scheduler'"
        assert (answer.code, answer.err) == (2, f"tenure: {said}\n")
        assert leads.is_leader


def test_resign_to_one_that_dies_leaves_the_role_to_another(postgres_url, tmp_path):
    from tests.support.cluster import Cluster

    with Cluster(postgres_url, tmp_path, ttl=20, renew_every=0.3) as cluster:
        cluster.start(3)
        leader, token = cluster.wait_for_leader()
        chosen, other = [node for node in cluster.nodes if node is not leader]
        chosen.stop()  # it stands, and will not take the role
        answers: list[Answer] = []
        asking = threading.Thread(
            target=lambda: answers.append(Answer("resign", cluster.role, "--to", chosen.name, url=postgres_url))
        )
        asking.start()
        leader.wait_event("deposed", token=token)
        chosen.kill()
        _, new_token = cluster.wait_for_leader(token)
        asking.join(30)
        assert answers[0].code == 0
        assert f"with token {new_token}" in answers[0].out
        assert other.running


def test_leader_that_does_not_answer_is_told_of_and_nothing_hangs(postgres_url, tmp_path):
    from tests.support.cluster import Cluster

    with Cluster(postgres_url, tmp_path, ttl=30) as cluster:
        cluster.start(2)
        leader, _ = cluster.wait_for_leader()
        leader.stop()
        answer = Answer("resign", cluster.role, "--timeout", "0.5", url=postgres_url)
        assert answer.code == 2
        assert f"{leader.name!r} was asked to resign and has not done so within 0.5 s" in answer.err
        leader.cont()


def test_resign_waits_for_a_transaction_under_the_term_and_says_so(postgres_url, monkeypatch):
    monkeypatch.setattr("tenure.databases.backend.LOOK_TIMEOUT_S", 0.6)
    with Desk(postgres_url) as desk, connected(postgres_url) as connection:
        fence(connection, desk.lead("r"), 5.0)
        answer = Answer("resign", "r", "--timeout", "0.1", url=postgres_url)
        assert answer.code == 2
        assert "could not be asked to resign: a transaction under its term keeps the role locked" in answer.err
        threading.Timer(1.5, connection.rollback).start()  # in the midst of the second attempt or of a later one
        answer = Answer("resign", "r", "--timeout", "3", url=postgres_url)
        assert "was asked to resign and has not done so within 3 s; the request remains" in answer.err


# --- maintenance --------------------------------------------------------------------------------------------


def test_init_creates_the_tables_and_sets_the_largest_ttl(store_url):
    there = tell("init", url=store_url).out.rstrip()
    time_limit = tell("init", "--max-ttl", "20", url=store_url).out
    assert time_limit == f"{there}; the largest TTL of namespace 'default' is 20 s\n"
    with pytest.raises(tenure.ConfigError, match="above the largest permitted"):
        tenure.Node(store_url, ttl=21).start()
    answer = Answer("init", "--max-ttl", "0", url=store_url)
    assert (answer.code, answer.err) == (2, "tenure: max_ttl=0 must be 1 to 3600 seconds\n")


def test_largest_ttl_is_raised_again_whatever_it_was_and_whatever_the_default_ttl_is(store_url):
    for limit in ("60", "5", "1", "2", "3600", "9", "10"):
        told = tell("init", "--max-ttl", limit, url=store_url).out
        assert f"the largest TTL of namespace 'default' is {exact(float(limit))}" in told


def test_largest_ttl_is_not_set_below_that_of_a_living_member(store_url):
    with Desk(store_url, ttl=30) as desk:
        answer = Answer("init", "--max-ttl", "20", url=store_url)
        assert answer.code == 2
        assert f"below the TTL of living members: stop them first ({desk.settings.name!r} (30))" in answer.err
    tell("init", "--max-ttl", "30", url=store_url)


def objects(url):
    """Everything that stands in a database."""
    queries = {
        "sqlite": "select name from sqlite_master",
        "mysql": "select table_name from information_schema.tables where table_schema = database()",
        "postgresql": (
            "select 'table', relname from pg_class union all select 'function', proname from pg_proc "
            "union all select 'schema', nspname from pg_namespace union all select 'type', typname from pg_type"
        ),
    }
    return set(execute(url, queries[url.partition(":")[0]]))


def test_uninstalling_as_the_page_says_leaves_nothing(store_url):
    execute(store_url, "create table mine (id integer)")
    before = objects(store_url)
    with Nodes(store_url) as nodes:
        nodes.pair("r")
    assert objects(store_url) > before
    page = (ROOT / "docs" / "how-to" / "tables.md").read_text()
    if store_url.startswith("sqlite"):
        query = re.search(r"`(select name from sqlite_master .*?)`", page).group(1)
        execute(store_url, *(f"drop table {name}" for (name,) in execute(store_url, query)))
    else:
        word = "table" if store_url.startswith("mysql") else "schema"
        execute(store_url, re.search(rf"^drop {word} .*?;", page, re.MULTILINE).group(0))
    assert objects(store_url) == before


def test_printed_statements_create_the_same_tables_and_the_grants_suffice(postgres_server, postgres_url):
    with connected(postgres_url, autocommit=True) as connection:
        connection.execute(Answer("sql").out.encode())
        connection.execute("drop role if exists app_user")
        connection.execute("create role app_user login")
        connection.execute(Answer("sql", "--grants", "app_user").out.encode())
    database = postgres_url.rpartition("/")[2]
    with (
        tenure.Node(postgres_server.url(database, user="app_user")) as node,
        node.lead("r", timeout=20) as term,
        term.transaction() as transaction,
    ):
        transaction.execute("select 1")
    assert execute(postgres_url, "select value from tenure.meta where name = 'version'") == [
        (tables.MIGRATIONS[-1].version,)
    ]


def test_printed_statements_create_the_same_tables_on_sqlite(sqlite_url):
    with connected(sqlite_url) as connection:
        connection.executescript(Answer("sql", "--dialect", "sqlite").out)
    with tenure.Node(sqlite_url) as node, node.lead("r", timeout=20):
        pass


def test_printed_fence_is_the_one_of_the_library():
    assert Answer("sql", "--fence", "it's").out == tenure.fence_sql("it's") + ";\n"


def test_forget_deletes_a_namespace_without_living_members(store_url):
    with Nodes(store_url, namespace="old") as nodes:
        nodes("a").election("r").wait(20)
        answer = Answer("forget", "old", "--yes", url=store_url)
        assert answer.code == 2
        assert "living members: stop them first ('a')" in answer.err
    assert Answer("forget", "old", url=store_url, text="n\n").code == 1
    assert tell("status", "--namespace", "old", url=store_url).lines[1][0] == "r"
    assert tell("forget", "old", "--yes", url=store_url).out == "namespace 'old' is deleted\n"
    answer = Answer("forget", "old", "--yes", url=store_url)
    assert (answer.code, answer.err) == (2, "tenure: namespace 'old' does not exist; existing namespaces: none\n")


# --- watch --------------------------------------------------------------------------------------------------


def ended(url: str, namespace: str) -> None:
    """Make a namespace with a role whose leader has left."""
    with Desk(url, namespace=namespace) as desk:
        desk.lead("r")
        desk.ask(messages.Leave(desk.id))


def test_forget_spares_a_node_that_is_joining(store_url):
    """The node's row is written and not committed yet when the namespace is looked at."""
    ended(store_url, "old")
    with (
        Desk(store_url, namespace="old", name="late", join=False) as desk,
        tenure.Registry(store_url, namespace="old") as registry,
        ThreadPoolExecutor() as pool,
    ):
        member = messages.Member("late's id", "late", 30.0, "instant", None)
        with desk.session.transaction() as run:
            run(desk.store.entry(member, desk.opened.server), Step(LIVES, {"id": member.id}))[1].rows  # noqa: B018 - sends it
            forgetting = pool.submit(registry.forget)
            wait([forgetting], timeout=1)
        with pytest.raises(tenure.ConfigError, match=r"living members: stop them first \('late'\)"):
            forgetting.result(20)
        assert [(role.role, role.token) for role in registry.roles()] == [("r", 1)]
        assert [member.name for member in registry.members()] == ["late"]


@pytest.mark.long
def test_forget_and_nodes_that_join_at_the_same_time_get_along(store_url):
    """Whichever is first: the node lives, and leads what it stands for."""
    chance = random.Random(7)
    refused = 0
    for _ in range(30):
        ended(store_url, "old")
        with (
            Desk(store_url, namespace="old", join=False) as desk,
            tenure.Registry(store_url, namespace="old") as registry,
            ThreadPoolExecutor() as pool,
        ):
            pause = chance.uniform(-0.02, 0.02)
            joining = pool.submit(lambda pause, desk: time.sleep(max(0.0, pause)) or desk.join(), pause, desk)
            time.sleep(max(0.0, -pause))
            try:
                registry.forget()
            except tenure.ConfigError:
                refused += 1
            joining.result(20)
            assert desk.session.read(Step(LIVES, {"id": desk.id}))[0].rows[0] == (1,)
            assert desk.acquire("r")
            desk.ask(messages.Leave(desk.id))
    assert 0 < refused < 30, "both were first at times"


def test_registry_that_is_not_open_says_so(sqlite_url):
    with Desk(sqlite_url):
        pass
    registry = tenure.Registry(sqlite_url)
    asked = {
        "namespaces": (),
        "roles": (),
        "members": (),
        "history": ("r",),
        "jobs": ("r",),
        "resign": ("r",),
        "forget": (),
    }
    for state in ("before", "after"):
        for method, arguments in asked.items():
            with pytest.raises(
                tenure.NodeClosed, match="registry of namespace 'default' is not connected: use it inside"
            ):
                getattr(registry, method)(*arguments)
        if state == "before":
            with registry:
                assert registry.namespaces() == ["default"]
    registry.close()
    registry.connect()
    assert registry.namespaces() == ["default"]
    registry.close()


@pytest.mark.twin("postgres")
def test_watch_prints_a_line_for_each_change(store_url):
    with Nodes(store_url) as nodes:
        leads, stands = nodes.pair("r")
        process = subprocess.Popen(
            [TENURE, "watch", "--every", "0.1"],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TENURE_URL": store_url},
        )
        assert process.stdout is not None
        with process:
            assert process.stdout.readline().endswith(" r token 1 led by leader\n")
            leads.withdraw()
            stands.wait(20)
            assert any(line.endswith(" r token 2 led by standby\n") for line in process.stdout)
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130


@contextlib.contextmanager
def watching(url: str) -> Iterator[Iterator[dict[str, Any]]]:
    """The readings of `tenure watch --json`, one by one, as they come."""
    with subprocess.Popen(
        [TENURE, "watch", "--json", "--every", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TENURE_URL": url},
    ) as process:
        assert process.stdout is not None
        yield (json.loads(line) for line in process.stdout)
        process.send_signal(signal.SIGINT)
        last = process.stdout.read()
        assert (process.wait(20), process.stderr.read()) == (130, "")
        assert all(json.loads(line) for line in last.splitlines()), "Ctrl-C does not cut a line off"


@pytest.mark.twin("postgres")
def test_watch_prints_each_reading_as_a_line_of_json(store_url):
    with Nodes(store_url) as nodes:
        leads, stands = nodes.pair("r")
        with watching(store_url) as readings:
            reading = next(readings)
            assert set(reading) == documented("`watch`")
            assert (reading["namespace"], reading["error"]) == ("default", None)
            assert [set(role) for role in reading["roles"]] == [documented("`roles` of it")]
            assert [set(one) for one in reading["members"]] == [documented("`members` of it, and `members`")] * 2
            assert reading["roles"][0]["leader"]["name"] == "leader"
            leads.withdraw()
            stands.wait(20)
            assert any((one["roles"][0]["leader"] or {}).get("name") == "standby" for one in readings)


def test_watch_as_json_says_that_the_database_is_away_and_goes_on(postgres_server, postgres_url):
    tell("init", url=postgres_url)
    with watching(postgres_url) as readings:
        assert next(readings)["roles"] == []
        postgres_server.restart()
        away = next(one for one in readings if one["error"])
        assert set(away) == documented("`watch`")
        assert (away["as_of"], away["roles"], away["members"]) == (None, None, None)
        assert away["error"].startswith("the database cannot be reached: ")
        assert next(one for one in readings if one["error"] is None)["members"] == []


def test_watch_as_json_ends_without_a_word_when_nobody_reads_any_more(sqlite_url):
    tell("init", url=sqlite_url)
    pipe = f"{TENURE} watch --json --every 0.1 --url {sqlite_url} | head -n 2"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {pipe}"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (len(done.stdout.splitlines()), done.stderr) == (2, "")
    assert done.returncode in (0, 1)


def test_watch_and_resign_outlive_the_database_or_say_that_it_is_gone(postgres_server, postgres_url):
    tell("init", url=postgres_url)
    with (
        subprocess.Popen(
            [TENURE, "watch", "--every", "0.1"],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TENURE_URL": postgres_url},
        ) as process,
        Desk(postgres_url, ttl=60) as desk,
    ):
        assert process.stdout is not None
        desk.acquire("r")
        assert " r token 1 led by desk-" in process.stdout.readline()
        answers: list[Answer] = []
        asking = threading.Thread(target=lambda: answers.append(Answer("resign", "r", url=postgres_url)))
        asking.start()
        until(lambda: execute(postgres_url, "select request_token from tenure.roles")[0][0] == 1, "the request")
        postgres_server.restart()
        asking.join(30)
        assert (answers[0].code, answers[0].out) == (2, "")
        assert answers[0].err.count("\n") == 1
        assert " the database cannot be reached: " in process.stdout.readline()
        assert any(line.endswith(" the database is back\n") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


# --- what can be wrong --------------------------------------------------------------------------------------

LOOKS = (
    ("status",),
    ("members",),
    ("history", "r"),
    ("resign", "r"),
    ("watch", "--count", "1"),
    ("forget", "x", "--yes"),
)


@pytest.mark.parametrize("command", LOOKS, ids=lambda command: command[0])
def test_database_that_is_missing_empty_newer_or_unreachable_is_one_line_and_2(command, postgres_url, tmp_path):
    missing = f"sqlite:///{tmp_path}/missing.db"
    newer = f"sqlite:///{tmp_path}/newer.db"
    tell("init", url=newer)
    execute(newer, "update tenure_meta set value = 99")
    garbage = tmp_path / "garbage.db"
    garbage.write_text("this is no database\n" * 100)
    for url, said in (
        (missing, "does not exist: no node has run there yet"),
        (postgres_url, "there are no tables of Tenure in schema 'tenure'"),
        (newer, "upgrade Tenure here"),
        (f"sqlite:///{garbage}", "not a database"),
        (f"postgresql://u:{PASSWORD}@127.0.0.1:1/x", "cannot connect"),
        (f"postgresql://u:{PASSWORD}@[::1/x", "malformed"),
        (f"oracle://u:{PASSWORD}@host/x", "unknown database 'oracle'"),
    ):
        answer = Answer(*command, url=url)
        assert answer.code == 2
        assert answer.out == ""
        assert said in answer.err
        assert answer.err.count("\n") == 1
        assert PASSWORD not in answer.err
    assert not (tmp_path / "missing.db").exists()


def test_server_that_freezes_is_told_of_and_nothing_hangs(postgres_url, monkeypatch):
    monkeypatch.setattr("tenure.registry.LOOK_TIMEOUT_S", 0.5)
    tell("init", url=postgres_url)
    with tenure.Registry(postgres_url) as registry:
        os.kill(registry.session.pid, signal.SIGSTOP)
        try:
            with pytest.raises(tenure.StoreUnavailable, match=r"the database: no answer within 0\.5 s"):
                registry.roles()
        finally:
            os.kill(registry.session.pid, signal.SIGCONT)


def test_looking_changes_nothing_in_a_file_of_another_user(sqlite_url):
    execute(sqlite_url, "create table mine (id integer)")
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    before = path.read_bytes()
    assert "there are no tables of Tenure in this database" in Answer("status", url=sqlite_url).err
    assert path.read_bytes() == before


def test_what_is_written_into_a_row_does_nothing_to_a_terminal(sqlite_url):
    with Desk(sqlite_url) as desk:
        desk.acquire("r")
        execute(sqlite_url, "update tenure_members set name = 'a' || char(27) || '[31m' || char(10)")
        for command in (["status"], ["members"], ["watch", "--count", "1"]):
            said = tell(*command, url=sqlite_url).out
            assert "a\\u001b[31m\\u000a" in said
            assert "\x1b" not in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", f"postgresql://u:{PASSWORD}@h/db"],
        [f"postgresql://u:{PASSWORD}@h/db"],
        ["status", "--url-file", f"postgresql://u:{PASSWORD}@h/db"],
        ["status", f"--postgresql://u:{PASSWORD}@h/db"],
        ["run", "--role", "r", f"postgresql://u:{PASSWORD}@h/db"],
        ["history", "r", "--limit", f"postgresql://u:{PASSWORD}@h/db"],
    ],
)
def test_url_in_the_wrong_place_does_not_show_its_password(arguments):
    answer = Answer(*arguments)
    assert answer.code in (2, 127)
    assert PASSWORD not in answer.out + answer.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["history", "r", "--limit", "0"], "0 is not in the range"),
        (["watch", "--every", "nan"], "is not a number of seconds"),
        (["watch", "--every", "inf"], "not in the range"),
        (["resign", "r", "--timeout", "-1"], "not in the range"),
        (["sql", "--grants", "a", "--fence", "b"], "give one of them"),
        (["sql", "--grants", ""], "give the name of a database user"),
        (["sql", "--grants", "a\x1b[31m"], "give the name of a database user"),
    ],
)
def test_values_that_make_no_sense_are_refused(arguments, said):
    answer = Answer(*arguments)
    assert answer.code == 2
    assert said in answer.err


def test_output_to_a_closed_pipe_is_not_a_traceback(sqlite_url):
    tell("init", url=sqlite_url)
    for redirection, code, said in ((">&-", 0, ""), (">/dev/full", 2, "No space left"), ("| true", 0, "")):
        done = subprocess.run(
            ["sh", "-c", f"{TENURE} sql {redirection}"], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == code, done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    assert (
        subprocess.run(["sh", "-c", f"{TENURE} status --url {sqlite_url} >&-"], check=False, timeout=60).returncode == 0
    )


def test_ctrl_c_is_130(postgres_url, tmp_path):
    with Desk(postgres_url) as desk:
        desk.acquire("r")
        with subprocess.Popen(
            [TENURE, "resign", "r"], env=os.environ | {"TENURE_URL": postgres_url}, stderr=subprocess.PIPE
        ) as process:
            until(lambda: execute(postgres_url, "select request_token from tenure.roles")[0][0] == 1, "the request")
            process.send_signal(signal.SIGINT)
            assert (process.wait(20), process.stderr.read()) == (130, b"")


def test_url_comes_from_a_file_or_the_environment(sqlite_url, tmp_path, monkeypatch):
    tell("init", url=sqlite_url)
    file = tmp_path / "url"
    file.write_text(sqlite_url + "\n")
    assert Answer("status", "--url-file", str(file)).err == "namespace 'default' has no roles and no members\n"
    monkeypatch.setenv("TENURE_URL", sqlite_url)
    monkeypatch.setenv("TENURE_NAMESPACE", "blue")
    assert Answer("status").err == "namespace 'blue' has no roles and no members; other namespaces: 'default'\n"
    for wrong in (("--url-file", str(tmp_path / "none")), ("--url-file", str(file), "--url", sqlite_url)):
        answer = Answer("status", *wrong)
        assert answer.code == 2
        assert "--url-file" in answer.err


def test_output_on_a_terminal_is_a_table(sqlite_url):
    import pty

    tell("init", url=sqlite_url)
    with Nodes(sqlite_url) as nodes:
        nodes("a[b]").election("r").wait(20)
        ours, theirs = pty.openpty()
        done = subprocess.run(
            [TENURE, "status", "--url", sqlite_url], stdout=theirs, check=False, env={"TERM": "xterm"}
        )
        os.close(theirs)
        said = os.read(ours, 65536).decode()
        os.close(ours)
    assert done.returncode == 0
    assert "\x1b[1m" in said
    assert "a[b]" in said


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_with_an_example(command):
    answer = Answer(command, "--help")
    assert answer.code == 0
    assert command == "forget" or f"tenure {command}" in answer.out.partition("Options:")[0].partition("\n")[2]


def test_module_runs_as_the_program():
    said = subprocess.run([sys.executable, "-m", "tenure", "--version"], capture_output=True, text=True, check=True)
    assert said.stdout == f"tenure {tenure.__version__}\n"


def test_page_about_the_commands_is_what_they_say():
    """If this fails: `make docs`."""
    import runpy

    script = runpy.run_path(str(ROOT / "scripts" / "cli-reference"))
    assert script["PAGE"].read_text() == script["page"]()
