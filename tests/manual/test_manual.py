"""Step by step: candidates without a thread, on their own connection and in the application's transactions."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sa_asyncio

import tenure
from tenure import manual
from tenure.base.moments import time_of
from tenure.core import messages
from tests.support.store_by_hand import Desk, execute, fork, table, until

ROOT = Path(__file__).parents[2]
PATIENCE_S = 100.0
ROLE = "leader"


@pytest.fixture(params=["sqlite", "postgres", "mariadb", "pooler"])
def url(request):
    """An empty store of each kind; `pooler` is PostgreSQL behind PgBouncer in transaction mode."""
    if request.param != "pooler":
        return request.getfixturevalue(f"{request.param}_url")
    make = request.getfixturevalue("make_pgbouncer")
    direct = request.getfixturevalue("postgres_url")
    pooler = make(request.getfixturevalue("postgres_server"), pool_size=8)
    return pooler.through(direct)


@pytest.fixture(autouse=True)
def left_alone():
    """Every test begins and ends without a connection and with the default expiry."""
    yield
    manual.close()
    manual.set_expire(manual.DEFAULT_EXPIRE_S)
    manual._settings.place, manual._settings.schema = None, "tenure"


@pytest.fixture
def place(one_url):
    """The URL of an empty store that the calls without `session=` use."""
    manual.use(one_url)
    return one_url


@pytest.fixture
def engine(place):
    engine = engine_for(place)
    manual.leader()  # creates the tables
    yield engine
    engine.dispose()


def child(program, *arguments):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def engine_for(url, **arguments):
    drivers = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "sqlite": "sqlite"}
    scheme, _, rest = url.partition(":")
    if scheme == "mysql":
        arguments["isolation_level"] = "READ COMMITTED"
    return sa.create_engine(f"{drivers[scheme]}:{rest}", **arguments)


def members(url):
    return table(url, "members")


def living(url):
    """The names of the living members, candidates and nodes."""
    return [name for (name,) in execute(url, f"select name from {members(url)} where ended_at is null order by name")]


def age(url, seconds):
    """Let every renewal be older by so much, as if the database's clock had been stepped."""
    execute(url, f"update {members(url)} set renewed_at = {earlier(url, 'renewed_at', seconds)}")


def earlier(url, moment, seconds):
    if url.startswith("sqlite"):
        return f"strftime('%Y-%m-%dT%H:%M:%fZ', {moment}, '-{seconds} seconds')"
    return f"{moment} - interval '{seconds}' second"


# --- one leader ---------------------------------------------------------------------------------------------


CROWD = """
import json, os, sys, traceback
import psycopg, pymysql
from tenure import manual

url, directory, beats = sys.argv[1], sys.argv[2], int(sys.argv[3])
flag = f"{directory}/leads"
ready, gate = os.pipe(), os.pipe()

def run(me):
    manual.use(url)
    manual.register_candidate(me)
    os.write(ready[1], b".")
    os.close(gate[1])
    os.read(gate[0], 1)  # until every worker is ready
    seen = {}
    for beat in range(beats):
        leader = manual.elect(me)
        if leader is None:
            continue
        assert seen.setdefault(leader.token, leader.name) == leader.name
        assert leader.mine == (leader.name == me)
        if leader.mine and beat % 20 == 0:
            os.close(os.open(flag, os.O_CREAT | os.O_EXCL))  # no other worker may lead until this is gone
            assert manual.is_leader(me)
            os.unlink(flag)
            manual.unregister_candidate(me)
    manual.unregister_candidate(me)
    with open(f"{directory}/{me}.json", "w") as file:
        json.dump(seen, file)

def child(me):
    try:
        run(me)
        return 0
    except BaseException:
        traceback.print_exc()
        return 1

children = []
for number in range(8):
    children.append(os.fork())
    if not children[-1]:
        os._exit(child(f"worker-{number}"))
os.close(ready[1])
for _ in children:
    os.read(ready[0], 1)
os.close(gate[1])
sys.exit(any([os.waitpid(pid, 0)[1] for pid in children]))
"""


@pytest.mark.long
def test_of_eight_processes_that_elect_two_hundred_times_never_two_lead_and_none_fails(url, tmp_path, request):
    beats = 25 if "pooler" in request.node.name else 200  # every statement takes three times as many there
    crowd = child(CROWD, url, tmp_path, beats)
    crowd.communicate(timeout=PATIENCE_S)
    assert crowd.returncode == 0
    leaders = {}
    for number in range(8):
        for token, name in json.loads((tmp_path / f"worker-{number}.json").read_text()).items():
            assert leaders.setdefault(token, name) == name  # no worker saw another leader under the same token
    assert len(set(leaders.values())) > 1


def test_a_leader_that_calls_no_more_is_succeeded_when_it_has_expired_and_not_before(place):
    first = manual.elect("first", expire=1)
    assert first.mine
    ((renewed,),) = execute(place, f"select renewed_at from {members(place)} where name = 'first'")
    second = until(lambda: (leader := manual.elect("second", expire=30)) and leader.mine and leader)
    assert second.token > first.token
    # By the database's own clock, whatever this machine was busy with: not before the expiry, and with the next beat.
    assert 1 <= (second.since - time_of(renewed)).total_seconds() < 20
    assert not manual.is_leader("first")
    assert manual.elect("first").name == "second"


def test_a_leader_that_goes_on_calling_goes_on_leading_under_the_same_token(place):
    token = manual.elect("me", expire=30).token
    manual.heartbeat("me")
    assert manual.elect("me").token == token
    assert [record.token for record in history(place)] == [token]


def history(url):
    with tenure.Registry(url) as registry:
        return registry.history(ROLE)


def test_a_candidate_that_expired_leads_again_only_under_a_new_token(place):
    token = manual.elect("me", expire=2).token
    age(place, 3)
    assert not manual.is_leader("me")
    assert manual.leader() is None
    assert manual.list_candidates() == []
    again = manual.elect("me")
    assert again.mine
    assert again.token > token
    assert again.expire == 2  # as it registered before
    assert living(place) == ["me"]


def test_one_that_leaves_is_succeeded_at_once(place):
    manual.elect("first")
    manual.elect("second")
    assert manual.unregister_candidate("first")
    assert not manual.unregister_candidate("first")
    assert manual.elect("second").mine


def test_the_same_id_is_one_candidate_from_eight_threads_at_once(place):
    begin, failures = threading.Barrier(8), []
    own = [manual._OwnConnection(place, "tenure", None) for _ in range(8)]  # as in eight processes: a connection each

    def register(connection):
        try:
            connection.call("default", lambda election: election.holding(ROLE))  # connects
            begin.wait(PATIENCE_S)
            for number in range(5):
                connection.call(
                    "default", lambda election, name=f"same-{number}": election.register(name, ROLE, None, 60)
                )
        except Exception as error:  # noqa: BLE001 - the test tells
            begin.abort()
            failures.append(error)

    threads = [threading.Thread(target=register, args=(connection,)) for connection in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for connection in own:
        connection.close()
    assert failures == []
    names = [f"same-{number}" for number in range(5)]
    assert living(place) == names
    assert sorted(candidate.name for candidate in manual.list_candidates()) == names


def test_roles_and_namespaces_have_leaders_of_their_own(place):
    assert manual.elect("a", role="one").mine
    assert manual.elect("b", role="two").mine
    assert manual.elect("b", "elsewhere", role="one").mine
    assert not manual.elect("b", role="one").mine
    assert manual.leader(role="one").name == "a"
    assert manual.leader("elsewhere", role="one").name == "b"
    assert manual.leader("elsewhere", role="two") is None
    assert [candidate.name for candidate in manual.list_candidates(role="one")] == ["a", "b"]


CLOCK = """
import datetime, sys, time
import psycopg
url, offset = sys.argv[1], float(sys.argv[2])
real, genuine = time.time, datetime.datetime
time.time = lambda: real() + offset
time.time_ns = lambda: int(time.time() * 1e9)
class Kind(type):
    def __instancecheck__(cls, thing):
        return isinstance(thing, genuine)
class Shifted(datetime.datetime, metaclass=Kind):
    @classmethod
    def now(cls, zone=None):
        return super().fromtimestamp(time.time(), zone)
    @classmethod
    def utcnow(cls):
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)
datetime.datetime = Shifted
from tenure import manual
manual.use(url)
assert not manual.elect("traveller", expire=30).mine  # the living leader is not robbed
assert manual.leader().name == "at home"
manual.unregister_candidate("traveller")
assert manual.elect("traveller", role="other", expire=30).mine
"""


@pytest.mark.twin("postgres")
def test_the_clock_of_a_caller_changes_nothing(place):
    offset = -3600 if place.startswith("mysql") else 3600
    manual.elect("at home", expire=30)
    done = child(CLOCK, place, offset)
    done.communicate(timeout=PATIENCE_S)
    assert done.returncode == 0
    assert manual.elect("at home", role="other").name == "traveller"  # and its own lease neither lasts an hour …
    age(place, 31)
    assert manual.elect("at home", role="other").mine  # … nor is it over before its time


# --- the term -----------------------------------------------------------------------------------------------


def test_a_leader_that_was_paused_is_told_the_truth_and_its_late_write_is_refused(engine, place):
    old = manual.elect("paused", expire=2)
    with orm.Session(engine) as session, session.begin():
        old.fence(session)
    age(place, 3)
    assert manual.elect("successor").mine
    assert not manual.is_leader("paused")
    with pytest.raises(tenure.Fenced), orm.Session(engine) as session, session.begin():
        old.fence(session)


def test_only_the_leader_has_a_term_to_fence(engine):
    manual.elect("first")
    with engine.connect() as connection, pytest.raises(tenure.NotLeader, match="'first' leads"):
        manual.elect("second").fence(connection)


def test_a_leader_that_is_asked_to_resign_hands_over_with_its_next_call(place):
    manual.elect("first")
    manual.elect("second")
    manual.elect("third")
    with tenure.Registry(place) as registry:
        asking = threading.Thread(target=registry.resign, args=(ROLE, "third"))
        asking.start()
        until(lambda: manual.elect("first") is None, "resigned")
        assert manual.elect("second") is None  # it is kept for the third
        assert manual.elect("third").mine
        asking.join()


def test_a_reservation_ends_when_the_candidate_does_not_come(place):
    manual.elect("first", expire=20)
    manual.elect("second", expire=60)
    with Desk(place) as desk:
        kept_for = next(found.member_id for found in manual.list_candidates() if found.name == "second")
        leader = manual.leader()
        desk.ask(messages.Vacate(leader.member_id, ROLE, leader.token, kept_for))
    assert manual.elect("first") is None
    terms = table(place, "terms")
    execute(place, f"update {terms} set resigned_at = {earlier(place, 'resigned_at', 21)}")
    assert manual.elect("first").mine


# --- beside nodes -------------------------------------------------------------------------------------------


def test_a_node_and_a_candidate_exclude_each_other(place):
    manual.elect("script", expire=30)
    with tenure.Node(place, name="node", ttl=10, renew_every=0.2) as node:
        election = node.election(ROLE)
        until(lambda: len(manual.list_candidates()) == 2, "both stand")
        for _ in range(10):
            assert manual.elect("script").mine
            assert not election.is_leader
        assert manual.unregister_candidate("script")
        term = election.wait(PATIENCE_S)
        leader = manual.elect("script")
        assert (leader.name, leader.token, leader.mine) == ("node", term.token, False)
    assert until(lambda: manual.elect("script"), "the node left").mine


def test_a_node_ends_a_silent_candidate_after_its_expiry(postgres_url):
    manual.use(postgres_url)
    before = manual.elect("script", expire=1)
    with tenure.Node(postgres_url, name="node", ttl=10) as node:
        term = node.election(ROLE).wait(PATIENCE_S)
        assert term.token > before.token
        assert (node.election(ROLE).leader().since - before.since).total_seconds() >= 1


def test_no_candidate_ends_a_living_node_by_the_clock_of_the_database(place):
    with tenure.Node(place, name="node", ttl=10, renew_every=4) as node:
        term = node.election(ROLE).wait(PATIENCE_S)
        age(place, 3600)
        assert manual.elect("script").name == "node"
        assert term.valid
        assert node.member_id in {candidate.member_id for candidate in manual.list_candidates()}


def test_a_node_that_fell_silent_is_succeeded_when_this_process_has_watched_it_for_its_ttl(sqlite_url):
    manual.use(sqlite_url)
    with Desk(sqlite_url, ttl=1.0, name="node") as desk:  # holds its sentinel, and never renews
        desk.lead(ROLE)
        assert manual.elect("script").name == "node"
        assert until(lambda: (leader := manual.elect("script")) and leader.mine, "watched long enough")


def test_a_node_that_died_is_succeeded_by_a_script_that_was_not_there(place):
    with Desk(place, ttl=30.0, name="node") as desk:
        desk.lead(ROLE)
    age(place, 31)
    assert manual.elect("script").mine
    assert history(place)[1].reason == "death"


# --- in a transaction of the caller's -----------------------------------------------------------------------


def test_an_election_and_the_callers_writes_commit_together(engine):
    with engine.begin() as connection:
        connection.execute(sa.text("create table invoices (number integer)"))
    with orm.Session(engine) as session, session.begin():
        session.execute(sa.text("insert into invoices values (1)"))
        leader = manual.elect("me", session=session)
        assert leader.mine
        assert manual.is_leader("me", session=session)
        assert manual.leader(session=session).name == "me"
        assert [candidate.name for candidate in manual.list_candidates(session=session)] == ["me"]
        leader.fence(session)
        session.execute(sa.text("insert into invoices values (2)"))
    assert manual.elect("me").token == leader.token
    with engine.connect() as connection:
        assert connection.scalar(sa.text("select count(*) from invoices")) == 2


def test_token_that_the_callers_transaction_issues_is_on_disk(postgres_url):
    """Whatever the caller's database says: a crash would take the token back."""
    manual.use(postgres_url)
    engine = engine_for(postgres_url)
    manual.leader()
    database = postgres_url.rpartition("/")[2]
    with engine.begin() as connection:
        connection.execute(sa.text(f"alter database {database} set synchronous_commit = off"))
    engine.dispose()
    with engine.begin() as connection:
        assert connection.scalar(sa.text("show synchronous_commit")) == "off"
        assert manual.elect("me", session=connection).mine
        assert connection.scalar(sa.text("show synchronous_commit")) == "local"
    engine.dispose()


def test_an_election_is_rolled_back_with_the_callers_transaction(engine, place):
    with engine.connect() as connection:
        assert manual.elect("me", session=connection).mine
        connection.rollback()
    assert manual.leader() is None
    assert living(place) == []
    manual.elect("me")
    with orm.Session(engine) as session:
        assert manual.unregister_candidate("me", session=session)
        session.rollback()
    assert manual.is_leader("me")


def test_a_session_is_used_again_while_the_application_holds_what_it_has_read(engine):
    """An ORM session may remember a row; the answer must come from the database."""
    with orm.Session(engine, expire_on_commit=False) as session:
        assert manual.elect("first", session=session).mine
        session.commit()
        kept = manual.leader(session=session)
        session.commit()
        manual.unregister_candidate("first")
        manual.elect("second")
        assert kept.name == "first"
        assert manual.leader(session=session).name == "second"
        assert not manual.is_leader("first", session=session)
        assert manual.elect("first", session=session).name == "second"


@pytest.mark.parametrize("store", ["postgres", "mariadb"])
def test_a_crowd_in_open_transactions_blocks_nobody(store, request):
    """Whoever cannot have the role at this moment is told so, instead of waiting for another's transaction."""
    url = request.getfixturevalue(f"{store}_url")
    manual.use(url)
    for number in range(4):
        manual.register_candidate(f"worker-{number}")
    engine = engine_for(url)
    sessions = [orm.Session(engine) for _ in range(4)]
    answers = [manual.elect(f"worker-{number}", session=session) for number, session in enumerate(sessions)]
    assert answers[0].mine
    assert answers[1:] == [None, None, None]
    for session in sessions:
        session.commit()
        session.close()
    assert manual.elect("worker-3").name == "worker-0"
    engine.dispose()


@pytest.mark.parametrize("store", ["postgres", "mariadb"])
def test_a_holder_whose_row_is_in_use_is_left_alone(store, request):
    """Another transaction may renew the member now. To wait for its row while holding one risks a deadlock."""
    url = request.getfixturevalue(f"{store}_url")
    manual.use(url)
    manual.elect("holder", expire=2)
    manual.register_candidate("other")
    age(url, 3)
    engine = engine_for(url)
    with orm.Session(engine) as session, session.begin():
        session.execute(sa.text(f"update {members(url)} set host = 'here' where name = 'holder'"))
        assert manual.elect("other") is None
    assert manual.elect("other").mine
    engine.dispose()


def test_a_candidate_that_is_renewed_in_an_open_transaction_does_not_become_two(postgres_url):
    manual.use(postgres_url)
    manual.register_candidate("same", expire=1)
    engine = engine_for(postgres_url)
    with orm.Session(engine) as session, session.begin():
        manual.heartbeat("same", session=session)
        until(lambda: not manual.list_candidates(), "expired, as others see it")
        elsewhere = threading.Thread(target=manual.register_candidate, args=("same",))
        elsewhere.start()
        time.sleep(0.3)  # it looks, and has to wait
    elsewhere.join()
    engine.dispose()
    assert living(postgres_url) == ["same"]


@pytest.mark.parametrize(("store", "driver"), [("sqlite", "sqlite+aiosqlite"), ("postgres", "postgresql+asyncpg")])
def test_async_sessions_elect_by_run_sync(store, driver, request):
    url = request.getfixturevalue(f"{store}_url")
    manual.use(url)
    manual.leader()

    async def main():
        engine = sa_asyncio.create_async_engine(f"{driver}:{url.partition(':')[2]}")
        async with sa_asyncio.AsyncSession(engine) as session, session.begin():
            with pytest.raises(tenure.ConfigError, match="run_sync"):
                manual.elect("me", session=session)
            leader = await session.run_sync(lambda session: manual.elect("me", session=session))
            assert leader.mine
            await session.run_sync(leader.fence)
        await engine.dispose()

    asyncio.run(main())
    assert manual.is_leader("me")


def test_another_schema_works_throughout(postgres_url):
    manual.use(postgres_url, schema="elections")
    token = manual.elect("me").token
    engine = engine_for(postgres_url)
    with orm.Session(engine) as session, session.begin():
        leader = manual.elect("me", session=session)
        leader.fence(session)
        assert leader.token == token
    with tenure.Node(postgres_url, schema="elections") as node:
        assert node.election(ROLE).leader().name == "me"
    engine.dispose()
    assert execute(postgres_url, "select count(*) from pg_namespace where nspname = 'tenure'") == [(0,)]


# --- servers that change, processes that fork, tables that grow ---------------------------------------------


def test_nobody_leads_on_a_server_that_has_just_been_replaced(place):
    """A replica that was promoted may lack the commit that elected a leader: wait for the largest TTL."""
    with Desk(place, join=False):
        pass
    namespaces = table(place, "namespaces")
    execute(place, f"update {namespaces} set incarnation = 'another:1', max_ttl_ms = 30000 where name = 'default'")
    assert manual.elect("me", expire=20) is None
    assert not manual.is_leader("me")
    execute(place, f"update {members(place)} set joined_at = {earlier(place, 'joined_at', 31)}")
    assert manual.elect("me").mine


def test_a_membership_of_another_incarnation_leads_no_more(place):
    token = manual.elect("me").token
    execute(place, f"update {members(place)} set incarnation = 'another:1'")
    assert not manual.is_leader("me")
    assert manual.elect("me").token > token


def test_a_forked_child_elects_on_a_connection_of_its_own(place):
    manual.elect("parent")
    pid = fork()
    if pid == 0:  # pragma: no cover - another process
        os._exit(0 if manual.elect("child").name == "parent" and manual.unregister_candidate("child") else 1)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    assert manual.is_leader("parent")


def test_the_connection_may_be_cut_between_two_calls(postgres_url):
    manual.use(postgres_url)
    token = manual.elect("me").token
    execute(postgres_url, "select pg_terminate_backend(pid) from pg_stat_activity where application_name ~ 'registry'")
    assert manual.elect("me").token == token


def test_the_tables_stay_small(sqlite_url, monkeypatch):
    monkeypatch.setattr("tenure.manual.steps.TIDY_SHARE", 1.0)
    monkeypatch.setattr("tenure.store.tidying.KEPT_MEMBERS", 5)
    monkeypatch.setattr("tenure.store.tidying.KEPT_TERMS", 5)
    manual.use(sqlite_url)
    for number in range(20):
        manual.elect(f"run-{number}")
        age(sqlite_url, 61)  # as if it had been killed without unregistering
    assert execute(sqlite_url, "select count(*) from tenure_members") <= [(8,)]
    assert execute(sqlite_url, "select count(*) from tenure_terms") <= [(8,)]
    assert execute(sqlite_url, "select count(*) from tenure_candidates") <= [(8,)]


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: manual.elect("x" * 256), "candidate_id=.* is 256 bytes"),
        (lambda: manual.elect(""), "candidate_id='' is 0 bytes"),
        (lambda: manual.elect(None), "candidate_id=None must be text"),
        (lambda: manual.elect(7), "candidate_id=7 must be text"),
        (lambda: manual.elect("me", ns=""), "ns='' is 0 bytes"),
        (lambda: manual.elect("me", role="a\0b"), "role='a.*control characters"),
        (lambda: manual.elect("me", expire=0), "expire=0 must be 1 to 3600"),
        (lambda: manual.elect("me", expire=3601), "expire=3601 must be 1 to 3600"),
        (lambda: manual.elect("me", expire="soon"), "expire='soon' must be a number"),
        (lambda: manual.elect("me", expire=61), "expire=61 is above the largest permitted in namespace 'default', 10"),
        (lambda: manual.set_expire(-1), "expire=-1 must be 1 to 3600"),
        (lambda: manual.elect("me", session=object()), "must be a Session or Connection of SQLAlchemy, not object"),
        (lambda: manual.use("oracle://db"), "unknown database 'oracle'"),
        (lambda: manual.use("sqlite:///:memory:"), "in-memory"),
    ],
)
def test_bad_arguments_are_named(sqlite_url, call, message):
    manual.use(sqlite_url)
    manual.register_candidate("somebody", expire=10)
    with pytest.raises(tenure.ConfigError, match=message):
        call()


def test_an_unknown_candidate_leads_nothing_and_may_leave(sqlite_url):
    manual.use(sqlite_url)
    assert not manual.is_leader("nobody")
    assert not manual.unregister_candidate("nobody")
    assert manual.leader() is None


def test_a_uuid_is_an_id(sqlite_url):
    manual.use(sqlite_url)
    me = uuid.uuid4()
    assert manual.elect(me).name == str(me)
    assert manual.is_leader(str(me))


def test_a_session_that_cannot_serve_is_refused_with_the_reason(engine, tmp_path):
    closed = engine.connect()
    closed.close()
    with pytest.raises(tenure.ConfigError, match="is closed"):
        manual.elect("me", session=closed)
    over = orm.Session(engine, close_resets_only=False)
    over.close()
    with pytest.raises(tenure.ConfigError, match="closed"):
        manual.elect("me", session=over)
    with pytest.raises(tenure.ConfigError, match="cannot be used"):
        manual.elect("me", session=orm.Session())
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    with autocommit.connect() as connection, pytest.raises(tenure.ConfigError, match="autocommit"):
        manual.elect("me", session=connection)
    empty = sa.create_engine(f"sqlite:///{tmp_path}/empty.db")
    with empty.connect() as connection, pytest.raises(tenure.ConfigError, match="no tables of Tenure"):
        manual.elect("me", session=connection)
    empty.dispose()
    assert manual.leader() is None


def test_a_session_of_mariadb_that_shows_the_past_is_refused(mariadb_url):
    manual.use(mariadb_url)
    engine = sa.create_engine(f"mysql+pymysql:{mariadb_url.partition(':')[2]}", isolation_level="REPEATABLE READ")
    with engine.connect() as connection, pytest.raises(tenure.ConfigError, match="READ COMMITTED"):
        manual.elect("me", session=connection)
    engine.dispose()


def test_a_read_only_session_is_refused(postgres_url):
    manual.use(postgres_url)
    manual.leader()
    engine = engine_for(postgres_url, connect_args={"options": "-c default_transaction_read_only=on"})
    with engine.connect() as connection, pytest.raises(tenure.StoreUnavailable, match="primary"):
        manual.elect("me", session=connection)
    engine.dispose()
