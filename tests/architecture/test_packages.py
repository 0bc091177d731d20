"""What each package may import and use. ``docs/development/architecture.md`` has the same table, for people."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "src" / "tenure"
ARCHITECTURE = REPOSITORY / "docs" / "development" / "architecture.md"

DRIVERS = {"psycopg", "pymysql", "asyncpg", "sqlite3", "aiosqlite"}
FRAMEWORKS = {
    "sqlalchemy",
    "django",
    "starlette",
    "fastapi",
    "apscheduler",
    "celery",
    "prometheus_client",
    "opentelemetry",
    "jinja2",
    "uvicorn",
}
LOOPS = {"asyncio", "anyio", "trio"}
WORLD = {"time", "threading", "socket", "os", "logging", "secrets", "subprocess", "signal"}
VALUES = {"base", "errors", "events"}
"""What may be imported from everywhere but ``core``, and imports nothing above itself."""


@dataclass(frozen=True)
class Rule:
    """What a package may import of Tenure, besides its public names, and of others; what its text may not hold."""

    imports: set[str]
    """Packages and modules of Tenure. ``from tenure import Node`` is a public name, and needs no permission."""
    without: set[str] = field(default_factory=set)
    never: str = ""
    """A pattern that no line of code matches."""


SQL = r"\b(select|insert into|update|delete from)\b .*[:{]"
SQL_OR_PROTOCOL = rf"{SQL}|\b_?engine\.(protocol|command)\b"
"""The protocol belongs to the engine's threads: others use the methods of Engine, Candidacy and Holding."""
PRIVATE = r"\b(node|election|term|registry|transaction)\._[a-z]"

RULES = {
    "errors": Rule(set(), DRIVERS | FRAMEWORKS | LOOPS),
    "base": Rule({"errors"}, DRIVERS | FRAMEWORKS | LOOPS),
    "events": Rule({"base"}, DRIVERS | FRAMEWORKS | LOOPS),
    "core": Rule({"events"}, WORLD | DRIVERS | FRAMEWORKS | LOOPS),
    "settings": Rule({"core", *VALUES}, DRIVERS | FRAMEWORKS | LOOPS),
    "stats": Rule({*VALUES}, DRIVERS | FRAMEWORKS | LOOPS),
    "store": Rule({"core", "settings", *VALUES}, DRIVERS | FRAMEWORKS | LOOPS),
    "databases": Rule(
        {"core", "settings", "store", "databases.postgres", "databases.mysql", "databases.sqlite", *VALUES}, LOOPS
    ),
    "databases.postgres": Rule({"core", "databases", "settings", "store", *VALUES}, {"pymysql", "sqlite3"} | LOOPS),
    "databases.mysql": Rule({"core", "databases", "settings", "store", *VALUES}, {"psycopg", "sqlite3"} | LOOPS),
    "databases.sqlite": Rule({"core", "databases", "settings", "store", *VALUES}, {"psycopg", "pymysql"} | LOOPS),
    "fence": Rule(
        {"databases", "databases.mysql", "databases.sqlite", "settings", "store", *VALUES},
        LOOPS | {"time", "threading"},
        never=r"\.commit\(|\bconnect\(",
    ),
    "transaction": Rule({"databases", "databases.mysql", "fence", "store", *VALUES}, FRAMEWORKS | LOOPS),
    "engine": Rule({"core", "databases", "settings", "store", *VALUES}, DRIVERS | FRAMEWORKS | LOOPS, never=SQL),
    "internals": Rule(set(), DRIVERS | FRAMEWORKS | LOOPS),
    "term": Rule(
        {"engine", "fence", "internals", "settings", "transaction", *VALUES},
        DRIVERS | FRAMEWORKS | LOOPS,
        never=SQL_OR_PROTOCOL,
    ),
    "election": Rule(
        {"engine", "settings", "store", "term", *VALUES}, DRIVERS | FRAMEWORKS | LOOPS, never=SQL_OR_PROTOCOL
    ),
    "campaign": Rule({"election", "engine", "term", *VALUES}, DRIVERS | FRAMEWORKS | LOOPS, never=SQL_OR_PROTOCOL),
    "manual": Rule({"core", "databases", "databases.sqlite", "fence", "settings", "store", *VALUES}, LOOPS),
    "aio": Rule(
        {"election", "engine", "fence", "settings", "term", *VALUES}, DRIVERS | FRAMEWORKS, never=SQL_OR_PROTOCOL
    ),
    "schedule": Rule(
        {"aio", "core", "election", "engine", "fence", "internals", "settings", "store", "term", *VALUES},
        DRIVERS | FRAMEWORKS,
        never=SQL_OR_PROTOCOL,
    ),
    "registry": Rule({"core", "databases", "schedule", "settings", "store", *VALUES}, DRIVERS | FRAMEWORKS | LOOPS),
    "services": Rule(
        {
            *("aio", "core.backoff", "core.timing", "election", "settings", "term", *VALUES),
            *("engine.callbacks", "engine.candidacy", "engine.engine"),  # the page says which of their names
        },
        DRIVERS | FRAMEWORKS,
        never=SQL_OR_PROTOCOL,
    ),
    "node": Rule(
        {
            *("campaign", "databases", "election", "engine", "internals", "services", "settings", "stats", "term"),
            *VALUES,
        },
        DRIVERS | FRAMEWORKS,  # it starts a loop for services, and imports one when there are any
        never=SQL_OR_PROTOCOL,
    ),
    "aio.node": Rule(
        {"aio", "campaign", "election", "engine", "internals", "node", *VALUES},
        DRIVERS | FRAMEWORKS,
        never=SQL_OR_PROTOCOL,
    ),
    "testing": Rule(
        {
            *("aio", "aio.node", "core", "databases", "election", "engine", "internals", "node", "schedule"),
            *("settings", "store", "term", *VALUES),
        },
        DRIVERS | FRAMEWORKS | LOOPS,
        never=SQL,
    ),
    # What the command line and the dashboard both show; the doctor's findings are part of it.
    "reports": Rule({"databases.doctor", "settings", *VALUES}, DRIVERS | FRAMEWORKS | LOOPS, never=PRIVATE),
    "integrations": Rule(
        {
            "aio.bridge",  # a blocking call on any event loop
            "schedule",  # how a run is claimed and recorded, for APScheduler
            "services.service",  # the states of a service
            "settings",  # the checks of names and durations that a node makes too
            *VALUES,
        },
        DRIVERS,
        never=PRIVATE,
    ),
    "dashboard": Rule(
        {
            "aio.bridge",  # a blocking call on any event loop
            "integrations",  # what says which extra is missing
            "reports",
            "settings",
            *VALUES,
        },
        DRIVERS,
        never=PRIVATE,
    ),
    # All that the command line needs beyond public names is in this one module.
    "cli.internals": Rule(
        {
            "aio.bridge",
            "core.backoff",
            "databases.guards",
            "databases.schema",
            "internals",
            "schedule",
            "store",
            *VALUES,
        },
        DRIVERS | FRAMEWORKS | LOOPS,
    ),
    "cli": Rule(
        {
            "cli.internals",
            "dashboard",  # `tenure ui`
            "databases.doctor",  # the type of what `tenure doctor` prints
            "reports",
            "settings",  # the default file, for the line that names it; the settings that the doctor examines
            *VALUES,
        },
        DRIVERS | FRAMEWORKS | LOOPS,
        never=PRIVATE,
    ),
    # Its management commands are commands of the command line. Its settings become a URL as an engine's do.
    "integrations.django": Rule(
        {"cli", "cli.internals", "databases.handover", "integrations", *VALUES}, DRIVERS | LOOPS, never=PRIVATE
    ),
    "integrations.django_celery_beat": Rule(
        {"integrations", "integrations.django", *VALUES}, DRIVERS | LOOPS, never=PRIVATE
    ),
}
"""Bottom up: a package stands below all that may import it, but for ``databases`` and the packages in it."""
FREE = {"__init__", "__main__"}
"""Entry points."""


def unit_of(module: str) -> str:
    """Return the package or module whose rule holds for a module: the innermost that has one."""
    name = module
    while "." in name and name not in RULES:
        name = name.rpartition(".")[0]
    return name


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imports_of(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return which modules of ours a file imports, and which packages of others; those for types only left out."""
    tree = ast.parse(path.read_text())
    for_types = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    excused = {id(inner) for block in for_types for inner in ast.walk(block)}
    names = set()
    for node in ast.walk(tree):
        if id(node) in excused:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {resolved(node.module, alias.name) for alias in node.names}
    ours = frozenset(name.removeprefix("tenure.") for name in names if name.startswith("tenure."))
    return ours, frozenset(name.split(".")[0] for name in names if not name.startswith("tenure"))


def resolved(module: str, name: str) -> str:
    """Return the module that ``from module import name`` means: the name may be a module itself."""
    file = SOURCE / "/".join([*module.split(".")[1:], name])
    return f"{module}.{name}" if file.is_dir() or file.with_suffix(".py").exists() else module


SOURCES = sorted(
    path for path in SOURCE.rglob("*.py") if unit_of(module_of(path)) not in FREE and path.parent != SOURCE
) + [SOURCE / f"{name}.py" for name in RULES if (SOURCE / f"{name}.py").exists()]


LONGEST_FILE, MOST_MODULES = 450, 15


def test_every_module_has_a_rule():
    units = {unit_of(module_of(path)) for path in SOURCE.rglob("*.py")} - {"__init__", ""}
    assert units - FREE == set(RULES)


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_package_imports_what_it_may(path):
    module = module_of(path)
    unit, (ours, others) = unit_of(module), imports_of(path)
    rule = RULES[unit]
    not_permitted = {name for name in ours if unit_of(name) != unit and not {name, unit_of(name)} & rule.imports}
    assert not not_permitted, f"{module} imports {sorted(not_permitted)}"
    assert not others & rule.without, f"{module} imports {sorted(others & rule.without)}"


@pytest.mark.parametrize("path", [path for path in SOURCES if RULES[unit_of(module_of(path))].never], ids=module_of)
def test_package_does_not_do_what_is_not_its_business(path):
    rule = RULES[unit_of(module_of(path))]
    found = [line for line in path.read_text().splitlines() if re.search(rule.never, line)]
    assert not found


def test_no_rule_permits_what_is_not_used():
    for unit, rule in RULES.items():
        used = {name for path in SOURCES if unit_of(module_of(path)) == unit for name in imports_of(path)[0]}
        unused = rule.imports - VALUES - used - {unit_of(name) for name in used}
        assert not unused, f"{unit} may import {sorted(unused)}, and does not"


def test_files_and_folders_stay_small():
    long = {str(path.relative_to(SOURCE)) for path in SOURCES if len(path.read_text().splitlines()) > LONGEST_FILE}
    full = {str(path.parent.relative_to(SOURCE)) for path in SOURCES if len([*path.parent.glob("*.py")]) > MOST_MODULES}
    assert (long, full) == (set(), set())


def test_architecture_page_shows_the_tree():
    shown, folders = set(), [SOURCE]
    for line in ARCHITECTURE.read_text().partition("```text\n")[2].partition("```")[0].splitlines()[1:]:
        indent, _, entry = line.partition("── ")
        folders[len(indent) // 4 + 1 :] = []
        name = entry.split()[0]
        if name.endswith("/"):
            folders.append(folders[-1] / name)
        shown |= {folders[-1] / file for file in re.findall(r"\b\w+\.py\b", entry)}
    assert shown == {path for path in SOURCE.rglob("*.py") if not path.name.startswith("__")}


def test_architecture_page_has_the_same_rules():
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|", ARCHITECTURE.read_text().partition("may import\n")[2], re.MULTILINE)
    shown = {name: set(re.findall(r"`([\w.]+)`", row[1])) for row in rows for name in re.findall(r"`([\w.]+)`", row[0])}
    permitted = {
        name: rule.imports - VALUES if rule.imports >= VALUES else rule.imports for name, rule in RULES.items()
    }
    assert shown == {name: imports for name, imports in permitted.items() if name not in VALUES}


def test_rules_leave_no_circle():
    """A package is imported by those only that stand after it; the packages of databases are one with ``databases``."""
    seen = set()
    for name, rule in RULES.items():
        below = {unit_of(permitted) for permitted in rule.imports if not permitted.startswith("databases")}
        assert below <= seen, f"{name} may import {sorted(below - seen)}, which stand above it"
        seen.add(name)
