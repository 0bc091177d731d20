"""A real terminal, 80 columns wide unless told otherwise: tmux, without a status line, on a socket of its own."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.store_by_hand import until

if TYPE_CHECKING:
    from typing_extensions import Self

OVERRIDES = ("LINES", "COLUMNS", "NO_COLOR", "FORCE_COLOR", "TMUX")
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
        self._code = settings.with_name("code")
        code = shlex.quote(str(self._code))
        self._tmux("new-session", "-d", *self._size, *self._set, f"trap : INT; {self._command}; echo $? > {code}")
        return self

    def __exit__(self, *_: object) -> None:
        self._tmux("kill-server")
        self._directory.cleanup()

    def _tmux(self, *arguments: str) -> str:
        # A runner of tests may set LINES and COLUMNS, which would count for more than the size of this terminal.
        environment = {name: value for name, value in os.environ.items() if name not in OVERRIDES}
        command = [*self._base, *arguments]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=20).stdout

    def lines(self, *, colours: bool = False) -> list[str]:
        """What the terminal shows, from the top to the last line that is not empty."""
        shown = self._tmux("capture-pane", "-p", *(("-e",) if colours else ()))
        return shown.rstrip("\n").split("\n")

    def press(self, *keys: str) -> None:
        """Press keys, such as ``C-c``, or type a text."""
        self._tmux("send-keys", "--", *keys)

    def wait_ended(self) -> int:
        """Wait for the end of the command, and return its exit code."""
        return int(self._until(lambda: self._code.exists() and self._code.read_text(), "the command has ended"))

    def wait_for(self, text: str) -> list[str]:
        """Wait until a text is shown; return all lines."""
        self._until(lambda: any(text in line for line in self.lines()), f"{text!r} is shown")
        return self.lines()

    def _until(self, condition: Callable[[], Any], what: str) -> Any:
        try:
            return until(condition, what)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *self.lines()])) from None
