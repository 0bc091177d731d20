"""The benchmark beside peers: what it counts and writes; and, where there is time, that it runs."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.peers import entrants, report
from benchmarks.peers.counting import CountingLine
from tests.conftest import INSTALLATIONS, NO_POSTGRES, missing
from tests.support.store_by_hand import until

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "beside.py"


def made_up(everybody, quick_ms):
    """Samples in which Tenure takes so long, and everybody else a hundred times that."""
    samples = {}
    for one in everybody:
        ms = {"bare_lock": 5.0, "tenure_node": quick_ms}.get(one.module, 100 * quick_ms)
        paused = {"succeeded_ms": 1e4, "overlap_ms": 0.0 if one.module == "tenure_node" else 5000.0}
        samples[one.label] = {
            "start": [300.0],
            "crash": [ms, ms, None] if one.module == "pals_lock" else [ms, ms, ms],
            "hand-over": [ms],
            "pause": [paused if one.survives_a_pause else {"succeeded_ms": None, "overlap_ms": None}],
            "rest": [{"requests_per_s": 1.5, "cpu_ms_per_s": 2.0, "connections": 2.0}],
            "check": [200.0 if one.module != "etcdctl" else None],
        }
    return samples


def report_of(quick_ms, **more):
    everybody = entrants(defaults=True)
    for one in everybody:
        try:
            report.package_version(one)
        except ImportError as error:
            missing(f"no {error} found: install the dependency group peers")
    growth = [
        {"nodes": 3, "roles": roles, "crash_ms": [20.0 + ms], "rest": {"requests_per_s": 1.5, "cpu_ms_per_s": 2.0}}
        for roles, ms in ((1, 0.0), (10_000, more.get("for_roles_ms", 400.0)))
    ]
    return report.Report(everybody, made_up(everybody, quick_ms), growth, [], "--rounds 3", 60.0)


@pytest.fixture(autouse=True)
def _no_server_is_asked_for_its_release(monkeypatch):
    monkeypatch.setattr("benchmarks.peers.servers.version", lambda kind: f"{kind} 1.0")


def test_report_has_a_line_for_everybody_and_says_what_was_reached():
    made = report_of(15.0)
    text = made.markdown()
    for one in made.everybody:
        assert f"| {one.label} | 300.0 ms |" in text
    assert made.kept
    assert "- yes: crash failover within 4 times of the bare waiter: 3.00 times" in text
    assert "never" in text
    ET.fromstring(made.picture())


@pytest.mark.parametrize(("quick_ms", "more"), [(21.0, {}), (15.0, {"for_roles_ms": 600.0})])
def test_report_says_what_was_not_reached(quick_ms, more):
    made = report_of(quick_ms, **more)
    assert not made.kept
    assert "- **NO**: " in made.markdown()


def test_either_benchmark_keeps_what_the_other_has_written(tmp_path):
    results = tmp_path / "RESULTS.md"
    assert report.schedulers_in(results) == ""
    results.write_text("# Peers\n\nold\n")
    results.write_text(report.without_schedulers(results) + f"{report.SCHEDULERS}\n\n| a |\n")
    results.write_text("# Peers\n\nnew\n" + report.schedulers_in(results))
    assert results.read_text() == f"# Peers\n\nnew\n\n{report.SCHEDULERS}\n\n| a |\n"
    assert report.without_schedulers(results) == "# Peers\n\nnew\n\n"


def test_median_of_what_mostly_never_happens_is_never():
    assert report.median([1.0, None, None]) is None
    assert report.median([1.0, 3.0, None]) == 3.0
    assert report.median([1.0, 2.0]) == 1.5
    assert report.p95([1.0] * 19 + [7.0]) == 7.0


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
    few = ["--rounds", "1", "--pauses", "0", "--rests", "1", "--rest", "1", "--growth", "0", "--only", "lock"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *few, "--into", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert "bare pg_advisory_lock" in (tmp_path / "RESULTS.md").read_text(), done.stderr
    ET.parse(tmp_path / "results.svg")
