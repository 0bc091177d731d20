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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_test_that_is_named_exists(page):
    for path, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text()):
        assert re.search(rf"\bdef {name}\(", (REPOSITORY / path).read_text()), f"{path}::{name}"


ROW = re.compile(r"^\| (\*\*.*?) \| (.*) \| (.*?) \|$", re.MULTILINE)
GLOSSARY = ROW.findall((REPOSITORY / "docs" / "glossary.md").read_text())


def text_at(name: str) -> str:
    """What is in a module or a folder that the glossary names, with its name, in small letters."""
    places = [*REPOSITORY.glob(name), *(REPOSITORY / "src/tenure").glob(name)]
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*.py"))]
    return " ".join(f"{file.relative_to(REPOSITORY)} {file.read_text()}" for file in files).lower()


@pytest.mark.parametrize(("term", "meaning", "where"), GLOSSARY, ids=[term for term, _, _ in GLOSSARY])
def test_every_module_that_the_glossary_names_has_the_term(term, meaning, where):
    """The beginnings of all words of a term, or a name that the explanation has in code or in italics."""
    alternatives = re.findall(r"\*\*(.+?)\*\*", term) + re.findall(r"`(\w+)`|(?<!\*)\*(\w+)\*(?!\*)", meaning)
    names = [alternative if isinstance(alternative, str) else "".join(alternative) for alternative in alternatives]
    for name in re.findall(r"`([^`]+)`", where):
        text = text_at(name)
        assert text, f"there is no {name}"
        wanted = [[word[:6].lower() for word in re.findall(r"\w{3,}", alternative)] for alternative in names]
        assert any(all(word in text for word in words) for words in wanted), f"{name} has none of {names}"


def test_the_glossary_is_read():
    assert len(GLOSSARY) > 60
