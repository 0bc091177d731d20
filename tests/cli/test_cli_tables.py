"""What the tables say about themselves: the zone of their times, what they leave out, and how rows are ordered."""

from __future__ import annotations

import html
import json
import re
import time

import pytest

import tenure
from tenure.dashboard import dashboard
from tenure.reports import first_line
from tests.cli.test_cli import TENURE, Answer, tell
from tests.conftest import missing
from tests.dashboard.client import ask
from tests.support.store_by_hand import Desk, execute, until
from tests.support.terminal import NO_TMUX, Terminal, tmux_program


@pytest.fixture
def zone(monkeypatch):
    """Set the local time zone."""

    def set_(name):
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield set_
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def scheduled(sqlite_url):
    """A database with a job that has a zone of its own, and one that has none; both have run."""
    schedule = tenure.Schedule(zone="America/New_York")
    schedule.cron("30 2 * * *", name="invoices")(lambda _: None)
    schedule.every("1 h", name="heartbeat")(lambda _: None)
    node = tenure.Node(sqlite_url, name="worker-1")
    node.leader_only("scheduler", schedule)
    with node, tenure.Registry(sqlite_url) as registry:
        until(lambda: len(registry.jobs()) == 2, "the jobs")
        for job in ("invoices", "heartbeat"):
            registry.trigger(job)
        until(lambda: [run.outcome for run in registry.runs()] == ["done"] * 2, "the runs")
    return sqlite_url


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("UTC", "UTC"),
        ("Asia/Kolkata", "IST (UTC+5:30)"),
        ("Pacific/Honolulu", "HST (UTC-10)"),
        ("America/Sao_Paulo", "UTC-3"),
    ],
)
def test_every_table_with_times_names_their_zone_once(scheduled, zone, name, said):
    zone(name)
    with Desk(scheduled) as desk:
        desk.acquire("other")
        for command in (["status"], ["status", "other"], ["history", "other"], ["runs"], ["runs", "heartbeat"]):
            lines = tell(*command, url=scheduled).out.splitlines()
            assert lines[-1] == f"times are local, {said}", command
            assert sum("local" in line for line in lines) == 1
        assert "local" not in tell("members", url=scheduled).out, "it has no times of day"


def test_table_across_a_change_of_the_clocks_names_both_zones(sqlite_url, zone):
    zone("Europe/Paris")
    with Desk(sqlite_url) as first, Desk(sqlite_url) as second:
        first.lead("r")
        second.succeed(first, "r")
        for token, month in ((1, "07"), (2, "12")):
            execute(
                sqlite_url, f"update tenure_terms set began_at = '2025-{month}-02T03:04:05.000Z' where token = {token}"
            )
        said = tell("history", "r", url=sqlite_url).out.splitlines()[-1]
        assert said == "times are local, CET (UTC+1) and CEST (UTC+2)"


def test_jobs_say_which_times_are_local_and_which_are_in_the_zone_of_the_job(scheduled, zone):
    zone("Asia/Kolkata")
    with Desk(scheduled) as desk:
        desk.lead("scheduler")
        *_, invoices, _, said = tell("jobs", url=scheduled).lines
    assert said == ["NEXT and LAST are local times, IST (UTC+5:30); DUE is in the zone that it names"]
    assert invoices[2] == "30 2 * * * America/New_York"
    assert invoices[3].partition(" ")[2] in ("12:00:00", "13:00:00"), "local time"


def test_job_that_the_leader_does_not_know_has_no_next_run(scheduled):
    execute(scheduled, "update tenure_jobs set listed_token = listed_token - 1 where job = 'heartbeat'")
    _, heartbeat, *_, said, _ = tell("jobs", url=scheduled).lines
    assert (heartbeat[1], heartbeat[3], heartbeat[-1]) == ("heartbeat", "-", "unknown")
    assert said[0].startswith("unknown: the last leader's program does not have the job; ")
    page = ask(dashboard(scheduled), "/jobs").text
    assert html.unescape(page).count(said[0]) == 1
    assert page.count('<td class="least">\N{EN DASH}</td>') == 1
    (record,) = [job for job in json.loads(tell("jobs", "--json", url=scheduled).out) if job["job"] == "heartbeat"]
    assert record["next_due"] is not None, "programs get what the definition says"


def test_lost_run_does_not_say_how_long_it_took(scheduled):
    execute(scheduled, "update tenure_runs set outcome = 'lost' where job = 'heartbeat'")
    rows = {row[0]: row for row in tell("runs", url=scheduled).lines[1:3]}
    assert rows["heartbeat"][3:5] == ["lost", "-"], "nobody knows when it ended"
    assert rows["invoices"][4] != "-"
    assert '<td class="minor number">-</td>' in ask(dashboard(scheduled), "/jobs").text


def test_history_names_the_roles_where_none_or_a_wrong_one_is_given(sqlite_url):
    with Desk(sqlite_url) as desk:
        assert Answer("history", url=sqlite_url).err.endswith("give a ROLE; namespace 'default' has no roles\n")
        desk.acquire("billing")
        answer = Answer("history", "nope", url=sqlite_url)
        said = "tenure: namespace 'default' has no role 'nope'; known roles: 'billing'\n"
        assert (answer.code, answer.err) == (2, said)
        for number in range(9):
            desk.acquire(f"role-{number}")
        few = "known roles: 'billing', 'role-0', 'role-1', 'role-2', 'role-3' and 5 more\n"
        assert Answer("history", "nope", url=sqlite_url).err.endswith(few)
        answer = Answer("history", url=sqlite_url)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.endswith(f"Error: give a ROLE; {few}")


def screen(*command, url, height=24):
    """What a terminal of 80 columns shows after a command."""
    if tmux_program() is None:
        missing(NO_TMUX)
    with Terminal(TENURE, *command, height=height, TENURE_URL=url) as terminal:
        assert terminal.wait_ended() == 0
        return terminal.lines()


LONG = "customer-statement-export-by-mail"
MANY_LINES = 'relation "x" does not exist\nLINE 1: insert into x\n        ^'


@pytest.fixture
def recorded(sqlite_url):
    """A database with two jobs, of which one always fails with a message of several lines, and 30 runs."""

    def fail(_):
        raise ValueError(MANY_LINES)

    schedule = tenure.Schedule(zone="Europe/Paris")
    schedule.cron("30 2 * * *", name="invoices")(fail)
    schedule.cron("0 6 * * 1-5", name=LONG)(lambda _: None)
    node = tenure.Node(sqlite_url, name="payments-scheduler-7d9c6bf7b9-x2x4q")
    node.leader_only("scheduler", schedule)
    with node, tenure.Registry(sqlite_url) as registry:
        until(lambda: len(registry.jobs()) == 2, "the jobs")
        for job, outcome in (("invoices", "failed"), (LONG, "done")):
            registry.trigger(job)
            until(lambda job=job, outcome=outcome: [run.outcome for run in registry.runs(job)] == [outcome], "a run")
    copied = (
        "job, due_us - {0} * 60000000, attempt, first_us, covers, outcome, detail, token, member, began_at, ended_at"
    )
    names = copied.replace(" - {0} * 60000000", "")
    for number in range(1, 15):
        execute(
            sqlite_url,
            f"insert into tenure_runs (namespace, role, {names}) select namespace, role, {copied.format(number)} "
            "from tenure_runs group by job having due_us = max(due_us)",
        )
    return sqlite_url


def test_runs_show_the_first_line_of_an_error_and_json_the_whole(recorded):
    row = tell("runs", "invoices", "--limit", "1", url=recorded).lines[1]
    assert row[3] == 'failed: ValueError: relation "x" does not exist'
    (run,) = json.loads(tell("runs", "invoices", "--limit", "1", "--json", url=recorded).out)
    assert run["detail"].endswith(r"does not exist\nLINE 1: insert into x\n        ^")


@pytest.mark.parametrize(
    ("detail", "line"),
    [
        ("OSError: gone", "OSError: gone"),
        (r"OSError: one\ntwo", "OSError: one"),
        (r"OSError: C:\\new\nline", r"OSError: C:\\new"),
        ("one\ntwo", "one"),
        (r"cut in an escape\x", r"cut in an escape\x"),
        ("cut in an escape\\", "cut in an escape"),
        ("", ""),
    ],
)
def test_first_line_ends_at_a_line_break_and_at_no_backslash(detail, line):
    assert first_line(detail) == line


def test_jobs_have_a_line_each_on_80_columns_and_say_which_columns_are_missing(recorded):
    lines = screen("jobs", url=recorded)
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["JOB", "NEXT", "STATE"]
    assert [line.split()[0] for line in lines[1:3]] == [LONG, "invoices"]
    assert lines[4] == "too narrow for ROLE, DUE, LAST: widen the terminal, or add `| less -S`"


def test_runs_fit_on_the_screen_with_the_newest_first_and_say_how_many_are_left_out(recorded):
    lines = screen("runs", url=recorded)
    assert len(lines) < 24, "there is room for the prompt"
    assert lines[0].split() == ["JOB", "DUE", "OUTCOME"]
    assert lines[1].startswith(f"{LONG}  "), "the name is whole, and the newest is not out of sight"
    end = lines.index("")
    shown = sum(line[:1].isalpha() for line in lines[1:end])
    assert lines[end + 1] == f"{20 - shown} older ones do not fit: give --limit, or add `| less`"
    assert lines[end + 2].startswith("too narrow for ATTEMPT, TOOK, TOKEN, NODE: ")
    whole = screen("runs", "--limit", "25", url=recorded, height=60)
    assert sum(line[:1].isalpha() for line in whole[1 : whole.index("")]) == 25


def test_runs_of_all_jobs_and_of_one_are_in_the_order_of_their_due_times(recorded):
    execute(recorded, "update tenure_runs set began_at = (select max(began_at) from tenure_runs) where due_us % 2 = 0")
    for command in (["runs"], ["runs", LONG]):
        due = [run["due"] for run in json.loads(tell(*command, "--limit", "100", "--json", url=recorded).out)]
        assert due == sorted(due, reverse=True)
        assert len(due) == (30 if command == ["runs"] else 15)


def test_skipped_due_times_are_counted_with_the_outcome(recorded):
    execute(recorded, f"update tenure_runs set covers = 3, outcome = 'skipped', detail = 'missed' where job = '{LONG}'")
    row = tell("runs", LONG, url=recorded).lines[1]
    assert row[3].startswith("skipped: missed, 3 due times since 20")


def test_history_fits_on_the_screen_with_the_newest_first(sqlite_url):
    with Desk(sqlite_url) as desk:
        for _ in range(25):
            desk.acquire("r")
        lines = screen("history", "r", url=sqlite_url, height=20)
        assert len(lines) == 19
        assert lines[1].startswith("● 25")
        assert any(line.endswith("older ones do not fit: give --limit, or add `| less`") for line in lines)


def age(url, desk, seconds):
    """Let a member have renewed so many seconds ago."""
    moment = f"strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-{seconds} seconds')"
    execute(url, f"update tenure_members set renewed_at = {moment} where id = '{desk.id}'")


def test_leader_that_has_missed_a_renewal_is_late_before_it_is_overdue(sqlite_url):
    with Desk(sqlite_url, name="b", ttl=60) as desk, Desk(sqlite_url, name="a", ttl=60) as other:
        desk.lead("r")
        other.lead("q")
        assert "late" not in tell("status", url=sqlite_url).out
        age(sqlite_url, desk, 40)
        lines = tell("status", url=sqlite_url).lines
        assert [line[0] for line in lines[1:3]] == ["r", "q"], "what needs attention comes first"
        assert lines[1][4].endswith(" s ago, late")
        assert "late" not in " ".join(lines[2])
        with Terminal(TENURE, "watch", TENURE_URL=sqlite_url) as terminal:
            lines = terminal.wait_for("2 roles (1 late)")
        assert [line[:3] for line in lines if line[:1] in tuple("◐●")] == ["◐ r", "● q", "● a", "◐ b"]
        assert json.loads(tell("status", "--json", url=sqlite_url).out)["roles"][1]["overdue"] is False


def test_members_and_candidates_are_in_the_order_of_their_names(sqlite_url):
    with Desk(sqlite_url, name="c") as c, Desk(sqlite_url, name="a") as a, Desk(sqlite_url, name="b") as b:
        for desk in (c, a, b):
            desk.stand("r")
        for command in (["members"], ["status"], ["status", "r"]):
            lines = tell(*command, url=sqlite_url).lines
            assert [line[0] for line in lines if line[0] in ("a", "b", "c")] == ["a", "b", "c"], command
        joined = [member["name"] for member in json.loads(tell("members", "--json", url=sqlite_url).out)]
        assert joined == ["c", "a", "b"], "programs find them where they were"


def test_watch_says_how_to_end_it_and_which_columns_are_missing(sqlite_url):
    with Desk(sqlite_url, name="payments-scheduler-7d9c6bf7b9-x2x4q") as desk:
        desk.lead("scheduler")
        with Terminal(TENURE, "watch", TENURE_URL=sqlite_url, TZ="Asia/Kolkata") as terminal:
            lines = terminal.wait_for("Ctrl-C")
        assert re.fullmatch(r"Ctrl-C ends it; too narrow for SINCE, .*: widen the terminal", lines[-1])
        assert re.match(r"\d\d:\d\d:\d\d IST  namespace default", lines[0]), "it names the zone"
        with Terminal(TENURE, "watch", width=200, TENURE_URL=sqlite_url) as terminal:
            assert terminal.wait_for("Ctrl-C")[-1] == "Ctrl-C ends it"
