"""The two releases: this one, and an earlier commit in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster import ROOT


class Refused(RuntimeError):
    """A command ended with an error; the message is what it said."""


@dataclass(frozen=True)
class Release:
    """A release that is installed."""

    name: str
    bindir: Path

    @property
    def python(self) -> str:
        return str(self.bindir / "python")

    def tenure(self, *arguments: str, url: str = "") -> str:
        """Run a command of this release and return what it says."""
        command = [str(self.bindir / "tenure"), *arguments]
        env = os.environ | ({"TENURE_URL": url} if url else {})
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise Refused(done.stderr.strip())
        return str(done.stdout).strip()


def present() -> Release:
    return Release("new", Path(sys.executable).parent)


def earlier(commit: str, directory: Path) -> Release:
    """Install an earlier commit, by its own bootstrap: it knows best what it needs."""
    command = ["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        raise Refused(f"the commit {commit} is not in this clone")
    source = directory / found.stdout.strip()
    release = Release("old", source / ".venv" / "bin")
    if not (release.bindir / "tenure").exists():
        archive = subprocess.run(["git", "archive", source.name], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        source.mkdir(parents=True, exist_ok=True)
        subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
        # Our private uv, if there is no other. And no tools for development: nodes run there, and nothing else.
        path = f"{os.environ.get('PATH', os.defpath)}:{ROOT / '.tools' / 'bin'}"
        env = os.environ | {"PATH": path, "PYTHON": sys.executable, "UV_NO_DEFAULT_GROUPS": "1"}
        subprocess.run(["scripts/bootstrap"], cwd=source, env=env, check=True)
    return release
