"""The command that examines a database: whether nodes can work there, and what to do where they cannot."""

from __future__ import annotations

import sys

import click

from tenure.cli.common import USAGE, as_json, database, on_terminal, print_json
from tenure.diagnosis import Finding, diagnosed
from tenure.settings import node_settings

SHOWN = {"ok": ("ok  ", "green"), "warning": ("warn", "yellow"), "error": ("FAIL", "red")}
STRICT = 1
"""The exit code with --strict where nothing fails and something is worth a warning."""
INDENT = 6


@click.command()
@click.option("--ttl", type=float, help="The TTL of the nodes, in seconds; else TENURE_TTL, else 10.")
@click.option("--strict", is_flag=True, help="Leave with 1 if there are warnings.")
@database
@as_json
def doctor(
    ttl: float | None, *, strict: bool, url: str | None, namespace: str | None, schema: str, json_: bool
) -> None:
    """Examine the database as a node would, and say what to do about what is found.

    Nothing in the database is created or changed. Leaves with 0 if nothing fails, and with 2 if something does.

    \b
    tenure doctor --url postgresql://localhost/app
    tenure doctor --ttl 3 --strict && echo fit
    """
    settings = node_settings(url, name="doctor", namespace=namespace, ttl=ttl, schema=schema)
    if settings.database == "sqlite":
        from tenure.sqlite_checks import examine  # noqa: PLC0415 - each where it is needed
    elif settings.database == "mysql":
        from tenure.mysql_checks import examine  # noqa: PLC0415
    else:
        from tenure.postgres_checks import examine  # noqa: PLC0415
    findings = diagnosed(examine(settings))
    if json_:
        print_json(findings)
    else:
        _print(findings)
    levels = {finding.level for finding in findings}
    sys.exit(USAGE if "error" in levels else STRICT if strict and "warning" in levels else 0)


def _print(findings: list[Finding]) -> None:
    """Print a line for each finding; for people, the remedy on a line of its own."""
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        word, colour = SHOWN[finding.level]
        remedy = f"remedy: {finding.remedy}" if finding.remedy else ""
        between = "\n" + " " * (INDENT + width + 2) if on_terminal() else "; "
        told = f"{finding.check:{width}}  {finding.text}" + (between + remedy if remedy else "")
        click.echo(f"{click.style(word, fg=colour)}  {told}")
