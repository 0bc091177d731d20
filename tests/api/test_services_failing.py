"""Services that fail, return too early, or resign: what the node makes of it."""

from __future__ import annotations

import logging
import re
import sys
import threading

import anyio
import pytest

from tenure.base.clock import now
from tests.api.hosted import Thing, coroutine, function, lead
from tests.support.store_by_hand import until


def test_a_service_that_fails_to_start_is_started_again_and_those_after_it_wait(host, caplog):
    node, diary = host(), []

    class Reluctant(Thing):
        def start(self):
            super().start()
            if len(self.diary) < 3:
                raise OSError("not yet")

    node.leader_only("r", Reluctant("first", diary), Thing("second", diary))
    node.start()
    lead(node)
    assert diary == ["start first"] * 3 + ["start second"]
    info = node.services()[0]
    assert (info.failures, info.error) == (2, "start() failed: OSError('not yet')")
    said = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 2
    assert "service first start() failed: OSError('not yet'); starting it again in" in said[0].message
    assert (said[0].tenure_role, said[0].tenure_service) == ("r", "first")
    assert isinstance(said[0].exc_info[1], OSError)  # with where it was raised


def test_a_service_that_dies_is_started_again_under_the_same_term(host):
    node, tokens = host(), []

    async def dies(term):
        tokens.append(term.token)
        if len(tokens) == 1:
            raise ValueError("a bug")

    def returns(term):
        if len(tokens) > 2:
            term.wait_lost()

    node.leader_only("r", dies, returns)
    node.start()
    until(lambda: len(tokens) == 3, "started three times")
    assert set(tokens) == {1}
    assert node.services()[0].failures >= 2  # raised once, and returned: that is a death, too
    assert node.services()[0].error in ("failed: ValueError('a bug')", "returned")


def test_a_service_that_has_finished_is_started_again_only_in_the_next_term(host, caplog):
    caplog.set_level(logging.INFO, "tenure.services")
    node, starts = host(), []

    async def import_rates(term):
        starts.append(("import_rates", term.token))

    def clean_up(term):
        starts.append(("clean_up", term.token))

    node.leader_only("r", import_rates, clean_up, on_return="done")
    node.leader_only("r", function([], "last"))
    node.start()
    until(lambda: node.states() == {"import_rates": "done", "clean_up": "done", "last": "running"}, "both are done")
    assert [info.failures for info in node.services()] == [0, 0, 0]
    assert sorted(starts) == [("clean_up", 1), ("import_rates", 1)]
    until(lambda: "import_rates returned" in caplog.text, "the log says so")
    [said] = [record for record in caplog.records if "import_rates returned" in record.message]
    assert said.message.endswith("service import_rates returned; it is done until the next term (on_return='done')")
    assert said.levelno == logging.INFO
    node.resign("r")
    until(lambda: sorted(starts[2:]) == [("clean_up", 2), ("import_rates", 2)], "both run again in the next term")


@pytest.mark.parametrize(
    ("options", "words", "tokens"),
    [
        (
            {},
            r"starting it again in \d.\d s \(on_failure='restart'\); if it has finished, set on_return='done'",
            [1, 1],
        ),
        ({"on_failure": "resign", "on_return": "restart"}, r"starting it again in .* \(on_return='restart'\)", [1, 1]),
        ({"on_return": "resign"}, r"resigning \(on_return='resign'\)", [1, 2]),
        (
            {"on_failure": "resign"},
            r"resigning \(on_failure='resign'\); if it has finished, set on_return='done'",
            [1, 2],
        ),
    ],
)
def test_what_a_return_leads_to_is_what_the_log_says(host, caplog, options, words, tokens):
    node, found = host(), []

    async def returns(term):
        found.append(term.token)
        if len(found) > 1:
            await anyio.sleep_forever()

    node.leader_only("r", returns, **options)
    node.start()
    until(lambda: found == tokens, "started again")  # which comes after the log
    [said] = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert re.search(f"service returns returned; {words}$", said)
    assert node.services()[0].failures == 1


def test_on_return_does_not_change_what_a_failure_leads_to(host):
    node, tokens = host(), []

    async def fails(term):
        tokens.append(term.token)
        if len(tokens) == 1:
            raise OSError("no route")

    node.leader_only("r", fails, on_return="done")
    node.start()
    until(lambda: node.states() == {"fails": "done"}, "started again after its failure")
    assert tokens == [1, 1]
    assert node.services()[0].failures == 1


def test_a_service_that_waits_for_another_one_costs_nothing(host, monkeypatch):
    """Both have failed; the second is due again, and is not to be started before the first."""
    from tenure.services.group import ServiceGroup

    node, rests, rest = host(), [], ServiceGroup._rest

    async def counted(self, *arguments):
        rests.append(arguments)
        await rest(self, *arguments)

    monkeypatch.setattr(ServiceGroup, "_rest", counted)
    starts, third = [], threading.Event()

    def first(term):  # dies three times, so that its pause grows
        starts.append(term)
        if len(starts) == 3:
            third.set()
        elif len(starts) == 4:
            term.wait_lost()

    def second(term):  # dies with the third death of the first
        third.wait()

    node.leader_only("r", first, second)
    node.start()
    until(lambda: len(starts) == 4, "started for the fourth time")
    assert len(rests) < 100


def test_an_object_that_is_no_longer_alive_is_stopped_and_started_again(host):
    node, diary = host(), []

    class Mortal(Thing):
        def alive(self):
            return self.diary.count("start it") > 1

    node.leader_only("r", Mortal("it", diary))
    node.start()
    until(lambda: diary[:3] == ["start it", "stop it", "start it"], "restarted")
    until(lambda: node.states() == {"it": "running"})
    assert node.services()[0].error == "is not alive"


def test_on_failure_resign_hands_over_to_a_node_that_can(host, caplog):
    broken, healthy = host("broken"), host("healthy")

    async def fails():
        raise OSError("no such device")

    broken.leader_only("r", fails, on_failure="resign")
    broken.start()
    until(lambda: broken.services()[0].failures, "it has tried")
    healthy.leader_only("r", coroutine([]))
    healthy.start()
    lead(healthy)
    assert any("failed: OSError('no such device'); resigning" in record.message for record in caplog.records)


class Resigns(Thing):
    def start(self, term):
        super().start()
        term.resign()


class ResignsAsync(Thing):
    async def start(self, term):
        super().start()
        await term.resign()


def resigns(diary):
    async def run(term):
        diary.append("start function")
        await term.resign()

    return run


@pytest.mark.parametrize(
    "service",
    [lambda diary: Resigns("thing", diary), lambda diary: ResignsAsync("async thing", diary), resigns],
    ids=["start()", "async start()", "function"],
)
@pytest.mark.long
def test_a_service_that_resigns_at_once_is_not_started_all_the_time(host, caplog, service):
    node, diary = host("hasty"), []
    node.leader_only("r", service(diary))
    began = now()
    node.start()
    until(lambda: len([entry for entry in diary if "start" in entry]) >= 3, "it is tried again")
    assert now() - began > 1.4  # 0.5 s, then 1 s
    said = [record.message for record in caplog.records if record.name == "tenure.services"]
    assert "hasty: role 'r' was given up within a second of being acquired; standing again in 0.5 s" in said
    assert "hasty: role 'r' was given up within a second of being acquired; standing again in 1.0 s" in said


@pytest.mark.long
def test_a_service_that_resigns_at_once_does_not_hold_up_another_node(host):
    hasty, healthy, diary = host("hasty"), host("healthy"), []
    hasty.leader_only("r", Resigns("thing", diary))
    hasty.start()
    until(lambda: len(diary) >= 3, "it has tried twice")
    healthy.leader_only("r", coroutine([]))
    healthy.start()
    lead(healthy)
    until(lambda: healthy.candidates("r") == 2, "the hasty node stands again")
    assert healthy.election("r").is_leader


def test_a_start_that_hangs_is_a_failure_and_hands_over(host):
    node, other, gate = host("a"), host("b"), threading.Event()

    class Hangs(Thing):
        def start(self):
            gate.wait()

    node.leader_only("r", Hangs("hanging", []), start_within=0.2, drain_within=0.2)
    node.start()
    until(lambda: node.services()[0].error == "did not start within 0.2 s", "given up")
    other.leader_only("r", coroutine([]))
    other.start()
    lead(other)
    assert node.states() == {"hanging": "stuck"}
    gate.set()
    until(lambda: node.states() == {"hanging": "standby"}, "it stands again")


def test_a_start_that_is_interrupted_is_followed_by_stop(host):
    node, diary = host(), []

    class Slow(Thing):
        async def start(self):
            self.diary.append("half started")
            await anyio.sleep_forever()

    node.leader_only("r", Slow("it", diary))
    node.start()
    until(lambda: diary, "starting")
    node.close()
    assert diary == ["half started", "stop it"]


def test_an_alive_that_does_not_answer_is_a_death(host, monkeypatch):
    node, diary, gate = host(), [], threading.Event()
    monkeypatch.setattr("tenure.services.runner.ALIVE_WITHIN_S", 0.2)

    class Mute(Thing):
        def alive(self):
            gate.wait()

    node.leader_only("r", Mute("it", diary))
    node.start()
    until(lambda: diary[:3] == ["start it", "stop it", "start it"], "restarted")
    assert node.services()[0].error == "alive() did not answer within 0.2 s"
    node.close()
    gate.set()


def test_a_service_that_returns_work_for_others_to_do_has_failed(host):
    node = host()

    class Deceptive:
        def start(self):
            return anyio.sleep(1)

        def stop(self):
            pass

    node.leader_only("r", Deceptive())
    node.start()
    until(lambda: node.services()[0].failures, "failed")
    assert "the function returned a coroutine, which Tenure does not run" in node.services()[0].error


def test_a_service_that_calls_exit_dies_alone(host):
    node, starts = host(), []

    async def leaves():
        starts.append(1)
        if len(starts) == 1:
            sys.exit(3)
        await anyio.sleep_forever()

    node.leader_only("r", leaves)
    node.start()
    until(lambda: len(starts) == 2, "started again")
    assert node.services()[0].error == "failed: SystemExit(3)"
