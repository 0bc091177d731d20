"""What others on the same server do, whose business is not Tenure: strangers, two-phase commits, logging settings.

A stranger may CONNECT and nothing else (tests/verification/torture/stranger.py). What such a one may cost is a look: a
notification that is lost or in vain is made up for by the next look, and a key proves nothing by itself.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, ClassVar

import psycopg

from tenure.databases.postgres import session as postgres
from tenure.store.dialects import postgresql
from tests.support.history import now_ns
from tests.verification.torture.nemeses import Aim, Kill, Nemesis
from tests.verification.torture.server_nemeses import OnServer, RestartFast
from tests.verification.torture.stranger import Stranger
from tests.verification.torture.victims import STRANGER

SCHEMA, NAMESPACE = "tenure", "default"


BEGIN_WITHIN_S = 3.0
PATIENCE_S = 15.0


def come(arena: Any, deed: str, *more: str) -> Stranger:
    """Let a stranger do something from now on.

    Its effect is not waited for where another nemesis of the step has stopped the server: that one starts it again
    only after this.
    """
    url = arena.server.url(arena.dbname, user=STRANGER, host=str(arena.server.socket_dir))
    stranger = Stranger(deed, url, *more)
    stranger.has_begun(BEGIN_WITHIN_S if arena.server.running else 0.0)
    return stranger


def go(arena: Any, stranger: Stranger) -> None:
    """End the stranger, and its connections that still wait for a lock: each nemesis is to be judged by itself."""
    stranger.stop()
    with contextlib.suppress(psycopg.Error):  # the server is down, and has no connections
        arena.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where usename = '{STRANGER}'")


class NotifyFlood(Nemesis):
    name, what = "notify-flood", "somebody who may only CONNECT floods the nodes' channels with notifications"
    field = "stranger"
    lasts = (0.7, 1.5)

    def begin(self) -> None:
        dialect = postgresql(SCHEMA)
        channels = (f"{kind}={postgres.channel(dialect, NAMESPACE, kind)}" for kind in ("vacant", "changed"))
        self.stranger = come(self.arena, "flood", *channels)

    def end(self) -> None:
        self.had_effect = self.stranger.has_begun()
        go(self.arena, self.stranger)

    def bound(self) -> float:
        return self.bounds.look


class SquatterKill(Kill):
    name, what = "squatter-kill", "somebody who may only CONNECT queues for every sentinel's key, and a node is killed"
    field = "stranger"
    lasts = (0.7, 1.5)
    aims: ClassVar[tuple[Aim, ...]] = ("leader",)

    def begin(self) -> None:
        self.stranger = come(self.arena, "squat")
        time.sleep(1.2 * self.bounds.look)  # the nodes that wait for a key do so behind the stranger from then on
        self.had_effect = self.stranger.has_begun()
        if self.had_effect:
            super().begin()

    def end(self) -> None:
        if self.had_effect:
            super().end()
        go(self.arena, self.stranger)

    def bound(self) -> float:
        return self.bounds.death(self.slot)  # a look at most, by proof: the stranger's lock is none


class SquatterRestart(RestartFast):
    name, what = "squatter-restart", "the same, and the server is restarted: the keys are free for a moment"
    beside = ("stranger",)
    lasts = (0.5, 1.0)

    def strike(self) -> None:
        self.stranger = come(self.arena, "squat")
        if not self.stranger.has_begun(PATIENCE_S):  # the server is up: no other nemesis of the step may stop it
            raise RuntimeError(f"no effect of the stranger within {PATIENCE_S:g} s")
        self.began = time.monotonic()
        super().strike()
        self.arena.revive()
        self.outage_s = time.monotonic() - self.began

    def heal(self) -> None:
        go(self.arena, self.stranger)

    def bound(self) -> float:
        return self.bounds.gone(self.outage_s) + self.bounds.look


class LogSettings(OnServer):
    name, what = "log-settings", "log_min_duration_statement, deadlock_timeout = 10 ms, with log_lock_waits"
    lasts = (0.7, 1.5)
    settings: ClassVar[dict[str, Any]] = {
        "log_min_duration_statement": "10ms", "deadlock_timeout": "10ms", "log_lock_waits": True
    }  # fmt: skip

    def strike(self) -> None:
        self.arena.server.configure(**self.settings)

    def heal(self) -> None:
        self.arena.server.configure(**dict.fromkeys(self.settings))

    def bound(self) -> float:
        return 0.0


class TwoPhase(Kill):
    """The stale-write checker judges it: what is committed late must not come after a later term's beginning."""

    name, what = "two-phase", "a fenced transaction is prepared, its leader killed, and it is committed later"
    field = "server"
    lasts = (0.5, 1.2)
    aims: ClassVar[tuple[Aim, ...]] = ("leader",)
    commit: ClassVar[str] = "commit prepared '{}'"

    def begin(self) -> None:
        self.choose()
        self.began, self.committed_s = time.monotonic(), 0.0
        self.gid = f"tenure-{self.planned.seed}-{now_ns()}"
        # Not through the node's door: what is held up there could arrive after all was tidied up.
        self.reply = self.node.ask(f"prepare {self.gid} {self.arena.cluster.url}", 10)
        self.node.kill()

    def end(self) -> None:
        if "error" in self.reply:
            self.target += f" (refused: {self.reply['error']})"
        else:
            at_before = now_ns()
            self.arena.execute(self.commit.format(self.gid))
            self.committed_s = time.monotonic() - self.began
            self.arena.cluster.recorder.write(
                self.arena.cluster.role, self.reply["token"], ok=True, at_before=at_before, element=self.gid
            )
        super().end()

    def bound(self) -> float:
        return self.committed_s + self.bounds.death(self.slot)


class MariaDbTwoPhase(TwoPhase):
    commit = "xa commit '{}'"
