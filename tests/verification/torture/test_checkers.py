"""Each checker of the torture catches a planted fault; and what is used to torture does what it says."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import threading
import time
from typing import Any

import pytest

from tests.support.cluster import ROOT
from tests.support.history import History, ledger_regressions, stale_writes, token_regressions
from tests.verification.torture import checkers, scenarios
from tests.verification.torture.arena import ARENAS
from tests.verification.torture.catalogue import CATALOGUES, catalogue
from tests.verification.torture.checkers import Cut, Fired, Harm, Struck
from tests.verification.torture.nemeses import Bounds, Nemesis
from tests.verification.torture.plan import plan
from tests.verification.torture.proxy import Doors
from tests.verification.torture.scenarios import SCENARIOS
from tests.verification.torture.timeline import timeline
from tests.verification.torture.turned_clock import TurnedClock

MS, S = 10**6, 10**9


def reads(node: str, token: int, since: int, until: int) -> list[dict[str, Any]]:
    """A node that leads from one moment to another, with a look every 10 ms, and then does not."""
    who = {"kind": "read", "node": node, "pid": 1, "role": "r"}
    lines = [
        {**who, "leader": True, "token": token, "at_before": at, "at": at + 1000} for at in range(since, until, 10 * MS)
    ]
    return [*lines, {**who, "leader": False, "token": None, "at_before": until, "at": until + 1000}]


def write(node: str, token: int, at: int, element: str, *, ok: bool = True) -> dict[str, Any]:
    line = {"kind": "write", "node": node, "pid": 1, "role": "r", "token": token, "ok": ok, "element": element}
    return {**line, "at_before": at, "at": at + MS}


def add(workload: str, element: str, name: str = "s") -> dict[str, Any]:
    line = {"kind": "add", "node": "a", "pid": 1, "workload": workload, "set": name, "element": element}
    return {**line, "at_before": 0, "at": 0}


def struck(since: int, settled: int, *names: str, cuts: tuple[Cut, ...] = (), bound_s: float = 1.0) -> Struck:
    fired = [Fired(name, "a", since, since + S, bound_s, cuts) for name in names]
    return Struck(1, since, fired, since + S, settled)


# --- one leader ---------------------------------------------------------------------------------------------

TWO_LEADERS = History([*reads("a", 1, 0, 3 * S), *reads("b", 2, 2 * S, 5 * S)])


@pytest.mark.parametrize(
    ("takeover", "cuts", "ttl", "broken"),
    [
        pytest.param("instant", (Cut("a", 1 * S, 2 * S),), 4, False, id="the older holder was cut before"),
        pytest.param("strict", (Cut("a", 1 * S, 2 * S),), 4, True, id="strict mode has no such case"),
        pytest.param("instant", (), 4, True, id="nobody was cut"),
        pytest.param("instant", (Cut("b", 1 * S, 2 * S),), 4, True, id="the successor was cut"),
        pytest.param("instant", (Cut("c", 1 * S, 2 * S),), 4, True, id="somebody else was cut"),
        pytest.param("instant", (Cut("a", 5 * S // 2, 3 * S),), 4, True, id="cut after the overlap began"),
        pytest.param("instant", (Cut("a", 1 * S, 2 * S),), 1, True, id="trust was over by then"),
    ],
)
def test_overlap_is_permitted_in_instant_mode_and_only_to_the_member_that_was_cut(takeover, cuts, ttl, broken):
    steps = [struck(1 * S, 4 * S, "x", cuts=cuts)]
    found, permitted = checkers.judged_overlaps(TWO_LEADERS, steps, takeover=takeover, ttl=ttl)
    assert bool(found) == broken
    assert [round(width / 10) for width, _ in permitted] == ([] if broken else [99])


def test_overlap_outside_of_all_steps_is_no_named_case():
    found, _ = checkers.judged_overlaps(TWO_LEADERS, [], takeover="instant", ttl=4)
    assert found


def test_one_leader_after_the_other_is_no_overlap():
    history = History([*reads("a", 1, 0, 2 * S), *reads("b", 2, 2 * S + MS, 5 * S)])
    assert checkers.judged_overlaps(history, [], takeover="strict", ttl=4) == ([], [])


# --- tokens and writes --------------------------------------------------------------------------------------


def test_token_that_goes_back_is_found():
    assert token_regressions(History([*reads("a", 2, 0, S), *reads("b", 1, 2 * S, 3 * S)]))
    assert token_regressions(History([*reads("a", 1, 0, S), *reads("b", 1, 2 * S, 3 * S)]))


def test_write_of_an_older_term_after_a_newer_one_is_found():
    history = History([*reads("a", 1, 0, S), *reads("b", 2, 2 * S, 3 * S), write("a", 1, 4 * S, "a.1")])
    assert stale_writes(history)
    assert ledger_regressions([(1, 1), (2, 2), (3, 1)])


def test_acknowledged_write_that_is_not_there_is_found():
    history = History([write("a", 1, 0, "a.1"), write("a", 1, S, "a.2"), write("a", 1, 2 * S, "a.3", ok=False)])
    assert checkers.lost_writes(history, ["a.1", "a.2"]) == []
    (found,) = checkers.lost_writes(history, ["a.1"])
    assert "a.2" in found


def test_lost_update_of_the_fence_is_found_and_so_is_a_naive_lease_that_loses_none():
    history = History([add("fenced", "a.1"), add("fenced", "a.2"), add("naive", "a.3", "n"), add("naive", "a.4", "n")])
    good = checkers.set_results(history, [("s", " a.1 a.2"), ("n", " a.4")])
    assert checkers.lost_updates(good) == []
    assert good["naive"].lost == ("a.3",)
    lossy = checkers.set_results(history, [("s", " a.2"), ("n", " a.4")])
    assert "fenced set are lost" in checkers.lost_updates(lossy)[0]
    assert checkers.lost_updates(lossy, may_lose=True) == []
    assert "proves nothing" in checkers.lost_updates(
        checkers.set_results(history, [("s", " a.1 a.2"), ("n", " a.3 a.4")])
    )[0]  # fmt: skip
    assert len(checkers.lost_updates({})) == 2
    assert len(checkers.lost_updates({}, must_lose=False)) == 1


def test_unfenced_writes_that_came_late_are_counted():
    assert checkers.unfenced_stale([(1, 1), (2, 1), (3, 2), (4, 1), (5, 2)]) == 1


# --- someone leads again ------------------------------------------------------------------------------------


def test_recovery_is_measured_against_its_bound():
    history = History([*reads("a", 1, 0, 2 * S), *reads("b", 2, 7 * S, 9 * S)])
    (in_time,) = checkers.recoveries(history, [struck(1 * S, 9 * S, "kill", bound_s=4.5)], 0)
    assert round(in_time.took_s, 1) == 5.0
    assert checkers.late_recoveries([in_time]) == []
    (late,) = checkers.recoveries(history, [struck(1 * S, 9 * S, "kill", bound_s=1.0)], 0)
    (found,) = checkers.late_recoveries([late])
    assert "nobody led for 5.0" in found


def test_recovery_from_several_faults_is_measured_from_the_last_heal():
    history = History([*reads("a", 1, 0, 2 * S), *reads("b", 2, 7 * S, 9 * S)])
    step = struck(1 * S, 9 * S, "kill", "outage")
    step.healed = 5 * S
    (one,) = checkers.recoveries(history, [step], 0.5)
    assert round(one.took_s, 1) == 2.0
    assert checkers.late_recoveries([one])


def test_cluster_that_does_not_settle_is_found_and_so_is_a_stall_of_the_machine_forgiven():
    history = History([*reads("a", 1, 0, 2 * S), *reads("b", 2, 7 * S, 9 * S)])
    step = struck(1 * S, 9 * S, "kill", bound_s=1.0)
    step.stalled_s = 4.0
    assert checkers.late_recoveries(checkers.recoveries(history, [step], 0)) == []
    step.amiss = "nobody leads"
    assert checkers.late_recoveries(checkers.recoveries(history, [step], 0))


# --- enough was done, and no harm ---------------------------------------------------------------------------


def test_nemesis_that_fired_too_seldom_is_found():
    assert checkers.seldom_fired([struck(0, S, "kill")], ["kill"], 1) == []
    assert checkers.seldom_fired([struck(0, S, "kill")], ["kill", "outage"], 1)
    assert checkers.seldom_fired([struck(0, S, "kill")], ["kill"], 2)


def test_nemesis_that_struck_in_company_only_is_found():
    steps = [struck(0, S, "kill"), struck(0, S, "kill", "outage"), struck(0, S)]
    assert checkers.never_alone(steps, ["kill", "outage"]) == ["outage"]


def test_nemesis_that_was_left_out_is_a_failure_in_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    assert checkers.left_out({"a pooler": "install pgbouncer"}) == []
    monkeypatch.setenv("CI", "true")
    assert checkers.left_out({"a pooler": "install pgbouncer"})
    assert checkers.left_out({}) == []


def asks(node: str, *counts: int) -> list[dict[str, Any]]:
    """How often a node had asked, each half second."""
    return [
        {"kind": "asks", "node": node, "pid": 1, "count": count, "at_before": n * S // 2, "at": n * S // 2}
        for n, count in enumerate(counts)
    ]


def test_node_that_asks_too_often_is_found_with_the_step_that_made_it_do_so():
    history = History([*asks("a", 0, 1, 2, 3, 4, 5), *asks("b", 0, 1, 2, 102, 202, 302, 402, 403, 404)])
    found = checkers.busiest(history, [struck(0, 9 * S, "notify-flood")])
    assert found["a"][0] == 2
    assert found["b"] == (200, "step 1 (notify-flood)")
    (text,) = checkers.harm_done(Harm(asks_per_s=found))
    assert text.startswith("b asked 200 times a second")
    assert checkers.busiest(History(asks("a", 0, 1000)), []) == {}, "too short to tell"


def test_every_kind_of_harm_is_found():
    assert checkers.harm_done(Harm(0.9, connections_at_end={"a": 2}, living=["a"], descriptors={"a": (20, 22)})) == []
    for harm in (
        Harm(9.0),
        Harm(quiet_lines=["ERROR: x"]),
        Harm(connections_at_end={"a": 3}, living=["a"]),
        Harm(connections_at_end={"dead": 1}, living=["a"]),
        Harm(descriptors={"a": (20, 60)}),
    ):
        assert len(checkers.harm_done(harm)) == 1


# --- scenarios and clocks -----------------------------------------------------------------------------------


def test_runs_that_are_lost_repeated_or_end_early_are_found():
    assert scenarios.irregular("j", [1, 2, 3], until=3) == []
    assert "never ran" in scenarios.irregular("j", [], until=3)[0]
    assert "twice" in scenarios.irregular("j", [1, 2, 2, 3], until=3)[0]
    assert "left out 1 times, first at 2" in scenarios.irregular("j", [1, 3], until=3)[0]
    assert "ran last at 3" in scenarios.irregular("j", [1, 2, 3], until=9)[0]


def test_outcome_later_than_its_bound_is_a_violation():
    outcome = scenarios.Outcome("promotion", "")
    outcome.took(1.9, 1.0)
    assert outcome.violations == []
    outcome.took(2.1, 1.0)
    assert outcome.violations


def test_turned_clock_runs_at_its_rate_and_never_steps():
    true_s = 100.0
    turned = TurnedClock(lambda: true_s)
    assert turned() == 100
    turned.turn(1.5)
    true_s = 110.0
    assert turned() == 115
    turned.turn(0.5)
    assert turned() == 115
    true_s = 120.0
    assert turned() == 120


# --- plan, picture, proxy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CATALOGUES)
def test_plan_is_a_function_of_the_seed_and_deals_every_nemesis_equally(kind):
    nemeses = CATALOGUES[kind]
    steps = list(itertools.islice(plan(7, nemeses, 4.0, alone_first=False), 200))
    assert steps == list(itertools.islice(plan(7, nemeses, 4.0, alone_first=False), 200))
    assert steps != list(itertools.islice(plan(8, nemeses, 4.0, alone_first=False), 200))
    names = [one.nemesis for step in steps for one in step.planned]
    counts = [names.count(nemesis.name) for nemesis in nemeses]
    assert max(counts) - min(counts) <= 1
    by_name: dict[str, type[Nemesis]] = {nemesis.name: nemesis for nemesis in nemeses}
    for step in steps:
        struck_at = [by_name[one.nemesis] for one in step.planned]
        fields = [field for nemesis in struck_at for field in (nemesis.field, *nemesis.beside) if field != "process"]
        assert len(fields) == len(set(fields))
    assert {len(step.planned) for step in steps} == {1, 2, 3}


@pytest.mark.parametrize("kind", CATALOGUES)
def test_plan_of_a_long_run_deals_every_nemesis_alone_before_any_company(kind):
    nemeses = CATALOGUES[kind]
    steps = list(itertools.islice(plan(7, nemeses, 4.0, alone_first=True), 200))
    first, rest = steps[: len(nemeses)], steps[len(nemeses) :]
    assert sorted(one.nemesis for step in first for one in step.planned) == sorted(one.name for one in nemeses)
    assert {len(step.planned) for step in first} == {1}
    assert {len(step.planned) for step in rest} == {1, 2, 3}


def test_nemeses_have_names_of_their_own_and_what_a_machine_lacks_is_left_out():
    for kind, nemeses in CATALOGUES.items():
        assert len({nemesis.name for nemesis in nemeses}) == len(nemeses)
        assert kind in ARENAS
    assert "disk-full" not in [one.name for one in catalogue("postgres", {"a disk of its own": "no root"})]


def test_bounds_are_those_of_the_guarantees():
    instant, strict = Bounds(4.0, "instant"), Bounds(4.0, "strict")
    assert instant.silence == strict.silence == 1.02 * 4 + 1
    assert instant.gone(2.0) == 2.0 + 1.0 + 4.0


def test_picture_shows_leaders_faults_and_refusals():
    lines = [*reads("a.1", 1, 0, 2 * S), {**write("a.1", 1, 3 * S, "x", ok=False), "error": "Fenced"}]
    picture = timeline(History(lines), [struck(1 * S, 2 * S, "kill")], ["a", "b"], "a <run>")
    assert 'class="refused"' in picture
    assert "a.1, token 1" in picture
    assert ">kill<" in picture
    assert "a &lt;run&gt;" in picture


@pytest.fixture
def echo():
    """A server that sends back what it gets; its port."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1000):
                connection.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_door_passes_delays_holds_and_cuts(echo):
    with Doors() as doors:
        port = doors.open("d", "127.0.0.1", echo)

        def said(text: bytes, timeout: float = 10) -> bytes:
            client.settimeout(timeout)
            client.sendall(text)
            with contextlib.suppress(TimeoutError):
                return client.recv(100)
            return b"nothing"

        with socket.create_connection(("127.0.0.1", port)) as client:
            assert said(b"one") == b"one"
            doors.fault("d", delay_s=0.2)
            began = time.monotonic()
            assert said(b"two") == b"two"
            assert time.monotonic() - began >= 0.4
            for way in ("up", "down"):
                doors.fault("d", hold=[way])
                assert said(b"three", 0.3) == b"nothing"
                doors.heal("d")
                client.settimeout(10)
                assert client.recv(100) == b"three"
            assert doors.cut("d", "reset") == 1
            with pytest.raises(ConnectionResetError):
                client.recv(100)
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert said(b"four") == b"four"
            assert doors.cut("d", "server") == 1
            assert said(b"five", 0.3) == b"nothing"
            doors.heal("d")
            client.settimeout(10)
            with pytest.raises(ConnectionResetError):
                client.recv(100)
        with socket.create_connection(("127.0.0.1", port)) as client:
            doors.fault("d", swallow=["down"])
            assert said(b"six", 0.3) == b"nothing"
            doors.heal("d")
            client.settimeout(10)
            with pytest.raises(ConnectionResetError):
                client.recv(100)


def test_every_nemesis_is_in_the_documents():
    page = (ROOT / "docs" / "proof.md").read_text()
    named = set(re.findall(r"[a-z]+(?:-[a-z]+)*", page.partition("## Nemeses")[2].partition("## Checkers")[0]))
    scenarios = {name for named_so in SCENARIOS.values() for name in named_so}
    assert {nemesis.name for nemeses in CATALOGUES.values() for nemesis in nemeses} | scenarios <= named
