"""The commands that show who leads: status, members, history."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

import click

from tenure import Candidate, MemberInfo, Registry, RoleInfo, WaitInfo
from tenure.base.durations import duration, exact
from tenure.cli.options import as_json, database, role_is_argument
from tenure.cli.output import (
    Columns,
    brief,
    echo,
    fitting,
    left_out,
    notes,
    print_json,
    printable,
    show,
    show_newest,
    when,
    without_password,
    zone_note,
)
from tenure.reports import (
    HistoryRow,
    RoleDetail,
    Status,
    by_name,
    is_late,
    is_overdue,
    last_terms,
    standing_by,
    state_of_role,
)
from tenure.settings import some_names

MEMBER_COLUMNS = {
    "MEMBER": lambda member: member.name,
    "HOST": lambda member: member.host,
    "PID": lambda member: member.pid,
    "VERSION": lambda member: member.version,
    "MODE": lambda member: f"{member.mode}, {member.takeover}",
    "TTL": lambda member: exact(member.ttl),
    "RENEWED": lambda member: _renewed(member, mark_word(member)),
}
CANDIDATE_COLUMNS = {
    "CANDIDATE": lambda candidate: candidate.name,
    "HOST": lambda candidate: candidate.host,
    "PID": lambda candidate: candidate.pid,
    "TTL": lambda candidate: exact(candidate.ttl),
    "RENEWED": lambda candidate: _renewed(candidate, mark_word(candidate)),
}
DETAILS = {**MEMBER_COLUMNS, "LEADS": lambda member: _few(member.leads), "ID": lambda member: member.member_id}


MARKS = {
    "overdue": ("✗", "bold red", "red"),
    "vacant": ("○", "bold yellow", "yellow"),
    "late": ("◐", "bold yellow", "yellow"),
    "led": ("●", "bold green", ""),
    "idle": ("·", "dim", "dim"),
}
SPARE = ("SINCE", "VERSION", "MODE", "PID", "STANDBY", "TTL")
"""What a narrow terminal does not show, in this order, so that the names can be read."""
LAST_TERMS = 5


@click.command()
@click.argument("role", required=False)
@role_is_argument
@database
@as_json
def status(role: str | None, url: str | None, namespace: str | None, schema: str, *, json_: bool) -> None:
    """Show every role and its leader, and every living member; or ROLE in detail.

    The first command to run when you wonder who leads. Roles that need attention come first: overdue ones, then those
    without a leader that have candidates, those with a leader, and those without candidates. An overdue leader has not
    renewed its lease within its TTL: it is dead, paused or cut off, and no other node has taken over yet. A late one
    has missed a renewal, which happens on a busy machine, too. STANDBY counts the candidates that do not lead. If the
    nodes are waiting for something, such as old leases after the promotion of a replica, the last lines say for what,
    and until when.

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
        members = by_name(overview.members)
        table = RoleTable(members)
        roles = table.ordered(overview.roles)
        print_unattended(overview.unattended)
        role_columns, member_columns = fitting(roles, table.columns, SPARE), fitting(members, MEMBER_COLUMNS, SPARE)
        show(roles, role_columns, table.mark)
        click.echo()
        show(members, member_columns, mark_member)
        moments = _print_waits(overview.waits, overview.as_of)
        if "SINCE" in role_columns:
            moments += [role.leader.since for role in roles if role.leader]
        missing = left_out({**table.columns, **MEMBER_COLUMNS}, {**role_columns, **member_columns})
        notes(*missing, *zone_note(moments))


def _print_role(detail: RoleDetail, *, json_: bool) -> None:
    if json_:
        print_json(detail)
        return
    print_unattended(detail.unattended)
    role, leader = detail.role, detail.role.leader
    word = RoleTable(detail.candidates).state(role)
    state = {
        "overdue": "overdue: the leader has not renewed within its TTL",
        "late": "late: the leader has missed a renewal",
        "vacant": "without a leader",
        "led": "led",
        "idle": "without a leader and without candidates",
    }[word]
    facts = {"role": role.role, "state": state, "leader": leader.name if leader else "-", "token": role.token}
    if leader is not None:
        facts["since"] = f"{when(leader.since)}, for {duration((detail.as_of - leader.since).total_seconds())}"
        facts["renewed"] = _renewed(leader, word)
    for label, value in facts.items():
        echo(printable(f"{label:<9}{value}"), MARKS[word][2] if label == "state" else "")
    moments = [leader.since] if leader is not None else []
    moments += _print_waits(detail.waits, detail.as_of)
    if detail.candidates:
        click.echo()
        show(sorted(detail.candidates, key=lambda candidate: candidate.name), CANDIDATE_COLUMNS, mark_member)
    if detail.terms:
        click.echo()
        _show_terms(detail.terms, detail.as_of, moments)
    else:
        notes(*zone_note(moments))


def print_unattended(text: str | None) -> None:
    """Print first that no member renews: what follows is how things were."""
    if text is not None:
        echo(printable(text), "bold red")
        click.echo()


def _print_waits(waits: list[WaitInfo], as_of: datetime) -> list[datetime]:
    """Print a line for each wait; return the moments that they name."""
    named = []
    for wait in waits:
        role = f"role {wait.role}: " if wait.role else ""
        ends = "not begun: start a node"
        if wait.ends is not None:
            left_s = (wait.ends - as_of).total_seconds()
            ends = "it ends at any moment"
            if left_s >= 1:
                ends = f"{duration(left_s)} more, until {when(wait.ends)}"
                named.append(wait.ends)
        click.echo()
        echo(printable(f"waiting: {role}{wait.reason} ({ends})"), "yellow")
    return named


class RoleTable:
    """How roles are shown: a role whose leader is late is marked, and only the members' TTLs say who is late."""

    def __init__(self, members: Iterable[MemberInfo | Candidate]) -> None:
        self._late = {member.member_id for member in members if is_late(member)}
        self.columns: Columns = {
            "ROLE": lambda role: role.role,
            "LEADER": lambda role: role.leader.name if role.leader else "-",
            "TOKEN": lambda role: role.token,
            "SINCE": lambda role: when(role.leader.since) if role.leader else "-",
            "RENEWED": lambda role: _renewed(role.leader, self.state(role)) if role.leader else "-",
            "STANDBY": standing_by,
        }

    def state(self, role: RoleInfo) -> str:
        """Return the state of a role, or that its leader is late."""
        state = state_of_role(role)
        return "late" if state == "led" and role.leader and role.leader.member_id in self._late else state

    def ordered(self, roles: Iterable[RoleInfo]) -> list[RoleInfo]:
        """Return roles in the order of their states, those that need attention first."""
        return sorted(roles, key=lambda role: [*MARKS].index(self.state(role)))

    def mark(self, role: RoleInfo) -> tuple[str, str, str]:
        """Return the sign and the colours of a role."""
        return MARKS[self.state(role)]


def mark_word(member: MemberInfo | Candidate) -> str:
    """Return whether a member is overdue, or late; else that it is well."""
    return "overdue" if is_overdue(member) else "late" if is_late(member) else "led"


def mark_member(member: MemberInfo | Candidate) -> tuple[str, str, str]:
    """Return the sign and the colours of a member."""
    return MARKS[mark_word(member)]


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
        rows = rows if json_ else by_name(rows)
        columns = DETAILS if json_ else fitting(rows, DETAILS, ("ID", *SPARE))
        print_rows(rows, columns, lambda: _nothing(registry, "members"), json_=json_)
    if not json_:
        notes(*left_out(DETAILS, columns))


def _show_terms(rows: list[HistoryRow], as_of: datetime, moments: Sequence[datetime] = ()) -> None:
    """Print terms, newest first, and what has to be known about them, and about the moments that were shown before."""
    columns: Columns = {
        "TOKEN": lambda row: row.token,
        "LEADER": lambda row: row.name,
        "BEGAN": lambda row: brief(row.began),
        "LASTED": lambda row: duration(row.lasted(as_of)),
        "ENDED": lambda row: row.end(as_of),
        "GAP BEFORE": HistoryRow.gap_before,
    }

    def about(shown: Columns) -> list[str]:
        lines = []
        if any(" to " in row.gap_before() for row in rows):
            lines.append(
                "two times in GAP BEFORE: the leader of the term before, one row below, died or hung. The first counts "
                "from the moment another node noticed, the second from that leader's last sign of life. The real gap "
                "is between them."
            )
        if any(row.gap_before() == "unknown" for row in rows):
            lines.append(
                "GAP BEFORE is unknown if the term before lapsed, because only its node knew when, or if that term is "
                "not recorded any more"
            )
        if "LASTED" in shown and any(row.last_seen for row in rows):
            lines.append("after a death, LASTED counts to the last sign of life")
        began = [row.began for row in rows] if "BEGAN" in shown else []
        return lines + zone_note([*moments, *began])

    show_newest(rows, columns, ("LASTED", "BEGAN"), about, _mark_term)


def _mark_term(row: HistoryRow) -> tuple[str, str, str]:
    if row.ended is None:
        return MARKS["led" if row.last_seen is None else "overdue"]
    return " ", "", "yellow" if row.last_seen else ""


@click.command()
@click.argument("role", required=False, metavar="ROLE")
@click.option("--limit", type=click.IntRange(1, 1_000_000), default=20, show_default=True,
              help="How many terms to show, the newest first.")  # fmt: skip
@role_is_argument
@database
@as_json
def history(role: str | None, limit: int, url: str | None, namespace: str | None, schema: str, *, json_: bool) -> None:
    """Show the terms of ROLE: who led, how long, and why each ended.

    Use this after an incident: a term that ended by `death` was a crash, and the gap before the next term, one row
    above, says how long the role was without a leader. After a crash there are two times, such as `2.1 ms to 156 ms`.
    The first counts from the moment another node noticed the death, the second from the leader's last sign of life. The
    real gap is between them. After a term that `lapsed` the gap is unknown. A leader that is silent, and that no node
    has ended yet, is shown as such. Without --limit, a terminal shows as many terms as fit.

    \b
    tenure history scheduler
    tenure history scheduler --limit 5 --json
    """
    with Registry(url, namespace=namespace, schema=schema) as registry:
        if role is None:
            roles = [info.role for info in registry.roles()]
            known = f"known roles: {some_names(roles)}" if roles else f"namespace {registry.namespace!r} has no roles"
            raise click.UsageError(printable(f"give a ROLE; {known}"))
        # An unknown role is an error, as in `tenure status ROLE`.
        registry.role(role)
        rows, as_of = last_terms(registry, role, limit), registry.overview().as_of
    if json_:
        print_json(rows)
    elif rows:
        _show_terms(rows, as_of)
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


def _renewed(info: Any, state: str) -> str:
    return f"{duration(info.renewed_ago)} ago" + (f", {state}" if state in ("overdue", "late") else "")


def _few(roles: tuple[str, ...]) -> str:
    return ", ".join(roles[:3]) + (f" and {len(roles) - 3} more" if len(roles) > 3 else "") or "-"


def _nothing(registry: Registry, what: str) -> str:
    others = [name for name in registry.namespaces() if name != registry.namespace]
    hint = f"; other namespaces: {', '.join(map(repr, others))}" if others else ""
    return without_password(f"namespace {registry.namespace!r} has no {what}{hint}")
