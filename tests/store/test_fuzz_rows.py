"""Somebody edits Tenure's tables by hand, and nodes that run on them neither break nor believe wrongly.

A `Puppet` is a node without threads and with a clock of the test's: the real protocol and the real statements, one
after the other. So hours pass in milliseconds, and whatever would have killed a thread or been logged as a fault of
Tenure's comes out of `turn()` as the exception that it is. `tests/support/fuzzing.py` says how to run more examples.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tenure
from tenure.core import messages
from tenure.core.options import ProtocolOptions
from tenure.core.protocol import NodeProtocol
from tenure.databases.backend import backend_for
from tenure.databases.postgres.session import channel
from tenure.errors import TenureError
from tenure.settings import node_settings
from tenure.store import records
from tenure.store.dialects import postgresql
from tenure.store.session import Failed, Gone
from tests.support.fuzzing import fuzzed, only_our_errors
from tests.support.store_by_hand import Nodes, connected, execute, table, until

ROLES = ("alpha", "beta")
TTL = 10.0


class Puppet:
    """One node, moved by hand."""

    def __init__(self, url: str, name: str, seed: int) -> None:
        self.backend = backend_for(node_settings(url, name=name, ttl=TTL))
        self.protocol = NodeProtocol(ProtocolOptions(name=name, ttl=TTL), seed)
        for role in ROLES:
            self.protocol.stand(role)
            self.protocol.observe(role)
        self.store: Any = None
        self.session: Any = None
        self.watch: Any = None
        self.watch_session: Any = None

    def close(self) -> None:
        self._drop()
        self._drop_watch()

    def turn(self, now: float) -> None:
        """Do all that is due, and look once."""
        for _ in range(100):
            ask = self.protocol.control(now)
            if isinstance(ask, float):
                break
            self._control(ask, now)
        else:
            pytest.fail(f"never done: {ask}")
        for _ in range(5):
            ask = self.protocol.watch(now)
            if isinstance(ask, float):
                return
            self._watch(ask, now)
            if isinstance(ask, messages.Look):
                return

    def leads(self, role: str, now: float) -> int | None:
        """The token under which it believes to lead."""
        return self.protocol.roles.holding.get(role) if now < self.protocol.trusted_until else None

    def _control(self, ask: Any, now: float) -> None:
        try:
            if isinstance(ask, messages.Open):
                self._drop()
                self.store, self.session, answer = self.backend.open_control()
            else:
                answer = self.store.perform(ask)
        except (Gone, Failed, TenureError) as error:  # whatever else comes is a fault of ours
            lost = isinstance(error, Gone)
            self.protocol.fail(ask, now, lost=lost)
            if lost:
                self._drop()
        else:
            self.protocol.answer(ask, answer, now)

    def _watch(self, ask: Any, now: float) -> None:
        try:
            if isinstance(ask, messages.OpenWatch):
                self._drop_watch()
                self.watch, self.watch_session = self.backend.open_watch()
                answer: Any = messages.Watching()
            else:
                answer = self.watch.perform(ask._replace(wait_for=None) if isinstance(ask, messages.Look) else ask)
        except (Gone, Failed, TenureError) as error:
            lost = not isinstance(error, Failed)
            self.protocol.fail_watch(ask, now, lost=lost)
            if lost:
                self._drop_watch()
        else:
            self.protocol.answer_watch(ask, answer, now)

    def _drop(self) -> None:
        if self.session is not None:
            self.session.close()
            self.store.sentinel.abandon()
        self.store = self.session = None

    def _drop_watch(self) -> None:
        if self.watch_session is not None:
            self.watch_session.close()
        self.watch = self.watch_session = None


class Theatre:
    """Two puppets on one database, and somebody with an SQL prompt."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.now = 1000.0
        self.puppets = [Puppet(url, "one", 1), Puppet(url, "two", 2)]
        self.play(3)
        assert all(self.leader(role) for role in ROLES)

    def play(self, seconds: float, step: float = 1.0) -> None:
        end = self.now + seconds
        while self.now < end:
            for puppet in self.puppets:
                puppet.turn(self.now)
            self.now += step

    def leader(self, role: str) -> tuple[str | None, int] | None:
        """Who believes to lead, and under which token: one at most."""
        held = [(p.protocol.member_id, token) for p in self.puppets if (token := p.leads(role, self.now)) is not None]
        assert len(held) <= 1, held
        return held[0] if held else None

    def edit(self, *edits: tuple[str, dict[str, Any]]) -> None:
        """Write by hand; what the database itself refuses is not written."""
        with connected(self.url) as connection:
            for text, given_ in edits:
                with contextlib.suppress(Exception):
                    named = ":{}" if self.url.startswith("sqlite") else "%({})s"
                    names = {name: named.format(name) for name in given_}
                    connection.execute(text.format(**names, **TABLES[self.url.partition(":")[0]]), given_)
                    connection.commit()
                connection.rollback()

    def close(self) -> None:
        for puppet in self.puppets:
            puppet.close()


TABLES = {
    kind: {name: table(kind, name) for name in ("meta", "namespaces", "members", "roles", "candidates", "terms")}
    for kind in ("sqlite", "postgresql", "mysql")
}

# --- what somebody may write --------------------------------------------------------------------------------

NUMBERS = st.sampled_from([0, -1, 1, 999, 60_000, 2**31 - 1, -(2**31), 2**40, 2**63 - 1, 2**63 - 2, -(2**63), None])
WORDS = st.sampled_from(
    ["", "nobody", "manual", "strict", "instant", "one", "alpha", "beta", "default", "☃", "x" * 300, None]
)
TIMES = st.sampled_from(["2001-01-01 00:00:00", "9999-12-31 23:59:59", "0001-01-01 00:00:00", None])
COLUMNS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "namespaces": {"incarnation": WORDS, "base": NUMBERS, "max_ttl_ms": NUMBERS},
    "members": {
        **dict.fromkeys(
            ("namespace", "name", "metadata", "takeover", "server_start", "incarnation", "end_reason"), WORDS
        ),
        **dict.fromkeys(("ttl_ms", "renewals", "sentinel_key", "sentinel_epoch", "control_pid", "watch_pid"), NUMBERS),
        **dict.fromkeys(("joined_at", "renewed_at", "ended_at"), TIMES),
    },
    "roles": {
        **dict.fromkeys(("namespace", "name", "holder", "reserved_for", "request_to"), WORDS),
        **dict.fromkeys(("token", "request_token"), NUMBERS),
    },
    "candidates": dict.fromkeys(("namespace", "role", "member_id"), WORDS),
    "terms": {
        **dict.fromkeys(("namespace", "role", "member_id", "member_name", "end_reason"), WORDS),
        **dict.fromkeys(("began_at", "resigned_at", "ended_at"), TIMES),
        "token": NUMBERS,
    },
    "meta": {"value": NUMBERS},
}
MEMBER = """
insert into {members} (namespace, id, name, host, pid, version, metadata, takeover, ttl_ms, renewals, sentinel_key,
                       sentinel_epoch, server_start, incarnation, joined_at, renewed_at)
values ('default', {id}, {name}, '', 0, '', {metadata}, {takeover}, {ttl}, {renewals}, {key}, 0, {start}, {start},
        '2001-01-01 00:00:00', '2001-01-01 00:00:00')
"""


@st.composite
def updates(draw):
    where = draw(st.sampled_from(["", " where name = 'alpha'", " where role = 'alpha'", " where name = 'one'"]))
    name = draw(st.sampled_from(sorted(COLUMNS)))
    column = draw(st.sampled_from(sorted(COLUMNS[name])))
    return f"update {{{name}}} set {column} = {{value}}{where}", {"value": draw(COLUMNS[name][column])}


DELETES = st.builds(
    lambda name, where: (f"delete from {{{name}}}{where}", {}),
    st.sampled_from(sorted(COLUMNS)),
    st.sampled_from(["", " where name = 'alpha'", " where role = 'alpha'", " where name = 'one'"]),
)
FAKES = st.builds(
    lambda **given_: (MEMBER, given_),
    id=WORDS, name=WORDS, metadata=WORDS, takeover=WORDS, ttl=NUMBERS, renewals=NUMBERS, key=NUMBERS, start=WORDS,
)  # fmt: skip
MOVES = st.sampled_from(
    [
        ("update {roles} set holder = 'nobody'", {}),
        ("update {roles} set holder = (select min(id) from {members})", {}),
        ("update {roles} set holder = (select max(id) from {members})", {}),
        ("update {roles} set reserved_for = (select min(id) from {members}), holder = null", {}),
        ("update {roles} set request_token = token, request_to = 'nobody'", {}),
        ("update {roles} set token = token - 1", {}),
        ("update {roles} set token = token + 5", {}),
        ("insert into {roles} (namespace, name, token) values ('default', 'gamma', -7)", {}),
        ("insert into {candidates} select namespace, 'gamma', id from {members}", {}),
        ("insert into {candidates} values ('default', 'nothing', 'nobody')", {}),
    ]
)
EDITS = st.lists(st.one_of(updates(), updates(), DELETES, FAKES, MOVES), min_size=1, max_size=4)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def memory():
    """A directory in memory, where there is one: thousands of small transactions are quicker there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        yield directory


def believe_what_is_written(theatre: Theatre) -> None:
    """Whoever believes to lead is who the table names, under that token; and what people ask is answered."""
    with connected(theatre.url) as connection:
        rows = connection.execute("select name, holder, token from {roles} where namespace = 'default'".format(
            **TABLES[theatre.url.partition(":")[0]]
        )).fetchall()  # fmt: skip
    written = {name: (holder, token) for name, holder, token in rows}
    for role in ROLES:
        leader = theatre.leader(role)
        assert leader is None or leader == written.get(role)
    with only_our_errors(), tenure.Registry(theatre.url) as registry:
        registry.namespaces()
        for info in registry.roles():
            registry.history(info.role)
        registry.members()
    for puppet, role in itertools.product(theatre.puppets, ROLES):
        if puppet.store is not None:
            with only_our_errors():
                records.candidates(puppet.store, role)
            with only_our_errors():
                records.leader(puppet.store, role)


@contextlib.contextmanager
def theatre_in(directory: str) -> Iterator[Theatre]:
    theatre = Theatre(f"sqlite:///{directory}/{next(_numbers)}.db")
    try:
        yield theatre
    finally:
        theatre.close()


@fuzzed(40)
@given(edits=EDITS)
@example(
    edits=[
        (
            MEMBER,
            {"id": None, "name": "", "metadata": "", "takeover": "", "ttl": 0, "renewals": 0, "key": 0, "start": ""},
        )
    ]
)
@example(edits=[("delete from {namespaces}", {})])
@example(edits=[("delete from {terms}", {})])
@example(edits=[("delete from {meta}", {})])
@example(edits=[("update {members} set metadata = '[', renewed_at = 'soon'", {})])
@pytest.mark.long
def test_tables_edited_by_hand_break_no_node_and_nobody_believes_what_is_not_written(edits, memory):
    with theatre_in(memory) as theatre:
        theatre.edit(*edits)
        theatre.play(30, 2.0)
        believe_what_is_written(theatre)


HARMLESS = st.one_of(
    MOVES,
    DELETES.filter(lambda edit: "candidates" not in edit[0] and "meta" not in edit[0]),
    st.builds(
        lambda column, value: (f"update {{members}} set {column} = {{value}}", {"value": value}),
        st.sampled_from(["ttl_ms", "renewals", "sentinel_key", "sentinel_epoch"]),
        st.sampled_from([0, -1, 1, 7, 30_000]),
    ),
    st.builds(lambda value: ("update {members} set ended_at = {value}", {"value": value}), TIMES),
    st.builds(
        lambda token: ("update {roles} set token = {token}", {"token": token}), st.sampled_from([0, -1, 1, 5, -(2**63)])
    ),
    st.builds(
        lambda holder: ("update {roles} set holder = {holder}", {"holder": holder}),
        WORDS.filter(lambda word: word != ""),
    ),
    st.builds(lambda who: ("update {roles} set reserved_for = {who}, holder = null", {"who": who}), WORDS),
    st.builds(lambda what: ("update {members} set takeover = {what}", {"what": what}), WORDS),
    st.builds(lambda start: ("update {members} set server_start = {start}", {"start": start}), WORDS),
)


@fuzzed(25)
@given(edits=st.lists(HARMLESS, min_size=1, max_size=4))
@example(edits=[("delete from {roles}", {})])
@example(edits=[("update {roles} set token = -1", {})])
@example(edits=[("update {roles} set token = 0", {})])
@pytest.mark.long
def test_somebody_leads_again_under_a_token_that_was_never_used(edits, memory):
    with theatre_in(memory) as theatre:
        theatre.play(10, 2.0)
        before = {role: theatre.leader(role) for role in ROLES}
        theatre.edit(*edits)
        theatre.play(80, 2.0)
        believe_what_is_written(theatre)
        for role in ROLES:
            leader = theatre.leader(role)
            assert leader is not None, role
            # A holder named by hand takes the token over; and where the history is gone as well, it begins anew.
            by_hand = any("holder = (select" in text or "delete from {terms}" in text for text, _ in edits)
            assert by_hand or leader == before[role] or leader[1] > before[role][1]


# --- nodes that run -----------------------------------------------------------------------------------------

NASTY = (
    "update {members} set ttl_ms = 0",
    "update {members} set ttl_ms = -2147483648",
    "update {members} set takeover = 'whatever', server_start = 'nowhere'",
    "update {members} set ended_at = '2001-01-01 00:00:00'",
    "update {members} set sentinel_key = 7, sentinel_epoch = -3",
    "update {roles} set token = -1",
    "update {roles} set holder = 'nobody', reserved_for = 'nobody', request_to = 'nobody', request_token = token",
    "update {roles} set token = 1",
    "delete from {roles}",
    "delete from {terms}",
    "delete from {members}",
    "delete from {namespaces}",
)


def test_nodes_go_on_over_tables_edited_by_hand(one_url, caplog):
    with Nodes(one_url, ttl=3, renew_every=0.1) as nodes:
        elections = nodes.pair("r")
        engines = [election._engine for election in elections]
        for text in NASTY:
            execute(one_url, text.format(**TABLES[one_url.partition(":")[0]]))
            until(lambda: all(election.leader() for election in elections), text)
            until(lambda: any(election.is_leader for election in elections), text)
        assert all(thread.is_alive() for engine in engines for thread in engine._threads)
        until(lambda: len(elections[0].candidates()) == 2, "both stand")

        def commits():
            leads = until(lambda: next((one for one in elections if one.is_leader), None), "one of them leads")
            # What was edited last may just now end this term, too.
            with contextlib.suppress(tenure.Fenced, tenure.LeadershipLost):
                with leads.wait(20).transaction() as transaction:
                    transaction.execute("select 1")
                return True
            return False

        until(commits, "a fenced transaction commits")
    assert not [record for record in caplog.records if "bug in Tenure" in record.getMessage()]


def test_node_that_can_make_nothing_of_a_row_says_so_and_begins_anew(sqlite_url, caplog):
    """SQLite takes text for a number."""
    with Nodes(sqlite_url, ttl=3, renew_every=0.1) as nodes:
        election = nodes("one").election("r")
        before = election.wait(20).token
        execute(sqlite_url, "update tenure_roles set token = 'many'")
        until(lambda: election.is_leader and election.term.token > before, "leads again")
        execute(sqlite_url, "update tenure_members set ttl_ms = 'long'")
        with pytest.raises(tenure.StoreUnavailable, match=r"cannot be read .* written by hand"):
            election.candidates()
        assert all(thread.is_alive() for thread in election._engine._threads)
    assert "because of a bug in Tenure" in caplog.text


PAYLOADS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=60)


def tell_nodes(url: str) -> None:
    """Say all kinds of things where nodes listen."""
    channels = [channel(postgresql("tenure"), "default", kind) for kind in ("vacant", "changed")]
    with connected(url, autocommit=True) as connection:

        @fuzzed(30)
        @given(payload=PAYLOADS)
        @example(payload="vacant")
        @example(payload="vacant x r")
        @example(payload="vacant x nobody stands for this")
        @example(payload="changed x y")
        @example(payload="x" * 7999)
        def tell(payload):
            for channel in channels:
                connection.execute("select pg_notify(%s, %s)", (channel, payload))

        tell()


def test_notifications_of_strangers_change_nothing(postgres_url, caplog):
    with Nodes(postgres_url, ttl=30) as nodes:
        leads, stands = nodes.pair("r")
        term = leads.term
        for one in (leads, stands):
            one.on_event(lambda _: None)  # so that it listens to changes, too
        tell_nodes(postgres_url)
        assert leads.leader().token == stands.leader().token == term.token
        assert term.valid
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_time_that_python_does_not_know_costs_an_answer_and_nothing_else(postgres_url, caplog):
    with tenure.Node(postgres_url, ttl=30) as node, node.lead("r", timeout=20) as term:
        execute(postgres_url, "update tenure.members set joined_at = 'infinity'", "delete from tenure.terms")
        with tenure.Registry(postgres_url) as registry, pytest.raises(tenure.StoreUnavailable, match="cannot be read"):
            registry.members()
        with pytest.raises(tenure.StoreUnavailable, match="cannot be read"):
            node.election("r").leader()
        assert term.valid
    assert "bug in Tenure" not in caplog.text
