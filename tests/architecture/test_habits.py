"""The Makefile is the one front door: hooks, workflows and CI go through it and add nothing of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
CALLERS = [ROOT / ".pre-commit-config.yaml", *sorted((ROOT / ".github" / "workflows").glob("*.yml"))]
COMMAND = re.compile(r"^\s*(?:- )?(?:run|entry): (.+)$", re.MULTILINE)


@pytest.mark.parametrize("path", CALLERS, ids=lambda path: path.name)
def test_hooks_and_workflows_call_targets_of_the_makefile(path):
    commands = COMMAND.findall(path.read_text())
    assert commands
    assert {command.split()[0] for command in commands} == {"make"}
    assert {command.split()[1] for command in commands} <= TARGETS


def test_workflow_runs_every_python_that_the_package_names():
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    matrix = re.search(r"python: \[(.+)\]", (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert matrix is not None
    tested = set(re.findall(r"[\d.]+", matrix[1]))
    assert set(named) <= tested
    releasing = (ROOT / "docs" / "development" / "releasing.md").read_text()
    assert [one for one in sorted(tested - set(named)) if f"Python {one} is in the matrix" not in releasing] == []


def test_each_package_of_the_verification_says_how_it_is_run():
    packages = [*(ROOT / "tests" / "verification").glob("*/__init__.py")]
    assert len(packages) > 5
    for package in packages:
        named = set(re.findall(r"^    make ([a-z-]+)", package.read_text(), re.MULTILINE))
        assert named, package
        assert named <= TARGETS, package


def test_documented_targets_are_there():
    for page in ("README.md", "CONTRIBUTING.md", "tests/README.md", *(str(p) for p in (ROOT / "docs").rglob("*.md"))):
        named = set(re.findall(r"`make ([a-z-]+)", (ROOT / page).read_text()))
        assert named <= TARGETS, page
