"""Reads a crontab: five fields and a command in each line, variables, and a name after ``#``."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

from tenure.errors import ConfigError

_VARIABLE = re.compile(r"([A-Za-z_]\w*)\s*=\s*(.*)")
_NAME = re.compile(r"(.*\S)\s+#\s*([\w.:-]+)\s*")
_QUOTED = re.compile(r"""(["'])(.*)\1""")
_FIELD = re.compile(r"[\d*,/-]+\s")
"""The beginning of a command that looks like one more field."""
ZONE = "CRON_TZ"
"""The variable that sets the time zone of the lines below it."""
STRETCHED = 200_000
"""How many rounds the digest of variables takes: about a tenth of a second, once."""


@dataclass(frozen=True)
class Entry:
    """One line of a crontab."""

    name: str
    expression: str
    command: tuple[str, ...]
    zone: str = "UTC"
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    place: str = field(default="", compare=False)
    """Where the entry is, for messages: ``line 3 of the crontab``."""


def parse(text: str, zone: str) -> list[Entry]:
    """Return the entries of a crontab, or raise ConfigError with the number of the line that is wrong."""
    entries: list[Entry] = []
    environment: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        if variable := _VARIABLE.fullmatch(stripped):
            name, value = variable[1], _unquoted(variable[2])
            zone = value if name == ZONE else zone
            environment = {**environment, name: value}
            continue
        entry = _entry(f"line {number} of the crontab", stripped, zone, environment)
        if any(entry.name == other.name for other in entries):
            raise ConfigError(f"{entry.place}: there are two jobs with the name {entry.name!r}: rename one of them")
        entries.append(entry)
    if not entries:
        raise ConfigError("the crontab has no entries: write lines such as `30 2 * * * ./backup  # backup`")
    return entries


def _unquoted(value: str) -> str:
    """Return a variable's value without the quotes around it. Other quotes belong to the value, as in crontab(5)."""
    quoted = _QUOTED.fullmatch(value)
    return value if quoted is None else quoted[2]


def _entry(place: str, line: str, zone: str, environment: dict[str, str]) -> Entry:
    named = _NAME.fullmatch(line)
    if named is None:
        raise ConfigError(
            f"{place} has no name, by which the machines know that it is the same job: add one at the end, as in "
            "`30 2 * * * ./backup  # backup`"
        )
    count = 1 if line.startswith("@") else 5
    fields = named[1].split(None, count)
    if len(fields) <= count:
        raise ConfigError(f"{place} has no command: write five fields, and then the command")
    command = fields[count]
    if _FIELD.match(command):
        raise ConfigError(f"{place} has six fields before the command: write five, as cron does, without seconds")
    if re.search(r"(?<!\\)%", command):
        raise ConfigError(
            f"{place} has a % in its command, which cron would take for a line break: write \\%, or move the command "
            "into a script"
        )
    argv = (environment.get("SHELL", "/bin/sh"), "-c", command.replace("\\%", "%"))
    return Entry(named[2], " ".join(fields[:count]), argv, zone, environment, place)


def digest(entries: list[Entry]) -> str:
    """Return what identifies the entries, to compare the crontabs of two machines."""
    text = "\n".join(sorted(map(_identity, entries))).encode()
    if any(map(_variables, entries)):
        # The digest is stored, and a variable may be a password: a guess must cost something.
        return hashlib.pbkdf2_hmac("sha256", text, b"tenure cron", STRETCHED).hex()[:12]
    return hashlib.sha256(text).hexdigest()[:12]


def _identity(entry: Entry) -> str:
    identity = f"{entry.name} {entry.expression} {entry.zone} {entry.command}"
    # Older nodes leave the variables out. Without any, the identity is as theirs, so that an upgrade of one machine
    # after the other warns of nothing.
    variables = _variables(entry)
    return f"{identity} {variables}" if variables else identity


def _variables(entry: Entry) -> list[tuple[str, str]]:
    """Return the variables that are for the command. CRON_TZ is in the identity as the zone."""
    return sorted((name, value) for name, value in entry.environment.items() if name != ZONE)
