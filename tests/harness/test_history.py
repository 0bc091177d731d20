"""Each checker finds the violation that it is for, and says nothing about a clean history.

A checker that cannot fail proves nothing, so every promise is broken here on purpose. Times are in ms.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.history import (
    History,
    Recorder,
    leaderless,
    ledger_regressions,
    now_ns,
    overlap_spans,
    overlaps,
    report,
    sampling_gaps,
    stale_writes,
    token_regressions,
    violations,
)

REPOSITORY = Path(__file__).parents[2]
MS = 1_000_000
ROLE = "scheduler"


def read(node, at, token=None, *, until=None, role=ROLE, pid=None):
    """A read begun at `at`: True under a token, else False. It took a microsecond, or lasted `until`."""
    end = at * MS + 1000 if until is None else until * MS
    return {
        "kind": "read", "node": node, "pid": pid, "role": role, "leader": token is not None, "token": token,
        "at_before": at * MS, "at": end,
    }  # fmt: skip


def reads(node, first, last, token=None, **more):
    return [read(node, at, token, **more) for at in range(first, last + 1)]


def elected(node, at, token, **more):
    stamps = {"at_before": at * MS, "at": at * MS}
    return {"kind": "term", "event": "elected", "node": node, "role": ROLE, "token": token, **stamps, **more}


def write(node, at, token, *, until=None, ok=True):
    stamps = {"at_before": at * MS, "at": (at if until is None else until) * MS}
    return {"kind": "write", "node": node, "role": ROLE, "token": token, "ok": ok, **stamps}


def fault(what, target, at):
    stamps = {"at_before": at * MS, "at": at * MS}
    return {"kind": "fault", "node": "test", "fault": what, "target": target, **stamps}


def clean():
    """`a` leads with 1, dies; `b` leads with 2, resigns; `a`, started anew, leads with 3."""
    return History(
        [
            *[elected("a", 1, 1, pid=10), *reads("a", 2, 10, 1, pid=10), write("a", 5, 1)],
            *[*reads("b", 2, 14), elected("b", 15, 2), *reads("b", 16, 30, 2), write("b", 17, 2)],
            *[*reads("b", 31, 50), *reads("a", 20, 31, pid=11), *reads("a", 33, 50, 3, pid=11)],
            *[write("a", 12, 1, until=20, ok=False), write("a", 40, 3)],
            fault("kill -9", "a", 10),
        ]
    )


def test_clean_history_has_no_violations():
    assert violations(clean()) == []


def test_order_of_the_files_does_not_matter():
    assert violations(History(reversed(clean().lines))) == []


# --- overlap


def test_two_leaders_at_once_are_found():
    history = History([*reads("a", 1, 10, 1), *reads("b", 8, 20, 2)])
    assert overlaps(history) == [
        "role 'scheduler': a (token 1) and b (token 2) both led for 2.001 ms, from 0.007000 s to 0.009001 s"
    ]


def test_overlap_of_a_single_read_is_found():
    assert len(overlaps(History([*reads("a", 1, 10, 1), read("b", 5, 2)]))) == 1


def test_leader_amid_the_reads_of_another_is_found_across_a_gap():
    """Nobody asked `a` while `b` led, but its term went on afterwards, so it had never ended."""
    assert len(overlaps(History([read("a", 1, 1), *reads("b", 100, 200, 2), read("a", 300, 1)]))) == 1


def test_two_processes_of_one_name_are_two_leaders():
    history = History([*reads("a", 1, 10, 1, pid=10), *reads("a", 8, 20, 2, pid=11)])
    assert len(overlaps(history)) == 1


def test_leaders_of_different_roles_do_not_overlap():
    history = History([*reads("a", 1, 10, 1, role="x"), *reads("b", 1, 10, 1, role="y")])
    assert overlaps(history) == []


def test_suspended_leader_does_not_overlap_with_its_successor():
    history = History([*reads("a", 1, 10, 1), *reads("a", 11, 30), *reads("b", 12, 30, 2)])
    assert overlaps(history) == []


def test_own_terms_of_one_process_do_not_overlap():
    history = History([*reads("a", 1, 10, 1), *reads("b", 11, 12, 2), *reads("a", 13, 20, 3)])
    assert overlaps(history) == []


def test_process_stopped_inside_a_read_is_no_overlap():
    """It was True before the stop, and the clock was looked at only after it: nobody knows, so no proof."""
    history = History([*reads("a", 1, 9, 1), read("a", 10, 1, until=500), *reads("b", 100, 600, 2)])
    assert violations(history) == []


def test_process_stopped_inside_its_first_read_is_no_overlap():
    history = History([*reads("b", 1, 100, 2), read("a", 50, 3, until=200), *reads("a", 201, 300, 3)])
    assert violations(history) == []


def test_process_stopped_inside_its_only_read_is_no_regression():
    history = History([read("a", 10, 1, until=500), *reads("b", 100, 600, 2)])
    assert violations(history) == []
    assert [belief.until - belief.since for belief in history.beliefs() if belief.node == "a"] == [0]


def test_extent_of_an_overlap_can_be_bounded():
    [overlap] = overlap_spans(History([*reads("a", 1, 10, 1), *reads("b", 8, 20, 2)]))
    assert (overlap.since, overlap.until) == (8 * MS, 10 * MS + 1000)
    assert (overlap.one.node, overlap.other.node) == ("a", "b")


# --- tokens


def test_token_that_goes_back_is_found():
    history = History([*reads("a", 1, 10, 5), *reads("a", 11, 12), *reads("b", 15, 20, 4)])
    assert token_regressions(history) == [
        "role 'scheduler': b began to lead with token 4 at 0.014000 s, after token 5 was a's at 0.000001 s"
    ]


def test_token_used_twice_is_found():
    history = History([*reads("a", 1, 10, 5), *reads("b", 15, 20, 5)])
    assert token_regressions(history) == ["role 'scheduler': token 5 was used by a (pid None), b (pid None)"]


def test_token_used_again_by_a_restarted_process_is_found():
    history = History([*reads("a", 1, 10, 5, pid=10), *reads("a", 15, 20, 5, pid=11)])
    assert token_regressions(history) == ["role 'scheduler': token 5 was used by a (pid 10), a (pid 11)"]


def test_token_used_twice_is_found_where_it_was_only_announced():
    assert len(token_regressions(History([elected("a", 1, 5), elected("b", 2, 5)]))) == 1


def test_same_token_announced_twice_to_one_process_is_found():
    [found] = token_regressions(History([elected("a", 1, 5), elected("a", 2, 5)]))
    assert "a was elected with token 5" in found


def test_term_taken_up_again_after_a_later_one_is_found():
    """No overlap, since `a` read False meanwhile: but its term was over."""
    suspended = [*reads("a", 1, 5, 1), *reads("a", 6, 20), *reads("a", 21, 25, 1)]
    history = History([*suspended, *reads("b", 10, 15, 2)])
    assert overlaps(history) == []
    [found] = token_regressions(history)
    assert "a began to lead with token 1 at 0.020000 s, after token 2 was b's" in found


def test_term_resumed_with_nobody_in_between_is_fine():
    assert violations(History([*reads("a", 1, 5, 1), *reads("a", 6, 20), *reads("a", 21, 25, 1)])) == []


def test_leading_without_a_token_is_found():
    line = read("a", 1, 1) | {"token": None}
    assert token_regressions(History([line])) == ["role 'scheduler': a led without a token from 0.000000 s"]


def test_election_heard_of_late_is_no_regression():
    """`a` was elected, stopped, succeeded, and heard of it all only when it woke; it never read True."""
    assert violations(History([*reads("b", 10, 20, 2), elected("a", 30, 1)])) == []


# --- fenced writes


SIGNS = {"elected": elected("b", 10, 2), "read": read("b", 10, 2), "write": write("b", 9, 2, until=10)}


@pytest.mark.parametrize("sign", SIGNS.values(), ids=SIGNS)
def test_write_sent_after_a_later_term_began_is_found(sign):
    [found] = stale_writes(History([sign, write("a", 11, 1)]))
    assert "a's write with token 1" in found
    assert "though token 2 was b's" in found


def test_write_refused_after_a_later_term_began_is_fine():
    assert stale_writes(History([elected("b", 10, 2), write("a", 11, 1, ok=False)])) == []


def test_write_under_way_when_a_later_term_began_proves_nothing():
    assert stale_writes(History([elected("b", 10, 2), write("a", 9, 1, until=12)])) == []


def test_refused_write_is_no_sign_of_a_later_term():
    assert stale_writes(History([write("b", 9, 2, ok=False), write("a", 11, 1)])) == []


def test_ledger_with_falling_tokens_is_found():
    assert ledger_regressions([(1, 1), (2, 2), (3, 2), (5, 3)]) == []
    assert ledger_regressions([(4, 1), (1, 1), (2, 2)]) == ["row 4 has token 1, after row 2 with token 2"]
    assert ledger_regressions([]) == []


# --- leaderless time, gaps, report


def test_leaderless_time_is_what_no_belief_covers():
    history = History([*reads("a", 10, 20, 1), *reads("b", 15, 30, 2), *reads("c", 40, 50, 3)])
    spans = leaderless(history, 5 * MS, 60 * MS)
    assert [(span.since, span.until) for span in spans] == [
        (5 * MS, 10 * MS),
        (30 * MS + 1000, 40 * MS),
        (50 * MS + 1000, 60 * MS),
    ]
    assert leaderless(history, 12 * MS, 28 * MS) == []
    assert [span.length for span in leaderless(history, 35 * MS, 38 * MS)] == [3 * MS]


def test_role_that_nobody_led_is_leaderless_throughout():
    history = History([*reads("a", 10, 20), *reads("b", 10, 20, 1, role="other")])
    [span] = leaderless(history, role=ROLE)
    assert (span.since, span.until) == (history.start, history.end)


def test_gaps_between_reads_are_reported():
    history = History([read("a", 1, 1), read("a", 2, 1), read("a", 302, 1), read("b", 5)])
    [gap] = sampling_gaps(history, 100 * MS)
    assert (gap.node, gap.length) == ("a", 300 * MS + 1000)
    assert "no reads of 'scheduler' by a for 300.0 ms" in report(history)


def test_report_shows_terms_writes_faults_and_how_far_it_saw():
    text = report(clean())
    print(text)
    assert "writes: 3 acknowledged, 1 not" in text
    assert "nobody led for" in text
    assert "fault at 0.009000 s: kill -9 a" in text
    assert [line.split()[:2] for line in text.splitlines()[2:5]] == [["1", "a"], ["2", "b"], ["3", "a"]]
    assert "reads were at most 2.0 ms apart; 0 torn lines" in text


def test_empty_history_is_reported_too():
    assert violations(History([])) == []
    assert report(History([])) == "reads were at most 0.0 ms apart; 0 torn lines"


# --- recording


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_recorder_writes_ends_of_runs_and_heartbeats_only(tmp_path):
    path = tmp_path / "a.jsonl"
    recorder = Recorder(path, "a", heartbeat_s=0.010)
    every = [*reads("a", 0, 24), *reads("a", 25, 40, 7), *reads("a", 41, 43), read("a", 90), read("a", 91)]
    for line in every:
        fields = {name: line[name] for name in ("role", "leader", "token", "at_before", "at")}
        recorder.read(**fields)
    recorder.close()
    lines = lines_of(path)
    # First and last of each run, one every 10 ms, both sides of the step from 43 to 90.
    assert [line["at_before"] // MS for line in lines] == [0, 10, 20, 24, 25, 35, 40, 41, 43, 90, 91]
    assert sum(line["reads"] for line in lines) == len(every)
    assert [line["gap"] // MS for line in lines] == [0, 1, 1, 1, 1, 1, 1, 1, 1, 47, 1]
    thinned, whole = History.load([path]), History(every)
    for one, other in zip(thinned.beliefs(), whole.beliefs(), strict=True):
        assert (one.since, one.until, one.reads, one.token) == (other.since, other.until, other.reads, 7)
    assert [gap.length for gap in sampling_gaps(thinned, 20 * MS)] == [47 * MS + 1000]


def test_sample_leaves_out_an_answer_between_two_tokens(tmp_path):
    recorder = Recorder(tmp_path / "a.jsonl", "a")
    tokens = iter([5, 5, 5, 6, 6, None, None])
    assert recorder.sample(ROLE, lambda: True, lambda: next(tokens))
    assert recorder.sample(ROLE, lambda: True, lambda: next(tokens))  # under 5 or under 6?
    assert recorder.sample(ROLE, lambda: True, lambda: next(tokens))  # under 6, or none?
    assert not recorder.sample(ROLE, lambda: False, lambda: next(tokens))
    recorder.close()
    found = [(line["leader"], line["token"]) for line in lines_of(tmp_path / "a.jsonl")]
    assert found == [(True, 5), (False, None)]


def test_all_kinds_of_lines_come_back(tmp_path):
    path = tmp_path / "a.jsonl"
    recorder = Recorder(path, "a")
    before = now_ns()
    recorder.sample(ROLE, lambda: True, lambda: 3)
    recorder.term(ROLE, "elected", 3)
    recorder.write(ROLE, 3, ok=True, at_before=before, rows=2)
    recorder.fault("partition", "server")
    recorder.close()
    lines = History.load([path]).lines
    assert {line.kind for line in lines} == {"read", "term", "write", "fault"}
    assert {line.pid for line in lines} == {os.getpid()}
    assert all(before <= line.at_before <= line.at <= now_ns() for line in lines)
    [write] = [line for line in lines if line.kind == "write"]
    assert (write.at_before, write.ok, write.details) == (before, True, {"rows": 2})


def test_killed_process_leaves_whole_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    program = (
        "import sys; from tests.support.history import Recorder\n"
        "recorder = Recorder(sys.argv[1], 'a', heartbeat_s=0)\n"
        "while True: recorder.sample('scheduler', lambda: True, lambda: 1); print(flush=True)"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as child:
        for _ in range(1000):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    history = History.load([path])
    assert len(history.lines) >= 1000
    assert history.torn == 0


def test_torn_last_line_is_counted_and_any_other_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl"
    whole = json.dumps(read("a", 1, 1))
    path.write_text(f'{whole}\n{{"kind": "re')
    history = History.load([path])
    assert (len(history.lines), history.torn) == (1, 1)
    path.write_text(f'{{"kind": "re\n{whole}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1"):
        History.load([path])


@pytest.mark.parametrize("believed", [True, False])
def test_forked_child_answers_for_its_own_reads_only(tmp_path, believed):
    path = tmp_path / "a.jsonl"
    program = (
        "import os, sys; from tests.support.history import Recorder\n"
        "recorder = Recorder(sys.argv[1], 'a', heartbeat_s=1)\n"
        "for _ in range(3): recorder.sample('scheduler', lambda: True, lambda: 1)\n"
        "child = os.fork()\n"
        f"if not child: recorder.sample('scheduler', lambda: {believed}, lambda: 1)\n"
        "recorder.close()\n"
        "if child: os.waitpid(child, 0)"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], cwd=REPOSITORY, check=True)
    found = token_regressions(History.load([path]))
    assert ["token 1 was used by a (pid" in text for text in found] == [True] * believed
