"""A real terminal, 80 columns wide unless told otherwise: tmux, without a status line, on a socket of its own."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.store_by_hand import until

if TYPE_CHECKING:
    from typing_extensions import Self

NO_TMUX = "no tmux found: install tmux"
SETTINGS = """
set -g status off
set -g remain-on-exit on
set -g remain-on-exit-format ''
set -g default-terminal screen-256color
"""


def tmux_program() -> str | None:
    """The path of tmux, if there is one."""
    return shutil.which("tmux")


class Terminal:
    """Runs one command: `with Terminal("tenure", "watch") as terminal:`."""

    def __init__(self, *command: str | Path, width: int = 80, height: int = 24, **environment: str) -> None:
        self._command = shlex.join(map(str, command))
        self._size = ["-x", str(width), "-y", str(height)]
        self._set = [word for name, value in environment.items() for word in ("-e", f"{name}={value}")]

    def __enter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory()  # a short path: a socket's name has 107 characters at most
        settings = Path(self._directory.name, "settings")
        settings.write_text(SETTINGS)
        self._base = ["tmux", "-S", str(settings.with_name("socket")), "-f", str(settings)]
        self._tmux("new-session", "-d", *self._size, *self._set, self._command)
        return self

    def __exit__(self, *_: object) -> None:
        self._tmux("kill-server")
        self._directory.cleanup()

    def _tmux(self, *arguments: str) -> str:
        return subprocess.run([*self._base, *arguments], check=True, capture_output=True, text=True, timeout=20).stdout

    def lines(self, *, colours: bool = False) -> list[str]:
        """What the terminal shows, from the top to the last line that is not empty."""
        shown = self._tmux("capture-pane", "-p", *(("-e",) if colours else ()))
        return shown.rstrip("\n").split("\n")

    def press(self, *keys: str) -> None:
        """Press keys, such as ``C-c``, or type a text."""
        self._tmux("send-keys", *keys)

    def wait_ended(self) -> int:
        """Wait for the end of the command, and return its exit code."""
        shown = "#{pane_dead_status}"
        return int(until(lambda: self._tmux("display-message", "-p", shown).strip(), "the command has ended", 60))

    def wait_for(self, text: str) -> list[str]:
        """Wait until a text is shown; return all lines."""
        until(lambda: any(text in line for line in self.lines()), f"{text!r} on the terminal", 60)
        return self.lines()
