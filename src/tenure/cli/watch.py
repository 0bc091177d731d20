"""``tenure watch``: who leads, live: on a terminal as a screen, in a pipe as a line for each change, or as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import repeat
from typing import TYPE_CHECKING, Any

import click

from tenure import Overview, Registry, RoleInfo
from tenure.cli.inspect import MEMBER_COLUMNS, SPARE, RoleTable, mark_member
from tenure.cli.options import Seconds, database, role_is_argument
from tenure.cli.output import Columns, Marks, console, narrowed, on_terminal, one_line, printable, table
from tenure.errors import StoreUnavailable
from tenure.reports import Reading, by_name, state_of_role, to_json

if TYPE_CHECKING:
    from rich.console import Console

HEADING = 1
"""The lines above the rows of a table."""
LOW = 10
"""On a terminal with fewer lines, all of them show who leads."""


@click.command()
@click.argument("role", required=False)
@click.option("--every", default=0.5, show_default=True, type=Seconds(0.1), help="Seconds between two readings.")
@click.option("--count", type=click.IntRange(1), help="How many readings; endless by default.")
@role_is_argument
@database
@click.option("--json", "json_", is_flag=True, help="Print JSON: a line for each reading.")
def watch(
    role: str | None,
    every: float,
    count: int | None,
    url: str | None,
    namespace: str | None,
    schema: str,
    *,
    json_: bool,
) -> None:
    """Show every role and its leader, live; or ROLE only.

    Use this during a deployment or a failover test. Roles that need attention come first, as in `tenure status`: a late
    leader has missed a renewal, and an overdue one has let its lease run out. If not all roles fit, it says how many
    are left out. In a pipe it prints a line for each change. Once the database has been reached, it goes on while
    that cannot be reached. It needs the tables, which the first node creates. Ctrl-C ends it.

    \b
    tenure watch
    tenure watch scheduler
    tenure watch | while read line; do notify-send "$line"; done
    tenure watch --json --every 5 | jq --unbuffered '.roles[] | select(.overdue)'
    """
    with Registry(url, namespace=namespace, schema=schema) as registry:
        if role is not None:
            # An unknown role is an error, as in `tenure status ROLE`.
            registry.role(role)
        looks = (_about(look, role) for look in _looks(registry, every, count))
        if json_:
            _as_json(looks, registry.namespace)
        elif on_terminal():
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


def _about(look: Overview | str, role: str | None) -> Overview | str:
    """Return a reading with one role, if one is asked for."""
    if role is None or isinstance(look, str):
        return look
    return replace(look, roles=[info for info in look.roles if info.role == role])


def _on_screen(looks: Iterable[Overview | str]) -> None:
    from rich.console import Group  # noqa: PLC0415 - only on a terminal
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    with Live(console=console(), screen=True, auto_refresh=False) as live:
        shown: list[Any] = []
        for look in looks:
            moment = f"{datetime.now().astimezone():%H:%M:%S %Z}"
            if isinstance(look, Overview):
                title = Text(f"{moment}  {_summary(look)}", style="bold", no_wrap=True, overflow="ellipsis")
                shown = _tables(look, live.console)
                if look.unattended is not None:
                    shown.insert(
                        0, Text(printable(look.unattended), style="bold red", no_wrap=True, overflow="ellipsis")
                    )
            else:
                title = Text(f"{moment}  {look}", style="bold red")
            live.update(Group(title, *shown), refresh=True)


def _summary(look: Overview) -> str:
    table = RoleTable(look.members)
    states = [table.state(role) for role in look.roles]
    troubles = [f"{states.count(state)} {state}" for state in ("overdue", "vacant", "late") if state in states]
    roles = _count(len(look.roles), "role") + (f" ({', '.join(troubles)})" if troubles else "")
    return printable(f"namespace {look.namespace}: {roles}, {_count(len(look.members), 'member')}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _tables(look: Overview, terminal: Console) -> list[Any]:
    """Return the roles and the members, as far as they fit below the title, and how to go on.

    If there are too many of both, the members have a third of the lines. A role has a line even if no member has one.
    """
    from rich.text import Text  # noqa: PLC0415 - only on a terminal

    members = by_name(look.members)
    roles_table = RoleTable(members)
    roles = roles_table.ordered(look.roles)
    footer = int(terminal.height >= LOW)
    # The title takes one line, and so do what is said if no member renews, and the empty line before each table.
    lines = terminal.height - 3 - footer - (look.unattended is not None)
    for_roles, for_members = len(roles) + HEADING, len(members) + HEADING
    if for_roles + for_members > lines:
        for_members = min(for_members, max(lines // 3, lines - for_roles))
        for_roles = max(lines - for_members, min(lines, HEADING + 2))
        for_members = lines - for_roles
    of_roles = Part(roles_table.columns, roles_table.mark, "role", "tenure status")
    of_members = Part(MEMBER_COLUMNS, mark_member, "member", "tenure members")
    shown = [
        *of_roles.made(_with_led(roles, for_roles), terminal.width, for_roles),
        *of_members.made(members, terminal.width, for_members),
    ]
    if not footer:
        return shown
    missing = ", ".join(dict.fromkeys([*of_roles.missing, *of_members.missing]))
    closing = "Ctrl-C ends it" + (f"; too narrow for {missing}: widen the terminal" if missing else "")
    used = 1 + sum(len(terminal.render_lines(part)) for part in shown)
    blank = [""] if used + 1 < terminal.height else []
    return [*shown, *blank, Text(closing, style="dim", no_wrap=True, overflow="ellipsis")]


def _fit(rows: list[Any], lines: int) -> int:
    """Return how many rows fit into the lines, below a heading and above the line that counts the others."""
    return len(rows) if len(rows) + HEADING <= lines else lines - HEADING - 1


def _with_led(roles: list[RoleInfo], lines: int) -> list[RoleInfo]:
    """Return the roles in another order if none of those that fit is led: then the last of these is led."""
    last = max(0, _fit(roles, lines) - 1)
    led = next((role for role in roles if state_of_role(role) == "led"), None)
    if led is None or led in roles[: last + 1]:
        return roles
    others = [role for role in roles if role is not led]
    return [*others[:last], led, *others[last:]]


@dataclass
class Part:
    """A table of the screen."""

    columns: Columns
    mark: Marks
    what: str
    command: str
    """What shows the rows that are left out."""
    missing: list[str] = field(default_factory=list)
    """The columns for which the terminal is too narrow."""

    def made(self, rows: list[Any], width: int, lines: int) -> list[Any]:
        """Return a table that fits, an empty line before it, and how many rows it leaves out."""
        from rich.text import Text  # noqa: PLC0415 - only on a terminal

        if not rows or lines < 1:
            return []
        fit = _fit(rows, lines)
        if fit < 1:
            return ["", Text(f"{_count(len(rows), self.what)}: {self.command}", style="dim")]
        shown, left = rows[:fit], len(rows) - fit
        columns = narrowed(shown, self.columns, SPARE, width)
        self.missing = [heading for heading in self.columns if heading not in columns]
        more = [Text(f"{_count(left, f'more {self.what}')}: {self.command}", style="dim")] if left else []
        return ["", table(shown, columns, self.mark, one_line=True), *more]


def _as_json(looks: Iterable[Overview | str], namespace: str) -> None:
    """Print each reading as a line of JSON."""
    for look in looks:
        click.echo(to_json(Reading.of(namespace, look), None))


AWAY = ""
"""The key of the text about an unreachable database, in a dict that is keyed by role: no role has an empty name."""
NOBODY = " "
"""The key of the text that no member renews. No role has this name, either."""
OVER = {AWAY: "the database is back", NOBODY: "a member renews again"}
"""What is printed when a text does not hold any more."""


def _as_lines(looks: Iterable[Overview | str]) -> None:
    """Print what has changed since the previous reading."""
    known: dict[str, str] = {}
    for look in looks:
        roles = look.roles if isinstance(look, Overview) else []
        lines = {role.role: _line(role) for role in roles}
        # A later text does not replace the first one, so it is printed once.
        if isinstance(look, str):
            lines = {AWAY: look} | known
        elif look.unattended is not None:
            lines = {NOBODY: known.get(NOBODY, printable(look.unattended))} | lines
        news = [line for role, line in lines.items() if known.get(role) != line]
        news[:0] = [text for key, text in OVER.items() if key in known and key not in lines]
        for line in news:
            click.echo(f"{datetime.now().astimezone():%Y-%m-%dT%H:%M:%S%z} {line}")
        sys.stdout.flush()
        known = lines


def _line(role: RoleInfo) -> str:
    leader = f"led by {role.leader.name}" if role.leader else "without a leader"
    return printable(f"{role.role} token {role.token} {leader}") + (", which is overdue" if role.overdue else "")
