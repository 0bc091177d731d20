"""Keeps nodes on two files of one name from leading at the same time.

A program may delete or replace the file under running nodes. Nodes that have the old file open notice that before they
next extend their trust (``DatabaseFile.check``). Until then one of them may lead, and the new file shows nothing of it.
So each node, before it joins, takes a lock in the directory of sentinels. The lock's name has the id of the node's
file. The node keeps the lock for as long as it may trust anything that it read there. A node that finds the lock of
another file does not join.

    a node on the old file             a node on the new file
    1. takes the lock of the old       1. takes the lock of the new
    2. sees: the path is the old file  2. sees: the path is the new file
    3. joins, leads, renews            3. sees no lock of another file
       (each time: 2)                  4. joins

If step 2 on the left comes before step 2 on the right, then the lock of the old file was taken before step 3 on the
right, which sees it. A lock ends with its process. A process that is stopped keeps its lock, but it does not extend its
trust while the path names another file, so its trust is over after the silence of its TTL.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tenure.base import clock
from tenure.base.durations import duration
from tenure.core import messages, timing
from tenure.databases.sqlite.connect import SqliteConnector
from tenure.databases.sqlite.filesystem import DatabaseFile
from tenure.databases.sqlite.sentinel import LockedFiles, is_free
from tenure.databases.sqlite.session import SqliteSession
from tenure.store.control import ControlStore
from tenure.store.session import Failed, Gone


class FileUse:
    """A node's lock, which names the file that the node may trust."""

    def __init__(self, connector: SqliteConnector, ttl: float) -> None:
        """Begin without a file. ``ttl`` is how long the node trusts a renewal, at most."""
        self._connector = connector
        self._ttl = ttl
        self._files = LockedFiles()
        self._path = Path()
        self._pin: SqliteSession | None = None
        """Keeps the file open whatever becomes of the node's other connections, so that its id is not reused."""
        self._first_seen: dict[str, float] = {}

    @property
    def file(self) -> str:
        """The id of the file in use; empty if there is none."""
        return self._pin.file.id if self._pin else ""

    def begin(self, file: DatabaseFile) -> None:
        """Use a file from now on, and stop using an earlier one.

        Raises Gone if the path names another file, and Failed while another node may trust another file.
        """
        if self.file != file.id:
            self.end()
            self._pin = self._connector.open()
        self.keep()
        if self.file != file.id:
            raise Gone(f"the file {str(file.path)!r} was replaced")
        file.check()
        left = self._others(file)
        if left > 0:
            raise Failed(
                f"another file was at {str(file.path)!r} before, and a node that uses it may still lead: waiting at "
                f"most {duration(left)} until that node has noticed"
            )

    def keep(self) -> None:
        """Ensure that other nodes see the lock, even if a program has removed its file."""
        while self._pin is not None and not self._files.visible(self._path):
            self._files.unlock(self._path)
            name = f"{self.file}.{round(self._ttl * 1000)}.{os.urandom(4).hex()}.use"
            self._path = self._pin.file.sentinels / name
            try:
                # Another node may be testing the lock at this moment. The next attempt has another name.
                if not self._files.lock(self._path):
                    self._path.unlink(missing_ok=True)
            except OSError as error:
                raise Failed(f"cannot lock {str(self._path)!r}: {error.strerror}") from error

    def end(self) -> None:
        """Free the lock: this node trusts nothing that it read in the file."""
        self._files.unlock(self._path)
        self._first_seen.clear()
        if self._pin is not None:
            self._pin.close()
            self._pin = None

    def _others(self, file: DatabaseFile) -> float:
        """Return for how many seconds a node may still trust another file. Remove the locks of dead processes."""
        now, left = clock.now(), 0.0
        for path in file.sentinels.glob("*.use"):
            used, ttl_ms, *_ = path.name.split(".")
            if path in self._files or not ttl_ms.isdigit():
                continue
            if is_free(path):
                path.unlink(missing_ok=True)
            elif used != file.id:
                since = self._first_seen.setdefault(path.name, now)
                left = max(left, since + timing.silence(int(ttl_ms) / 1000) - now)
        return left


class FileStore(ControlStore):
    """The tables in a file that a program may replace."""

    def __init__(self, session: SqliteSession, *arguments: Any, use: FileUse) -> None:
        """Work on an open session. ``use`` locks its file from the join on."""
        super().__init__(session, *arguments)
        self._file = session.file
        self._use = use

    def _join(self, request: messages.Join) -> messages.Joined:
        """Join once no node can lead on another file. This node does not lead, so it may give up an earlier file."""
        self._use.begin(self._file)
        return super()._join(request)

    def _renew(self, request: messages.Renew) -> messages.Standing:
        self._use.keep()
        return super()._renew(request)
