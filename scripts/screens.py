"""Make the pictures of the documents, and the transcript of the proof, from a real run: `make screens`.

docs/screens/demo.svg     `tenure demo`, in the middle and at the end
docs/screens/failover.svg who led when in the same run, as an animation
docs/screens/status.svg   `tenure status` of three nodes
docs/proof.md             what `tenure demo` prints on a pipe, between the marks
"""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

import tenure
from scripts import failover
from scripts.failover import Happening
from tenure.base.clock import now
from tenure.cli.demo.command import perform
from tenure.cli.demo.scenario import Tone
from tenure.cli.demo.screen import Screen

REPOSITORY = Path(__file__).parents[1]
SCREENS = REPOSITORY / "docs" / "screens"
TENURE = Path(sys.executable).with_name("tenure")
WIDTH = 100


class Recording(Screen):
    """A screen that keeps, of all its pictures, the one of a leader that is frozen and does not know."""

    kept = False

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.happened: list[Happening] = []

    def event(self, at: float, who: str, what: str, tone: Tone = "plain") -> None:
        super().event(at, who, what, tone)
        self.happened.append(Happening(at, who, what))

    def tick(self) -> None:
        frozen = [replica for replica in self.replicas if replica.fate == "frozen"]
        if not self.kept and frozen and 0 < frozen[0].until - now() < 0.4 * frozen[0].lease:
            self.kept = True
            self.console.print(self.picture())


def console() -> Console:
    return Console(record=True, force_terminal=True, color_system="truecolor", width=WIDTH, file=io.StringIO())


def save(recorded: Console, name: str, title: str) -> None:
    svg = recorded.export_svg(title=title, unique_id=name)
    svg = re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)  # the reader's own, nothing from elsewhere
    lines = (line.rstrip() for line in svg.splitlines())
    (SCREENS / f"{name}.svg").write_text("\n".join(lines) + "\n")


def demo() -> None:
    recorded = console()
    recording = Recording(recorded)
    perform(recording, None, fast=False, sqlite=False)
    save(recorded, "demo", "tenure demo")
    terms = {token: (one.name, *span) for one in recording.replicas for token, span in one.terms.items()}
    picture = failover.draw([one.name for one in recording.replicas], terms, recording.happened)
    (SCREENS / "failover.svg").write_text(picture)


def status() -> None:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        url = f"sqlite:///{directory}/app.db"
        nodes = [stack.enter_context(tenure.Node(url, name=f"worker-{number}")) for number in (1, 2, 3)]
        for leader, role in zip(nodes, ("billing", "clean-up", "scheduler"), strict=True):
            leader.election(role).wait(30)
            for node in nodes:
                node.election(role)
        while any(len(nodes[0].election(role).candidates()) < 3 for role in ("billing", "clean-up", "scheduler")):
            pass
        recorded = console()
        recorded.print(Text.from_ansi(on_a_terminal("status", url)))
    save(recorded, "status", "tenure status")


def on_a_terminal(command: str, url: str) -> str:
    """Return what a command prints where somebody looks."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TENURE_URL": url, "TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    subprocess.run([TENURE, command], stdin=theirs, stdout=theirs, env=environment, check=True)
    os.close(theirs)
    return os.read(ours, 65536).decode().replace("\r\n", "\n")


def transcript() -> None:
    said = subprocess.run([TENURE, "demo"], check=True, stdout=subprocess.PIPE, text=True).stdout
    page = REPOSITORY / "docs" / "proof.md"
    block = f"<!-- demo -->\n```text\n$ tenure demo\n{said}```\n<!-- /demo -->"
    text, changes = re.subn(r"<!-- demo -->.*<!-- /demo -->", lambda _: block, page.read_text(), flags=re.DOTALL)
    assert changes == 1
    page.write_text(text)


if __name__ == "__main__":
    SCREENS.mkdir(parents=True, exist_ok=True)
    for make in (demo, status, transcript):
        make()
