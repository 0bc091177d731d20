"""`tenure forget --role`: what goes, what stays, and who is in the way."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import datetime, timezone

import pytest

import tenure
from tenure.core import messages
from tenure.fence.fence import fence
from tenure.store import manual_statements, statements
from tenure.store.control import listed
from tenure.store.session import Step
from tests.cli.test_cli import Answer, tell
from tests.support.store_by_hand import Desk, Nodes, connected, execute, table, until

DUE = datetime(2026, 1, 2, 3, 4, tzinfo=timezone.utc)


def left(url: str, role: str) -> dict[str, int]:
    """How many rows each table has about a role."""
    columns = {"roles": "name", "candidates": "role", "terms": "role", "jobs": "role", "runs": "role"}
    return {
        name: execute(url, f"select count(*) from {table(url, name)} where {column} = '{role}'")[0][0]
        for name, column in columns.items()
    }


def retire(url: str, role: str, terms: int = 3) -> int:
    """Lead a role some times and leave it; return the last token."""
    token = 0
    for _ in range(terms):
        with Desk(url) as desk:
            token = desk.lead(role).token
            desk.ask(messages.Leave(desk.id))
    return token


def test_forgotten_role_is_gone_from_every_screen_and_every_table_but_for_its_token(store_url):
    with tenure.Node(store_url, name="a") as node, node.lead("old", timeout=20) as term, term.transaction() as work:
        assert work.claim("report", DUE)
    retire(store_url, "kept")
    assert left(store_url, "old") | {"candidates": 0} == {"roles": 1, "candidates": 0, "terms": 1, "jobs": 1, "runs": 1}
    assert tell("forget", "--role", "old", "--yes", url=store_url).out == (
        "role 'old' of namespace 'default' is deleted; its last token is kept\n"
    )
    assert left(store_url, "old") == {"roles": 1, "candidates": 0, "terms": 0, "jobs": 0, "runs": 0}
    with tenure.Registry(store_url) as registry:
        assert [(info.role, info.token) for info in registry.roles()] == [("kept", 3)]
        assert registry.history("old") == []
        assert registry.jobs() == []
        assert len(registry.history("kept")) == 3
    answer = Answer("forget", "--role", "old", "--yes", url=store_url)
    assert (answer.code, answer.err) == (2, "tenure: namespace 'default' has no role 'old'; known roles: 'kept'\n")


@pytest.mark.twin("postgres")
def test_role_that_comes_back_issues_no_token_again(store_url):
    """Neither to a node of this release nor to one that knows nothing of it: both take the row that they find."""
    last = retire(store_url, "old")
    tell("forget", "--role", "old", "--yes", url=store_url)
    with tenure.Node(store_url, name="again") as node, node.lead("old", timeout=20) as term:
        assert term.token == last + 1
        header, row, *_ = tell("status", url=store_url).lines
        assert (header[0], row[:3]) == ("ROLE", ["old", "again", str(last + 1)])
    with tenure.Registry(store_url) as registry:
        assert [record.token for record in registry.history("old")] == [last + 1]
        assert [info.role for info in registry.roles()] == ["old"], "it is a role like others again"


@pytest.mark.twin("postgres")
def test_role_with_a_new_candidate_is_shown_before_it_is_led(store_url):
    retire(store_url, "old")
    tell("forget", "--role", "old", "--yes", url=store_url)
    with Desk(store_url, name="stands") as desk, tenure.Registry(store_url) as registry:
        assert registry.roles() == []
        desk.stand("old")
        assert [(info.role, info.candidates) for info in registry.roles()] == [("old", 1)]


def test_fence_refuses_a_leader_of_the_forgotten_role_before_and_after_it_comes_back(store_url):
    with Desk(store_url, name="paused") as paused, Desk(store_url, name="other") as other:
        term = paused.lead("old")
        assert other.end(paused.id)
        tell("forget", "--role", "old", "--yes", url=store_url)
        for _ in ("before", "after"):
            with connected(store_url) as connection, pytest.raises(tenure.Fenced):
                fence(connection, term, 5.0)
            other.acquire("old")


@pytest.mark.twin("postgres")
def test_forget_refuses_a_role_that_is_in_use_and_says_by_whom(store_url):
    with Nodes(store_url) as nodes:
        leads, stands = nodes.pair("busy")
        answer = Answer("forget", "--role", "busy", "--yes", url=store_url)
        assert (answer.code, answer.out) == (2, "")
        assert (
            "role 'busy' of namespace 'default' is in use: 'leader' leads it and 'standby' stands for it; "
            in answer.err
        )
        assert "stop these nodes, or let them withdraw" in answer.err
        leads.withdraw()
        stands.withdraw()
        until(lambda: not stands.candidates(), "both have withdrawn")
        tell("forget", "--role", "busy", "--yes", url=store_url)
    with Desk(store_url, name="dead") as desk:
        desk.stand("waiting")
    assert "'dead' stands for it; " in Answer("forget", "--role", "waiting", "--yes", url=store_url).err


def test_node_that_begins_to_stand_while_its_role_is_forgotten_leads_it(store_url):
    """Its candidacy is written, and not committed yet, when the role is looked at."""
    last = retire(store_url, "old")
    with Desk(store_url, name="late") as late, tenure.Registry(store_url) as registry, ThreadPoolExecutor() as pool:
        candidacy = {"namespace": "default", "id": late.id, "names": listed(("old",))}
        with late.session.transaction() as run:
            stand = Step(statements.ADD_CANDIDACIES, candidacy)
            _, stands = run(stand, Step(manual_statements.STANDS, candidacy | {"role": "old"}))
            assert stands.rows, "it is sent"
            forgetting = pool.submit(registry.forget_role, "old")
            wait([forgetting], timeout=1)
        with contextlib.suppress(tenure.ConfigError):  # where the command had to wait, it has seen the candidate
            forgetting.result(20)
        assert [candidate.name for candidate in registry.candidates("old")] == ["late"]
        acquired = late.ask(messages.Acquire(late.id, "late", ("old",), 0))
        assert acquired.tokens == {"old": last + 1}


@pytest.fixture(params=["postgres", "mariadb"])
def server_url(request: pytest.FixtureRequest) -> str:
    """A database that can guard tables."""
    return str(request.getfixturevalue(f"{request.param}_url"))


def test_role_that_guards_a_table_cannot_be_forgotten(server_url):
    retire(server_url, "billing")
    retire(server_url, "free")
    execute(server_url, "create table invoices (n int)")
    tell("guard", "invoices", "--role", "billing", url=server_url)
    answer = Answer("forget", "--role", "billing", "--yes", url=server_url)
    assert answer.code == 2
    assert "role 'billing' of namespace 'default' guards tables, which could not be written to any more" in answer.err
    assert "invoices" in answer.err
    tell("forget", "--role", "free", "--yes", url=server_url)
    tell("guard", "invoices", "--remove", url=server_url)
    tell("forget", "--role", "billing", "--yes", url=server_url)


def test_forget_asks_before_it_deletes_a_role_and_takes_the_namespace_as_an_option(sqlite_url):
    with Desk(sqlite_url, namespace="blue") as desk:
        desk.lead("old")
        desk.ask(messages.Leave(desk.id))
    assert "no role 'old'" in Answer("forget", "--role", "old", "--yes", url=sqlite_url).err
    blue = ("forget", "--role", "old", "--namespace", "blue")
    answer = Answer(*blue, url=sqlite_url, text="n\n")
    assert (answer.code, answer.out) == (1, "Delete role 'old' of namespace 'blue', with 1 as last token? [y/N]: n\n")
    assert Answer(*blue, url=sqlite_url, text="y\n").code == 0
    for wrong in ([], ["blue", "--role", "old"], ["blue", "--namespace", "blue"]):
        assert Answer("forget", *wrong, "--yes", url=sqlite_url).code == 2
    assert tell("forget", "blue", "--yes", url=sqlite_url).out == "namespace 'blue' is deleted\n"
