"""The benchmark beside peers: what it counts and writes; and, where there is time, that it runs."""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks import beside, trace
from benchmarks.peers import entrants, report
from benchmarks.peers.counting import CountingLine
from benchmarks.peers.figures import median, p95
from benchmarks.peers.servers import filesystem
from benchmarks.starts import STARTS, floor_of
from tests.conftest import INSTALLATIONS, NO_POSTGRES, missing
from tests.support.store_by_hand import until

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "beside.py"


FLOOR_MS = 5.0
GOOD = {
    "crash_ms": 2 * FLOOR_MS,
    "handover_ms": 1.9 * FLOOR_MS,
    "start_ratio": 1.1,
    "cpu_ms_per_s": 1.9,
    "requests_per_s": 1.4,
    "for_roles_ms": 200.0,
    "durable": True,
}
"""Figures of Tenure that reach everything that is demanded, beside floors of 5 ms and peers of a second."""


def made_up(everybody, figures):
    """Samples in which Tenure has these figures."""
    samples = {}
    for one in everybody:
        crash_ms, handover_ms = {
            "bare_lock": (FLOOR_MS, FLOOR_MS),
            "commits": (None, FLOOR_MS),
            "tenure_node": (figures["crash_ms"], figures["handover_ms"]),
        }.get(one.module, (1000.0, 2 * FLOOR_MS))
        paused = {"succeeded_ms": 1e4, "overlap_ms": 0.0 if one.module == "tenure_node" else 5000.0}
        rest = {name: figures[name] for name in ("cpu_ms_per_s", "requests_per_s")}
        samples[one.label] = {
            "start": [300.0],
            "crash": [crash_ms, crash_ms, None] if one.module == "pals_lock" else [crash_ms] * 3,
            "hand-over": [handover_ms],
            "pause": [paused if one.survives_a_pause else {"succeeded_ms": None, "overlap_ms": None}],
            "rest": [{**rest, "connections": 2.0}],
            "check": [200.0 if one.module != "etcdctl" else None],
        }
    return samples


def report_of(**worse):
    figures = GOOD | worse
    everybody = entrants(defaults=True)
    for one in everybody:
        try:
            report.package_version(one)
        except ImportError as error:
            missing(f"no {error} found: install the dependency group peers")
    rest = {name: figures[name] for name in ("cpu_ms_per_s", "requests_per_s")}
    growth = [
        {"nodes": nodes, "roles": roles, "crash_ms": [figures["crash_ms"] + ms], "floor_ms": [FLOOR_MS], "rest": rest}
        for nodes, roles, ms in ((3, 1, 0.0), (50, 1, 0.0), (3, 10_000, figures["for_roles_ms"]))
    ]
    starts = {one.name: [100.0 * (figures["start_ratio"] if one.floor else 1.0)] for one in STARTS}
    kept = [report.Durability("postgres", "fsync=on", "ext4", 12, figures["durable"])]
    return report.Report(everybody, made_up(everybody, figures), growth, [], starts, kept, options="--rounds 3")


@pytest.fixture(autouse=True)
def _no_server_is_asked_for_its_release(monkeypatch):
    monkeypatch.setattr("benchmarks.peers.servers.version", lambda kind: f"{kind} 1.0")


def test_report_has_a_line_for_everybody_and_says_what_was_reached():
    made = report_of()
    text = made.markdown()
    for one in made.everybody:
        assert f"| {one.label} | 300.0 ms |" in text
    assert [said for said, reached in made.verdicts if not reached] == []
    for said in (
        "crash failover within 2.2 times of the bare waiter: 2.00 times",
        "crash failover 70 times quicker than kazoo, session 1 s: 100.00 times",
        "crash failover of 50 nodes within 2.2 times of as many bare waiters: 2.00 times",
        "hand-over not slower than etcdctl, lock, TTL 2 s: 0.95 times as long",
        "hand-over within 2 times of two commits and a notification: 1.90 times",
        "start of Node, PostgreSQL within 1.2 times of the bare program: 1.10 times",
        "at most 1.4 requests per second and node at rest, 3 nodes, 10,000 roles: 1.40",
        "10,000 roles led again within 350 ms: 210.0 ms",
    ):
        assert f"- yes: {said}" in text
    assert "never" in text
    ET.fromstring(made.picture())


@pytest.mark.parametrize(
    ("worse", "said"),
    [
        ({"crash_ms": 11.1}, "crash failover within 2.2 times of the bare waiter"),
        ({"crash_ms": 11.1}, "crash failover of 50 nodes within 2.2 times of as many bare waiters"),
        ({"crash_ms": 15.0}, "crash failover 70 times quicker than as Oban does it, interval 1 s"),
        ({"handover_ms": 10.1}, "hand-over within 2 times of two commits and a notification"),
        ({"handover_ms": 10.1}, "hand-over not slower than kazoo, session 1 s"),
        ({"start_ratio": 1.3}, "start of Node, PostgreSQL within 1.2 times"),
        ({"start_ratio": 1.6}, "start of Node, SQLite within 1.5 times"),
        ({"cpu_ms_per_s": 2.1}, "at most 2 ms of CPU per second and node at rest, 50 nodes, 1 roles"),
        ({"requests_per_s": 1.46}, "at most 1.4 requests per second and node at rest, tenure, TTL 10 s"),
        ({"for_roles_ms": 260.0}, "at most 25 µs more of crash failover for each role"),
        ({"for_roles_ms": 345.0}, "10,000 roles led again within 350 ms"),
        ({"durable": False}, "postgres keeps what it has answered"),
    ],
)
def test_report_says_what_was_not_reached(worse, said):
    made = report_of(**worse)
    assert not made.kept
    assert f"- **NO**: {said}" in made.markdown()


def test_peers_as_they_come_are_measured_many_at_a_time_and_demand_nothing():
    made = report_of()
    come = [one for one in made.everybody if one.is_default]
    assert {one.module for one in come} >= {"oban", "gemstone", "etcdctl"}
    for one in come:
        assert set(one.variant.waits) >= {"crash", "hand-over"}
        assert not any(one.label in said for said, _ in made.verdicts)


@pytest.mark.parametrize(
    ("told", "filled_in"),
    [
        ({}, {"waits": 5, "growth": 5, "traces": 12, "starts": 20, "into": "benchmarks"}),
        ({"rounds": 2}, {"waits": 2, "pauses": 2, "rests": 2, "growth": 5, "growth_rounds": 2, "into": "build"}),
        ({"only": "River"}, {"waits": 5, "growth": 0, "traces": 0, "starts": 0, "into": "build"}),
        ({"only": "River", "traces": 1, "into": Path("there")}, {"traces": 1, "starts": 0, "into": "there"}),
    ],
)
def test_fewer_rounds_mean_less_of_everything_and_spare_the_published_results(told, filled_in):
    options = argparse.Namespace(**dict.fromkeys([*beside.USUAL, "growth", "only", "into"]) | {"rounds": 20} | told)
    beside.fill_in(options)
    assert {name: vars(options)[name] for name in filled_in if name != "into"} | {
        "into": options.into.name
    } == filled_in


def test_every_start_is_compared_with_a_bare_program_on_the_same_server():
    for start in STARTS:
        if start.floor:
            bare = floor_of(start)
            assert (bare.server, bare.fresh) == (start.server, start.fresh)
            assert not bare.floor
    assert len({start.name for start in STARTS}) == len(STARTS)


def test_filesystem_is_that_of_the_innermost_mount():
    mounts = "/dev/vda / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n/dev/vdb /tmp xfs rw 0 0\nnone /tmp tmpfs rw 0 0\n"
    assert filesystem(Path("/var/tmp/data"), mounts) == "ext4"
    assert filesystem(Path("/dev/shm/tenure/data"), mounts) == "tmpfs"
    assert filesystem(Path("/tmp"), mounts) == "tmpfs"


SPANS = [
    (-900, 4_000_000, "watch", "Look"),
    (-800, 3_000_000, "watch", "round-trip"),
    (-900, 99_000_000, "other", "Look"),
    (4_100_000, 9_000_000, "watch", "Knock"),
    (4_200_000, 8_000_000, "watch", "connect"),
    (9_500_000, 12_000_000, "control", "Acquire"),
    (10_000_000, 10_500_000, "control", "round-trip"),
    (11_000_000, 11_500_000, "control", "round-trip"),
    (12_500_000, 13_000_000, "control", "Acquire"),
    (13_100_000, 13_100_000, "knocker", "connect"),
    (9_000_000, 9_000_000, "control", "notified:vacant"),
    (15_000_000, 16_000_000, "control", "Renew"),
]
"""What a successor recorded, as nanoseconds after a fault at 0; it led at 14 ms."""


def test_trace_names_round_trips_after_their_requests_and_leaves_out_what_had_no_part():
    stages = {stage.what: stage for stage in trace.stages_of(trace.NEW, SPANS, 0, 14_000_000)}
    assert sorted(stages) == [
        "Acquire",
        "Acquire 2",
        "Acquire, round trip 1",
        "Acquire, round trip 2",
        "Knock",
        "Knock, connect 1",
        "Look",
        "Look, round trip 1",
        "no request, connect 1",
        "notified vacant",
    ]
    assert (stages["Acquire"].began_ms, stages["Acquire"].ended_ms) == (9.5, 12.0)
    assert stages["Look"].began_ms < 0
    assert stages["Knock, connect 1"].is_detail
    assert not stages["Knock"].is_detail


def traces_of(*totals_ms):
    return [
        trace.Trace(kind, tuple(trace.stages_of(trace.NEW, spans, 0, round(total * 1e6))), total)
        for kind in (trace.CRASH, trace.HANDOVER)
        for number, total in enumerate(totals_ms)
        for spans in [SPANS if number else [*SPANS, (1, 2_000_000, "control", "Tidy")]]
    ]


def test_trace_shows_the_example_nearest_to_the_median_and_what_most_rounds_have():
    traces = traces_of(30.0, 14.0, 17.0)
    (crashes, _) = trace.kinds(traces)
    assert trace.example(crashes).total_ms == 17.0
    text = trace.markdown(traces)
    assert "### A crash failover: 17.0 ms in the median" in text
    assert "| successor | watch | Look | before | 4.0 ms | before | 4.0 ms | 4.0 ms | 3 |" in text
    assert "| successor | control | Acquire | 9.5 ms | 12.0 ms | 9.5 ms | 12.0 ms | 2.5 ms | 3 |" in text
    assert "Tidy" not in text
    assert "| old leader | | call of resign() |" in text
    ET.fromstring(trace.picture(traces))


def test_either_benchmark_keeps_what_the_other_has_written(tmp_path):
    results = tmp_path / "RESULTS.md"
    assert report.schedulers_in(results) == ""
    results.write_text("# Peers\n\nold\n")
    results.write_text(report.without_schedulers(results) + f"{report.SCHEDULERS}\n\n| a |\n")
    results.write_text("# Peers\n\nnew\n" + report.schedulers_in(results))
    assert results.read_text() == f"# Peers\n\nnew\n\n{report.SCHEDULERS}\n\n| a |\n"
    assert report.without_schedulers(results) == "# Peers\n\nnew\n\n"


def test_median_of_what_mostly_never_happens_is_never():
    assert median([1.0, None, None]) is None
    assert median([1.0, 3.0, None]) == 3.0
    assert median([1.0, 2.0]) == 1.5
    assert p95([1.0] * 19 + [7.0]) == 7.0


def test_request_is_counted_once_however_it_is_cut_up():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                while True:
                    piece = connection.recv(100)
                    if not piece:
                        return
                    if piece.endswith(b"!"):
                        connection.sendall(b"yes")

        threading.Thread(target=answer, daemon=True).start()
        with contextlib.closing(CountingLine(server.getsockname()[1])) as line:
            with socket.create_connection(("127.0.0.1", line.port)) as client:
                for _ in range(3):
                    for piece in (b"are ", b"you ", b"there!"):
                        client.sendall(piece)
                    assert client.recv(10) == b"yes"
                assert (line.requests, line.connections) == (3, 1)
            until(lambda: line.connections == 0, "the connection is gone")


@pytest.mark.long
def test_benchmark_beside_peers_runs(tmp_path):
    if not INSTALLATIONS:
        missing(NO_POSTGRES)
    few = ["--rounds", "1", "--waits", "0", "--pauses", "0", "--rests", "1", "--rest", "1", "--traces", "1"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *few, "--only", "lock", "--into", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert "bare pg_advisory_lock" in (tmp_path / "RESULTS.md").read_text(), done.stderr
    assert "| successor | control | Acquire |" in (tmp_path / "RESULTS.md").read_text()
    for name in ("results.svg", report.TRACE_SVG):
        ET.parse(tmp_path / name)
