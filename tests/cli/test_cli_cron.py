"""``tenure cron`` and ``tenure run --claim`` by forked processes; ``tenure jobs`` and its kin in this process."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

import tenure
from tests.cli.test_cli import Answer
from tests.support import starter
from tests.support.run_processes import PATIENCE_S
from tests.support.schedules import unaccounted
from tests.support.store_by_hand import until

ROUNDS = int(os.environ.get("RUN_ROUNDS", "6"))
"""How often a machine is killed; `RUN_ROUNDS=100 make test ARGS="-m long …"` for more."""


def tenure_(*arguments, url="", **options):
    """Run a command to its end, in a process; return the finished process."""
    environment = {**os.environ, **({"TENURE_URL": url} if url else {})}
    return starter.run("tenure", *map(str, arguments), env=environment, timeout=PATIENCE_S, **options)


@pytest.fixture
def machine():
    """Start processes of ``tenure cron``; they end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments, url, **options):
            environment = {**os.environ, "TENURE_URL": url}
            process = starter.start("tenure", "cron", *map(str, arguments), env=environment, **options)

            def close():
                for number in (signal.SIGCONT, signal.SIGTERM):
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(number)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(20)

            stack.callback(close)
            return process

        yield start


def test_crontab_runs_its_commands_at_their_due_times(sqlite_url, tmp_path, machine):
    crontab = tmp_path / "crontab"
    crontab.write_text(f"* * * * * echo no >{tmp_path}/no  # minutely\n@hourly true # other\n")
    process = machine("--file", crontab, url=sqlite_url)
    until(lambda: "minutely" in Answer("jobs", url=sqlite_url).out, "the jobs are known")
    assert Answer("trigger", "minutely", url=sqlite_url).code == 0
    until((tmp_path / "no").exists, "the command has run")
    until(lambda: "done" in Answer("runs", "minutely", url=sqlite_url).out, "the run is recorded")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def test_crontab_may_begin_with_a_byte_order_mark(sqlite_url, tmp_path, machine):
    """As editors on Windows write it."""
    crontab = tmp_path / "crontab"
    crontab.write_text("@hourly true # marked\n", encoding="utf-8-sig")
    machine("--file", crontab, url=sqlite_url)
    until(lambda: "marked" in Answer("jobs", url=sqlite_url).out, "the job is known")


def test_command_finds_its_run_in_the_environment(sqlite_url, tmp_path, machine):
    script = f"env | grep ^TENURE_ | sort >{tmp_path}/env.new; mv {tmp_path}/env.new {tmp_path}/env"
    machine("--name", "show", "--role", "night", "0 0 1 1 *", "--", "sh", "-c", script, url=sqlite_url)
    until(lambda: "show" in Answer("jobs", url=sqlite_url).out, "the job is known")
    Answer("trigger", "show", url=sqlite_url)
    until((tmp_path / "env").exists, "the command has run")
    found = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    assert (found["TENURE_JOB"], found["TENURE_ROLE"], found["TENURE_TOKEN"]) == ("show", "night", "1")
    assert found["TENURE_DUE"].endswith("+00:00")


def test_command_that_fails_is_recorded_with_its_exit_code(sqlite_url, machine):
    machine("--name", "bad", "0 0 1 1 *", "--", "sh", "-c", "exit 3", url=sqlite_url, stderr=subprocess.DEVNULL)
    until(lambda: "bad" in Answer("jobs", url=sqlite_url).out, "the job is known")
    Answer("trigger", "bad", url=sqlite_url)
    until(lambda: "failed: exit code 3" in Answer("runs", "bad", url=sqlite_url).out, "the record")


@pytest.mark.parametrize("difference", ["@yearly true # {}", "TARGET={}\n@yearly true # a"], ids=["job", "variable"])
def test_crontabs_that_differ_are_warned_of(sqlite_url, tmp_path, machine, difference):
    for value in ("prod", "test"):
        (tmp_path / value).write_text(difference.format(value))
    machine("--file", tmp_path / "prod", "--node", "one", url=sqlite_url)
    until(lambda: "cron" in Answer("status", url=sqlite_url).out, "a leader")
    with (tmp_path / "log").open("w") as log:
        second = machine("--file", tmp_path / "test", "--node", "two", url=sqlite_url, stderr=log)
    with tenure.Registry(sqlite_url) as registry:
        until(lambda: registry.roles()[0].candidates == 2, "the second machine stands")
        registry.resign("cron")
    until(lambda: "the crontab of one differs from that of two" in (tmp_path / "log").read_text(), "a warning")
    assert second.poll() is None


@pytest.mark.parametrize("rounds", [2, pytest.param(ROUNDS, marks=pytest.mark.long)], ids=["few rounds", "all rounds"])
def test_commands_never_overlap_and_no_due_time_runs_twice_on_four_machines(postgres_url, tmp_path, machine, rounds):
    """Each command looks for those before it, and writes when it begins; machines are killed at random."""
    look = "for pid in $(cat pids 2>/dev/null); do kill -0 $pid 2>/dev/null && echo overlap $pid >>log; done"
    script = f'cd {tmp_path}; {look}; echo $$ >>pids; echo "begin $TENURE_DUE" >>log; sleep 0.3'
    crontab = ("--name", "tick", "--ttl", "5", "* * * * *", "--", "sh", "-c", script)
    chance, machines = random.Random(15), {}
    for number in range(1, 5):
        machines[number] = machine("--node", f"m{number}", *crontab, url=postgres_url)
    until(lambda: "tick" in Answer("jobs", url=postgres_url).out, "the job is known")
    with tenure.Registry(postgres_url) as registry:
        for number in range(5, 5 + rounds):
            registry.trigger("tick")
            until(lambda: any(run.outcome == "begun" for run in registry.runs("tick")), "a run")
            time.sleep(chance.uniform(0.0, 0.3))
            victim = until(lambda: leader_of(registry), "a leader")
            machines.pop(victim).kill()
            machines[number] = machine("--node", f"m{number}", *crontab, url=postgres_url)
            until(lambda victim=victim: leader_of(registry) not in (None, victim), "another leader")
        until(lambda: is_at_rest(registry), "every request is answered, and every run has ended")
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines
    assert [line for line in lines if line.startswith("overlap")] == []
    assert len(lines) == len(set(lines)), "no run is made twice"
    assert unaccounted(postgres_url) == []


def test_guard_that_is_killed_ends_its_own_command_and_spares_the_other_jobs(sqlite_url, tmp_path, machine):
    script = tmp_path / "script"
    script.write_text(f"""cd {tmp_path}
setsid sleep 1000 & child=$!
echo $PPID $$ $child >$TENURE_JOB.new; mv $TENURE_JOB.new $TENURE_JOB
while ! [ -e over ]; do sleep 0.05; done
kill $child
""")
    crontab = tmp_path / "crontab"
    crontab.write_text("".join(f"@yearly exec sh {script} # {job}\n" for job in ("one", "two")))
    machine("--file", crontab, url=sqlite_url, stderr=subprocess.DEVNULL)
    until(lambda: "two" in Answer("jobs", url=sqlite_url).out, "the jobs are known")
    with tenure.Registry(sqlite_url) as registry:
        families = []
        for job in ("one", "two"):
            registry.trigger(job)
            until((tmp_path / job).exists, "the command")
            families.append([int(pid) for pid in (tmp_path / job).read_text().split()])
        os.kill(families[0][0], signal.SIGKILL)
        until(lambda: registry.runs("one")[0].outcome == "failed", "the record of the end")
        assert registry.runs("one")[0].detail == "exit code 137"
        assert [is_alive(pid) for pid in families[0]] == [False] * 3
        assert [is_alive(pid) for pid in families[1]] == [True] * 3
        (tmp_path / "over").touch()
        until(lambda: registry.runs("two")[0].outcome == "done", "the other job's end")


def is_alive(pid):
    """Whether a process runs; a zombie does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def is_at_rest(registry):
    (job,) = registry.jobs()
    return job.requested is None and not any(run.outcome == "begun" for run in registry.runs("tick", 1000))


def leader_of(registry):
    """The number of the machine that leads."""
    leader = registry.roles()[0].leader
    return None if leader is None else int(leader.name[1:])


# --- tenure run --claim ---------------------------------------------------------------------------------------


@pytest.mark.twin("postgres")
def test_claimed_run_is_made_by_one_machine_only(store_url, tmp_path):
    """As a system's cron does, on every machine: the first runs the command, the others find it done."""
    due = "2026-11-17T02:30+01:00"
    told = (
        "run",
        "--role",
        "backup",
        "--claim",
        "backup",
        "--due",
        due,
        "--",
        "sh",
        "-c",
        f"echo run >>{tmp_path}/log",
    )
    started = [starter.start("tenure", *told, env={**os.environ, "TENURE_URL": store_url}) for _ in range(3)]
    assert [process.wait(PATIENCE_S) for process in started] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "run\n"
    with tenure.Registry(store_url) as registry:
        (job,) = registry.jobs()
        assert (job.job, job.last.outcome) == ("backup", "done")


def test_claimed_command_that_fails_is_recorded(sqlite_url):
    done = tenure_(
        "run", "--role", "r", "--claim", "bad", "--due", "minute", "--", "sh", "-c", "exit 4", url=sqlite_url
    )
    assert done.returncode == 4
    with tenure.Registry(sqlite_url) as registry:
        (job,) = registry.jobs()
        assert (job.last.outcome, job.last.detail) == ("failed", "exit code 4")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "--role", "r", "--claim", "x", "--", "true"), "--claim and --due belong together"),
        (("run", "--role", "r", "--due", "day", "--", "true"), "--claim and --due belong together"),
        (("run", "--role", "r", "--claim", "x", "--due", "noon", "--", "true"), "must be minute, hour, day"),
        (("run", "--role", "r", "--claim", "x", "--due", "2026-01-31T02:30", "--", "true"), "with its zone"),
        (("run", "--role", "r", "--claim", "x", "--due", "day", "--restart", "--", "true"), "give one of them"),
        (("cron",), "give either --file"),
        (("cron", "--file", "/none", "* * * * *", "--", "true"), "give either --file"),
        (("cron", "--file", "/none"), "--file cannot be read"),
        (("cron", "* * * * *", "--", "true"), "give --name"),
        (("cron", "--name", "x", "* * * * *"), "COMMAND is missing"),
        (("cron", "--name", "x", "* * *", "--", "true"), "not a cron expression"),
        (("cron", "--name", "x", "--zone", "Mars/Base", "* * * * *", "--", "true"), "is not a time zone"),
        (("cron", "--name", "x", "--missed", "each", "* * * * *", "--", "true"), "--missed each needs --within"),
        (("cron", "@dayly", "--name", "x", "--", "true"), "must be one of @yearly"),
        (("cron", "--name", "x", "* * * * *", "--", "no-such-command"), "command not found"),
        (("jobs", "--reset", "x"), "no schedule has a job 'x'"),
        (("trigger", "x"), "no schedule has a job 'x'"),
    ],
)
def test_bad_input_is_one_clear_line(sqlite_url, arguments, words):
    with tenure.Node(sqlite_url):
        done = tenure_(*arguments, url=sqlite_url)
    assert done.returncode in (2, 127)
    said = done.stderr.decode()
    assert words in " ".join(said.split())
    assert "Traceback" not in said


# --- what is shown --------------------------------------------------------------------------------------------


def test_jobs_and_runs_are_shown_as_tables_and_as_json(sqlite_url, machine):
    machine("--name", "tick", "0 0 1 1 *", "--", "true", url=sqlite_url)
    until(lambda: "tick" in Answer("jobs", url=sqlite_url).out, "the job is known")
    assert Answer("pause", "tick", "--reason", "a test", url=sqlite_url).out == "tick: paused\n"
    assert "paused: a test" in Answer("jobs", url=sqlite_url).out
    said = [Answer("resume", "tick", url=sqlite_url).out for _ in range(2)]
    assert said == ["tick: runs again from its next due time on\n", "tick: it was not paused\n"]
    (job,) = json.loads(Answer("jobs", "--json", url=sqlite_url).out)
    assert (job["job"], job["role"], job["spec"], job["paused"]) == ("tick", "cron", "cron 0 0 1 1 * UTC", None)
    assert job["next_due"].endswith("-01-01T00:00:00+00:00")
    Answer("trigger", "tick", url=sqlite_url)
    until(lambda: '"done"' in Answer("runs", "--json", url=sqlite_url).out, "a run")
    (run,) = json.loads(Answer("runs", "--json", url=sqlite_url).out)
    assert (run["job"], run["outcome"], run["attempt"]) == ("tick", "done", 0)


def test_nothing_to_show_is_said(sqlite_url):
    with tenure.Node(sqlite_url):
        assert "has no jobs" in Answer("jobs", url=sqlite_url).err
        assert "has no runs" in Answer("runs", url=sqlite_url).err
