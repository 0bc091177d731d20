"""The commands that show who leads: status, members, history."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import click

from tenure import MemberInfo, Registry, RoleInfo, WaitInfo
from tenure.cli.options import as_json, database
from tenure.cli.output import (
    Columns,
    console,
    echo,
    narrowed,
    on_terminal,
    print_json,
    printable,
    show,
    without_password,
)
from tenure.durations import duration, exact
from tenure.reports import HistoryRow, RoleDetail, Status, by_attention, last_terms, state_of_role

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
    "TTL": lambda member: exact(member.ttl),
    "RENEWED": lambda member: _renewed(member, member.overdue),
}
CANDIDATE_COLUMNS = {
    "CANDIDATE": lambda candidate: candidate.name,
    "HOST": lambda candidate: candidate.host,
    "PID": lambda candidate: candidate.pid,
    "TTL": lambda candidate: exact(candidate.ttl),
    "RENEWED": lambda candidate: f"{duration(candidate.renewed_ago)} ago",
}
DETAILS = {**MEMBER_COLUMNS, "LEADS": lambda member: _few(member.leads), "ID": lambda member: member.member_id}


MARKS = {
    "overdue": ("✗", "bold red", "red"),
    "vacant": ("○", "bold yellow", "yellow"),
    "led": ("●", "bold green", ""),
    "idle": ("·", "dim", "dim"),
}
SPARE = ("SINCE", "VERSION", "MODE", "PID", "CANDIDATES", "TTL")
"""What a narrow terminal does not show, in this order, so that the names can be read."""
LAST_TERMS = 5


@click.command()
@click.argument("role", required=False)
@database
@as_json
def status(role: str | None, url: str | None, namespace: str | None, schema: str, *, json_: bool) -> None:
    """Show every role and its leader, and every living member; or ROLE in detail.

    The first command to run when you wonder who leads. Roles that need attention come first: overdue ones, then those
    without a leader that have candidates, those with a leader, and those without candidates. An overdue leader has not
    renewed its lease within its TTL: it is dead, paused or cut off, and no other node has taken over yet. If the nodes
    are waiting for something, such as old leases after the promotion of a replica, the last lines say for what, and
    until when.

    \b
    tenure status
    tenure status scheduler
    tenure status --url postgresql://localhost/app --json
    """
    if role is not None and re.match(r"[a-z][a-z0-9+]*://", role, re.IGNORECASE):
        raise click.UsageError("ROLE looks like a URL: give the database with --url, and the role by its name")
    with Registry(url, namespace=namespace, schema=schema) as registry:
        if role is None:
            print_status(registry, json_=json_)
        else:
            _print_role(RoleDetail.of(registry, role, LAST_TERMS), json_=json_)


def print_status(registry: Registry, *, json_: bool) -> None:
    """Print every role and its leader, and every living member."""
    overview = Status.of(registry)
    if json_:
        print_json(overview)
    elif not overview.roles and not overview.members:
        click.echo(_nothing(registry, "roles and no members"), err=True)
    else:
        roles, members = by_attention(overview.roles), overdue_first(overview.members)
        role_columns, member_columns = _fitting(roles, ROLE_COLUMNS), _fitting(members, MEMBER_COLUMNS)
        show(roles, role_columns, mark_role)
        click.echo()
        show(members, member_columns, mark_member)
        _print_waits(overview.waits, overview.as_of)
        _say_left_out({**ROLE_COLUMNS, **MEMBER_COLUMNS}, {**role_columns, **member_columns})


def _fitting(rows: Sequence[Any], columns: Columns, spare: Sequence[str] = SPARE) -> Columns:
    """Return the columns that fit on the terminal; all of them if the output is not a terminal."""
    return narrowed(rows, columns, spare, console().width) if on_terminal() else columns


def _say_left_out(columns: Columns, shown: Columns) -> None:
    """Say which columns are not shown, and how to see them."""
    if left_out := [name for name in columns if name not in shown]:
        click.echo()
        echo(f"too narrow for {', '.join(left_out)}: widen the terminal, or add `| less -S`", "dim")


def _print_role(detail: RoleDetail, *, json_: bool) -> None:
    if json_:
        print_json(detail)
        return
    role, leader = detail.role, detail.role.leader
    state = {
        "overdue": "overdue: the leader has not renewed within its TTL",
        "vacant": "without a leader",
        "led": "led",
        "idle": "without a leader and without candidates",
    }[state_of_role(role)]
    facts = {"role": role.role, "state": state, "leader": leader.name if leader else "-", "token": role.token}
    if leader is not None:
        facts["since"] = f"{when(leader.since)}, for {duration((detail.as_of - leader.since).total_seconds())}"
        facts["renewed"] = f"{duration(leader.renewed_ago)} ago"
    for label, value in facts.items():
        echo(printable(f"{label:<9}{value}"), mark_role(role)[2] if label == "state" else "")
    _print_waits(detail.waits, detail.as_of)
    if detail.candidates:
        click.echo()
        show(detail.candidates, CANDIDATE_COLUMNS)
    if detail.terms:
        click.echo()
        show_terms(detail.terms, detail.as_of)


def _print_waits(waits: list[WaitInfo], as_of: datetime) -> None:
    for wait in waits:
        role = f"role {wait.role}: " if wait.role else ""
        ends = "not begun: start a node"
        if wait.ends is not None:
            left_s = (wait.ends - as_of).total_seconds()
            ends = f"{duration(left_s)} more, until {when(wait.ends)}" if left_s >= 1 else "it ends at any moment"
        click.echo()
        echo(printable(f"waiting: {role}{wait.reason} ({ends})"), "yellow")


def mark_role(role: RoleInfo) -> tuple[str, str, str]:
    """Return the sign and the colours of a role."""
    return MARKS[state_of_role(role)]


def mark_member(member: MemberInfo) -> tuple[str, str, str]:
    """Return the sign and the colours of a member."""
    return MARKS["overdue" if member.overdue else "led"]


def overdue_first(members: list[MemberInfo]) -> list[MemberInfo]:
    """Return members in the order in which they joined, the overdue ones before all others."""
    return sorted(members, key=lambda member: not member.overdue)


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
        rows = registry.members()
        columns = DETAILS if json_ else _fitting(rows, DETAILS, ("ID", *SPARE))
        print_rows(rows, columns, lambda: _nothing(registry, "members"), json_=json_)
    if not json_:
        _say_left_out(DETAILS, columns)


def show_terms(rows: list[HistoryRow], as_of: datetime) -> None:
    """Print terms, newest first, and how the gaps between them are counted."""
    columns: Columns = {
        "TOKEN": lambda row: row.token,
        "LEADER": lambda row: row.name,
        "BEGAN": lambda row: _short(row.began) if on_terminal() else when(row.began),
        "LASTED": lambda row: duration(row.lasted(as_of)),
        "ENDED": lambda row: row.end(as_of),
        "GAP BEFORE": _gap,
    }
    shown = _fitting(rows, columns, ("LASTED",))
    show(rows, shown, _mark_term)
    _say_left_out(columns, shown)
    if any(_gap(row).startswith("up to") for row in rows):
        click.echo()
        echo(
            "up to: counted from the last sign of life of the term before. LASTED ends there, too: the leader died or "
            "fell silent at that moment or later.",
            "dim",
        )


def _short(moment: datetime) -> str:
    """Return a moment without the year, if it is this year."""
    return when(moment).removeprefix(f"{datetime.now().astimezone():%Y-}")


def _gap(row: HistoryRow) -> str:
    """Return how long the role was without a leader before a term; if the leader before died, how long at most."""
    if row.silence is None or row.gap is None:
        return "-"
    return duration(row.gap) if row.silence == row.gap else f"up to {duration(row.silence)}"


def _mark_term(row: HistoryRow) -> tuple[str, str, str]:
    if row.ended is None:
        return MARKS["led" if row.last_seen is None else "overdue"]
    return " ", "", "yellow" if row.last_seen else ""


@click.command()
@click.argument("role")
@click.option("--limit", type=click.IntRange(1, 1_000_000), default=20, show_default=True,
              help="How many terms to show, the newest first.")  # fmt: skip
@database
@as_json
def history(role: str, limit: int, url: str | None, namespace: str | None, schema: str, *, json_: bool) -> None:
    """Show the terms of ROLE: who led, how long, and why each ended.

    Use this after an incident: a term that ended by `death` was a crash, and the gap before the next term says how long
    the role was without a leader. After a crash the gap counts from the leader's last sign of life, so it is the
    longest that the role can have been without a leader. A leader that is silent, and that no node has ended yet, is
    shown as such.

    \b
    tenure history scheduler
    tenure history scheduler --limit 5 --json
    """
    with Registry(url, namespace=namespace, schema=schema) as registry:
        registry.role(role)  # an unknown role is an error, as in `tenure status ROLE`
        rows, as_of = last_terms(registry, role, limit), registry.overview().as_of
    if json_:
        print_json(rows)
    elif rows:
        show_terms(rows, as_of)
    else:
        click.echo(without_password(f"role {role!r} has no terms in namespace {registry.namespace!r}"), err=True)


def print_rows(rows: Sequence[Any], columns: Columns, nothing: Callable[[], str], *, json_: bool) -> None:
    """Print rows as JSON or as a table; on stderr what ``nothing`` returns if there are none."""
    if json_:
        print_json(rows)
    elif rows:
        show(rows, columns)
    else:
        click.echo(nothing(), err=True)


def _renewed(info: Any, overdue: bool) -> str:
    return f"{duration(info.renewed_ago)} ago" + (", overdue" if overdue else "")


def _few(roles: tuple[str, ...]) -> str:
    return ", ".join(roles[:3]) + (f" and {len(roles) - 3} more" if len(roles) > 3 else "") or "-"


def _nothing(registry: Registry, what: str) -> str:
    others = [name for name in registry.namespaces() if name != registry.namespace]
    hint = f"; other namespaces: {', '.join(map(repr, others))}" if others else ""
    return without_password(f"namespace {registry.namespace!r} has no {what}{hint}")


def when(moment: datetime) -> str:
    """Return a moment for people, in their time zone."""
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S}"
