"""Beats as people start them, under torment, with a real worker and a task that writes down when it was due."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys

from tenure import Registry
from tests.integrations.cluster import ROOT, Process, Replicas
from tests.support.store_by_hand import until

CELERY = [sys.executable, "-m", "celery"]


def beat(application: str, scheduler: str = "tenure.integrations.celery:LeaderScheduler") -> list[str]:
    return [*CELERY, "-A", application, "beat", "-S", scheduler, "--loglevel", "info"]


def worker(application: str) -> list[str]:
    return [*CELERY, "-A", application, "worker", "--pool", "solo", "--loglevel", "info"]


def test_any_number_of_beats_send_each_run_at_most_once_and_keep_its_phase(postgres_url, tmp_path, record_property):
    application, environment = "tests.integrations.celery_beats", {"RUNS_URL": postgres_url}
    every = {"tick": 1.0, "phase": 5.0}
    with Replicas(
        postgres_url, tmp_path, beat(application), role="beat", environment=environment, every=every
    ) as beats:
        working = beats.beside("worker", worker(application), environment)
        runs = beats.torment(record_property)
        beats.terminate(working)
        assert runs.jobs == ["phase", "tick"]
        assert runs.duplicates == []
        assert runs.out_of_phase == []
        assert runs.stale == []
        with Registry(postgres_url) as registry:
            assert registry.history("beat", 1)[0].reason == "left", "SIGTERM hands over"


def test_beats_of_django_tasks_send_each_run_at_most_once_and_a_single_one_only_once(
    postgres_url, tmp_path, record_property
):
    application = "tests.integrations.celery_django"
    environment = {"RUNS_URL": postgres_url, "TENURE_URL": ""}
    command = beat(application, "tenure.integrations.django_celery_beat:LeaderScheduler")
    every = {"tick": 1.0, "at a time": 1.0, "after a while": 4.0}
    with Replicas(
        postgres_url, tmp_path, command, role="django-beat", size=3, environment=environment, every=every
    ) as beats:
        subprocess.run([sys.executable, "-m", application], cwd=ROOT, env={**os.environ, **environment}, check=True)
        working = beats.beside("worker", worker(application), environment)
        runs = beats.torment(record_property, kills=2, pauses=1)
        beats.terminate(working)
        assert runs.duplicates == []
        assert runs.out_of_phase == []
        assert runs.stale == []
        single = [run.job for run in runs.rows if run.job != "tick"]
        assert single, "one of them may be left out, by a kill between its claim and its message"
        assert len(single) == len(set(single)), "what runs once does not run again"


def test_the_example_goes_on_when_the_beat_that_sends_is_ended(tmp_path):
    url = f"sqlite:///{tmp_path}/tenure.db"
    environment = {"TENURE_URL": url, "BROKER_URL": f"sqla+sqlite:///{tmp_path}/broker.db"}
    command = [*CELERY, "--workdir", str(ROOT / "examples"), "-A", "celery_app"]
    scheduler = ["-S", "tenure.integrations.celery:LeaderScheduler"]

    def reports() -> list[tuple[str, str]]:
        return re.findall(r"report of (\S+), sent under token (\d+)", processes[0].log.read_text())

    with contextlib.ExitStack() as stack:
        processes = [Process("worker", [*command, "worker", "--pool", "solo"], environment, tmp_path)]
        processes += [Process(f"beat-{n}", [*command, "beat", *scheduler], environment, tmp_path) for n in range(2)]
        for process in processes:
            stack.callback(process.close)
            stack.callback(lambda process=process: print(process.output()))
        until(lambda: len(reports()) >= 2, "reports", 60)
        with Registry(url) as registry:
            until(lambda: len(registry.members()) == 2, "a second beat", 60)
            (pid,) = (member.pid for member in registry.members() if member.leads)
        (leader,) = (process for process in processes if process.process.pid == pid)
        leader.process.terminate()
        assert leader.wait() == 0
        until(lambda: len({token for _, token in reports()}) == 2, "reports under another token", 60)
    dues = [due for due, _ in reports()]
    assert dues == sorted(set(dues))
