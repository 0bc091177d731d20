"""The commands that look: status, members, history, watch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import zip_longest
from typing import Any

import click

from tenure.cli.common import (
    Columns,
    Seconds,
    ago,
    as_json,
    database,
    on_terminal,
    one_line,
    print_json,
    printable,
    show,
    table,
    when,
    without_password,
)
from tenure.errors import StoreUnavailable
from tenure.registry import MemberInfo, Registry, RoleInfo
from tenure.values import TermRecord


@dataclass(frozen=True)
class Overview:
    """A namespace: every role with its leader, and every living member."""

    namespace: str
    roles: list[RoleInfo]
    members: list[MemberInfo]

    @classmethod
    def of(cls, registry: Registry) -> Overview:
        """Look."""
        return cls(registry.namespace, registry.roles(), registry.members())


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
    """Show every role and who leads it, and every living member.

    A leader that is overdue has not renewed within its TTL: it is dead, paused or cut off, and nobody has taken over.

    \b
    tenure status
    tenure status --url postgresql://localhost/app --json
    """
    with Registry(url, namespace=namespace, schema=schema) as registry:
        print_status(registry, json_=json_)


def print_status(registry: Registry, *, json_: bool) -> None:
    """Print every role and who leads it, and every living member."""
    overview = Overview.of(registry)
    if json_:
        print_json(overview)
    elif not overview.roles and not overview.members:
        click.echo(_nothing(registry, "roles and no members"), err=True)
    else:
        show(overview.roles, ROLE_COLUMNS)
        click.echo()
        show(overview.members, MEMBER_COLUMNS)


@click.command()
@database
@as_json
def members(url: str | None, namespace: str | None, schema: str, *, json_: bool) -> None:
    """Show every living member: where it runs, what it leads, its id.

    \b
    tenure members --namespace blue
    """
    with Registry(url, namespace=namespace, schema=schema) as registry:
        found = registry.members()
        if json_:
            print_json(found)
        elif found:
            show(found, DETAILS)
        else:
            click.echo(_nothing(registry, "members"), err=True)


@dataclass(frozen=True)
class Line:
    """A term of the history, and how long the role was without a leader before it."""

    token: int
    name: str
    member_id: str
    began: datetime
    ended: datetime | None
    reason: str | None
    gap: float | None


HISTORY_COLUMNS = {
    "TOKEN": lambda line: line.token,
    "LEADER": lambda line: line.name,
    "BEGAN": lambda line: when(line.began),
    "LASTED": lambda line: ago(((line.ended or datetime.now(timezone.utc)) - line.began).total_seconds()),
    "ENDED": lambda line: line.reason or "goes on",
    "GAP BEFORE": lambda line: (
        "-" if line.gap is None else f"{line.gap * 1000:.0f} ms" if line.gap < 10 else ago(line.gap)
    ),
}


@click.command()
@click.argument("role")
@click.option(
    "--limit",
    type=click.IntRange(1, 1_000_000),
    default=20,
    show_default=True,
    help="How many terms, the newest first.",
)
@database
@as_json
def history(role: str, limit: int, url: str | None, namespace: str | None, schema: str, *, json_: bool) -> None:
    """Show the terms of ROLE: who led, until when, why it ended, and the gap before.

    \b
    tenure history scheduler --limit 5
    """
    with Registry(url, namespace=namespace, schema=schema) as registry:
        lines = with_gaps(registry.history(role, limit + 1))[:limit]
        if json_:
            print_json(lines)
        elif lines:
            show(lines, HISTORY_COLUMNS)
        else:
            missing = f"role {role!r} has no terms in namespace {registry.namespace!r}"
            click.echo(without_password(missing), err=True)


def with_gaps(records: list[TermRecord]) -> list[Line]:
    """Return the terms, each with the time between the end of the one before and its own beginning."""
    return [
        Line(
            record.token,
            record.name,
            record.member_id,
            record.began,
            record.ended,
            record.reason,
            (record.began - earlier.ended).total_seconds()
            if earlier and earlier.ended and earlier.reason != "lapsed"  # when that was, its member knows
            else None,
        )
        for record, earlier in zip_longest(records, records[1:])
    ]


@click.command()
@click.option("--every", default=0.5, show_default=True, type=Seconds(0.1), help="Seconds between two looks.")
@click.option("--count", type=click.IntRange(1), help="How many looks; for ever by default.")
@database
def watch(every: float, count: int | None, url: str | None, namespace: str | None, schema: str) -> None:
    """Show every role and who leads it, again and again; on a pipe, a line for each change.

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
    """Look again and again. Where the database is away, say so and connect again; but the first look must work."""
    yield Overview.of(registry)
    connected = True
    made = 1
    while count is None or made < count:
        time.sleep(every)
        made += 1
        try:
            if not connected:
                registry.connect()
            look: Overview | str = Overview.of(registry)
            connected = True
        except StoreUnavailable as error:
            look = f"the database is away: {one_line(error)}"
            connected = False
        yield look


def _on_screen(looks: Iterator[Overview | str]) -> None:
    from rich.console import Group  # noqa: PLC0415 - only where somebody looks
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
    """Return a table that fits into so many lines, and says what it leaves out."""
    fit = max(1, lines - 3)
    more = [f"… and {len(rows) - fit} more: `tenure status` shows all"] if len(rows) > fit else []
    return ["", table(rows[:fit], columns), *more]


AWAY = ""
"""Stands among the roles, of which none has this name."""


def _as_lines(looks: Iterator[Overview | str]) -> None:
    """Print what is new since the look before."""
    known: dict[str, str] = {}
    for look in looks:
        roles = look.roles if isinstance(look, Overview) else []
        lines = {role.role: _line(role) for role in roles}
        if isinstance(look, str):
            lines = {AWAY: look} | known  # said once, whatever the next complaint is
        news = [line for role, line in lines.items() if known.get(role) != line]
        if AWAY in known and AWAY not in lines:
            news.insert(0, "the database is back")
        for line in news:
            click.echo(f"{datetime.now().astimezone():%Y-%m-%dT%H:%M:%S%z} {line}")
        sys.stdout.flush()
        known = lines


def _line(role: RoleInfo) -> str:
    leader = f"led by {role.leader.name}" if role.leader else "without a leader"
    return printable(f"{role.role} token {role.token} {leader}") + (", who is overdue" if role.overdue else "")


def _renewed(info: Any, overdue: bool) -> str:
    return f"{ago(info.renewed_ago)} ago" + (", overdue" if overdue else "")


def _few(roles: tuple[str, ...]) -> str:
    return ", ".join(roles[:3]) + (f" and {len(roles) - 3} more" if len(roles) > 3 else "") or "-"


def _nothing(registry: Registry, what: str) -> str:
    others = [name for name in registry.namespaces() if name != registry.namespace]
    hint = f"; others are: {', '.join(map(repr, others))}" if others else ""
    return without_password(f"namespace {registry.namespace!r} has no {what}{hint}")
