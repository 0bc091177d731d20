"""What users see: the public names, their words, the weight of the import, and the examples in the documents."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import tenure
from tests.support import starter

REPOSITORY = Path(__file__).parents[2]

PUBLIC = {
    *("Node", "Election", "Term", "Transaction"),
    *("Registry", "RoleInfo", "MemberInfo", "Overview"),
    *("AsyncNode", "AsyncElection", "AsyncTerm", "AsyncTransaction"),
    *("Event", "Elected", "Suspended", "Resumed", "Deposed", "LeaderChanged"),
    *("Candidate", "GuardedTable", "JobRecord", "LeaderInfo", "RunRecord", "TermRecord", "WaitInfo"),
    *("Run", "Schedule"),
    *("JobStats", "NodeStats", "RoleStats", "Latency", "ServiceInfo"),
    *("TenureError", "ConfigError", "StoreUnavailable", "PoolerDetected", "WaitTimeout", "NodeClosed"),
    "NotCommitted",
    *("NotLeader", "LeadershipLost", "Fenced", "Unfenced"),
    *("fence_sql", "guard_sql", "tables_sql", "translate_unfenced", "manual", "__version__"),
}
STEP_BY_STEP = {
    *("use", "close", "set_expire", "Leader"),
    *("register_candidate", "heartbeat", "elect", "is_leader", "leader", "list_candidates", "unregister_candidate"),
}

DRIVERS_AND_FRAMEWORKS = {
    *("psycopg", "pymysql", "asyncpg", "sqlalchemy", "asyncio", "anyio", "trio"),
    *("django", "starlette", "fastapi", "apscheduler", "celery", "prometheus_client", "opentelemetry"),
}


# --- names --------------------------------------------------------------------------------------------------


def test_public_names_are_these_and_no_others():
    assert set(tenure.__all__) == PUBLIC
    assert len(tenure.__all__) == len(PUBLIC)
    assert all(hasattr(tenure, name) for name in PUBLIC)
    assert set(tenure.manual.__all__) == STEP_BY_STEP


FACADES = ("Node", "Election", "Term", "Transaction")
REFERENCE = REPOSITORY / "docs" / "reference.md"


def documented_names():
    """The names that the reference shows, by class. A name without an owner (`.history()`) has the one before."""
    calls = REFERENCE.read_text().partition("## Node, Election, Term")[2].partition("\n## ")[0]
    names, owner = {facade: set() for facade in FACADES}, ""
    for cell in re.findall(r"^\| (.*?) \|", calls, flags=re.MULTILINE):
        for prefix, name in re.findall(r"`(\w*)\.(\w+)", cell):
            owner = prefix.capitalize() or owner
            if owner in names:
                names[owner].add(name)
    return names


@pytest.mark.parametrize("facade", FACADES)
@pytest.mark.parametrize("prefix", ["", "Async"])
def test_public_is_what_the_reference_shows(prefix, facade):
    shown = {name for name in dir(getattr(tenure, prefix + facade)) if not name.startswith("_")}
    assert shown == documented_names()[facade]


def test_instances_have_no_public_attributes_beside_those_of_their_classes(tmp_path):
    with tenure.Node(f"sqlite:///{tmp_path}/t.db") as node:
        election = node.election("r")
        term = election.wait(20)
        with term.transaction() as transaction:
            things = node, election, term, transaction
            assert [name for thing in things for name in vars(thing) if not name.startswith("_")] == []


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


def modules_loaded_by(program):
    return int(python(f"import sys\nbefore = set(sys.modules)\n{program}\nprint(len(set(sys.modules) - before))"))


def test_import_is_light():
    """Counted in modules, which no other process changes; ``make bench`` has the time beside a bare interpreter's."""
    assert modules_loaded_by("import tenure") <= 5
    assert modules_loaded_by("import tenure; tenure.Node") <= 170


# --- the documents ------------------------------------------------------------------------------------------


def python_examples():
    """Every Python example of the documents, by where it stands."""
    for document in [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]:
        examples = re.findall(r"^```python\n(.*?)^```", document.read_text(), flags=re.DOTALL | re.MULTILINE)
        for number, example in enumerate(examples, start=1):
            yield pytest.param(example, id=f"{document.name}-{number}")


def test_the_page_of_the_calls_has_examples():
    assert len([example for example in python_examples() if example.id.startswith("lead.md")]) >= 7


def test_the_program_of_the_readme_is_the_example():
    [shown] = re.findall(r"^```py\n(.*?)^```", (REPOSITORY / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    program = (REPOSITORY / "examples" / "three_terminals.py").read_text()
    assert program.endswith(f'"""\n\n{shown}')


def test_the_readme_is_short():
    """Half an hour of reading belongs into docs."""
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 130


@pytest.mark.parametrize("example", list(python_examples()))
def test_examples_of_the_documents_run(example, tmp_path):
    environment = {"TENURE_URL": f"sqlite:///{tmp_path}/readme.db", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    (tmp_path / "example.py").write_text(example)
    done = starter.run("example", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr.decode()
    assert not done.stderr
