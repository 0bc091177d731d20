"""The Patroni cluster of the tests: its machines can be unplugged, frozen and killed, and nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import missing
from tests.support import network as networks
from tests.support import patroni
from tests.support.network import Machines, inside
from tests.support.patroni import PatroniCluster

pytestmark = [pytest.mark.harness, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).parents[2]
PORT = 7000


@pytest.fixture(autouse=True)
def _what_it_needs() -> None:
    if reason := patroni.why_unavailable():
        missing(reason)


def eventually(condition: Callable[[], bool], timeout: float = 30) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_machine_that_is_unplugged_is_silent_and_the_others_are_not():
    with Machines(2) as machines, contextlib.ExitStack() as stack:
        for name, address in zip(machines.names, machines.addresses, strict=True):
            listener = inside(name, lambda address=address: socket.create_server((address, PORT)))
            stack.enter_context(listener)

        def knock(address: str) -> str:
            try:
                inside(machines.hub, lambda: socket.create_connection((address, PORT), timeout=1)).close()
            except OSError as error:
                return type(error).__name__
            return "connected"

        first, second = machines.addresses
        assert [knock(first), knock(second)] == ["connected", "connected"]
        machines.cut(0)
        assert [knock(first), knock(second)] == ["TimeoutError", "connected"]
        machines.heal(0)
        assert [knock(first), knock(second)] == ["connected", "connected"]


def test_cluster_that_loses_its_primary_promotes_the_standby_and_takes_the_old_one_back():
    with PatroniCluster("synchronous", etcd_members=3) as cluster:
        cluster.create_database("app", owner="app")
        old, standby = cluster.primary(), cluster.standby()
        assert Path(f"/proc/{old.postmaster}").stat().st_uid != 0
        old.execute("create table kept (n int)", dbname="app")
        old.freeze()
        assert cluster.wait_for_writes(old) is standby
        old.thaw()
        cluster.wait_until_whole()
        assert cluster.primary() is standby
        assert not old.takes_writes
        assert eventually(lambda: old.execute("select count(*) from kept", dbname="app") == [(0,)])
        directory, namespaces = cluster.directory, [cluster.network.hub, *cluster.network.names]
    assert not directory.exists()
    assert not {name for name in namespaces if Path("/run/netns", name).exists()}


def test_nothing_is_left_of_a_cluster_whose_test_process_was_killed():
    program = (
        "import time; from tests.support.patroni import PatroniCluster\n"
        "with PatroniCluster('asynchronous') as cluster:\n"
        "    pids = [pid for m in cluster.machines for pid in __import__('tests.support.network')"
        ".support.network.pids(m.namespace)]\n"
        "    print(cluster.directory, cluster.network.hub, *pids, flush=True)\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        directory, hub, *pids = process.stdout.readline().split()
        assert len(pids) > 2 * patroni.MACHINES
        os.kill(process.pid, signal.SIGKILL)
    assert eventually(lambda: not Path(directory).exists())
    assert eventually(lambda: not Path("/run/netns", hub).exists())
    assert eventually(lambda: not any(Path("/proc", pid, "ns", "net").exists() for pid in pids))


def test_namespaces_are_named_where_they_cannot_be_had(monkeypatch):
    monkeypatch.setattr(networks, "why_unavailable", lambda: "network namespaces need root")
    patroni.why_unavailable.cache_clear()
    try:
        assert patroni.why_unavailable() == "a Patroni cluster needs namespaces: network namespaces need root"
    finally:
        patroni.why_unavailable.cache_clear()
