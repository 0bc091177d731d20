"""The commands for guarded tables: guard, guards."""

from __future__ import annotations

import click

from tenure import Registry, guard_sql
from tenure.cli.inspect import print_rows
from tenure.cli.internals import unguard_sql
from tenure.cli.options import as_json, database
from tenure.cli.output import Columns

COLUMNS: Columns = {
    "TABLE": lambda table: table.table,
    "NAMESPACE": lambda table: table.namespace,
    "ROLE": lambda table: table.role,
    "LEAKS": lambda table: "; ".join(table.leaks) or "none",
}


@click.command()
@click.argument("table")
@click.option("--role", help="The role whose leader may write to TABLE.")
@click.option("--remove", is_flag=True, help="Remove the guard of TABLE.")
@click.option("--sql", is_flag=True, help="Print the statements, for a migration, and execute nothing.")
@click.option("--dialect", type=click.Choice(["postgresql", "mysql"]), default="postgresql", show_default=True,
              help="The database to print the statements for, with --sql.")  # fmt: skip
@database
def guard(
    table: str,
    role: str | None,
    *,
    remove: bool,
    sql: bool,
    dialect: str,
    url: str | None,
    namespace: str | None,
    schema: str,
) -> None:
    """Let only the leader of a role write to TABLE, a table of your own.

    The database then refuses every write to TABLE outside a transaction that the present leader has fenced, also from
    programs that know nothing of Tenure. Run this as the owner of TABLE. PostgreSQL and MariaDB can do that.

    \b
    tenure guard invoices --role billing
    tenure guard invoices --role billing --sql     # for a migration
    tenure guard invoices --remove
    """
    if remove == (role is not None):
        raise click.UsageError("give either --role, to guard the table, or --remove")
    if sql:
        named = namespace or "default"
        texts = (
            unguard_sql(table, schema, dialect)
            if role is None
            else guard_sql(table, role, namespace=named, schema=schema, database=dialect)
        )
        # The client of MariaDB ends a statement at the first semicolon, and triggers contain some.
        end = ";" if dialect == "postgresql" else " //"
        around = ("", "") if dialect == "postgresql" else ("delimiter //\n", "\ndelimiter ;")
        click.echo(around[0] + "\n".join(text + end for text in texts) + around[1])
        return
    with Registry(url, namespace=namespace, schema=schema) as registry:
        if role is None:
            registry.unguard(table)
            click.echo(f"{table}: not guarded any more")
            return
        registry.guard(table, role)
        click.echo(f"{table}: only the leader of role {role!r} can write to it now")
        if role not in [info.role for info in registry.roles()]:
            click.echo(f"no node has stood for role {role!r} in namespace {registry.namespace!r} yet", err=True)


@click.command()
@database
@as_json
def guards(url: str | None, namespace: str | None, schema: str, *, json_: bool) -> None:
    """Show the guarded tables, of all namespaces, and how a write could get around each guard.

    \b
    tenure guards --url postgresql://localhost/app
    """
    with Registry(url, namespace=namespace, schema=schema) as registry:
        found = registry.guarded_tables()
    print_rows(found, COLUMNS, lambda: "no table is guarded", json_=json_)
