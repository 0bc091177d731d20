"""Servers with more to break than the tests' own: a small disk, a clock that can be stepped, a user with few rights."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.mariadb import MariaDbServer
from tests.support.poolers import PgBouncer
from tests.support.servers import Guard, PostgresServer, ServerFailed

USER = "app"
"""The nodes' user on PostgreSQL, who owns the database and nothing else."""
STRANGER = "stranger"
"""Somebody who may CONNECT, and nothing else."""
DISK = "192m"
LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


class Clock:
    """The wall clock of one server, in a file that libfaketime reads at every look at it."""

    def __init__(self, library: Path, directory: Path) -> None:
        self.library = library
        self._file = directory / "clock"
        self.set("+0")

    def set(self, text: str) -> None:
        """Say something else from now on, as libfaketime spells it: `+3600`."""
        new = self._file.with_suffix(".new")
        new.write_text(text + "\n")
        new.chmod(0o644)
        new.replace(self._file)

    @property
    def command(self) -> list[str]:
        """What comes before the command whose clock it shall be."""
        library, only_wall_clock = f"LD_PRELOAD={self.library}", "DONT_FAKE_MONOTONIC=1"
        return ["env", library, only_wall_clock, f"FAKETIME_TIMESTAMP_FILE={self._file}", "FAKETIME_NO_CACHE=1"]


# Not before the server has ended, which another guard sees to, if we are killed: it looks for the server in there.
UNMOUNT = """
    read _
    n=0; while ! umount "$1" && [ $n -lt 150 ]; do sleep 0.1; n=$((n + 1)); done
    umount -l "$1"; rmdir "$1" "${1%/*}"
"""


class TorturedPostgres(PostgresServer):
    """A server on a small disk of its own and with a clock of its own, where the machine allows it."""

    clock: Clock | None = None
    disk: Guard | None = None

    def close(self) -> None:
        if self.disk is not None and not self.disk.is_inherited:
            if self.running:
                with contextlib.suppress(ServerFailed):
                    self.stop("immediate", timeout=10)
            self.disk.close()  # before the directory is removed
        super().close()

    def _initdb(self) -> None:
        if LIBRARIES:
            self.clock = Clock(LIBRARIES[0], self._scratch.path)
        if os.geteuid() == 0 and self.account is not None:
            self.data.mkdir()
            os.chown(self.data, self.account.uid, self.account.gid)
            self.data.chmod(0o700)
            who = f"uid={self.account.uid},gid={self.account.gid}"
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=0700,{who}", "tenure", self.data]
            if subprocess.run(mount, check=False, capture_output=True).returncode == 0:
                self.disk = Guard(UNMOUNT, str(self.data))
        super()._initdb()

    def _spawn(self, command: Sequence[str | Path], **popen: Any) -> subprocess.Popen[bytes]:
        if self.clock is not None and Path(command[0]).name == "postgres":
            command = [*self.clock.command, *command]
        return super()._spawn(command, **popen)


class TorturedPooler(PgBouncer):
    """A pooler for the nodes' user, that reaches the server by its socket: the server may sit in another network."""

    def _write(self, name: str, text: str) -> None:
        if name == "users":
            text += f'"{USER}" ""\n'
        super()._write(name, text.replace(f"host={self.server.listen} ", f"host={self.server.socket_dir} "))


class TorturedMariaDb(MariaDbServer):
    """A server with a clock of its own, where the machine allows it."""

    clock: Clock | None = None

    def _make(self) -> None:
        super()._make()
        if LIBRARIES:
            self.clock = Clock(LIBRARIES[0].with_name("libfaketimeMT.so.1"), self._scratch.path)
            program = self._scratch.path / "mariadbd"
            program.write_text(f'#!/bin/sh\nexec {" ".join(self.clock.command)} {self._program} "$@"\n')
            program.chmod(0o755)
            self._program = str(program)
