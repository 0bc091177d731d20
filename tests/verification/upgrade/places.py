"""The databases: each has a user who owns it, and one who may do there only what is granted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import mariadb
from tests.support.mariadb import MariaDbServer
from tests.support.servers import PostgresServer
from tests.support.store_by_hand import execute

OWNER, APP = "owner", "app"
KINDS = ("postgres", "mariadb", "sqlite")
FOR_THE_LEDGER = {
    "postgres": (f"grant insert on ledger to {APP}", f"grant usage on sequence ledger_n_seq to {APP}"),
    "mariadb": (f"grant insert on ledger to {APP}@'%'",),
}
DIALECTS = {"postgres": "postgresql", "mariadb": "mysql"}


@dataclass(frozen=True)
class Place:
    """An empty database. The nodes of a trial have one of the two URLs."""

    kind: str
    version: str
    url: str
    """The owner's."""
    app_url: str = ""
    """Of the user who may create no table."""
    log: Path | None = None
    restart: Callable[[], object] | None = None


@contextlib.contextmanager
def place(kind: str, directory: Path) -> Iterator[Place]:
    """A database of this kind, as long as the block lasts. Its log is kept in the directory."""
    make = {"postgres": _postgres, "mariadb": _mariadb, "sqlite": _sqlite}[kind]
    with make(directory) as made:
        try:
            yield made
        finally:
            if made.log is not None:
                (directory / "server.log").write_bytes(made.log.read_bytes())


@contextlib.contextmanager
def _postgres(_: Path) -> Iterator[Place]:
    with PostgresServer(fsync=False) as server:
        name = "upgrade"
        server.create_database(name)
        server.execute(f"create role {OWNER} login; create role {APP} login; alter database {name} owner to {OWNER}")
        version = f"PostgreSQL {server.installation.version}"
        owner, app = (server.url(name, user=user) for user in (OWNER, APP))
        yield Place("postgres", version, owner, app, server.log, server.restart)


@contextlib.contextmanager
def _mariadb(_: Path) -> Iterator[Place]:
    with MariaDbServer() as server:
        url = server.create_database()
        name = url.rpartition("/")[2]
        server.execute(f"create user {APP}@'%'")
        server.execute(f"grant all on {name}.* to {mariadb.USER}@'%' with grant option")
        version = f"MariaDB {server.execute('select version()')[0][0]}"
        yield Place("mariadb", version, url, server.url(name, user=APP), server.log, server.restart)


@contextlib.contextmanager
def _sqlite(directory: Path) -> Iterator[Place]:
    url = f"sqlite:///{directory / 'upgrade.db'}"
    ((version,),) = execute(url, "select sqlite_version()")
    yield Place("sqlite", f"SQLite {version}", url)
