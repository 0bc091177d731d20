"""The commands that administer: init, sql, resign, forget."""

from __future__ import annotations

import sys
import time

import click

from tenure import ConfigError, Registry, fence_sql, tables_sql
from tenure.base.durations import exact
from tenure.cli import exit_codes
from tenure.cli.internals import grants_sql, promotion_is_kept, refuse_to_forget
from tenure.cli.options import Seconds, as_json, database, schema_option
from tenure.cli.output import Ended, print_json, report_errors, without_password
from tenure.reports import HandOver
from tenure.settings import PROMOTIONS, some_names


@click.command()
@click.argument("role")
@click.option("--to", help="The name or id of the candidate that should lead next.")
@click.option("--timeout", type=Seconds(), default=20.0, show_default=True,
              help="Seconds to wait for the leader to hand over.")  # fmt: skip
@database
@as_json
def resign(
    role: str, to: str | None, timeout: float, url: str | None, namespace: str | None, schema: str, *, json_: bool
) -> None:
    """Ask the leader of ROLE to hand over to another candidate.

    For maintenance: move the work to another machine before you restart or drain one. Run this on any machine that
    reaches the database. A leader under `tenure run` ends its command first; without --restart it then exits with 76.

    \b
    tenure resign scheduler
    tenure resign scheduler --to worker-2
    """
    with Registry(url, namespace=namespace, schema=schema) as registry:
        # An unknown role is an error that names the nearest ones, as in `tenure status ROLE`.
        registry.role(role)
        done = HandOver.ask(registry, role, to, timeout)
    if json_:
        print_json(done)
    elif done.after is None:
        click.echo(f"{role}: the leader resigned; there is no other candidate, so the same node may lead again")
    else:
        click.echo(f"{role}: {done.after.name} leads now, with token {done.after.token}")


@click.command()
@click.option("--max-ttl", type=float, help="The largest TTL that nodes of the namespace may have, in seconds.")
@click.option("--promotion", type=click.Choice(PROMOTIONS),
              help="Whether a promoted replica has every commit that was acknowledged (PostgreSQL).")  # fmt: skip
@database
def init(max_ttl: float | None, promotion: str | None, url: str | None, namespace: str | None, schema: str) -> None:
    """Create the tables, or bring them up to date.

    Nodes do that themselves. Use this command if their database user may not create tables, or to set the largest
    permitted TTL. If you do not set it, nodes do: it is the longest TTL of any node, and at least 10 s. After the
    promotion of a replica, no node is elected until the largest TTL has passed. Exceptions: a strict leader that still
    trusts its lease takes its role at once, and no node waits if you say that a promotion loses nothing. Say that only
    if replication is synchronous, and only a synchronous replica is ever promoted.

    \b
    tenure init --url postgresql://owner@localhost/app
    tenure init --max-ttl 30
    tenure init --promotion loses-nothing
    """
    registry = Registry(url, namespace=namespace, schema=schema)
    version = registry.create(max_ttl, waits=_wait_for_leases, promotion=promotion)
    limit = "" if max_ttl is None else f"; the largest TTL of namespace {registry.namespace!r} is {exact(max_ttl)}"
    word = "" if promotion is None else f"; namespace {registry.namespace!r} has promotion={promotion}"
    click.echo(f"the tables are up to date, in version {version}{limit}{word}")
    # No refusal: right after a promotion, the tool that set synchronous_standby_names may not have set it again yet.
    if promotion is not None and not promotion_is_kept(registry):
        click.echo(
            "warning: synchronous_standby_names is empty: commits do not wait for a replica, and a promotion now could "
            "give two leaders; set it, or run `tenure init --promotion may-lose`",
            err=True,
        )


def _wait_for_leases(seconds: float) -> None:
    """Print why the command waits, and wait."""
    click.echo(
        "the namespace is new on a server that was once a replica, and the replica may have lost a namespace of that "
        f"name: waiting {exact(round(seconds))} until every lease in it is over (if you stop, the first node waits "
        "instead)",
        err=True,
    )
    time.sleep(seconds)


@click.command()
@click.option("--dialect", type=click.Choice(["postgresql", "sqlite", "mysql"]), default="postgresql",
              show_default=True, help="The database to print the statements for.")  # fmt: skip
@schema_option
@click.option("--grants", metavar="USER", help="Print the statements that grant USER what a node needs, no more.")
@click.option(
    "--fence", metavar="ROLE", help="Print the statement that fences a transaction, for programs in other languages."
)
@click.option("--namespace", default="default", show_default=True, help="The namespace, for --fence.")
def sql(dialect: str, schema: str, grants: str | None, fence: str | None, namespace: str) -> None:
    """Print the SQL statements that create the tables.

    For a DBA or a migration tool that creates the tables instead of the nodes. Nothing is executed.

    \b
    tenure sql | psql -v ON_ERROR_STOP=1 app
    tenure sql --grants app_user | psql -v ON_ERROR_STOP=1 app
    tenure sql --fence scheduler     # takes the token and the member's id
    """
    with report_errors():
        if fence is not None and grants is not None:
            raise click.UsageError("--fence and --grants exclude each other: give one of them")
        if fence is not None:
            texts = [fence_sql(fence, namespace=namespace, schema=schema, database=dialect)]
        elif grants is not None:
            if dialect == "sqlite":
                raise click.UsageError("--grants does not apply to SQLite, which has no users: leave it out")
            if not grants or not grants.isprintable():
                raise click.UsageError(f"--grants {grants!r} is not a name: give the name of a database user")
            texts = grants_sql(grants, dialect, schema)
        else:
            texts = ["begin", *tables_sql(dialect, schema=schema), "commit"]
        click.echo("\n".join(f"{text};" for text in texts))


@click.command()
@click.argument("name", required=False)
@click.option("--role", help="Delete this role only, and keep its namespace.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@database
def forget(
    name: str | None, role: str | None, *, yes: bool, url: str | None, namespace: str | None, schema: str
) -> None:
    """Delete the namespace NAME: its roles, its history and its tokens. Or delete one role, with --role.

    For namespaces that nothing uses any more, such as those of review apps. A new namespace of that name starts with
    token 1 again, so the fence no longer refuses old writers: make sure that there are none.

    With --role: for a role that nothing uses any more. Its history, its jobs and the record of their runs are deleted.
    Its last token is kept, so tokens go on growing if the role comes back, and the fence refuses old writers.

    \b
    tenure forget review-1234 --yes
    tenure forget --role old-importer
    tenure forget --role old-importer --namespace blue
    """
    if (name is None) == (role is None):
        raise click.UsageError("give either NAME, to delete a namespace, or --role, to delete a role of --namespace")
    if name is not None and namespace is not None:
        raise click.UsageError("--namespace goes with --role: give the namespace to delete as NAME only")
    with Registry(url, namespace=namespace if name is None else name, schema=schema) as registry:
        if role is not None:
            info = registry.role(role)
            refuse_to_forget(registry, info)
            _confirm(f"Delete role {role!r} of namespace {registry.namespace!r}, with {info.token} as last token?", yes)
            registry.forget_role(role)
            click.echo(f"role {role!r} of namespace {registry.namespace!r} is deleted; its last token is kept")
        else:
            _check_namespace(registry, url, schema)
            refuse_to_forget(registry, None)
            _confirm(f"Delete namespace {name!r}, with {len(registry.roles())} roles and their tokens?", yes)
            registry.forget()
            click.echo(f"namespace {name!r} is deleted")


def _check_namespace(registry: Registry, url: str | None, schema: str) -> None:
    """Raise ConfigError if the namespace does not exist; name the option if it is a role's name."""
    known, name = registry.namespaces(), registry.namespace
    if name in known:
        return
    hint = f"existing namespaces: {some_names(known) if known else 'none'}"
    with Registry(url, schema=schema) as usual:
        if name in (info.role for info in usual.roles()):
            hint = f"to delete the role of namespace {usual.namespace!r}, give `tenure forget --role {name}`"
    raise ConfigError(f"namespace {name!r} does not exist; {hint}")


def _confirm(question: str, yes: bool) -> None:
    """Ask, unless the caller has said yes already; exit with 1 if the answer is no."""
    try:
        if yes or click.confirm(without_password(question)):
            return
    except click.Abort:
        if sys.stdin is not None and sys.stdin.isatty():
            raise
        raise Ended(exit_codes.USAGE, "the question was not answered: give --yes") from None
    sys.exit(1)
