"""The documents lead somewhere: every relative link, every anchor, and every module that the glossary names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    *sorted(REPOSITORY.glob("*.md")),
    *sorted(REPOSITORY.glob("docs/**/*.md")),
    *sorted(REPOSITORY.glob("tests/**/*.md")),
    *sorted(REPOSITORY.glob("benchmarks/*.md")),
]


def prose(page: Path) -> str:
    """The text of a page without its code."""
    blocks = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
    return blocks.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_relative_link_resolves(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page))):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_module_that_the_glossary_names_exists():
    rows = re.findall(r"^\| \*\*.*\| (.*?) \|$", (REPOSITORY / "docs" / "glossary.md").read_text(), re.MULTILINE)
    named = {name for places in rows for name in re.findall(r"`([^`]+)`", places)}
    assert {name for name in named if not [*REPOSITORY.glob(name), *(REPOSITORY / "src/tenure").glob(name)]} == set()
    assert len(named) > 20
