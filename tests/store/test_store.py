"""The store: each ask of the protocol as one short transaction, and every write scoped to whom it speaks for."""

from __future__ import annotations

import contextlib
import socket
import threading

import psycopg
import pytest

from tenure import Registry
from tenure.core import messages
from tenure.core.evidence import NEIGHBOURS
from tenure.core.messages import Verdict
from tenure.core.servers import Server
from tenure.store.session import Failed, Gone, Step
from tests.support.store_by_hand import Desk, connected, execute, table, until


def rows(desk, text, **parameters):
    return list(desk.session.read(Step(text, parameters))[0].rows)


def renew(desk, **arguments):
    return desk.ask(messages.Renew(desk.id, **arguments))


def held(desk):
    return {mine.role: mine.token for mine in renew(desk).held}


# --- membership ---------------------------------------------------------------------------------------------


def test_renewal_counts_and_tells_what_is_held(store_url):
    with Desk(store_url) as desk:
        desk.acquire("a", "b")
        standing = renew(desk)
        assert standing.alive
        assert sorted((held.role, held.token) for held in standing.held) == [("a", 1), ("b", 1)]
        assert standing.vacant == ()
        assert rows(desk, "select renewals from {members}") == [(1,)]


def test_renewal_of_an_ended_member_changes_nothing(store_url):
    with Desk(store_url) as desk, Desk(store_url) as other:
        desk.lead("r")
        assert other.end(desk.id)
        assert not renew(desk).alive
        assert rows(desk, "select renewals from {members} where id = :id", id=desk.id) == [(0,)]
        assert desk.acquire("r") == {}


def test_end_by_silence_needs_the_count_that_was_watched(store_url):
    with Desk(store_url) as desk, Desk(store_url) as other:
        incarnation = desk.opened.server.incarnation
        renew(other)
        stale = Verdict(other.id, "silence", incarnation, renewals=0)
        assert desk.ask(messages.End(desk.id, (stale,))).ids == ()
        exact = Verdict(other.id, "silence", incarnation, renewals=1)
        assert desk.ask(messages.End(desk.id, (exact,))).ids == (other.id,)
        assert desk.ask(messages.End(desk.id, (exact,))).ids == (), "a membership ends once"


@pytest.mark.parametrize("wrong", [{"epoch": 1}, {"server_start": "another"}])
def test_end_by_death_needs_the_sentinel_that_was_seen(store_url, wrong):
    with Desk(store_url) as desk, Desk(store_url) as other:
        server = desk.opened.server
        seen = {"epoch": 0, "server_start": server.start}
        verdict = Verdict(other.id, "death", server.incarnation, **(seen | wrong))
        assert desk.ask(messages.End(desk.id, (verdict,))).ids == ()
        verdict = Verdict(other.id, "death", server.incarnation, **seen)
        assert desk.ask(messages.End(desk.id, (verdict,))).ids == (other.id,)


def test_end_tells_what_became_vacant(store_url):
    with Desk(store_url) as desk, Desk(store_url) as other:
        other.acquire("mine too", "only theirs")
        desk.stand("mine too")
        verdict = Verdict(other.id, "silence", desk.opened.server.incarnation, renewals=0)
        ended = desk.ask(messages.End(desk.id, (verdict,)))
        assert [(vacancy.role, vacancy.token) for vacancy in ended.vacant] == [("mine too", 1)]


def death(desk: Desk, other: Desk) -> Verdict:
    server = desk.opened.server
    return Verdict(other.id, "death", server.incarnation, epoch=0, server_start=server.start, urgent=True)


def test_dead_member_is_succeeded_in_one_transaction(store_url):
    with Desk(store_url) as desk, Desk(store_url) as other:
        other.acquire("mine too", "only theirs")
        desk.stand("mine too", "of nobody")
        ended = desk.ask(messages.End(desk.id, (death(desk, other),), messages.Succession("successor", 100)))
        assert (ended.ids, ended.tokens) == ((other.id,), {"mine too": 100})
        assert [vacancy.role for vacancy in ended.vacant] == ["of nobody"]
        began = "select member_id, member_name from {terms} where token = 100"
        assert rows(desk, began) == [(desk.id, "successor")]
        assert held(desk) == {"mine too": 100}


@pytest.mark.parametrize("lives", [True, False])
def test_resignation_names_the_member_with_the_reservation_only_if_that_lives(postgres_url, lives):
    with Desk(postgres_url) as leader, Desk(postgres_url) as candidate, Desk(postgres_url) as reserved:
        token = leader.lead("r").token
        candidate.stand("r")
        reserved.stand("r")
        if not lives:
            assert leader.end(reserved.id)
        assert leader.ask(messages.Vacate(leader.id, "r", token, reserved.id)).done
        never, waker = socket.socketpair()
        with never, waker:
            heir = reserved if lives else candidate
            assert candidate.session.idle(waker, 20) == [f"vacant {leader.id}>{heir.id} r"]


def test_member_that_lives_on_is_not_succeeded(store_url):
    with Desk(store_url) as desk, Desk(store_url) as other:
        other.lead("r")
        desk.stand("r")
        stale = death(desk, other)._replace(epoch=7)
        ended = desk.ask(messages.End(desk.id, (stale,), messages.Succession("successor", 0)))
        assert (ended.ids, ended.tokens, ended.vacant) == ((), {}, ())
        assert held(other) == {"r": 1}


def test_member_that_was_ended_succeeds_no_member(store_url):
    with Desk(store_url) as desk, Desk(store_url) as other, Desk(store_url) as third:
        other.lead("r")
        desk.stand("r")
        assert third.end(desk.id)
        ended = desk.ask(messages.End(desk.id, (death(desk, other),), messages.Succession("successor", 0)))
        assert (ended.ids, ended.tokens) == ((other.id,), {})


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_dead_member_is_ended_although_a_transaction_has_locked_its_role(kind, request):
    """The fence must refuse new transactions at once, or a stream of them would keep the role for ever."""
    url = request.getfixturevalue(f"{kind}_url")
    with Desk(url) as desk, Desk(url) as other, connected(url) as working:
        other.acquire("locked", "free")
        desk.stand("locked", "free")
        lock = f"select 1 from {table(url, 'roles')} where namespace = %s and name = 'locked' for update"
        working.execute(lock, (desk.settings.namespace,))
        ended = desk.ask(messages.End(desk.id, (death(desk, other),), messages.Succession("successor", 0)))
        assert (ended.ids, ended.tokens) == ((other.id,), {"free": 2})
        assert [vacancy.role for vacancy in ended.vacant] == ["locked"]
        working.commit()
        assert desk.acquire("locked") == {"locked": 2}


def test_resuming_takes_a_new_key_a_new_epoch_and_the_new_server(store_url):
    with Desk(store_url) as desk:
        desk.lead("r")
        member = messages.Member(desk.id, "desk", 30.0, "instant", 77)
        later = Server("restarted", desk.opened.server.incarnation)
        standing = desk.ask(messages.Resume(member, later, epoch=2))
        assert standing.alive
        assert [held.token for held in standing.held] == [1]
        assert rows(desk, "select sentinel_key, sentinel_epoch, server_start from {members}") == [(77, 2, "restarted")]
        assert desk.store.sentinel.standing([77]) == {77}
        elsewhere = Server("restarted", "another incarnation")
        assert not desk.ask(messages.Resume(member, elsewhere, epoch=3)).alive


@pytest.mark.parametrize("epoch", [1, 2])
def test_resume_that_was_delayed_on_its_way_changes_nothing(store_url, epoch):
    """It would leave a row that names a sentinel on a connection that is gone: a proof of death of a living member."""
    with Desk(store_url) as desk:
        member = messages.Member(desk.id, "desk", 30.0, "instant", 77)
        assert desk.ask(messages.Resume(member, desk.opened.server, epoch=2)).alive
        before = rows(desk, "select * from {members}")
        late = messages.Member(desk.id, "desk", 30.0, "instant", 78)
        assert not desk.ask(messages.Resume(late, desk.opened.server, epoch)).alive
        assert rows(desk, "select * from {members}") == before


# --- roles --------------------------------------------------------------------------------------------------


def test_role_is_acquired_by_one(store_url):
    with Desk(store_url) as desk, Desk(store_url) as other:
        assert desk.acquire("r") == {"r": 1}
        assert other.acquire("r") == {}
        assert other.acquire("r", patient=True) == {}


def test_thousand_roles_are_taken_over_in_one_batch(store_url):
    roles = [f"role {number}" for number in range(1000)]
    with Desk(store_url, ttl=60) as desk, Desk(store_url, ttl=60) as other:
        assert desk.acquire(*roles) == dict.fromkeys(roles, 1)
        assert other.end(desk.id)
        assert other.acquire(*roles) == dict.fromkeys(roles, 2)
        assert len(renew(other).held) == 1000


def test_own_role_is_acquired_anew_with_a_new_token(store_url):
    """Else a term that lapsed here and stands in the database would be a role that nobody may take, for ever."""
    with Desk(store_url) as desk:
        assert [desk.acquire("r")["r"] for _ in range(3)] == [1, 2, 3]


def test_tokens_of_roles_are_counted_apart_and_never_go_back(store_url):
    with Desk(store_url) as desk, Desk(store_url) as other:
        desk.acquire("a")
        desk.acquire("a", "b")
        assert other.end(desk.id)
        assert other.acquire("a", "b") == {"a": 3, "b": 2}
        other.ask(messages.Vacate(other.id, "a", 3))
        assert other.acquire("a") == {"a": 4}


def test_floor_lifts_a_token_and_never_lowers_it(store_url):
    """A promoted replica may lack the last terms; its timeline's floor is above all that they could have been."""
    timeline = 2**40
    with Desk(store_url) as desk:
        assert desk.acquire("r", floor=0) == {"r": 1}
        assert desk.acquire("r", floor=timeline) == {"r": timeline}
        assert desk.acquire("r", floor=timeline) == {"r": timeline + 1}
        assert desk.acquire("r", floor=0) == {"r": timeline + 2}
        assert desk.acquire("new", floor=timeline) == {"new": timeline}


def test_another_system_lifts_the_base_above_every_token(store_url):
    """After dump and restore, or pg_upgrade, the timeline begins again at 1."""
    with Desk(store_url) as desk:
        desk.acquire("r", floor=5 * 2**40)
        old, place = desk.opened.confirmed, desk.opened.server.place
        system = old.incarnation.split(":")[0]
        desk.ask(messages.Confirm(old, Server("start", f"{system}:7", 7, place)))
        later = renew(desk).confirmed
        assert (later.incarnation, later.base) == (f"{system}:7", 0), "the same system, a later timeline"
        desk.ask(messages.Confirm(later._replace(incarnation="somebody was quicker"), Server("start", "x:1", 1, place)))
        assert renew(desk).confirmed == later, "only from what was seen"
        desk.ask(messages.Confirm(later, Server("start", "restored:1", 1, place)))
        assert renew(desk).confirmed.base >= 5 * 2**40 + 2**32


def test_busy_role_delays_only_itself(every_postgres_url):
    url = every_postgres_url
    with Desk(url) as desk, connected(url) as blocker:
        desk.stand("busy", "free")
        blocker.execute("select 1 from tenure.roles where name = 'busy' for share")
        answer = desk.ask(messages.Acquire(desk.id, "desk", ("busy", "free"), 0))
        assert answer == messages.Acquired({"free": 1}, busy=("busy",))
        assert desk.ask(messages.Acquire(desk.id, "desk", ("busy",), 0, patient=True)).busy == ("busy",)
        blocker.rollback()
        assert desk.ask(messages.Acquire(desk.id, "desk", ("busy",), 0, patient=True)).tokens == {"busy": 1}


def test_what_was_taken_is_reported_even_if_nothing_can_be_read_about_a_busy_role(every_postgres_url):
    """The role is taken by then: a node that did not know would take it again, with one more token each time."""
    url = every_postgres_url
    with Desk(url) as desk, connected(url) as fenced, connected(url) as operator:
        desk.stand("busy", "free")
        fenced.execute("select 1 from tenure.roles where name = 'busy' for share")
        operator.execute("lock table tenure.candidates in access exclusive mode")
        answer = desk.ask(messages.Acquire(desk.id, "desk", ("busy", "free"), 0))
        assert answer == messages.Acquired({"free": 1}, busy=())


def test_waiting_for_a_busy_role_leaves_no_line_in_the_log(every_postgres_server, every_postgres_url):
    url = every_postgres_url
    with Desk(url) as desk, connected(url) as blocker:
        desk.stand("r")
        blocker.execute("select 1 from tenure.roles for update")
        mark = every_postgres_server.log_mark()
        assert desk.acquire("r", patient=True) == {}
        assert every_postgres_server.log_lines(mark) == []


def test_vacating_marks_first_and_waits_for_open_transactions(every_postgres_url):
    url = every_postgres_url
    with Desk(url) as desk, Desk(url) as other, connected(url) as fenced:
        desk.lead("r")
        fenced.execute("select 1 from tenure.roles for share")
        vacate = messages.Vacate(desk.id, "r", 1)
        assert desk.ask(vacate) == messages.Vacated(done=False)
        ((resigned,),) = execute(url, "select resigned_at is not null from tenure.terms")
        assert resigned
        assert other.acquire("r") == {}
        fenced.rollback()
        assert desk.ask(vacate) == messages.Vacated(done=True)
        assert desk.ask(vacate) == messages.Vacated(done=True)
        assert other.acquire("r") == {"r": 2}


def test_vacating_an_old_term_does_not_touch_the_new_one(store_url):
    with Desk(store_url) as desk, Desk(store_url) as other:
        desk.lead("r")
        other.succeed(desk, "r")
        assert desk.ask(messages.Vacate(desk.id, "r", 1)).done
        assert [held.token for held in renew(other).held] == [2]


def test_reserved_role_waits_for_its_heir_and_no_longer_than_it_lives(store_url):
    with Desk(store_url) as desk, Desk(store_url) as heir, Desk(store_url) as other:
        desk.lead("r")
        heir.stand("r")
        desk.ask(messages.Vacate(desk.id, "r", 1, reserved_for=heir.id))
        assert other.acquire("r") == {}
        (vacancy,) = renew(other).vacant
        assert vacancy.reserved_for == heir.id
        heir.ask(messages.Leave(heir.id))
        assert renew(other).vacant[0].reserved_for is None
        assert other.acquire("r") == {"r": 2}


def test_reservation_can_be_waited_out(store_url):
    with Desk(store_url) as desk, Desk(store_url) as heir, Desk(store_url) as other:
        desk.lead("r")
        desk.ask(messages.Vacate(desk.id, "r", 1, reserved_for=heir.id))
        other.stand("r")
        assert other.ask(messages.Acquire(other.id, "o", ("r",), 0, unreserved=("r",))).tokens == {"r": 2}


def test_renewal_says_where_nobody_else_stands(store_url):
    with Desk(store_url) as desk, Desk(store_url) as other:
        desk.stand("alone", "contested")
        other.stand("contested")
        assert renew(desk, alone_in=("alone", "contested")).alone_in == ("alone",)
        other.ask(messages.Stand(other.id, (), ("contested",)))
        assert renew(desk, alone_in=("alone", "contested")).alone_in == ("alone", "contested")


def test_namespaces_share_tables_and_nothing_else(store_url):
    with Desk(store_url, namespace="one") as one, Desk(store_url, namespace="other") as other:
        assert one.acquire("r") == other.acquire("r") == {"r": 1}
        assert one.acquire("r") == {"r": 2}
        assert [leader.token for leader in other.ask(messages.Leaders(("r",))).leaders] == [1]
        assert watch(one).look(look_of(one, "r")).members == ()


def watch(desk):
    """The watch lane of the same node."""
    looking, session = desk.backend.open_watch()
    desk.close = lambda close=desk.close: (session.close(), close())
    return looking


def look_of(desk, *roles, reach=NEIGHBOURS):
    return messages.Look(desk.id, None, 0.0, reach, roles)


def test_look_sees_another_member_its_sentinel_and_vacancies(store_url):
    with Desk(store_url) as desk, Desk(store_url) as other:
        other.lead("r")
        desk.stand("r")
        watching = watch(desk)
        look = watching.look(look_of(desk))
        assert look.server == desk.opened.server
        assert {(seen.id, seen.sentinel_stands) for seen in look.members} == {(other.id, True)}
        assert not look.vacancy
        other.store.release()
        (seen,) = watching.look(look_of(desk)).members
        assert seen.sentinel_stands == store_url.startswith("sqlite"), "a file that is gone proves nothing"
        desk.end(other.id)
        assert watching.look(look_of(desk)).vacancy
        assert watching.perform(messages.Knock(look.server.start)).open
        assert not watching.perform(messages.Knock("another server")).open


# --- when things go wrong -----------------------------------------------------------------------------------


def test_failed_statement_rolls_back_and_the_connection_goes_on(store_url):
    with Desk(store_url) as desk:
        with pytest.raises(Failed):
            desk.session.run(
                Step("update {members} set name = 'changed'", {}), Step("select nonsense from nowhere", {})
            )
        assert rows(desk, "select name from {members}") == [(desk.settings.name,)]


def test_ended_connection_is_gone_and_not_merely_failed(every_postgres_url):
    url = every_postgres_url
    with Desk(url) as desk:
        with contextlib.suppress(psycopg.Error):
            execute(url, f"select pg_terminate_backend({desk.session.pid})")
        with pytest.raises(Gone):
            renew(desk)


def test_statement_that_takes_too_long_fails_and_keeps_the_connection(every_postgres_url):
    """R0: control never starves; a time-out is not a loss."""
    with Desk(every_postgres_url, renew_every=0.2) as desk:
        with pytest.raises(Failed, match="statement timeout"):
            rows(desk, "select pg_catalog.pg_sleep(5)")
        assert renew(desk).alive


def test_one_connections_wait_is_nobody_elses(postgres_url):
    """Two lanes, and any number of nodes, share a process: none of them waits for another's answer."""
    with Desk(postgres_url) as waiting, Desk(postgres_url) as other, connected(postgres_url) as blocker:
        blocker.execute("select pg_advisory_lock(1)")
        lock = Step("select pg_catalog.pg_advisory_lock(1)", {})

        def wait():
            with waiting.session.transaction() as run:
                run(Step("select pg_catalog.set_config('lock_timeout', '30s', true)", {}))
                run(Step("select pg_catalog.set_config('statement_timeout', '30s', true)", {}))
                answered.append(run(lock)[0].rows)

        answered = []
        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: execute(postgres_url, "select 1 from pg_locks where locktype = 'advisory' and not granted"))
        assert other.acquire("r") == {"r": 1}
        assert renew(other).alive
        assert not answered
        blocker.execute("select pg_advisory_unlock(1)")
        thread.join(20)
        assert answered


# --- the largest TTL of a namespace (R16) -------------------------------------------------------------------------


def limit(url):
    """The limit of the namespace, the ripe one, and who set it."""
    (row,) = execute(url, f"select max_ttl_ms, ripe_ttl_ms, limit_by from {table(url, 'namespaces')}")
    return row


@pytest.mark.parametrize(("ttl", "largest"), [(3.0, 10_000), (30.0, 30_000)])
def test_limit_of_a_new_namespace_is_the_first_nodes_ttl_and_ten_seconds_at_least(store_url, ttl, largest):
    with Desk(store_url, join=False, ttl=ttl):
        assert limit(store_url) == (largest, largest, "nodes")


def test_limit_that_init_leaves_open_is_set_by_the_first_node(store_url):
    Registry(store_url).create()
    assert limit(store_url) == (60_000, 60_000, "open")
    with Desk(store_url, join=False, ttl=20.0):
        assert limit(store_url) == (20_000, 20_000, "nodes")


def test_limit_is_not_set_below_the_ttl_of_a_member_that_an_older_release_has_let_join(store_url):
    Registry(store_url).create()
    with Desk(store_url, ttl=40.0):
        execute(store_url, f"update {table(store_url, 'namespaces')} set limit_by = 'open', max_ttl_ms = 60000")
        with Desk(store_url, join=False, ttl=10.0):
            assert limit(store_url)[0] == 40_000


def test_node_raises_the_limit_for_itself_and_the_raise_ripens(store_url):
    with Desk(store_url, join=False, ttl=10.0), Desk(store_url, join=False, ttl=30.0) as longer:
        assert limit(store_url) == (30_000, 10_000, "nodes")
        ripe = 30.0 if store_url.startswith("sqlite") else 10.0
        assert longer.opened.confirmed.ripe_ttl == ripe


@pytest.mark.parametrize("ttl", [20.0, 61.0])
def test_node_does_not_raise_a_limit_above_a_minute_or_one_that_an_operator_has_set(store_url, ttl):
    with Desk(store_url, join=False, ttl=10.0):
        if ttl < 60:
            Registry(store_url).create(max_ttl=10)
        before = limit(store_url)
        with Desk(store_url, join=False, ttl=ttl):
            assert limit(store_url) == before
