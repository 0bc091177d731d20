"""Three nodes on one database, of two releases: replaced one after the other, killed and frozen, and back again.

All nodes stand for one role, and the leader writes fenced all the time. In each phase so many of them are of the
earlier release and the others of this one. Leaders of both are killed by kill -9, frozen by SIGSTOP for longer than
their lease, and the server restarts under them. Then the nodes must agree: each of them is asked who leads, who stands,
and who led before.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.cluster import Cluster, NodeFailed, NodeProcess
from tests.support.history import now_ns
from tests.support.ledger_process import LEDGERS
from tests.support.store_by_hand import table, until
from tests.verification.upgrade import judge
from tests.verification.upgrade.judge import Deed, Verdict, release_of
from tests.verification.upgrade.places import APP, DIALECTS, FOR_THE_LEDGER, Place
from tests.verification.upgrade.releases import Release

OLD, NEW = "old", "new"
PATIENCE_S = 60.0
"""How long nobody may lead, and nodes may disagree: so long that only what never ends is a failure."""
FROZEN_TTLS = 1.5
FREED_TTLS = 3
"""A frozen leader is woken after the first of these at the earliest. After the second it is woken if nobody has
succeeded it: one that stands still inside a write keeps everybody from SQLite's file."""
LOOK_S = 1.0
HEARTBEAT_S = 0.05
REFUSED_S = 15.0
"""So long a node that cannot start is given to say so; then it counts as waiting."""


class Trial:
    """The nodes of both releases on one database. Each phase adds a line to `verdicts`."""

    def __init__(
        self,
        place: Place,
        releases: dict[str, Release],
        directory: Path,
        *,
        user: str,
        rounds: int,
        calm_s: float,
        ttl: float,
        takeover: str,
    ) -> None:
        self.place, self.releases, self.rounds, self.calm_s, self.ttl = place, releases, rounds, calm_s, ttl
        self.name = place.kind if user != APP else f"{place.kind}, no rights"
        self.url = place.app_url if user == APP else place.url
        self.cluster = Cluster(
            place.url,
            directory,
            strictly=False,
            program="tests.support.ledger_process",
            sample_every_s=0.002,
            heartbeat_s=HEARTBEAT_S,
            ttl=ttl,
            takeover=takeover,
        )
        self.versions = {name: release.tenure("--version").split()[-1] for name, release in releases.items()}
        self.living: list[NodeProcess] = []
        self.verdicts: list[Verdict] = []
        self.notes: list[str] = []
        self._numbers = itertools.count(1)
        self._deeds: list[Deed] = []
        self._found: set[str] = set()
        self._over = False
        self.cluster.execute(LEDGERS[self.url.partition(":")[0]])
        if user == APP:
            self.cluster.execute(*FOR_THE_LEDGER[place.kind])

    def close(self) -> None:
        for node in self.cluster.nodes:
            node.close()
        self.cluster.recorder.close()

    # -- phases --

    def phase(self, name: str, act: Callable[[], None]) -> None:
        """Do something, and judge all that was recorded up to its end. No phase follows one that broke off."""
        if self._over:
            self._say(Verdict(self.name, name, found=("not run: an earlier phase broke off",)))
            return
        since, first, failed = now_ns(), len(self._deeds), []
        try:
            act()
        except Exception as error:  # noqa: BLE001 - what the nodes or the database say, whatever it is
            failed.append(f"broke off: {type(error).__name__}: {error}")
            self._over = True
        time.sleep(2 * HEARTBEAT_S)  # until all is in the records
        recorded = self.cluster.history
        found = judge.broken(recorded, self.cluster.execute("select n, token, element from ledger order by n"))
        new = [text for text in found if text not in self._found]
        self._found.update(new)
        told: dict[str, Any] = {"database": self.name, "phase": name, "tables": self._tables()}
        self._say(judge.verdict(recorded, self._deeds[first:], since=since, found=[*failed, *new], **told))

    def _say(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        print("  ".join(verdict.cells()), flush=True)
        for text in verdict.found:
            print(f"  - {text}", flush=True)

    def note(self, text: str) -> None:
        """Something to read beside the table."""
        self.notes.append(f"{self.name}: {' '.join(text.split())}")

    def _tables(self) -> int:
        """The version of the tables, 0 if there are none."""
        with contextlib.suppress(Exception):
            version = f"select value from {table(self.url, 'meta')} where name = 'version'"
            return int(self.cluster.execute(version)[0][0])
        return 0

    def mixture(self, old: int, new: int) -> None:
        """Have so many nodes of each release, let them run, and have leaders of each die and freeze."""
        self.reach({OLD: old, NEW: new})
        self.rest()
        self.suffer()

    def reach(self, wanted: dict[str, int]) -> None:
        """Replace one node after the other. A leader of the release that leaves hands over each time."""
        while {release: self.count(release) for release in wanted} != wanted:
            joins = [release for release in wanted if self.count(release) < wanted[release]]
            leaves = [release for release in wanted if self.count(release) > wanted[release]]
            for release in joins[:1]:
                self.join(release)
            for release in leaves[:1]:
                self.leave(release)
        self.check_versions()

    def suffer(self) -> None:
        """Do everything that can be done to a leader, to leaders of each release that is there."""
        strikes = (self.kill, self.freeze, self.restart) if self.place.restart else (self.kill, self.freeze)
        for _, strike in itertools.product(range(self.rounds), strikes):
            for release in sorted({release_of(node.name) for node in self.living}):
                strike(release)

    def rest(self) -> None:
        """Leave the nodes alone for a while."""
        with self.deed("otherwise"):
            time.sleep(self.calm_s)

    # -- nodes --

    def count(self, release: str) -> int:
        return sum(release_of(node.name) == release for node in self.living)

    def load(self, release: str, **options: Any) -> NodeProcess:
        """A process that has not started its node yet."""
        name = f"{release}-{next(self._numbers)}"
        (node,) = self.cluster.load(name, python=self.releases[release].python, url=self.url, **options)
        return node

    def join(self, release: str) -> NodeProcess:
        """Start one more node. The first one of a release that needs newer tables changes them."""
        node = self.load(release)
        with self.deed("otherwise") if self.living else contextlib.nullcontext():
            node.tell("start", PATIENCE_S)
            self.living.append(node)
            self.agree()
        return node

    def leave(self, release: str) -> None:
        """A leader of this release leaves, as in a deployment."""
        leader = self.led_by(release)
        with self.deed("leave"):
            reply = leader.send("leave")
            self.living.remove(leader)
            self.leader()
        leader.reply(reply)
        leader.close()
        self.agree()

    def agree(self) -> None:
        """Wait until every node tells the same: who of them leads, who led before, and that all of them stand."""
        names = sorted(node.name for node in self.living)

        def told(node: NodeProcess) -> dict[str, Any]:
            view = node.ask("leader")
            return view | {"candidates": sorted(view.get("candidates", ()))}

        def one_view() -> bool:
            views = [told(node) for node in self.living]
            seen[:] = views
            first = views[0]
            return all(view == first for view in views) and first["candidates"] == names and first["name"] in names

        seen: list[dict[str, Any]] = []
        try:
            until(one_view, timeout=PATIENCE_S)
        except AssertionError:
            raise NodeFailed(f"{names} do not tell the same within {PATIENCE_S:g} s: {seen}") from None

    def check_versions(self) -> None:
        """What the database has of each node: that it is of the release that it is called by."""
        members = f"select name, version from {table(self.url, 'members')} where ended_at is null"
        wanted = {node.name: self.versions[release_of(node.name)] for node in self.living}
        told = dict(self.cluster.execute(members))
        assert told == wanted, f"the database has other members: {told}"

    # -- who leads --

    def leader(self, timeout: float = PATIENCE_S) -> NodeProcess:
        """Wait until somebody reads True."""

        def found() -> NodeProcess | None:
            return next((node for node in self.living if leads(node)), None)

        try:
            leader: NodeProcess = until(found, timeout=timeout)
        except AssertionError:
            raise NodeFailed(f"nobody leads for {timeout:g} s") from None
        return leader

    def led_by(self, release: str) -> NodeProcess:
        """Have a node of this release lead, by a hand-over if another does, and wait until it has written."""
        deadline = time.monotonic() + PATIENCE_S
        while release_of((leader := self.leader()).name) != release:
            assert time.monotonic() < deadline, f"no {release} node was elected, however often one was named"
            to = random.choice([node for node in self.living if release_of(node.name) == release])
            with self.deed("resign"):
                leader.ask(f"resign {to.name}")
                with contextlib.suppress(AssertionError):  # another may be quicker: then once more
                    until(partial(leads, to), timeout=5)
        token = leader.tell("status")["token"]
        rows = f"select n from ledger where node = '{leader.name}' and token >= {token} limit 1"
        until(lambda: self.cluster.execute(rows), f"a write of {leader.name}", PATIENCE_S)
        time.sleep(2 * HEARTBEAT_S)  # a process that is killed takes along the reads since its last heartbeat
        return leader

    # -- what happens to them --

    @contextlib.contextmanager
    def deed(self, kind: str) -> Iterator[None]:
        """What is done in this block leaves the role without a leader for some time, or for none."""
        since = now_ns()
        try:
            yield
        finally:
            self._deeds.append(Deed(kind, since, now_ns()))

    def kill(self, release: str) -> None:
        """kill -9 of a leader; another process takes its place."""
        leader = self.led_by(release)
        with self.deed("kill"):
            leader.kill()
            self.living.remove(leader)
            self.leader()
        self.join(release)

    def freeze(self, release: str) -> None:
        """SIGSTOP of a leader for longer than its lease, then SIGCONT: its next write is a stale one."""
        leader = self.led_by(release)
        with self.deed("freeze"):
            stopped = leader.stop()
            self.living.remove(leader)
            woken = time.monotonic() + FROZEN_TTLS * self.ttl
            try:
                self.leader(FREED_TTLS * self.ttl)
            except NodeFailed:
                self.note(f"nobody led before {leader.name} was woken, {FREED_TTLS * self.ttl:g} s after it was frozen")
            time.sleep(max(0.0, woken - time.monotonic()))
            leader.cont()
            self.living.append(leader)
            self.leader()
        leader.wait_event("deposed", since=stopped)
        self.agree()

    def restart(self, release: str) -> None:
        """The server restarts under a leader of this release, which leads on if that is quick enough."""
        self.led_by(release)
        with self.deed("restart"):
            assert self.place.restart is not None
            self.place.restart()
            self.leader()
        self.agree()
        time.sleep(LOOK_S)  # until then a candidate may not wait for the leader's sentinel again

    def refused(self, release: str, reason: str, **options: Any) -> None:
        """A node that cannot start says why, by an error or, if it waits, in its log."""
        node = self.load(release, **options)
        how = "".join(f" with {name}={value!r}" for name, value in options.items())
        try:
            reply = node.ask("start", REFUSED_S)
            told = f"{reply['error']}: {reply['message']}" if reply.get("error") else "it starts"
        except NodeFailed:
            told = f"it waits, and its log says: {node.log.read_text().strip()}"
        node.close()
        self.note(f"a node of the {release} release is started{how}: {told}")
        assert reason in told, f"{node.name} does not name {reason!r}: {told}"


def leads(node: NodeProcess) -> bool:
    return bool(node.ask("status").get("leader"))


# --- there, and back ----------------------------------------------------------------------------------------


def there_and_back(trial: Trial) -> None:
    """As docs/how-to/upgrade.md tells it, for nodes that may change the tables."""
    there = ["3 old", "2 old, 1 new", "1 old, 2 new"]
    back = ["back: 1 old, 2 new", "back: 2 old, 1 new", "back: 3 old"]
    _mixtures(trial, there)
    if trial.place.kind != "sqlite":
        trial.phase("1 old, 2 new, guarded", partial(_guarded_beside_old, trial))
    _mixtures(trial, ["3 new"])
    if trial.place.kind != "sqlite":
        trial.phase("3 new, guarded", partial(_guarded, trial))
    _mixtures(trial, back)
    trial.phase("all die, 3 old", partial(_all_die, trial, OLD))
    _mixtures(trial, ["again: 2 old, 1 new"])
    trial.phase("largest TTL", partial(_largest_ttl, trial))
    if trial.place.kind == "postgres":
        trial.phase("oldest raised", partial(_oldest_raised, trial))
    trial.phase("all die, 3 new", partial(_all_die, trial, NEW))


def without_rights(trial: Trial) -> None:
    """The nodes' user may create and change no table: the owner does."""
    trial.phase("3 old", partial(_owner_creates, trial))
    trial.phase("not migrated yet", partial(_before_the_owner, trial))
    trial.phase("the owner migrates", partial(_owner_migrates, trial))
    _mixtures(trial, ["2 old, 1 new", "1 old, 2 new", "3 new", "back: 1 old, 2 new", "back: 3 old"])


def _mixtures(trial: Trial, names: list[str]) -> None:
    for name in names:
        words = name.rpartition(": ")[2].replace(",", "").split()
        counts = dict(zip(words[1::2], map(int, words[::2]), strict=True))
        trial.phase(name, partial(trial.mixture, counts.get(OLD, 0), counts.get(NEW, 0)))


def _all_die(trial: Trial, release: str) -> None:
    """Every process is killed, and nodes of one release are started on what they left."""
    trial.led_by(release_of(trial.leader().name))
    with trial.deed("kill"):
        for node in trial.living:
            node.kill()
        trial.living.clear()
        trial.join(release)
        trial.leader()
    for _ in range(2):
        trial.join(release)
    trial.check_versions()
    trial.suffer()


def _guarded_beside_old(trial: Trial) -> None:
    """On PostgreSQL the fence of an older node passes a guard. MariaDB refuses the guard, and names that node."""
    if trial.place.kind == "postgres":
        _guarded(trial)
        return
    (old,) = [node.name for node in trial.living if release_of(node.name) == OLD]
    said = complaint(lambda: _guarded(trial))
    trial.note(f"`tenure guard` beside a node of the old release: {said}")
    assert f"upgrade them first ({old!r}" in said, f"{old} is not named: {said}"


def _guarded(trial: Trial) -> None:
    """The ledger takes no write outside the fence; leaders write on."""
    tenure = trial.releases[NEW].tenure
    tenure("guard", "ledger", "--role", trial.cluster.role, url=trial.place.url)
    insert = "insert into ledger (role, token, node, element) values ('', 0, '', '')"
    said = complaint(lambda: trial.cluster.execute(insert))
    assert "guard" in said.lower(), f"a write outside the fence: {said}"
    trial.suffer()
    tenure("guard", "ledger", "--remove", url=trial.place.url)


def complaint(act: Callable[[], object]) -> str:
    """What is said about something that must not work; nothing if it works."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 - each driver has its own
        return str(error)
    return ""


def _largest_ttl(trial: Trial) -> None:
    """A namespace of the old release keeps its limit. One that an operator sets holds for the older nodes, too."""
    limit = f"select max_ttl_ms from {table(trial.url, 'namespaces')}"
    assert trial.cluster.execute(limit) == [(60_000,)]
    with trial.deed("otherwise"):
        largest = max(10.0, trial.ttl)
        trial.releases[NEW].tenure("init", "--max-ttl", f"{largest:g}", url=trial.place.url)
        for release in (OLD, NEW):
            trial.refused(release, "tenure init --max-ttl", ttl=2 * largest)
        trial.agree()


def _oldest_raised(trial: Trial) -> None:
    """An operator's word needs tables that only this release knows: the older nodes let go, until it is taken back."""
    tenure = trial.releases[NEW].tenure
    trial.led_by(OLD)
    began = now_ns()
    old = [node for node in trial.living if release_of(node.name) == OLD]
    trial.living = [node for node in trial.living if node not in old]
    with trial.deed("otherwise"):
        tenure("init", "--promotion", "loses-nothing", url=trial.place.url)
        trial.leader()
    time.sleep(2 * trial.ttl)
    (ended,) = {event["reason"] for node in old for event in node.events("deposed", since=began)}
    trial.note(f"the oldest is raised: the leader of the old release is deposed, {ended!r}")
    for node in old:
        assert not node.tell("status")["leader"]
        assert "upgrade Tenure here" in node.log.read_text(), f"{node.name} does not say why it lets go"
    trial.refused(OLD, "needs a release that knows at least version")
    tenure("init", "--promotion", "may-lose", url=trial.place.url)
    trial.living += old
    trial.agree()
    trial.suffer()


def _owner_creates(trial: Trial) -> None:
    trial.releases[OLD].tenure("init", url=trial.place.url)
    _grant(trial, OLD)
    trial.mixture(3, 0)


def _before_the_owner(trial: Trial) -> None:
    """Nodes of this release cannot start yet, say so, and disturb nobody."""
    before = trial.leader().tell("status")
    with trial.deed("otherwise"):
        for start in ("raise", "wait"):
            trial.refused(NEW, "tenure init", start=start)
    assert trial.leader().tell("status") == before, "the leader changed"


def _owner_migrates(trial: Trial) -> None:
    """The leader of the older release leads on. Nodes of this one wait for what is granted, and say so."""
    before = trial.leader().tell("status")
    with trial.deed("otherwise"):
        trial.releases[NEW].tenure("init", url=trial.place.url)
        trial.refused(NEW, "runs")
        waits = trial.load(NEW, start="wait")
        reply = waits.send("start")
        until(lambda: "runs" in waits.log.read_text(), "a word about what is not granted", PATIENCE_S)
        trial.note(f"a node of the new release waits: {waits.log.read_text().strip()}")
    assert trial.leader().tell("status") == before, "the leader changed"
    trial.suffer()
    _grant(trial, NEW)
    assert "error" not in (told := waits.reply(reply, PATIENCE_S)), told
    trial.living.append(waits)
    trial.agree()


def _grant(trial: Trial, release: str) -> None:
    """The owner runs what `tenure sql --grants` of this release prints."""
    script = trial.releases[release].tenure("sql", "--dialect", DIALECTS[trial.place.kind], "--grants", APP)
    trial.cluster.execute(*(text for line in script.splitlines() if (text := line.rstrip(";"))))
