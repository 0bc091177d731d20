"""What type checkers say about the programs of users: the pages and the public interface.

``make types`` checks the examples and the program of the public interface with mypy and pyright. The tests here also
check the pages, and what must be refused. All of it is one run of each checker, which takes its time.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.types.pages import REPOSITORY, write_blocks

PROGRAM = Path(__file__).parent / "interface.py"
MISUSE = Path(__file__).parent / "misuse.py"

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), pytest.mark.xdist_group("types")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A folder with the Python of the pages."""
    folder = tmp_path_factory.mktemp("pages")
    assert len(write_blocks("python", folder / "programs")) > 20
    assert len(write_blocks("py", folder / "parts")) > 20
    return folder


def run(*command):
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr  # it worked, and found the misuses
    return done.stdout


@pytest.fixture(scope="module")
def by_mypy(pages):
    """The errors that mypy finds with the settings of this repository: the file, the line and the code of each."""
    text = run("mypy", "--no-pretty", str(pages / "programs"), str(pages / "parts"), str(PROGRAM), str(MISUSE))
    found = re.findall(r"^(.+?):(\d+): error: .*\[([\w-]+)\]$", text, flags=re.MULTILINE)
    assert f"Found {len(found)} errors" in text, text
    return [(Path(path).name, int(line), code) for path, line, code in found]


@pytest.fixture(scope="module")
def by_pyright(pages):
    """The errors and warnings that pyright finds with its own settings: the file and the line of each."""
    paths = [str(PROGRAM), str(MISUSE), str(pages / "programs")]
    report = json.loads(run("pyright", "--outputjson", "--pythonpath", sys.executable, *paths))
    assert report["summary"]["filesAnalyzed"] > 20
    return [(Path(found["file"]).name, found["range"]["start"]["line"] + 1) for found in report["generalDiagnostics"]]


def wrong_lines():
    """The lines of the misuse that are marked as wrong, and the code of the error that mypy reports."""
    for number, line in enumerate(MISUSE.read_text().splitlines(), start=1):
        for code in re.findall(r"# wrong: ([\w-]+)$", line):
            yield number, code


def public_names():
    """Every public name, and what it has, of the recorded interface."""
    recorded = (REPOSITORY / "tests/architecture/interface.txt").read_text().partition("\n\n")[0]
    names = re.findall(r"^tenure\.([\w.]+)", recorded, flags=re.MULTILINE)
    return {name for name in names if not name.startswith("WaitTimeout.")}  # all that it has, it has from OSError


def test_the_program_uses_the_whole_public_interface():
    text = PROGRAM.read_text()
    assert [name for name in public_names() if not re.search(rf"\b{name.rpartition('.')[2]}\b", text)] == []


def test_mypy_finds_every_misuse(by_mypy):
    assert len(list(wrong_lines())) > 30
    assert {(line, code) for name, line, code in by_mypy if name == MISUSE.name} == set(wrong_lines())


def test_pyright_finds_every_misuse(by_pyright):
    assert {line for name, line in by_pyright if name == MISUSE.name} == {line for line, _ in wrong_lines()}


def test_mypy_accepts_the_pages_and_the_whole_interface(by_mypy):
    assert [error for error in by_mypy if error[0] != MISUSE.name] == []


def test_pyright_accepts_the_pages_and_the_whole_interface(by_pyright):
    assert [error for error in by_pyright if error[0] != MISUSE.name] == []
