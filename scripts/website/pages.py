"""The pages of the website: which there are, in which order, and how their links change.

The Markdown of the repository is the source, and GitHub shows it as it is. The website has the same pages, and some of
the pages outside `docs`. So links are written for GitHub, and changed here.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from scripts.website import api

NAVIGATION = {
    "Start": ["tutorial", "overview"],
    "Lead": ["how-to/lead", "how-to/services", "how-to/async", "how-to/run", "how-to/step-by-step", "how-to/fork"],
    "Run jobs": ["how-to/schedule", "how-to/apscheduler", "how-to/celery"],
    "Protect writes": ["how-to/fence", "how-to/guarded-tables"],
    "Web applications": ["how-to/fastapi", "how-to/django", "how-to/flask", "how-to/workers"],
    "Databases": [
        *("how-to/platforms", "how-to/postgresql", "how-to/mariadb", "how-to/poolers", "how-to/replication"),
        *("how-to/sqlalchemy", "how-to/tables"),
    ],
    "Operate": [
        *("how-to/kubernetes", "how-to/observe", "how-to/dashboard", "how-to/logs", "how-to/doctor"),
        *("how-to/upgrade", "how-to/fleets"),
    ],
    "Move over": ["how-to/move-from-a-lock", "how-to/lock-mode", "how-to/disappearing-lock"],
    "Test": ["how-to/testing-your-code"],
    "Understand": ["guarantees", "design", "explanation/comparison", "explanation/protocol", "benchmarks"],
    "Proof": [
        "proof",
        *("proof/postgres-strict", "proof/postgres-instant", "proof/mariadb-strict", "proof/mariadb-instant"),
        *("proof/sqlite-strict", "proof/sqlite-instant"),
    ],
    "Look up": ["reference", "api/index", "cli", "glossary", "changelog"],
    "Contribute": [
        *("contributing", "security", "development/architecture", "development/decisions", "development/testing"),
        *("development/tests", "development/releasing"),
        *("development/torture-ledger", "development/simulation-ledger", "development/exploration"),
    ],
}
"""The pages by theme. Sphinx refuses a page that is in none of them; one that does not exist is left out."""

ELSEWHERE = {
    "README.md": "index.md",
    "docs/README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "benchmarks.md",
    "tests/README.md": "development/tests.md",
    "tests/verification/exploration/README.md": "development/exploration.md",
    "tests/verification/simulation/FOUND.md": "development/simulation-ledger.md",
    "tests/verification/torture/LEDGER.md": "development/torture-ledger.md",
}
"""Where the website has pages that are elsewhere in the repository. Its front page takes the place of the README."""

PICTURES = (".png", ".svg")

REPORT = "This is the report of one run. [The proof](../proof.md#figures) says what became of each violation in it."
"""Stands below the title of the reports that `make torture` wrote, which readers reach from the navigation."""


def write(repository: Path, folder: Path) -> None:
    """Write the pages and what they show into a folder that does not exist yet."""
    shutil.copytree(repository / "docs", folder, ignore=shutil.ignore_patterns("README.md"))
    everywhere = places(repository)
    for page, place in everywhere.items():
        if page == "README.md":
            continue
        target = folder / place
        text = with_links(repository, folder, page, everywhere)
        if page.startswith("docs/proof/"):
            text = text.replace("\n\n", f"\n\n{REPORT}\n\n", 1)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    api.write(folder / "api")
    with (folder / "index.md").open("a") as front:
        front.write(_navigation(folder))


def places(repository: Path) -> dict[str, str]:
    """Return where the website has each page of the repository."""
    own = [path.relative_to(repository).as_posix() for path in sorted(repository.glob("docs/**/*.md"))]
    return {**{page: page.removeprefix("docs/") for page in own}, **ELSEWHERE}


def _navigation(folder: Path) -> str:
    titles = {"overview": "All pages <overview>"}  # on GitHub it is the README of a folder
    parts = [
        "\n".join(["", "```{toctree}", ":hidden:", f":caption: {theme}", "", *present, "```", ""])
        for theme, names in NAVIGATION.items()
        if (present := [titles.get(name, name) for name in names if (folder / f"{name}.md").exists()])
    ]
    return "\n".join(parts)


def with_links(repository: Path, folder: Path, page: str, places: dict[str, str]) -> str:
    """Return the text of a page, with each relative link as the website has it."""

    def changed(link: re.Match[str]) -> str:
        path, mark, anchor = link.group(1).partition("#")
        if re.match(r"\w+:", path) or not path:
            return link.group(0)
        target = os.path.normpath(Path(page).parent / path)
        if target in places:
            place = places[target]
        elif (repository / target).is_file():
            # A picture, or a file to download.
            place = target.removeprefix("docs/")
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(repository / target, folder / place)
        else:
            return link.group(0)  # Sphinx says that it leads nowhere
        return f"]({os.path.relpath(place, Path(places[page]).parent)}{mark}{anchor})"

    return _outside_code((repository / page).read_text(), lambda text: re.sub(r"\]\(([^)\s]+)\)", changed, text))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Change what is neither a block of code nor code within a line."""
    code = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
    parts = code.split(text)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))
