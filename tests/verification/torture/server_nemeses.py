"""What is done to the server: by its administrators, by others that use it, and by the machine below it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any, ClassVar, Literal

from tests.support.history import now_ns
from tests.verification.torture.nemeses import Nemesis, have_lead

HOUR_S = 3600


class OnServer(Nemesis):
    field = "server"
    began = 0.0

    def gone_s(self) -> float:
        return self.healed - self.began

    def begin(self) -> None:
        self.began = self.healed = time.monotonic()
        self.strike()

    def strike(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        self.heal()
        self.healed = time.monotonic()

    def heal(self) -> None:
        pass

    def bound(self) -> float:
        return self.bounds.gone(self.gone_s())


class HandsOver(OnServer):
    """Strikes at a slot of its own: half of the time that one shall lead."""

    slot_name: ClassVar[str]

    def prepare(self) -> None:
        self.slot = next(slot for slot in self.arena.slots if slot.name == self.slot_name)
        if self.planned.aim == "leader":
            have_lead(self.arena, self.slot)

    def begin(self) -> None:
        assert self.slot.node is not None
        self.target = self.slot.node.name
        super().begin()


# --- PostgreSQL ---------------------------------------------------------------------------------------------


class RestartFast(OnServer):
    name, what = "restart-fast", "fast stop and start of the server"
    lasts = (0.0, 0.5)
    mode: ClassVar[Literal["fast", "immediate"]] = "fast"

    def strike(self) -> None:
        self.arena.server.stop(self.mode)

    def heal(self) -> None:
        self.arena.revive()


class RestartImmediate(RestartFast):
    name, what, mode = "restart-immediate", "immediate stop of the server (a crash) and start", "immediate"


class Outage(RestartFast):
    name, what = "outage", "the server is gone for longer than the lease"
    lasts = (1.2, 1.6)


class KillPostmaster(RestartFast):
    name, what = "kill-postmaster", "kill -9 of the postmaster, and a start"

    def strike(self) -> None:
        self.arena.server.kill_postmaster()


class KillBackend(OnServer):
    name, what = "kill-backend", "kill -9 of one backend: the server throws out everybody and recovers"
    lasts = (0.3, 0.5)

    def strike(self) -> None:
        self.since, self.everybody = now_ns(), [slot.node.name for slot in self.arena.slots]
        pids = self.arena.execute("select pid from pg_stat_activity where application_name like 'tenure %'")
        os.kill(self.chance.choice(sorted(pids))[0], signal.SIGKILL)

    def heal(self) -> None:
        # The postmaster lives on, so this is no restart: every connection is cut, and every sentinel freed.
        self.has_cut(self.everybody, self.since)
        self.arena.revive()


class Terminate(OnServer):
    name, what = "terminate", "pg_terminate_backend of the leader's or any node's connections, twice"

    def strike(self) -> None:
        leader = self.arena.leader()
        self.target = leader.node.name if leader is not None and self.planned.aim == "leader" else ""
        self.end_one(f"tenure control %/{self.target}%")

    def heal(self) -> None:
        self.end_one("tenure %")

    def end_one(self, application: str) -> None:
        connections = self.arena.execute(
            f"select pid, application_name from pg_stat_activity where application_name like '{application}'"
        )
        if connections:
            since = now_ns()
            pid, whose = self.chance.choice(sorted(connections))
            self.arena.execute(f"select pg_terminate_backend({pid})")
            if whose.startswith("tenure control "):  # the others hold no sentinel
                self.has_cut([whose.rpartition("/")[2]], since)

    def bound(self) -> float:
        return 2 * self.bounds.look if self.arena.takeover == "instant" else 0.0


class ConnectionLimit(OnServer):
    name, what = "connection-limit", "somebody takes every connection that the server has left"
    lasts = (0.5, 1.2)

    def strike(self) -> None:
        self.taken: list[Any] = []
        with contextlib.suppress(Exception):
            for _ in range(500):
                self.taken.append(self.connect())
        self.target = f"{len(self.taken)} connections"

    def connect(self) -> Any:
        return self.arena.server.connect(self.arena.dbname, user="app")

    def heal(self) -> None:
        for connection in self.taken:
            with contextlib.suppress(Exception):
                connection.close()


class IdleSessionTimeout(OnServer):
    name, what = "idle-session-timeout", "idle_session_timeout = 300 ms for the whole server"
    lasts = (0.5, 1.2)

    def strike(self) -> None:
        self.arena.server.configure(idle_session_timeout="300ms")

    def heal(self) -> None:
        self.arena.server.configure(idle_session_timeout=None)

    def bound(self) -> float:
        return 0.0


class DiskFull(OnServer):
    name, what = "disk-full", "the server's disk is full"
    lasts = (0.5, 1.5)
    needs = "a disk of its own"

    def strike(self) -> None:
        self.since, self.everybody = now_ns(), [slot.node.name for slot in self.arena.slots]
        self.log_mark = self.arena.log_mark()
        self.balloon = self.arena.server.data / "balloon"
        with contextlib.suppress(OSError), self.balloon.open("wb", buffering=0) as file:
            while file.write(b"\0" * 65536):
                pass

    def heal(self) -> None:
        self.balloon.unlink()
        time.sleep(0.3)
        if any("terminating any other active server processes" in line for line in self.arena.log_lines(self.log_mark)):
            self.has_cut(self.everybody, self.since)  # a backend panicked: as if one had been killed
        self.arena.revive()


class PoolerRestart(HandsOver):
    name, what, slot_name = "pooler-restart", "PgBouncer is killed and started again", "pooled"
    needs = "a pooler"
    lasts = (0.0, 0.5)

    def strike(self) -> None:
        self.arena.pooler.kill()

    def heal(self) -> None:
        self.arena.pooler.start()


class CableCut(HandsOver):
    name, what, slot_name = "cable-cut", "the cable of one node is cut, both ways, without a word", "far"
    field = "wire"
    needs = "a network of its own"
    lasts = (1.2, 1.7)

    def strike(self) -> None:
        self.arena.network.cut()

    def heal(self) -> None:
        self.arena.network.heal()

    def bound(self) -> float:
        return self.bounds.pause


class CableOneWay(CableCut):
    name, what = "cable-one-way", "what comes through the cable from the server, or from the node, is lost"

    def strike(self) -> None:
        side = self.chance.choice(["server", "client"])
        self.target += f", from the {side}"
        self.arena.network.cut_one_way(side)


class MigrationLock(OnServer):
    name, what = "migration-lock", "somebody's migration holds Tenure's tables locked"
    lasts = (0.3, 1.4)

    def strike(self) -> None:
        tables = self.chance.choice(["tenure.roles", "tenure.members", "tenure.roles, tenure.members, tenure.terms"])
        self.target = tables
        self.connection = self.arena.server.connect(self.arena.dbname)
        self.connection.execute("set idle_session_timeout = 0; set deadlock_timeout = '10s'; begin")
        self.connection.execute(f"lock table {tables} in access exclusive mode")

    def heal(self) -> None:
        with contextlib.suppress(Exception):
            self.connection.execute("rollback")
        self.connection.close()


class Privileges(OnServer):
    name, what = "privileges", "the role's privileges are revoked, and given back"
    lasts = (0.3, 1.4)

    def strike(self) -> None:
        self.arena.execute("revoke all on all tables in schema tenure from app; revoke all on schema tenure from app")

    def heal(self) -> None:
        self.arena.execute("grant all on schema tenure to app; grant all on all tables in schema tenure to app")


class Clock(Nemesis):
    field = "clock"
    needs = "a clock of its own"
    lasts = (0.5, 1.5)
    text: ClassVar[str]

    def begin(self) -> None:
        self.target = self.text
        self.arena.server.clock.set(self.text)

    def end(self) -> None:
        self.arena.server.clock.set("+0")


class ClockForward(Clock):
    name, what, text = "clock-forward", "the server's wall clock is stepped by +1 h, and back", f"+{HOUR_S}"


class ClockBack(Clock):
    name, what, text = "clock-back", "the server's wall clock is stepped by -1 h, and back", f"-{HOUR_S}"


class ClockFast(Clock):
    name, what, text = "clock-fast", "the server's wall clock runs half as fast again, then is set right", "x1.5"

    def begin(self) -> None:
        self.target = self.text
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        began = time.monotonic()
        while not self.over.wait(0.05):
            self.arena.server.clock.set(f"+{0.5 * (time.monotonic() - began):.3f}")

    def end(self) -> None:
        self.over.set()
        self.thread.join()
        super().end()
