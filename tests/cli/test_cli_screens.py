"""What the commands show on a real terminal of 80 columns, with a fleet on it and with everything wrong."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenure.core import messages
from tests.cli.test_cli import TENURE, tell
from tests.conftest import missing
from tests.support.store_by_hand import Desk, execute, table, until
from tests.support.terminal import NO_TMUX, Terminal, tmux_program

SIGNS = "✗○●·"
"""Before the rows of roles and members: overdue, vacant, led, without candidates."""


@pytest.fixture(autouse=True)
def _has_terminal() -> None:
    if tmux_program() is None:
        missing(NO_TMUX)


def member(number: int) -> str:
    """What a scheduler of containers calls a member."""
    return f"importer-7d9c6bf7b9-x{number:02}"


@contextlib.contextmanager
def fleet(url: str, led: int, vacant: int, idle: int, members: int = 30) -> Iterator[list[Desk]]:
    """So many roles of each kind, and members."""
    with contextlib.ExitStack() as stack:
        desks = [stack.enter_context(Desk(url, name=member(number), ttl=30)) for number in range(members)]
        last = stack.enter_context(Desk(url, name="gone"))
        last.stand(*(f"idle-{number:02}" for number in range(idle)))
        last.ask(messages.Leave(last.id))
        for number in range(led):
            desks[number % members].acquire(f"led-{number:02}")
        for number in range(vacant):
            desks[number % members].stand(f"vacant-{number:02}")
        yield desks


def silence(url: str, desk: Desk) -> None:
    """Let it be long ago that a member renewed."""
    members = table(url, "members")
    ttl = f"update {members} set ttl_ms = 1, renewed_at = joined_at where id = '{desk.id}'"
    execute(url, ttl)


def signs(lines: list[str]) -> list[str]:
    """The signs of the rows, for each table."""
    tables = "\n".join(lines).split("\n\n")
    return ["".join(line[0] for line in one.splitlines() if line[:1] in SIGNS) for one in tables if "TOKEN" in one]


def test_watch_of_a_fleet_fills_the_terminal_with_what_needs_attention_first(sqlite_url):
    with fleet(sqlite_url, led=30, vacant=5, idle=5) as desks:
        silence(sqlite_url, desks[3])
        with Terminal(TENURE, "watch", TENURE_URL=sqlite_url) as terminal:
            terminal.wait_for("more members")
            lines = terminal.lines()
            coloured = "\n".join(terminal.lines(colours=True))
            terminal.press("C-c")
            assert terminal.wait_ended() == 130
    assert len(lines) == 24
    assert max(map(len, lines)) <= 80
    assert lines[0].endswith("namespace default: 40 roles (1 overdue, 5 vacant), 30 members")
    assert signs(lines) == ["✗○○○○○●●●●●●"]
    assert "✗ led-03" in lines[3]
    assert member(3) in lines[3]
    assert "28 more roles: tenure status" in lines
    assert "26 more members: tenure members" in lines
    assert lines[18].startswith(f"✗ {member(3)}"), "members that are overdue come first, too"
    assert all("…" not in line for line in lines), "names are whole: a narrow terminal lacks columns instead"
    assert "\x1b[31m" in coloured
    assert "\x1b[33m" in coloured
    assert "\x1b[32m" in coloured


def test_watch_never_hides_the_only_led_role(sqlite_url):
    with fleet(sqlite_url, led=1, vacant=39, idle=0), Terminal(TENURE, "watch", TENURE_URL=sqlite_url) as terminal:
        lines = terminal.wait_for("more roles")
    assert len(lines) == 24
    assert "28 more roles: tenure status" in lines
    assert signs(lines) == ["○○○○○○○○○○○●"]


def test_watch_leaves_nothing_out_that_fits(sqlite_url):
    with fleet(sqlite_url, led=15, vacant=0, idle=0, members=5):
        with Terminal(TENURE, "watch", TENURE_URL=sqlite_url) as terminal:
            until(lambda: len(terminal.lines()) == 24, "all lines but one")
            lines = terminal.lines()
        assert "3 more roles: tenure status" in lines
        with Terminal(TENURE, "watch", height=26, TENURE_URL=sqlite_url) as terminal:
            until(lambda: len(terminal.lines()) == 26, "all lines")
            lines = terminal.lines()
        assert not [line for line in lines if "more" in line]


@pytest.mark.parametrize("height", [5, 6, 8, 12])
@pytest.mark.twin("6", "8")
def test_watch_on_a_low_terminal_shows_the_only_led_role_or_says_how_many_there_are(sqlite_url, height):
    with (
        fleet(sqlite_url, led=1, vacant=9, idle=0, members=9),
        Terminal(TENURE, "watch", height=height, TENURE_URL=sqlite_url) as terminal,
    ):
        lines = terminal.wait_for("tenure status")
        assert len(lines) <= height
        assert "10 roles: tenure status" in lines or any(line.startswith("● led-00") for line in lines)


def test_status_has_the_same_order_everywhere_and_no_colour_where_it_is_not_wanted(sqlite_url):
    with fleet(sqlite_url, led=3, vacant=2, idle=2, members=4) as desks:
        silence(sqlite_url, desks[2])
        order = ["led-02", "vacant-00", "vacant-01", "led-00", "led-01", "idle-00", "idle-01"]
        piped = tell("status", url=sqlite_url)
        assert "\x1b" not in piped.out
        assert [line[0] for line in piped.lines[1:8]] == order
        assert piped.lines[10][0] == member(2)
        by_name = [role["role"] for role in json.loads(tell("status", "--json", url=sqlite_url).out)["roles"]]
        assert by_name == sorted(order), "programs find the roles where they were"
        for wish, codes in (({}, {"31", "32", "33"}), ({"NO_COLOR": "1"}, set())):
            with Terminal(TENURE, "status", height=40, TENURE_URL=sqlite_url, **wish) as terminal:
                assert terminal.wait_ended() == 0
                lines = terminal.lines()
                found = set(re.findall(r"\x1b\[(3\d)m", "\n".join(terminal.lines(colours=True))))
            assert signs(lines) == ["✗○○●●··"]
            assert [line.split()[1] for line in lines[1:8]] == order
            assert found - {"39"} == codes
            assert max(map(len, lines)) <= 80


def test_status_of_a_fleet_is_readable_on_80_columns(sqlite_url):
    with fleet(sqlite_url, led=33, vacant=5, idle=2) as desks:
        silence(sqlite_url, desks[3])
        with Terminal(TENURE, "status", height=120, TENURE_URL=sqlite_url) as terminal:
            assert terminal.wait_ended() == 0
            lines = terminal.lines()
    assert max(map(len, lines)) <= 80
    assert signs(lines) == ["✗" + "○" * 5 + "●" * 32 + "··"]
    rows = [line for line in lines if line[:1] in tuple(SIGNS)]
    assert len(rows) == 40 + 30, "each in one line"
    assert lines[-1] == "too narrow for SINCE, VERSION, MODE: widen the terminal, or add `| less -S`"


def test_members_of_a_fleet_have_a_line_each_and_it_says_which_columns_are_missing(sqlite_url):
    with fleet(sqlite_url, led=3, vacant=0, idle=0, members=3):
        with Terminal(TENURE, "members", height=40, TENURE_URL=sqlite_url) as terminal:
            assert terminal.wait_ended() == 0
            lines = terminal.lines()
        assert [line.split()[0] for line in lines[1:4]] == [member(number) for number in range(3)]
        assert re.fullmatch("too narrow for .*ID: widen the terminal, or add `. less -S`", "".join(lines[4:]))
        assert "ID" in tell("members", url=sqlite_url).lines[0]


MARKED = "[red]a[/red][link=http://localhost]b[/link]"


@pytest.mark.parametrize(
    "command",
    [["status"], ["status", MARKED], ["members"], ["watch"], ["history", MARKED], ["doctor"]],
    ids=lambda command: " ".join(command[:1]) + ("-role" if command[1:] else ""),
)
@pytest.mark.twin("history-role", "status-role", "members")
def test_markup_in_names_is_shown_as_it_is(sqlite_url, command):
    with Desk(sqlite_url, name=MARKED, ttl=30) as desk:
        desk.acquire(MARKED)
        if command == ["doctor"]:
            silence(sqlite_url, desk)
        with Terminal(TENURE, *command, width=200, TENURE_URL=sqlite_url) as terminal:
            terminal.wait_for(MARKED)


def test_history_counts_a_gap_from_the_last_sign_of_life_and_says_so(sqlite_url):
    with Desk(sqlite_url, name=member(1)) as first, Desk(sqlite_url, name=member(2)) as second:
        first.lead("r")
        second.succeed(first, "r")
        execute(sqlite_url, "update tenure_terms set began_at = '2026-01-02T03:04:05.000Z' where token = 1")
        execute(
            sqlite_url, f"update tenure_members set renewed_at = '2026-01-02T03:07:25.000Z' where id = '{first.id}'"
        )
        execute(sqlite_url, "update tenure_terms set began_at = '2026-01-02T03:12:26.000Z' where token = 2")
        silence(sqlite_url, second)
        execute(sqlite_url, "update tenure_terms set ended_at = '2026-01-02T03:12:25.990Z' where token = 1")
        answer = tell("history", "r", url=sqlite_url)
        _, newest, oldest, _, said, lasted, _ = answer.lines
        assert newest[5] == "10 ms to 5 min 1 s", "the two times of the dashboard"
        assert newest[4].startswith("silent "), "a leader that is dead does not go on"
        assert (oldest[3], oldest[4]) == ("3 min 20 s", "silence")
        assert said == [
            (
                "two times in GAP BEFORE: the leader of the term before, one row below, died or hung. The first counts "
                "from the moment another node noticed, the second from that leader's last sign of life. The real gap "
                "is between them."
            )
        ]
        assert lasted == ["after a death, LASTED counts to the last sign of life"]
        with Terminal(TENURE, "history", "r", TENURE_URL=sqlite_url) as terminal:
            assert terminal.wait_ended() == 0
            lines = terminal.lines()
        assert max(map(len, lines)) <= 80
        assert lines[0].startswith("TOKEN  LEADER")
        assert lines[1].startswith(f"✗ 2    {member(2)}  "), "the name is whole"
        assert [line for line in lines if line.startswith("  1    importer-")]
        assert any(line.startswith("too narrow for BEGAN, LASTED:") for line in lines)
        assert not [line for line in lines if line.startswith("LASTED")], "no note on a column that is left out"
        newest, oldest = json.loads(tell("history", "r", "--json", url=sqlite_url).out)
        assert (newest["ended"], newest["reason"], newest["silence"]) == (None, None, 301.0)
        assert newest["last_seen"] is not None


@pytest.mark.twin("postgres")
def test_leader_that_renews_goes_on(store_url):
    with Desk(store_url, ttl=30) as desk:
        desk.lead("r")
        assert tell("history", "r", url=store_url).lines[1][4] == "goes on"
        (term,) = json.loads(tell("history", "r", "--json", url=store_url).out)
        assert term["last_seen"] is None


@pytest.mark.twin("postgres")
def test_lone_leader_that_died_is_silent_and_its_term_does_not_go_on(store_url):
    with Desk(store_url, ttl=1) as desk:
        desk.lead("r")
    until(lambda: "overdue" in tell("status", url=store_url).out, "its lease is over")
    line = tell("history", "r", url=store_url).lines[1]
    assert line[4].startswith("silent ")
    assert "goes on" not in tell("status", "r", url=store_url).out


def test_doctor_with_everything_wrong_breaks_lines_between_words(postgres_url):
    with Desk(postgres_url, ttl=10, name="importer-7d9c6bf7b9-x2x4q") as desk:
        database = postgres_url.rpartition("/")[2]
        execute(
            postgres_url,
            "update tenure.members set renewed_at = joined_at, ttl_ms = 1",
            "update tenure.namespaces set promotion = 'loses-nothing'",
            "create table invoices (n int)",
            "select tenure.guard_table('invoices', 'default', 'billing')",
            "alter table invoices disable trigger all",
            *(
                f"alter database {database} set {name} = '{value}'"
                for name, value in (("statement_timeout", "5s"), ("lock_timeout", "5s"), ("transaction_timeout", "5s"))
                if execute(postgres_url, f"select count(*) from pg_settings where name = '{name}'") == [(1,)]
            ),
        )
        desk.acquire("r")
        with Terminal(TENURE, "doctor", "--ttl", "3600", height=100, TENURE_URL=postgres_url) as terminal:
            assert terminal.wait_ended() == 2
            lines = terminal.lines()
        with Terminal(TENURE, "doctor", "--ttl", "3600", TENURE_URL=postgres_url) as terminal:
            assert terminal.wait_ended() == 2
            low = terminal.lines()
    assert max(map(len, lines)) <= 80
    failed = [line for line in lines if line.startswith("FAIL")]
    assert [line for line in low if line.startswith("FAIL")] == failed, "they are repeated where they can be seen"
    *lines, blank, closing, rest = lines
    levels = [line[:4] for line in lines if line[:4].strip()]
    assert levels == sorted(levels, key=["FAIL", "warn", "ok  "].index), "the worst comes first"
    said = f"{closing} {rest}"
    assert not blank
    assert re.sub(r" \(.*?\)", "", said) == ", ".join(
        f"{levels.count(level)} {level.strip()}" for level in ("FAIL", "warn", "ok  ")
    )
    assert re.match(r"\d FAIL \((?=.*largest ttl)(?=.*promotion).*?\), ", said), "it names what fails"
    assert not [line for line in lines if re.search(r"^ +(ms|s|min|h|d)\b", line)], "a number stays with its unit"
    assert {"FAIL", "warn", "ok  "} <= set(levels)
    assert levels.count("FAIL") >= 2
    assert levels.count("warn") >= 3
    margin = len(lines[0]) - len(lines[0][6:].lstrip().split("  ", 1)[1].lstrip())
    assert all(line[:margin].strip() == "" for line in lines if not line[:4].strip()), "texts are below texts"
    said = " ".join(" ".join(line[margin:] for line in lines).split())
    for finding in json.loads(doctor_json(postgres_url)):
        if finding["level"] != "ok" and not re.search(r"\d ms|\d s ago", finding["text"]):
            assert finding["text"] in said, "no word is broken or lost"
            assert f"remedy: {finding['remedy']}" in said


def doctor_json(url: str) -> str:
    from tests.cli.test_cli import Answer

    return Answer("doctor", "--ttl", "3600", "--json", url=url).out


def test_completion_works_in_bash_as_the_page_says(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "cli.md"
    line = re.search(r"^(eval .*bash_source tenure.*)$", page.read_text(), re.MULTILINE)
    assert line is not None
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with Terminal("env", f"PATH={path}", "bash", "--norc", "-i", HOME=str(tmp_path)) as terminal:
        terminal.wait_for("bash-")
        terminal.press(line[1], "Enter")
        terminal.press("complete -p tenure", "Enter")
        terminal.wait_for("complete -o nosort -F _tenure_completion tenure")
        terminal.press("tenure stat", "Tab")
        terminal.wait_for("tenure status")
        terminal.press("--name", "Tab")
        terminal.wait_for("tenure status --namespace")


@pytest.mark.parametrize(
    ("shell", "word"), [("zsh", "compdef _tenure_completion tenure"), ("fish", "complete --no-files --command tenure")]
)
def test_completion_for_other_shells_is_printed(shell, word):
    import subprocess

    environment = os.environ | {"_TENURE_COMPLETE": f"{shell}_source"}
    said = subprocess.run([TENURE], env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    assert word in said
