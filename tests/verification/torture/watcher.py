"""Looks on while the cluster suffers: how long the machine itself stood still, and what the nodes cost the server."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import Counter
from typing import Any

import psutil

from tests.support.history import now_ns
from tests.verification.torture.arena import Arena, PostgresArena
from tests.verification.torture.checkers import Harm

BEAT_S = 0.05
LATE_S = 0.1
"""A beat that is later than this counts as time in which the machine stood still."""
HORIZONS = (
    "select pid, xact_start::text, application_name, state, wait_event, query from pg_stat_activity"
    " where application_name ~ '^tenure (control|watch|knock)' and backend_xmin is not null"
)
CONNECTIONS = "select application_name from pg_stat_activity where application_name ~ '^tenure (control|watch)'"
LINE = re.compile(r"@[^/]*/tenure \w+ \S+ (?P<severity>[A-Z]+): +(?P<message>.*)")
LONG_S = 60


class Metronome(threading.Thread):
    """Beats in the harness's own process; where it comes late, so does everybody on this machine."""

    def __init__(self) -> None:
        super().__init__(name="metronome", daemon=True)
        self._late: list[tuple[int, float]] = []
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            self._over.wait(BEAT_S)
            late_s = time.monotonic() - began - BEAT_S
            if late_s > LATE_S:
                self._late.append((now_ns(), late_s))

    def late_s(self, since: int = 0, until: int | None = None) -> float:
        """How late the beats between two moments (ns) were, together."""
        return sum(late_s for at, late_s in self._late if at >= since and (until is None or at <= until))

    def stop(self) -> None:
        self._over.set()
        self.join()


class Horizons(threading.Thread):
    """How long any of the nodes' connections held the vacuum horizon at one place, while time went on."""

    def __init__(self, arena: PostgresArena) -> None:
        super().__init__(name="horizons", daemon=True)
        self.longest_s = 0.0
        self.longest_by = ""
        self._arena = arena
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.2):
            with contextlib.suppress(Exception), contextlib.closing(self._arena.server.connect()) as connection:
                connection.execute("set idle_session_timeout = 0")
                self._look(connection)

    def _look(self, connection: Any) -> None:
        since: dict[tuple[int, str], float] = {}  # by transaction: the horizon itself may be held back by others
        while not self._over.wait(0.1):
            rows = connection.execute(HORIZONS).fetchall()
            now = time.monotonic()
            since = {row[:2]: since.get(row[:2], now) for row in rows}
            for pid, began, application, state, wait, query in rows:
                held_s = now - since[pid, began]
                if held_s > self.longest_s:
                    self.longest_s = held_s
                    doing = " ".join(query.split())[:90]
                    at_s = now_ns() / 1e9
                    self.longest_by = f"{application}, {state}, waiting for {wait}, until {at_s:.1f} s: `{doing}`"

    def stop(self) -> None:
        self._over.set()
        self.join()


class Watcher:
    """Everything that is watched over a run; rest() is called where nothing is being done to anybody."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.metronome = Metronome()
        self.horizons = Horizons(arena) if isinstance(arena, PostgresArena) else None
        self.harm = Harm()
        self._born: dict[str, float] = {}
        self._mark = arena.log_mark()
        for thread in filter(None, (self.metronome, self.horizons)):
            thread.start()

    def rest(self) -> None:
        """Count descriptors: everybody is connected and nothing is on its way."""
        now = time.monotonic()
        for slot in self.arena.slots:
            node = slot.node
            assert node is not None
            with contextlib.suppress(psutil.Error):
                number = psutil.Process(node.pid).num_fds()
                born = self._born.setdefault(node.name, now)
                first = self.harm.descriptors.get(node.name, (number, number))[0]
                # Its application's own connections are all open after a while.
                first = max(first, number) if now - born < LONG_S / 4 else first
                self.harm.descriptors[node.name] = (first, number)

    def finish(self, calm_s: float, quiet_s: float) -> Harm:
        """Let everything calm down, then see that a rest is one; and add it all up."""
        time.sleep(calm_s)
        mark = self.arena.log_mark()
        time.sleep(quiet_s)
        harm, now = self.harm, time.monotonic()
        harm.quiet_s = quiet_s
        harm.quiet_lines = [line for line in self.arena.log_lines(mark) if LINE.search(line)]
        self.rest()
        if self.horizons is not None:
            harm.connections_at_end = Counter(
                name.rpartition("/")[2]
                for (name,) in self.arena.execute(CONNECTIONS)
                if "/pooled." not in name  # a pooler keeps the name of whoever was there last
            )
            self.horizons.stop()
            harm.longest_xmin_s, harm.longest_xmin_by = self.horizons.longest_s, self.horizons.longest_by
        self.metronome.stop()
        harm.living = [slot.node.name for slot in self.arena.slots if slot.node is not None]
        harm.descriptors = {name: pair for name, pair in harm.descriptors.items() if now - self._born[name] >= LONG_S}
        for line in self.arena.log_lines(self._mark):
            if found := LINE.search(line):
                harm.said[f"{found['severity']}: {re.sub(r'[0-9]+', 'N', found['message'])}"] += 1
        return harm
