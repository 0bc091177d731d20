"""A program that uses the whole public interface. It is not run: type checkers must find nothing wrong with it.

``test_types.py`` compares it with the list of public names.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from datetime import datetime, timedelta

import sqlalchemy
from typing_extensions import assert_type

import tenure
from tenure import manual, testing

NOW = datetime.now().astimezone()


def settings(url: str, engine: sqlalchemy.Engine) -> list[tenure.Node]:
    nodes = [tenure.Node(), tenure.Node(url, ttl=10, takeover="strict", mode="hybrid", start="wait")]
    nodes.append(tenure.Node(url, password=lambda: "secret", metadata={"zone": "a"}, renew_every=2.5, name="a"))
    nodes.append(tenure.Node(url, direct_url=url, schema="elections", namespace="shop", takeover="instant"))
    nodes.append(tenure.Node.from_engine(engine, name="worker-1", mode="lease", start="raise"))
    assert_type(tenure.AsyncNode.from_engine(engine, ttl=5), tenure.AsyncNode)
    return nodes


# --- services, in every form --------------------------------------------------------------------------------------

node = tenure.Node()
async_node = tenure.AsyncNode()


@node.leader_only("threads")
def in_a_thread(term: tenure.Term) -> None:
    term.wait_lost()


@node.leader_only("coroutines", on_failure="resign", on_stuck="exit", start_within=3, stop_within=1, drain_within=2)
async def on_a_loop(term: tenure.AsyncTerm) -> None:
    await term.wait_lost()


@node.leader_only("coroutines", name="short", on_return="done", lock_id=7)
async def without_the_term() -> int:
    return 1


@node.everywhere
def serve(stop: threading.Event) -> None:
    stop.wait()


@node.everywhere(name="asynchronous", start_within=3, drain_within=2)
async def serve_on_a_loop() -> None:
    await asyncio.sleep(1)


@async_node.leader_only("threads")
def beside_a_loop(term: tenure.Term) -> None: ...


@async_node.everywhere
async def serve_async() -> None: ...


class Mailer:
    def __init__(self, greeting: str) -> None:
        self.greeting = greeting

    def warm(self) -> None: ...
    def start(self, term: tenure.Term) -> None: ...
    async def stop(self) -> None: ...
    def alive(self) -> bool:
        return True


class Poller:
    async def start(self) -> None: ...
    def stop(self) -> None: ...
    async def run(self, term: tenure.AsyncTerm) -> None: ...


def greet(greeting: str, term: tenure.Term) -> None: ...


# What is added is returned with its own type, so a decorated function can be called by the names of its parameters.
serve(stop=threading.Event())
assert_type(node.leader_only("mail", Mailer("hello"), Poller(), in_a_thread, on_a_loop), Mailer)
assert_type(async_node.everywhere(Poller(), serve_on_a_loop), Poller)
node.leader_only("polls", Poller().run)
node.leader_only("greetings", functools.partial(greet, "hello"), name="greet")
assert_type(node.services(), list[tenure.ServiceInfo])


# --- schedules -----------------------------------------------------------------------------------------------------

schedule = tenure.Schedule("Europe/Paris", workers=4)


@schedule.cron("30 2 * * *", name="bills", zone="UTC", missed="each", within="6 h", overlap="wait", attempts=3)
def invoices(run: tenure.Run) -> None:
    with run.transaction() as transaction:
        assert_type(transaction, tenure.Transaction)
    print(run.job, run.due.isoformat(), run.attempt, run.missed, run.requested, run.term.token)
    while not run.stopping and not run.wait(1):
        run.finish(object())


@schedule.every(timedelta(minutes=5), delivery="at-least-once", timeout=60, jitter="20 s", on_handover="finish")
async def news(run: tenure.Run) -> str:
    async with run.transaction() as transaction:
        assert_type(transaction, tenure.AsyncTransaction)
    await run.finish(object())
    return "news"


assert_type(node.leader_only("scheduler", schedule, on_failure="restart", on_stuck="log"), tenure.Schedule)
assert_type(schedule.jobs, tuple[str, ...])


# --- the facades ---------------------------------------------------------------------------------------------------


def facade() -> None:
    node.on_event(lambda event: print(event.role))
    assert_type(node.start(), tenure.Node)
    node.run()
    print(node.name, node.namespace, node.database, node.ttl, node.waits, node.mode, node.member_id)
    assert_type(node.stats(), tenure.NodeStats)
    with node, node.lead("reports", timeout=3, lock_id=7) as term:
        leading(term)
    for term in node.terms("reports", lock_id="0x7"):
        with term:
            term.ensure()
    asking(node.election("reports"))
    node.close()


def leading(term: tenure.Term) -> None:
    print(term.role, term.namespace, term.token, term.member_id, term.valid, term.remaining, term.lost_reason)
    term.on_lost(lambda lost: print(lost.token))
    term.fence(object(), bound=5)
    if term.claim(object(), "report", NOW) and term.finish(object(), "report", NOW):
        term.resign(to="worker-2")
    with term.transaction(bound=3) as transaction:
        transaction.execute("insert into reports values (%s)", [NOW])
        assert_type(transaction.claim("report", NOW), bool)
        assert_type(transaction.finish("report", NOW), bool)
        assert_type(transaction.anchor("report", NOW), datetime)
        assert_type(transaction.jobs(), list[tenure.JobRecord])
        assert_type(transaction.forget("report"), bool)


def asking(election: tenure.Election) -> None:
    assert_type(election.wait(timeout=3), tenure.Term)
    assert_type(election.term, tenure.Term | None)
    assert_type(election.leader(), tenure.LeaderInfo | None)
    assert_type(election.candidates(), list[tenure.Candidate])
    assert_type(election.history(limit=5), list[tenure.TermRecord])
    assert_type(election.jobs(), list[tenure.JobRecord])
    print(election.role, election.is_leader, election.standing)
    election.on_event(print)
    for event in election.events():
        heard(event)
    election.resign("worker-2")
    election.withdraw()


def heard(event: tenure.Event) -> str:
    match event:
        case tenure.Elected() | tenure.Suspended() | tenure.Resumed():
            return f"{event.role} {event.token}"
        case tenure.Deposed():
            return event.reason
        case tenure.LeaderChanged():
            return f"{event.name} {event.member_id}"


async def async_facade() -> None:
    assert_type(await async_node.start(), tenure.AsyncNode)
    await async_node.run()
    async with async_node, async_node.lead("reports", timeout=3) as term:
        await async_leading(term)
    async for term in async_node.terms("reports"):
        async with term:
            await term.ensure()
    await async_asking(async_node.election("reports"))
    await async_node.close()


async def async_leading(term: tenure.AsyncTerm) -> None:
    term.on_lost(lambda lost: print(lost.token))
    await term.fence(object(), bound=5)
    assert_type(await term.claim(object(), "report", NOW), bool)
    assert_type(await term.finish(object(), "report", NOW), bool)
    async with term.transaction(bound=3) as transaction:
        await transaction.execute("insert into reports values (%s)", [NOW])
        assert_type(await transaction.claim("report", NOW), bool)
        assert_type(await transaction.finish("report", NOW), bool)
        assert_type(await transaction.anchor("report", NOW), datetime)
        assert_type(await transaction.jobs(), list[tenure.JobRecord])
        assert_type(await transaction.forget("report"), bool)
    assert_type(await term.wait_lost(1), bool)
    await term.resign()


async def async_asking(election: tenure.AsyncElection) -> None:
    assert_type(await election.wait(), tenure.AsyncTerm)
    assert_type(election.term, tenure.AsyncTerm | None)
    assert_type(await election.leader(), tenure.LeaderInfo | None)
    assert_type(await election.candidates(), list[tenure.Candidate])
    assert_type(await election.history(), list[tenure.TermRecord])
    assert_type(await election.jobs(), list[tenure.JobRecord])
    async for event in election.events():
        heard(event)
    await election.resign()
    await election.withdraw()


# --- tests ---------------------------------------------------------------------------------------------------------


def in_a_test() -> None:
    with testing.LocalNode(name="a", ttl=5) as local, local.lead("reports") as term:
        local.lose("reports")
        local.win("reports")
        local.suspend()
        local.resume()
        [due] = testing.due_times(schedule, "bills", after=NOW, count=1)
        testing.run_job(schedule, "bills", due, term, attempt=2, missed=1)


async def in_an_async_test() -> None:
    async with testing.LocalAsyncNode() as local, local.lead("reports") as term:
        await local.lose("reports")
        await testing.run_job(schedule, "news", NOW, term)


# --- operators, step by step, SQL, errors --------------------------------------------------------------------------


def operate(url: str) -> None:
    with tenure.Registry(url, namespace="shop", schema="elections", password="secret") as registry:
        registry.connect()
        print(registry.create(max_ttl=60, waits=print), registry.namespace, registry.namespaces())
        print(registry.session)
        roles: list[tenure.RoleInfo] = registry.roles()
        members: list[tenure.MemberInfo] = registry.members()
        records: list[tenure.JobRecord] = registry.jobs(role="scheduler")
        print(roles, members, [(record.ahead, record.next_due, record.overdue, record.as_of) for record in records])
        print([(record.paused, record.paused_reason, record.requested, record.listed) for record in records])
        print([(record.jitter, record.spec, record.since, record.zone_data, record.last) for record in records])
        assert_type(registry.create(promotion="loses-nothing"), int)
        waits: list[tenure.WaitInfo] = registry.waits()
        overview: tenure.Overview = registry.overview()
        print(waits, overview, overview.as_of, overview.unattended)
        assert_type(registry.candidates("scheduler"), list[tenure.Candidate])
        assert_type(registry.runs("report", limit=3, role="scheduler"), list[tenure.RunRecord])
        assert_type(registry.history("scheduler"), list[tenure.TermRecord])
        print([record.last_seen for record in registry.history("scheduler")])
        assert_type(registry.resign("scheduler", to="worker-2", timeout=3), tenure.LeaderInfo | None)
        assert_type(registry.trigger("report"), bool)
        registry.pause("report", "broken")
        registry.resume("report")
        assert_type(registry.reset("report"), bool)
        registry.guard("invoices", role="billing")
        assert_type(registry.guarded_tables(), list[tenure.GuardedTable])
        registry.unguard("invoices")
        assert_type(registry.role("scheduler"), tenure.RoleInfo)
        registry.forget_role("scheduler")
        registry.forget()
        registry.close()


def step_by_step(session: sqlalchemy.Connection) -> None:
    manual.use("sqlite:///app.db")
    manual.set_expire(90)
    manual.register_candidate("worker-1")
    manual.heartbeat("worker-1", session=session)
    leader = manual.elect("worker-1", "shop", role="clean-up", expire=90)
    assert_type(leader, manual.Leader | None)
    if leader and leader.mine and manual.is_leader("worker-1"):
        leader.fence(session)
        print(leader.file)
    print(manual.leader(), manual.list_candidates(), manual.unregister_candidate("worker-1"))
    manual.close()


def measured(stats: tenure.NodeStats) -> None:
    latency: tenure.Latency = stats.renewals.plus(0.1)
    roles: tuple[tenure.RoleStats, ...] = stats.roles
    jobs: tuple[tenure.JobStats, ...] = stats.jobs
    print(latency, roles, jobs, tenure.__version__)


def refused() -> None:
    statements: list[str] = tenure.tables_sql("mysql") + tenure.guard_sql("invoices", role="billing", remove=True)
    print(statements, tenure.fence_sql("billing", database="sqlite", bound=3))
    try:
        with tenure.translate_unfenced():
            facade()
    except tenure.Unfenced as error:
        print(error.role, error.token)
    except tenure.Fenced as error:
        print(error.retryable)
    except (tenure.LeadershipLost, tenure.NotLeader) as error:
        print(error.role)
    except (tenure.ConfigError, tenure.NodeClosed, tenure.NotCommitted, tenure.WaitTimeout):
        raise
    except (tenure.PoolerDetected, tenure.StoreUnavailable, tenure.TenureError) as error:
        print(error)
