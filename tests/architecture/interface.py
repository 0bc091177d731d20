"""Everything that a user or an operator may depend on, as text: ``python -m tests.architecture.interface`` prints it.

``interface.txt`` is what it printed when it was last changed on purpose, and a test compares the two. To change the
interface, write the file again, and say so in the changelog:

    .venv/bin/python -m tests.architecture.interface > tests/architecture/interface.txt
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path

import click

import tenure
from scripts.website import api
from tenure import ConfigError
from tenure.cli import COMMANDS, main
from tenure.databases.schema import schema_for
from tenure.services.leader import EXIT_CODE
from tenure.store import dialects, forgetting, job_statements, manual_statements, statements

SOURCE = Path(tenure.__file__).parent
DATABASES = ("postgresql", "mysql", "sqlite")
OURS = ("tenure", "abc", "typing", "builtins")
"""Where classes are from whose names do not change with the release of a framework."""
WITHOUT_FRAMEWORKS = ("tenure.manual", "tenure.testing")
MISSING = " cannot be read: "
"""Follows the name of a module whose framework is not installed."""


def lines() -> Iterator[str]:
    """Return the interface, a line for each name."""
    yield "# Public names"
    for name in sorted(tenure.__all__):
        yield from _thing(f"tenure.{name}", getattr(tenure, name))
    for module in WITHOUT_FRAMEWORKS:
        yield from _module(module)
    yield "\n# Dashboard and integrations"
    with contextlib.suppress(ModuleNotFoundError):
        api.set_django_up()
    for module in api.MODULES:
        if module not in WITHOUT_FRAMEWORKS:
            yield from _module(module)
    yield "\n# Command line"
    for name in sorted(COMMANDS):
        command = main.get_command(click.Context(main), name)
        assert command is not None
        yield f"tenure {name}"
        yield from sorted(f"tenure {name} {_parameter(parameter)}" for parameter in command.params)
    yield "\n# Exit codes"
    source = (SOURCE / "cli" / "exit_codes.py").read_text()
    yield from sorted(f"{name} {code}" for name, code in re.findall(r"^([A-Z_]+) = (\d+)$", source, re.MULTILINE))
    yield f"tenure.services.leader.EXIT_CODE {EXIT_CODE}"
    yield "\n# Names of loggers"
    yield from _found(r'(?:getLogger|SafeLog)\("([\w.]+)"')
    yield "\n# Environment variables"
    yield from _found(r"\b(TENURE_[A-Z_]+)\b")
    yield "\n# SQL, as digests"
    for database in DATABASES:
        tables = tenure.tables_sql(database=database)
        yield f"tables_sql({database!r}) {_digest(tables if isinstance(tables, str) else ';'.join(tables))}"
        yield f"shut_out {database!r} {_digest(repr(schema_for(dialects.for_name(database, 'tenure')).shut_out))}"
        yield f"fence_sql('role', {database!r}) {_digest(tenure.fence_sql('role', database=database))}"
    for name, text in sorted(
        (vars(statements) | vars(manual_statements) | vars(job_statements) | vars(forgetting)).items()
    ):
        if name.isupper():
            yield f"{name} {_digest(repr(text))}"


def _module(module: str) -> Iterator[str]:
    """The names of a module; one line without names if its framework is not installed."""
    try:
        there = importlib.import_module(module)
    except (ConfigError, ModuleNotFoundError) as error:
        yield f"{module}{MISSING}{error}"
        return
    for name in sorted(api.names_of(module)):
        thing = getattr(there, name)
        if name in tenure.__all__ and thing is getattr(tenure, name):
            yield f"{module}.{name} is tenure.{name}"
        else:
            yield from _thing(f"{module}.{name}", thing)


def _thing(name: str, thing: object) -> Iterator[str]:
    if isinstance(thing, types.ModuleType):
        return
    if not isinstance(thing, type):
        yield f"{name}{_signature(thing)}"
        return
    # Of a framework's classes only the one that Tenure names: the others change with its releases.
    lasting = [base for base in thing.__mro__ if base.__module__.startswith(OURS) or base in thing.__bases__]
    bases = ", ".join(base.__name__ for base in lasting[1:] if not base.__name__.startswith(("_", "Base", "object")))
    yield f"{name}{_signature(thing)} is a {bases or 'class'}"
    ours = {name for base in thing.__mro__ if base.__module__.startswith(OURS) for name in vars(base)}
    for attribute in sorted(ours - set(dir(BaseException))):
        if not attribute.startswith("_"):
            yield f"{name}.{attribute}{_signature(inspect.getattr_static(thing, attribute))}"


def _signature(thing: object) -> str:
    thing = getattr(thing, "__func__", thing)
    if not isinstance(thing, type) and not inspect.isroutine(thing):
        return ""
    if isinstance(thing, type):
        made_by = next(base for base in thing.__mro__ if "__init__" in vars(base))
        if not made_by.__module__.startswith(OURS):
            return ""
    try:
        # A public type is the same with and without the package's name in front of it.
        return re.sub(r" object at 0x\w+>", ">", str(inspect.signature(thing))).replace("tenure.", "")
    except (TypeError, ValueError):
        return ""


def _parameter(parameter: click.Parameter) -> str:
    names = "/".join((*parameter.opts, *parameter.secondary_opts))
    is_flag = getattr(parameter, "is_flag", False)
    kind = "flag" if is_flag else parameter.type.name
    return f"{names} {kind}{' required' if parameter.required else ''}{' multiple' if parameter.multiple else ''}"


def _found(pattern: str) -> list[str]:
    texts = (path.read_text() for path in SOURCE.rglob("*.py"))
    return sorted({name for text in texts for name in re.findall(pattern, text)})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    print("\n".join(lines()))
