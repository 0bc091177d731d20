"""The commands that change something: resign, init, sql, forget."""

from __future__ import annotations

import sys

import click

from tenure import schema as tables
from tenure.cli.common import Seconds, database, place, schema_option, told_errors, without_password
from tenure.connections import fence_sql
from tenure.dialects import MYSQL, SQLITE, postgresql
from tenure.registry import Registry
from tenure.settings import check_schema


@click.command()
@click.argument("role")
@click.option("--to", help="The name or id of the candidate who shall lead next.")
@click.option("--timeout", type=Seconds(), default=20.0, show_default=True,
              help="Seconds to wait for the leader to do it.")  # fmt: skip
@database
def resign(role: str, to: str | None, timeout: float, url: str | None, namespace: str | None, schema: str) -> None:
    """Ask the leader of ROLE to hand over, from any machine.

    A leader under `tenure run` ends its command first; without --restart it leaves then, with exit code 76.

    \b
    tenure resign scheduler
    tenure resign scheduler --to worker-2
    """
    with Registry(url, namespace=namespace, schema=schema) as registry:
        after = registry.resign(role, to, timeout)
    if after is None:
        click.echo(f"{role}: given up; nobody else stands for it, so the same one may lead again")
    else:
        click.echo(f"{role}: {after.name} leads now, with token {after.token}")


@click.command()
@click.option("--max-ttl", type=float, help="The largest TTL that nodes of the namespace may have, in seconds.")
@database
def init(max_ttl: float | None, url: str | None, namespace: str | None, schema: str) -> None:
    """Create the tables, or bring them up to date. Nodes do that by themselves, where they may.

    The largest permitted TTL (60 s unless changed) is how long everybody waits after the promotion of a replica.

    \b
    tenure init --url postgresql://owner@localhost/app
    tenure init --max-ttl 30
    """
    registry = Registry(url, namespace=namespace, schema=schema)
    version = registry.create(max_ttl)
    limit = "" if max_ttl is None else f"; the largest TTL of namespace {registry.namespace!r} is {max_ttl:g} s"
    click.echo(f"the tables are there, in version {version}{limit}")


@click.command()
@click.option(
    "--dialect", type=click.Choice(["postgresql", "sqlite", "mysql"]), default="postgresql", show_default=True
)
@schema_option
@click.option("--grants", metavar="USER", help="Print the least privileges for a database user who runs nodes.")
@click.option("--fence", metavar="ROLE", help="Print the statement that fences a transaction, for other languages.")
@click.option("--namespace", default="default", show_default=True, help="The namespace, for --fence.")
def sql(dialect: str, schema: str, grants: str | None, fence: str | None, namespace: str) -> None:
    """Print the statements that create the tables, for people who do not let programs do that.

    \b
    tenure sql | psql -v ON_ERROR_STOP=1 app
    tenure sql --grants app_user | psql -v ON_ERROR_STOP=1 app
    tenure sql --fence scheduler     # takes the token and the member's id
    """
    with told_errors():
        if fence is not None and grants is not None:
            raise click.UsageError("--fence and --grants: give one of them")
        words = {"sqlite": SQLITE, "mysql": MYSQL}.get(dialect) or postgresql(check_schema(schema))
        if fence is not None:
            texts = [fence_sql(fence, namespace=namespace, schema=schema, database=dialect)]
        elif grants is not None:
            if dialect == "sqlite":
                raise click.UsageError("--grants: SQLite knows no users")
            if not grants or not grants.isprintable():
                raise click.UsageError(f"--grants {grants!r}: give the name of a database user")
            texts = tables.grants(words, grants)
        else:
            texts = tables.script(words)
        click.echo("\n".join(f"{text};" for text in texts))


@click.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@place
def forget(name: str, *, yes: bool, url: str | None, schema: str) -> None:
    """Delete everything about the namespace NAME: roles, history, and the highest tokens.

    A namespace of that name begins anew with token 1, so fenced writes of the old one are not refused any more: do this
    only when nothing uses it.

    \b
    tenure forget review-1234 --yes
    """
    with Registry(url, namespace=name, schema=schema) as registry:
        if not yes:
            question = (
                f"Delete namespace {name!r}, with its roles (there are {len(registry.roles())}) and their tokens?"
            )
            if not click.confirm(without_password(question)):
                sys.exit(1)
        registry.forget()
    click.echo(f"namespace {name!r} is forgotten")
