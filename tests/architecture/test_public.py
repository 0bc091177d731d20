"""What users see: the public names, their words, the weight of the import, and the layers behind them."""

from __future__ import annotations

import ast
import inspect
import os
import re
import resource
import subprocess
import sys
import types
from pathlib import Path

import pytest

import tenure

REPOSITORY = Path(__file__).parents[1]
SOURCES = sorted((REPOSITORY / "src" / "tenure").rglob("*.py"))

PUBLIC = {
    *("Node", "Election", "Term", "Transaction"),
    *("Registry", "RoleInfo", "MemberInfo"),
    *("AsyncNode", "AsyncElection", "AsyncTerm", "AsyncTransaction"),
    *("Event", "Elected", "Suspended", "Resumed", "Deposed", "LeaderChanged"),
    *("Candidate", "JobRecord", "LeaderInfo", "TermRecord"),
    *("NodeStats", "RoleStats", "Latency", "ServiceInfo"),
    *("TenureError", "ConfigError", "StoreUnavailable", "PoolerDetected", "WaitTimeout", "NodeClosed"),
    *("NotLeader", "LeadershipLost", "Fenced"),
    *("fence_sql", "tables_sql", "manual", "__version__"),
}
STEP_BY_STEP = {
    *("use", "close", "set_expire", "Leader"),
    *("register_candidate", "heartbeat", "elect", "is_leader", "leader", "list_candidates", "unregister_candidate"),
}

LAYERS = (
    # From values up to facades. A module may import from rows above its own, and from its own row.
    {"version", "errors", "timing", "clock", "events", "asks", "dialects", "mounts"},
    {"statements", "session", "settings", "candidacy", "observation", "meter"},
    {"protocol", "schema", "store", "watch"},
    {"values", "dialing", "postgres", "connector", "sqlite", "advisory", "mysql", "mysql_connector", "user_locks"},
    {"locking"},
    {"atomic", "connections", "backends", "dispatch", "booth", "borrowed", "engines"},
    {"engine", "claims"},
    {"term", "election"},
    {"loops", "registry", "manual", "diagnosis", "postgres_checks", "sqlite_checks", "mysql_checks"},
    {"async_term", "async_election", "jobs"},
    {"services", "crew"},
    {"node"},
    {"async_node"},
    {"cli", "integrations"},
    {"__init__", "__main__"},
)
DRIVERS_AND_FRAMEWORKS = {
    *("psycopg", "pymysql", "asyncpg", "sqlalchemy", "asyncio", "anyio", "trio"),
    *("django", "starlette", "fastapi", "apscheduler", "celery", "prometheus_client", "opentelemetry"),
}


# --- names --------------------------------------------------------------------------------------------------


def test_public_names_are_these_and_no_others():
    assert set(tenure.__all__) == PUBLIC
    assert list(tenure.__all__) == sorted(tenure.__all__)
    assert all(hasattr(tenure, name) for name in PUBLIC)
    assert set(tenure.manual.__all__) == STEP_BY_STEP


def public_things():
    """Every public name, and what users may call or read on it."""
    things = [(name, getattr(tenure, name)) for name in sorted(PUBLIC - {"__version__", "Event", "manual"})]
    things += [(f"manual.{name}", getattr(tenure.manual, name)) for name in sorted(STEP_BY_STEP)]
    for name, thing in things:
        yield name, thing
        for attribute, member in vars(thing).items() if isinstance(thing, type) else ():
            if attribute.startswith("_") or isinstance(
                member, (str, int, float, type(None), types.MemberDescriptorType)
            ):
                continue
            yield f"{name}.{attribute}", member


@pytest.mark.parametrize(
    ("name", "thing"), list(public_things()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_public_name_says_what_it_promises(name, thing):
    documentation = inspect.getdoc(thing) or ""
    assert documentation, f"{name} has no docstring"
    assert not documentation.startswith(f"{name.rpartition('.')[2]}("), f"{name} has only what dataclasses make up"
    assert documentation.rstrip()[-1] in ".:`", f"{name}: a sentence ends with a full stop"


def test_version_is_that_of_the_distribution():
    from importlib.metadata import version

    assert tenure.__version__ == version("tenure")


def test_type_hints_of_the_public_methods_resolve():
    import typing

    for thing in (tenure.Node, tenure.Election, tenure.Term, tenure.Transaction):
        for name, member in vars(thing).items():
            if inspect.isfunction(member) and not name.startswith("_"):
                names = {"Self": typing.Any, "Election": tenure.Election}
                typing.get_type_hints(inspect.unwrap(member), localns=names)


# --- layers -------------------------------------------------------------------------------------------------


def imports_of(path):
    """The modules of ours that a file imports at its top level, and those that it imports late or for types only."""
    tree = ast.parse(path.read_text())
    typing_only = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    excused = {id(inner) for block in typing_only for inner in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in excused or not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif node.module == "tenure":
            names = [f"tenure.{alias.name}" for alias in node.names]
        else:
            names = [node.module or ""]
        yield from (name.split(".")[1] for name in names if name.startswith("tenure."))


def layer_of(module):
    return next((number for number, layer in enumerate(LAYERS) if module in layer), None)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_imports_point_from_facades_down_to_values(path):
    name = path.relative_to(REPOSITORY / "src" / "tenure").parts[0].removesuffix(".py")  # a package is one place
    own = layer_of(name)
    assert own is not None, f"{name} needs a place in LAYERS"
    for module in imports_of(path):
        assert layer_of(module) is not None, f"{module} needs a place in LAYERS"
        assert layer_of(module) <= own, f"{path.stem} imports {module}, which is above it"


PURE = ("protocol", "candidacy", "observation", "timing", "asks", "events", "statements")


@pytest.mark.parametrize("module", PURE)
def test_protocol_knows_no_clock_no_thread_and_no_database(module):
    path = REPOSITORY / "src" / "tenure" / f"{module}.py"
    reached, todo = set(), {path.stem}
    while todo:
        reached |= todo
        todo = {name for one in todo for name in imports_of(path.with_stem(one))} - reached
    for name in reached:
        tree = ast.parse(path.with_stem(name).read_text())
        imported = {
            alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        } | {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        forbidden = {"time", "threading", "socket", "os", "sqlite3", "logging", "secrets", *DRIVERS_AND_FRAMEWORKS}
        assert not imported & forbidden, f"{module} reaches {name}, which imports {imported & forbidden}"


# --- the weight of the import -------------------------------------------------------------------------------


def python(program, **arguments):
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, **arguments
    ).stdout


def test_import_brings_no_driver_and_no_framework():
    loaded = set(
        python("import sys, tenure; tenure.Node; print(*{name.split('.')[0] for name in sys.modules})").split()
    )
    assert not loaded & DRIVERS_AND_FRAMEWORKS


def test_import_is_light(tmp_path):
    """Seven times what Python itself takes to start, at most; fourteen with everything that a node needs.

    In processor time, since others use the machine too; the best of several, in turns; compiled beforehand, as an
    installed package is.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path)

    def seconds(program):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        python(program, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    seconds("import tenure; tenure.Node")
    programs = ("pass", "import tenure", "import tenure; tenure.Node")
    rounds = [[seconds(program) for program in programs] for _ in range(6)]
    bare, ours, node = (min(times) for times in zip(*rounds, strict=True))
    assert ours < 7 * bare
    assert node < 14 * bare


# --- the documents ------------------------------------------------------------------------------------------


def python_examples():
    """Every Python example of the documents, by where it stands."""
    for document in [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]:
        examples = re.findall(r"^```python\n(.*?)^```", document.read_text(), flags=re.DOTALL | re.MULTILINE)
        for number, example in enumerate(examples, start=1):
            yield pytest.param(example, id=f"{document.name}-{number}")


def test_the_readme_has_examples():
    assert len([example for example in python_examples() if example.id.startswith("README")]) >= 5


@pytest.mark.parametrize("example", list(python_examples()))
def test_examples_of_the_documents_run(example, tmp_path):
    environment = {"TENURE_URL": f"sqlite:///{tmp_path}/readme.db", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", example]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
