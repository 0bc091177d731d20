"""The examination of a SQLite file. The file is opened, but neither created nor changed."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from tenure.base.durations import duration
from tenure.databases import doctor
from tenure.databases.doctor import Checks, Finding, error, ok, one_line, run_checks, warning
from tenure.databases.sqlite.connect import SqliteConnector
from tenure.databases.sqlite.filesystem import DatabaseFile, file_id, may_write, network_file_system
from tenure.databases.sqlite.sentinel import REMEDY, UNSUPPORTED, FileSentinel, is_supported
from tenure.databases.sqlite.session import SqliteSession
from tenure.settings import NodeSettings
from tenure.store.session import Failed, Step

WRITES = 5
PERMIT = "give this user the permission, or use another file"


@dataclass
class SqliteCase(doctor.Case):
    """What the checks examine on SQLite."""

    session: SqliteSession
    path: Path


def examine(settings: NodeSettings) -> Iterator[Finding]:
    """Examine the file that the settings name, as a node with these settings would find it."""
    if not is_supported():
        yield error("file", UNSUPPORTED, REMEDY)
        return
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
    file = DatabaseFile(path, file_id(path, companions=False), companions=False)
    with contextlib.closing(SqliteSession(connection, file)) as session:
        yield from run_checks(CHECKS, SqliteCase(doctor.as_members(settings, session), session, path))


def _places(path: Path, sentinels: Path) -> Iterator[Finding]:
    """Check the directory, the file and the sentinels' directory, without opening anything."""
    if not path.parent.is_dir():
        yield error("directory", f"{str(path.parent)!r} does not exist", "create it")
        return
    if may_write(path.parent):
        yield ok("directory", f"{str(path.parent)!r} is writable, and on a local disk")
    else:
        text = f"this user may not write to {str(path.parent)!r}, where SQLite's log has to be"
        yield error("directory", text, PERMIT)
    if not path.exists():
        yield warning("file", f"{str(path)!r} does not exist yet: a node that starts creates it", "run `tenure init`")
    elif not path.is_file():
        yield error("file", f"{str(path)!r} is not a file", "give the path of a file")
    elif may_write(path):
        yield ok("file", f"{str(path)!r} is writable, by SQLite {sqlite3.sqlite_version}")
    else:
        yield error("file", f"this user may not write to {str(path)!r}", PERMIT)
    if not sentinels.exists():
        yield ok("sentinels", f"{str(sentinels)!r} is created by the first node")
    elif sentinels.is_dir() and may_write(sentinels):
        yield ok("sentinels", f"{str(sentinels)!r} is writable")
    else:
        yield error("sentinels", f"this user may not write to {str(sentinels)!r}", PERMIT)


def _locks(case: SqliteCase) -> Iterator[Finding]:
    """Check that file locks work: take one in a new directory beside the file, and try to take it again."""
    elsewhere = "give a file on a local disk"
    key = random.getrandbits(31)
    try:
        with tempfile.TemporaryDirectory(dir=case.path.parent, prefix=".tenure-") as place:
            first, second = (FileSentinel(Path(place), case.session, threading.Event()) for _ in range(2))
            holds = first.hold(key) and not second.hold(key)
            for sentinel in (first, second):
                sentinel.release(key)
    except OSError as failure:
        yield error("locks", f"no file lock can be taken: {failure}", elsewhere)
        return
    if holds:
        yield ok("locks", "file locks hold: a crash is noticed at once")
    else:
        yield error("locks", f"file locks do not hold in {str(case.path.parent)!r}", elsewhere)


def _tables(case: SqliteCase) -> Iterator[Finding]:
    """Check the journal mode of the file, the tables, and what the tables contain."""
    try:
        (((mode,),), ((names,),)) = (
            result.rows for result in case.session.read(Step("pragma journal_mode", {}), _NAMES)
        )
    except Failed as failure:
        remedy = "give another file, or restore this one from a backup"
        yield error("file", f"{str(case.path)!r} cannot be read: {one_line(failure)}", remedy)
        return
    if mode == "wal":
        yield ok("log", "write-ahead, so writers do not wait for readers")
    else:
        text = f"journal mode is {mode}: a node that starts turns write-ahead logging on"
        yield warning("log", text, "run `tenure init`")
    there = set(filter(None, (names or "").split(",")))
    missing = {f"tenure_{name}" for name in ("meta", *doctor.created("table"))} - there
    if "tenure_meta" in missing and not there:
        yield warning("tables", "none in this file yet: a node that starts creates them", "run `tenure init`")
        return
    if missing:
        remedy = "restore them from a backup, or use another file (its tokens start again at 1)"
        yield error("tables", f"missing in this file: {', '.join(sorted(missing))}", remedy)
        return
    yield from doctor.contents(case, CHECKS_OF_TABLES, may_migrate=True)


_NAMES = Step(
    "select group_concat(name) from sqlite_master where type = 'table' and name like 'tenure\\_%' escape '\\'", {}
)


def _write(case: SqliteCase) -> Iterator[Finding]:
    """Measure how long writing takes: write a row to the disk, and delete it."""
    steps = [
        Step(text, {})
        for text in ("insert into {meta} values ('doctor', 0)", "delete from {meta} where name = 'doctor'")
    ]
    try:
        case.session.read(Step("pragma synchronous = full", {}))
        write_s = doctor.median_s(lambda: case.session.run(*steps), WRITES)
    except Failed as failure:
        text = f"failed after {case.settings.renew_every:g} s of waiting: {one_line(failure)}"
        yield error("write", text, "end the process that keeps the file locked (`fuser` names it)")
        return
    yield ok("write", f"{duration(write_s)}, the median of {WRITES}")
    yield doctor.pace(case.settings, write_s)


CHECKS: Checks[SqliteCase] = (_locks, _tables)
CHECKS_OF_TABLES: Checks[SqliteCase] = (_write, doctor.namespace, doctor.members)
