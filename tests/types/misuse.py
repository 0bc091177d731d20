"""A program that is wrong in every line that says so. It is not run: type checkers must find each of them.

``# wrong: CODE`` names the error code of mypy. pyright must report an error in the same lines, and in no others.
"""

from __future__ import annotations

import threading

import sqlalchemy

import tenure

engine = sqlalchemy.create_engine("sqlite:///app.db")
schedule = tenure.Schedule()

tenure.Node(takeover="instnat")  # wrong: arg-type
tenure.Node(mode="locks")  # wrong: arg-type
tenure.Node(start="later")  # wrong: arg-type
tenure.Node(ttl="10")  # wrong: arg-type
tenure.Node(password=7)  # wrong: arg-type
tenure.Node(namspace="shop")  # wrong: call-arg
tenure.AsyncNode(takeover="never")  # wrong: arg-type
tenure.Node.from_engine(engine, takeover="never")  # wrong: arg-type
tenure.Node.from_engine(engine, url="sqlite:///app.db")  # wrong: call-arg

node = tenure.Node()
async_node = tenure.AsyncNode()


def without_the_term() -> None: ...
def with_a_term(term: tenure.Term) -> None: ...
def with_the_wrong_term(term: tenure.AsyncTerm) -> None: ...
async def on_a_loop_with_the_wrong_term(term: tenure.Term) -> None: ...
def with_a_generator(term: tenure.Term) -> list[int]:
    return []


def with_a_stop(stop: threading.Event) -> None: ...


class Unstoppable:
    def start(self) -> None: ...


node.leader_only("reports", without_the_term)  # wrong: type-var
node.leader_only("reports", with_the_wrong_term)  # wrong: type-var
node.leader_only("reports", on_a_loop_with_the_wrong_term)  # wrong: type-var
node.leader_only("reports", with_a_generator)  # wrong: type-var
node.leader_only("reports", with_a_stop)  # wrong: type-var
node.leader_only("reports", Unstoppable())  # wrong: call-overload
node.leader_only("reports", with_a_term, "reports")  # wrong: call-overload
node.leader_only("reports", with_a_term, on_failure="ignore")  # wrong: call-overload
node.leader_only("reports", with_a_term, on_return="stop")  # wrong: call-overload
node.leader_only("reports", with_a_term, on_stuck="kill")  # wrong: call-overload
node.leader_only("reports", with_a_term, stopwithin=3)  # wrong: call-overload
node.leader_only(with_a_term)  # wrong: call-overload
node.leader_only("reports")(without_the_term)  # wrong: type-var
async_node.leader_only("reports", without_the_term)  # wrong: type-var
node.everywhere(with_a_term)  # wrong: type-var
node.everywhere(schedule)  # wrong: type-var
node.everywhere(with_a_stop, on_failure="resign")  # wrong: call-overload
async_node.everywhere(name="serve")(without_the_term)  # wrong: type-var


@schedule.every("5 min", missed="twice")  # wrong: arg-type
def a(run: tenure.Run) -> None: ...
@schedule.every("5 min", overlap="both")  # wrong: arg-type
def b(run: tenure.Run) -> None: ...
@schedule.cron("* * * * *", delivery="exactly-once")  # wrong: arg-type
def c(run: tenure.Run) -> None: ...
@schedule.cron("* * * * *", on_handover="stay")  # wrong: arg-type
def d(run: tenure.Run) -> None: ...
@schedule.every([5])  # wrong: arg-type
def e(run: tenure.Run) -> None: ...


schedule.every("5 min")(without_the_term)  # wrong: type-var
schedule.every("5 min")(with_a_term)  # wrong: type-var


def leading(term: tenure.Term) -> None:
    with node.lead("reports") as led:
        print(led.tocken)  # wrong: attr-defined
    with async_node.lead("reports"):  # wrong: attr-defined
        pass
    term.claim(object(), "report", "2026-01-01")  # wrong: arg-type
    print(node.election("reports").term.token)  # wrong: union-attr


async def leading_on_a_loop(term: tenure.AsyncTerm) -> None:
    await term.claim(object(), "report", None)  # wrong: arg-type
    for event in async_node.election("reports").events():  # wrong: attr-defined
        print(event)
