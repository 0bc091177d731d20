"""The commands that show who leads: status, members, history, watch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from itertools import repeat
from typing import Any

import click

from tenure import Overview, Registry, RoleInfo
from tenure.cli.options import Seconds, as_json, database
from tenure.cli.output import Columns, on_terminal, one_line, print_json, printable, show, table, without_password
from tenure.errors import StoreUnavailable
from tenure.reports import Status, ago, short, with_gaps

ROLE_COLUMNS = {
    "ROLE": lambda role: role.role,
    "LEADER": lambda role: role.leader.name if role.leader else "-",
    "TOKEN": lambda role: role.token,
    "SINCE": lambda role: when(role.leader.since) if role.leader else "-",
    "RENEWED": lambda role: _renewed(role.leader, role.overdue) if role.leader else "-",
    "CANDIDATES": lambda role: role.candidates,
}
MEMBER_COLUMNS = {
    "MEMBER": lambda member: member.name,
    "HOST": lambda member: member.host,
    "PID": lambda member: member.pid,
    "VERSION": lambda member: member.version,
    "MODE": lambda member: f"{member.mode}, {member.takeover}",
    "TTL": lambda member: f"{member.ttl:g} s",
    "RENEWED": lambda member: _renewed(member, member.overdue),
}
DETAILS = {**MEMBER_COLUMNS, "LEADS": lambda member: _few(member.leads), "ID": lambda member: member.member_id}


@click.command()
@database
@as_json
def status(url: str | None, namespace: str | None, schema: str, *, json_: bool) -> None:
    """Show every role and its leader, and every living member.

    The first command to run when you wonder who leads. An overdue leader has not renewed its lease within its TTL: it
    is dead, paused or cut off, and no other node has taken over yet. If the nodes are waiting for something, such as
    old leases after the promotion of a replica, the last lines say for what, and until when.

    \b
    tenure status
    tenure status --url postgresql://localhost/app --json
    """
    with Registry(url, namespace=namespace, schema=schema) as registry:
        print_status(registry, json_=json_)


def print_status(registry: Registry, *, json_: bool) -> None:
    """Print every role and its leader, and every living member."""
    overview = Status.of(registry)
    if json_:
        print_json(overview)
    elif not overview.roles and not overview.members:
        click.echo(_nothing(registry, "roles and no members"), err=True)
    else:
        show(overview.roles, ROLE_COLUMNS)
        click.echo()
        show(overview.members, MEMBER_COLUMNS)
        for wait in overview.waits:
            role = f"role {wait.role}: " if wait.role else ""
            ends = when(wait.ends) if wait.ends else "not begun: start a node"
            click.echo(printable(f"\nwaiting: {role}{wait.reason} (until {ends})"))


@click.command()
@database
@as_json
def members(url: str | None, namespace: str | None, schema: str, *, json_: bool) -> None:
    """Show every living member: where it runs, what it leads, and its id.

    A member is a process with a node that has joined the namespace. Use this to see whether every replica takes part,
    and with which version and TTL.

    \b
    tenure members
    tenure members --namespace blue --json
    """
    with Registry(url, namespace=namespace, schema=schema) as registry:
        print_rows(registry.members(), DETAILS, lambda: _nothing(registry, "members"), json_=json_)


HISTORY_COLUMNS = {
    "TOKEN": lambda line: line.token,
    "LEADER": lambda line: line.name,
    "BEGAN": lambda line: when(line.began),
    "LASTED": lambda line: ago(((line.ended or datetime.now(timezone.utc)) - line.began).total_seconds()),
    "ENDED": lambda line: line.reason or "goes on",
    "GAP BEFORE": lambda line: "-" if line.gap is None else short(line.gap),
}


@click.command()
@click.argument("role")
@click.option("--limit", type=click.IntRange(1, 1_000_000), default=20, show_default=True,
              help="How many terms to show, the newest first.")  # fmt: skip
@database
@as_json
def history(role: str, limit: int, url: str | None, namespace: str | None, schema: str, *, json_: bool) -> None:
    """Show the terms of ROLE: who led, how long, and why each ended.

    Use this after an incident: a term that ended by `death` was a crash, and the gap before the next term says how long
    the role was without a leader.

    \b
    tenure history scheduler
    tenure history scheduler --limit 5 --json
    """
    with Registry(url, namespace=namespace, schema=schema) as registry:
        rows = with_gaps(registry.history(role, limit + 1))[:limit]
        missing = f"role {role!r} has no terms in namespace {registry.namespace!r}"
        print_rows(rows, HISTORY_COLUMNS, lambda: without_password(missing), json_=json_)


@click.command()
@click.option("--every", default=0.5, show_default=True, type=Seconds(0.1), help="Seconds between two readings.")
@click.option("--count", type=click.IntRange(1), help="How many readings; endless by default.")
@database
def watch(every: float, count: int | None, url: str | None, namespace: str | None, schema: str) -> None:
    """Show every role and its leader, live.

    Use this during a deployment or a failover test. In a pipe it prints a line for each change. It goes on while the
    database cannot be reached. Ctrl-C ends it.

    \b
    tenure watch
    tenure watch | while read line; do notify-send "$line"; done
    """
    with Registry(url, namespace=namespace, schema=schema) as registry:
        looks = _looks(registry, every, count)
        if on_terminal():
            _on_screen(looks)
        else:
            _as_lines(looks)


def _looks(registry: Registry, every: float, count: int | None) -> Iterator[Overview | str]:
    """Yield a reading each time, or a text while the database cannot be reached; raise if the first reading fails."""
    yield registry.overview()
    connected = True
    for _ in repeat(None) if count is None else range(count - 1):
        time.sleep(every)
        try:
            if not connected:
                registry.connect()
            look: Overview | str = registry.overview()
            connected = True
        except StoreUnavailable as error:
            look = f"the database cannot be reached: {one_line(error)}"
            connected = False
        yield look


def _on_screen(looks: Iterator[Overview | str]) -> None:
    from rich.console import Group  # noqa: PLC0415 - only on a terminal
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    with Live(screen=True, auto_refresh=False) as live:
        shown: list[Any] = []
        for look in looks:
            moment = f"{datetime.now().astimezone():%H:%M:%S}"
            if isinstance(look, Overview):
                shown = [
                    *_fitting(look.roles, ROLE_COLUMNS, (live.console.height - 4) // 2),
                    *_fitting(look.members, MEMBER_COLUMNS, (live.console.height - 4) // 2),
                ]
                title = Text(f"{moment}  namespace {look.namespace}")
            else:
                title = Text(f"{moment}  {look}", style="bold red")
            live.update(Group(title, *shown), refresh=True)


def _fitting(rows: list[Any], columns: Columns, lines: int) -> list[Any]:
    """Return a table that fits into ``lines``, and how many rows it leaves out."""
    fit = max(1, lines - 3)
    more = [f"… and {len(rows) - fit} more: `tenure status` shows all"] if len(rows) > fit else []
    return ["", table(rows[:fit], columns), *more]


AWAY = ""
"""The key of the text about an unreachable database, in a dict that is keyed by role: no role has an empty name."""


def _as_lines(looks: Iterator[Overview | str]) -> None:
    """Print what has changed since the previous reading."""
    known: dict[str, str] = {}
    for look in looks:
        roles = look.roles if isinstance(look, Overview) else []
        lines = {role.role: _line(role) for role in roles}
        if isinstance(look, str):
            lines = {AWAY: look} | known  # a later text does not replace the first, so it is printed once
        news = [line for role, line in lines.items() if known.get(role) != line]
        if AWAY in known and AWAY not in lines:
            news.insert(0, "the database is back")
        for line in news:
            click.echo(f"{datetime.now().astimezone():%Y-%m-%dT%H:%M:%S%z} {line}")
        sys.stdout.flush()
        known = lines


def print_rows(rows: Sequence[Any], columns: Columns, nothing: Callable[[], str], *, json_: bool) -> None:
    """Print rows as JSON or as a table; on stderr what ``nothing`` returns if there are none."""
    if json_:
        print_json(rows)
    elif rows:
        show(rows, columns)
    else:
        click.echo(nothing(), err=True)


def _line(role: RoleInfo) -> str:
    leader = f"led by {role.leader.name}" if role.leader else "without a leader"
    return printable(f"{role.role} token {role.token} {leader}") + (", which is overdue" if role.overdue else "")


def _renewed(info: Any, overdue: bool) -> str:
    return f"{ago(info.renewed_ago)} ago" + (", overdue" if overdue else "")


def _few(roles: tuple[str, ...]) -> str:
    return ", ".join(roles[:3]) + (f" and {len(roles) - 3} more" if len(roles) > 3 else "") or "-"


def _nothing(registry: Registry, what: str) -> str:
    others = [name for name in registry.namespaces() if name != registry.namespace]
    hint = f"; other namespaces: {', '.join(map(repr, others))}" if others else ""
    return without_password(f"namespace {registry.namespace!r} has no {what}{hint}")


def when(moment: datetime) -> str:
    """Return a moment for people, in their time zone."""
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S}"
