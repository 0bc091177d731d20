"""The pages of the interface: each public name with its docstring. They exist on the website only."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import tenure

GROUPS = {
    "Node, election, term": "Node Election Term Transaction",
    "Async": "AsyncNode AsyncElection AsyncTerm AsyncTransaction",
    "Schedule": "Schedule Run",
    "Registry and records": "Registry Overview RoleInfo LeaderInfo MemberInfo Candidate TermRecord WaitInfo JobRecord "
    "RunRecord GuardedTable",
    "Events": "Event Elected Suspended Resumed Deposed LeaderChanged",
    "Errors": "TenureError ConfigError StoreUnavailable PoolerDetected WaitTimeout NodeClosed NotCommitted "
    "NotLeader LeadershipLost Fenced Unfenced",
    "Measures": "NodeStats RoleStats JobStats Latency ServiceInfo",
    "SQL": "fence_sql guard_sql tables_sql translate_unfenced",
}
"""The names of `tenure` itself, by page. A test checks that none is missing."""

MODULES = [
    "tenure.manual",
    "tenure.testing",
    "tenure.dashboard",
    "tenure.integrations.apscheduler",
    "tenure.integrations.asgi",
    "tenure.integrations.celery",
    "tenure.integrations.django",
    "tenure.integrations.django_celery_beat",
    "tenure.integrations.otel",
    "tenure.integrations.prometheus",
]
"""The other public modules, a page for each."""

NAMES_OF = {"tenure.integrations.otel": ["observe"], "tenure.integrations.prometheus": ["observe", "TenureCollector"]}
"""The public names of modules without `__all__`."""

INTRODUCTION = """# The interface

These pages show every public name, with its signature and its docstring.
[The reference](../reference.md) lists the same names as tables, with the settings, the events and the reasons.

"""

EXAMPLES = "```{highlight} python\n```\n\n"


def set_django_up() -> None:
    """Configure Django: tenure.integrations.django_celery_beat imports models, and those want that."""
    import django
    from django.conf import settings

    settings.configure(INSTALLED_APPS=["django.contrib.contenttypes", "django_celery_beat"], USE_TZ=True)
    django.setup()


def write(folder: Path) -> None:
    """Write the pages into a folder."""
    set_django_up()
    folder.mkdir()
    named = {title: f"tenure-{title.split(',')[0].split()[0].lower()}" for title in GROUPS}
    for title, names in GROUPS.items():
        text = "\n".join(_directive("tenure", name) for name in names.split())
        (folder / f"{named[title]}.md").write_text(f"# {title}\n\n{EXAMPLES}{text}")
    for module in MODULES:
        text = "\n".join(_directive(module, name) for name in names_of(module))
        # The module's own docstring is the introduction.
        head = f"# {module}\n\n{EXAMPLES}```{{eval-rst}}\n.. automodule:: {module}\n   :no-members:\n```\n\n"
        (folder / f"{module}.md").write_text(head + text)
    contents = "\n".join([*named.values(), *MODULES])
    (folder / "index.md").write_text(f"{INTRODUCTION}```{{toctree}}\n:maxdepth: 2\n\n{contents}\n```\n")


def names_of(module: str) -> list[str]:
    """Return the public names of a module."""
    return NAMES_OF.get(module) or list(importlib.import_module(module).__all__)


def _directive(module: str, name: str) -> str:
    if module != "tenure" and name in tenure.__all__ and getattr(tenure, name) is getattr(sys.modules[module], name):
        return f"`{name}` is {{py:class}}`tenure.{name}`.\n"
    return "\n".join(["```{eval-rst}", *_lines(module, name), "```", ""])


def _lines(module: str, name: str) -> Iterator[str]:
    thing = getattr(importlib.import_module(module), name)
    if not inspect.isclass(thing):
        yield f".. autofunction:: {module}.{name}" if inspect.isroutine(thing) else f".. autodata:: {module}.{name}"
        return
    yield f".. autoclass:: {module}.{name}"
    yield "   :members:"
    # Of a framework's class only what Tenure adds, and of an exception nothing but its meaning.
    if all(one.__module__.startswith(("tenure", "abc", "typing")) for one in thing.__mro__[:-1]):
        yield "   :inherited-members:"
