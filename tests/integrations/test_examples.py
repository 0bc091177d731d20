"""The examples, started as their users would start them. Those of a framework are run beside its other tests, too."""

from __future__ import annotations

import re
import signal
import sys
from contextlib import ExitStack

import pytest

from tests.integrations.cluster import PATIENCE_S, ROOT, Process
from tests.integrations.web import Server, free_port, uvicorn
from tests.support.store_by_hand import until

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) <= 40


@pytest.mark.parametrize("name", ["plain_asyncio", "plain_threads"])
def test_one_of_three_schedules_and_all_answer(name, postgres_url, tmp_path):
    with ExitStack() as stack:
        processes = []
        for number in range(3):
            told = {"TENURE_URL": postgres_url, "TENURE_NAME": f"replica-{number}"}
            process = Process(f"replica-{number}", [sys.executable, f"examples/{name}.py"], told, tmp_path)
            stack.callback(process.close)
            processes.append(process)
        until(lambda: all("answering" in process.output() for process in processes), "all to answer", PATIENCE_S)
        [leader] = until(lambda: [app for app in processes if "token 1" in app.output()], "a leader", PATIENCE_S)
        leader.process.send_signal(signal.SIGTERM)
        assert leader.wait() == 0, leader.output()
        others = [app for app in processes if app is not leader]
        [after] = until(lambda: [app for app in others if "token 2" in app.output()], "another leader", PATIENCE_S)
        for process in others:
            process.process.send_signal(signal.SIGINT)
        assert [process.wait() for process in others] == [0, 0]
        said = "".join(process.output() for process in processes)
        assert "Traceback" not in said
        under = {token: who for who, token in re.findall(r"(\S+): scheduled, under token (\d+)", said)}
        assert (under["1"], under["2"]) == (leader.name, after.name)


def test_schedule_ticks_once_a_second_through_a_kill(postgres_url, tmp_path):
    with ExitStack() as stack:
        processes = []
        for number in range(3):
            told = {"TENURE_URL": postgres_url, "TENURE_NAME": f"replica-{number}"}
            process = Process(f"replica-{number}", [sys.executable, "examples/schedule.py"], told, tmp_path)
            stack.callback(process.close)
            processes.append(process)
        [leader] = until(lambda: [app for app in processes if "token 1" in app.output()], "a leader", PATIENCE_S)
        leader.process.kill()
        until(lambda: any("token 2" in app.output() for app in processes), "another leader", PATIENCE_S)
        until(lambda: sum(app.output().count("token 2") for app in processes) >= 2, "two ticks", PATIENCE_S)
        ticks = sorted(re.findall(r"(\d\d:\d\d:\d\d) under", "".join(app.output() for app in processes)))
        assert len(ticks) == len(set(ticks))


def test_three_terminals_show_who_leads_and_tick_on_after_kill_9(tmp_path):
    """Without a URL, as a newcomer starts it: on a SQLite file of the user."""
    with ExitStack() as stack:
        processes = []
        for number in range(3):
            told = {"XDG_STATE_HOME": str(tmp_path / "state")}
            process = Process(f"terminal-{number}", [sys.executable, "examples/three_terminals.py"], told, tmp_path)
            stack.callback(process.close)
            processes.append(process)
        until(lambda: all(" leads" in app.output() for app in processes), "all to say who leads", PATIENCE_S)
        [leader] = until(lambda: [app for app in processes if "token 1," in app.output()], "a tick", PATIENCE_S)
        assert f"process {leader.process.pid} leads, which is this one: try `kill -9" in leader.output()
        leader.process.kill()
        others = [app for app in processes if app is not leader]
        [after] = until(lambda: [app for app in others if "token 2," in app.output()], "the next tick", PATIENCE_S)
        until(lambda: all(f"process {after.process.pid} leads" in app.output() for app in others), "both to say so")
        ticks = re.findall(r"(\d\d:\d\d:\d\d)  tick", "".join(app.output() for app in processes))
        assert len(ticks) == len(set(ticks))
        assert "Traceback" not in "".join(app.output() for app in processes)


def answered_by(server):
    """How many workers take part."""
    return len({server.ask("/").json()["answered by"] for _ in range(20)})


def test_fastapi_serves_on_four_workers_and_schedules_on_one(postgres_url, tmp_path):
    port = free_port()
    command = uvicorn("examples.fastapi_app:app", port, "--workers", "4")
    with Server("example", port, command, {"TENURE_URL": postgres_url}, tmp_path) as server:
        server.wait_for("/health/readyz")
        until(lambda: "scheduled" in server.running.output(), "a leader", PATIENCE_S)
        until(lambda: answered_by(server) > 1, "several workers to answer", PATIENCE_S)
        leads = {server.wait_for("/health/leader").json()["node"] for _ in range(3)}
        assert len(leads) == 1
        assert server.ask("/schedules", "POST").status_code in (200, 503)
        said = re.findall(r"(\S+): scheduled, under token (\d+)", server.running.output())
        assert set(said) == {(next(iter(leads)), "1")}
        assert server.end() in (0, -signal.SIGTERM)
