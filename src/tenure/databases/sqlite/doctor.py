"""The examination of a SQLite file. It is opened, but neither created nor changed."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from tenure import diagnosis
from tenure.diagnosis import Finding, error, fine, made, milliseconds, one_line, warning
from tenure.mounts import network_file_system
from tenure.session import Failed, Step
from tenure.settings import NodeSettings
from tenure.sqlite import FileSentinel, SqliteConnector, SqliteSession, may_write

WRITES = 5
PERMIT = "give this user the permission, or another file"


@dataclass
class Case:
    """What the checks look at."""

    settings: NodeSettings
    path: Path
    session: SqliteSession


def examine(settings: NodeSettings) -> Iterator[Finding]:
    """Examine the file that the settings name, as a node with these settings would find it."""
    path = Path(settings.sqlite_path).absolute()
    shared = network_file_system(path)
    if shared:
        text = f"{str(path)!r} is on a network file system ({shared}), where SQLite's locks do not hold"
        yield error("file", text, "give a file on a local disk, or use PostgreSQL")
        return
    findings = list(_places(path, SqliteConnector(str(path), settings.renew_every).sentinels))
    yield from findings
    if not path.exists() or any(finding.level == "error" for finding in findings):
        return
    try:
        connection = sqlite3.connect(
            f"file:{quote(str(path))}?mode=rw",
            uri=True,
            timeout=settings.renew_every,
            isolation_level=None,
            check_same_thread=False,
        )
    except sqlite3.Error as failure:
        yield error("file", f"{str(path)!r} cannot be opened: {failure}", PERMIT)
        return
    with contextlib.closing(SqliteSession(connection)) as session:
        yield from made(CHECKS, Case(settings, path, session))


def _places(path: Path, sentinels: Path) -> Iterator[Finding]:
    """Look at the directory, the file and the sentinels' directory, without opening anything."""
    if not path.parent.is_dir():
        yield error("directory", f"there is no {str(path.parent)!r}", "create it")
        return
    if may_write(path.parent):
        yield fine("directory", f"{str(path.parent)!r} is writable, and on a local disk")
    else:
        yield error(
            "directory", f"this user may not write to {str(path.parent)!r}, where SQLite's log has to be", PERMIT
        )
    if not path.exists():
        yield warning("file", f"there is no {str(path)!r} yet: a node that starts creates it", "run `tenure init`")
    elif not path.is_file():
        yield error("file", f"{str(path)!r} is no file", "give the path of a file")
    elif may_write(path):
        yield fine("file", f"{str(path)!r} is writable, by SQLite {sqlite3.sqlite_version}")
    else:
        yield error("file", f"this user may not write to {str(path)!r}", PERMIT)
    if not sentinels.exists():
        yield fine("sentinels", f"{str(sentinels)!r} comes with the first node")
    elif sentinels.is_dir() and may_write(sentinels):
        yield fine("sentinels", f"{str(sentinels)!r} is writable")
    else:
        yield error("sentinels", f"this user may not write to {str(sentinels)!r}", PERMIT)


def _locks(case: Case) -> Iterator[Finding]:
    """Take a lock in a directory of its own beside the file, and try to take it again."""
    elsewhere = "give a file on a local disk"
    key = random.getrandbits(31)
    try:
        with tempfile.TemporaryDirectory(dir=case.path.parent, prefix=".tenure-") as place:
            first, second = (FileSentinel(Path(place), case.session, threading.Event()) for _ in range(2))
            stands = first.hold(key) and not second.hold(key)
            for sentinel in (first, second):
                sentinel.release(key)
    except OSError as failure:
        yield error("locks", f"no file lock can be taken: {failure}", elsewhere)
        return
    if stands:
        yield fine("locks", "a file lock stands: a crash is noticed at once")
    else:
        yield error("locks", f"file locks do not hold in {str(case.path.parent)!r}", elsewhere)


def _content(case: Case) -> Iterator[Finding]:
    """Look at how the file is written, the tables and what is in them."""
    try:
        (((mode,),), ((names,),)) = (one.rows for one in case.session.read(Step("pragma journal_mode", {}), _NAMES))
    except Failed as failure:
        remedy = "give another file, or restore this one from a backup"
        yield error("file", f"{str(case.path)!r} cannot be read: {one_line(failure)}", remedy)
        return
    if mode == "wal":
        yield fine("log", "write-ahead, so nobody waits for readers")
    else:
        yield warning(
            "log", f"journal mode is {mode}: a node that starts turns write-ahead logging on", "run `tenure init`"
        )
    there = set(filter(None, (names or "").split(",")))
    missing = {f"tenure_{name}" for name in ("meta", *diagnosis.created("table"))} - there
    if "tenure_meta" in missing and not there:
        yield warning("tables", "none in this file yet: a node that starts creates them", "run `tenure init`")
        return
    if missing:
        remedy = "restore them from a backup, or take another file (tokens begin anew then)"
        yield error("tables", f"missing in this file: {', '.join(sorted(missing))}", remedy)
        return
    (finding,) = diagnosis.version(case.session, may_migrate=True)
    yield finding
    if finding.level != "error":
        yield from made(CHECKS_OF_TABLES, case)


_NAMES = Step(
    "select group_concat(name) from sqlite_master where type = 'table' and name like 'tenure\\_%' escape '\\'", {}
)


def _write(case: Case) -> Iterator[Finding]:
    """Write something and take it back, through to the disk."""
    steps = [
        Step(text, {})
        for text in ("insert into {meta} values ('doctor', 0)", "delete from {meta} where name = 'doctor'")
    ]
    try:
        case.session.read(Step("pragma synchronous = full", {}))
        write_s = diagnosis.median_s(lambda: case.session.run(*steps), WRITES)
    except Failed as failure:
        waited = f"after {case.settings.renew_every:g} s of waiting: {one_line(failure)}"
        yield error("write", f"none {waited}", "end the process that keeps the file locked (`fuser` names it)")
        return
    yield fine("write", f"{milliseconds(write_s)}, the median of {WRITES}")
    yield from diagnosis.pace(case.settings, write_s)


CHECKS: dict[str, Callable[[Case], Iterator[Finding]]] = {"locks": _locks, "tables": _content}
CHECKS_OF_TABLES: dict[str, Callable[[Case], Iterator[Finding]]] = {
    "write": _write,
    "namespace": lambda case: diagnosis.namespace(case.session, case.settings),
    "members": lambda case: diagnosis.members(case.session, case.settings),
}
