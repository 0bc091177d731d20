"""The website: its checker finds what it is for, and no page, public name or figure is left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tenure
from scripts.website import api, check, pages

REPOSITORY = Path(__file__).parents[2]
INTEGRATIONS = REPOSITORY / "src" / "tenure" / "integrations"


@pytest.fixture
def site(tmp_path):
    (tmp_path / "how-to").mkdir()
    (tmp_path / "picture.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"><use href="#a"/></svg>')
    (tmp_path / "site.css").write_text("body { background: url(data:image/png;base64,AA==) }")
    (tmp_path / "how-to" / "fence.html").write_text('<h2 id="why">Why</h2>')
    return tmp_path


GOOD = """
<link rel="stylesheet" href="site.css"><link rel="canonical" href="https://example.org/">
<a href="how-to/fence.html#why">a page</a> <a href="#top">here</a> <a href="https://example.org/">elsewhere</a>
<p id="top"><img src="picture.svg"></p>
"""


def test_a_page_that_needs_nothing_from_elsewhere_has_no_faults(site):
    (site / "index.html").write_text(GOOD)
    assert check.faults(site) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('<script src="https://example.org/a.js"></script>', "fetches https://example.org/a.js from another host"),
        ('<link rel="stylesheet" href="//example.org/a.css">', "fetches //example.org/a.css from another host"),
        ('<link rel="preconnect" href="https://fonts.example.org">', "from another host"),
        ('<img srcset="picture.svg 1x, https://example.org/b.png 2x">', "fetches https://example.org/b.png"),
        (
            "<style>@font-face { src: url('https://example.org/f.woff2') }</style>",
            "fetches https://example.org/f.woff2",
        ),
        ('<p style="background: url(http://example.org/b.png)">', "fetches http://example.org/b.png"),
        ('<iframe src="http://example.org/"></iframe>', "fetches http://example.org/"),
        ('<img src="lost.png">', "fetches lost.png, and there is no such file"),
        ('<a href="how-to/lost.html">', "a link leads to how-to/lost.html, and there is no such file"),
        ('<a href="how-to/fence.html#lost">', "the page has no such anchor"),
        ('<a href="#lost">', "the page has no such anchor"),
        ('<table><tr><th class="head"><p>a</p></th><th class="head"><p></p></th></tr></table>', "an empty head"),
    ],
)
def test_the_checker_finds_foreign_requests_broken_links_and_empty_heads(site, text, fault):
    (site / "index.html").write_text(text)
    (found,) = check.faults(site)
    assert found.startswith("index.html: ")
    assert fault in found


def test_the_checker_looks_into_styles_and_pictures(site):
    (site / "site.css").write_text('@import "https://example.org/a.css";')
    (site / "picture.svg").write_text("<svg><style>@font-face { src: url(https://example.org/f.woff) }</style></svg>")
    assert check.faults(site) == [
        "picture.svg: fetches https://example.org/f.woff from another host",
        "site.css: fetches https://example.org/a.css from another host",
    ]


def test_links_are_changed_to_where_the_website_has_the_page(tmp_path):
    for name in ("docs/how-to", "tests", "ops"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "README.md").write_text("# Read me")
    (tmp_path / "tests" / "README.md").write_text("# Tests\n[fence](../docs/how-to/fence.md#why)")
    (tmp_path / "ops" / "alerts.yml").write_text("groups: []")
    text = "[a](../../tests/README.md) [b](../../ops/alerts.yml) `[c](../../README.md)` [`d`](../../README.md)\n"
    block = "```md\n[e](../../README.md)\n```\n"
    (tmp_path / "docs" / "how-to" / "fence.md").write_text(text + block)
    (tmp_path / "pages").mkdir()
    places = {
        "README.md": "index.md",
        "tests/README.md": "development/tests.md",
        "docs/how-to/fence.md": "how-to/fence.md",
    }
    changed = "[a](../development/tests.md) [b](../ops/alerts.yml) `[c](../../README.md)` [`d`](../index.md)\n"
    assert pages.with_links(tmp_path, tmp_path / "pages", "docs/how-to/fence.md", places) == changed + block
    assert (tmp_path / "pages" / "ops" / "alerts.yml").exists()
    there = pages.with_links(tmp_path, tmp_path / "pages", "tests/README.md", places)
    assert there == "# Tests\n[fence](../how-to/fence.md#why)"


def test_every_page_is_in_the_navigation():
    """Sphinx refuses a page that is not; this says it without Sphinx, in no time."""
    named = [name for names in pages.NAVIGATION.values() for name in names]
    assert len(named) == len(set(named))
    assert set(pages.places(REPOSITORY).values()) - {"index.md"} <= {f"{name}.md" for name in named}


def test_every_public_name_is_on_a_page_of_the_interface():
    named = {name for group in api.GROUPS.values() for name in group.split()}
    assert named == {*tenure.__all__} - {"__version__", "manual"}


def test_every_integration_has_a_page_of_the_interface():
    there = {path.stem for path in INTEGRATIONS.iterdir() if not path.name.startswith("__")}
    named = {module.rpartition(".")[2] for module in api.MODULES if module.startswith("tenure.integrations.")}
    assert named == there


def test_the_comparison_has_the_figures_of_the_benchmarks():
    page = (REPOSITORY / "docs" / "explanation" / "comparison.md").read_text()
    results = _table((REPOSITORY / "benchmarks" / "RESULTS.md").read_text(), "| program | start |")
    columns = {
        "crash: median": "crash: median",
        "hand-over: median": "hand-over: median",
        "pause: succeeded after": "pause: succeeded after",
        "overlap: longest": "longest",
        "requests/s and node": "requests/s and node",
    }
    shown = _table(page, "| what | crash: median |")
    assert len(shown) >= 8
    for name, figures in shown.items():
        assert figures == {ours: results[name][theirs] for ours, theirs in columns.items()}, name
    (ten_thousand,) = re.findall(r"With 10,000 roles a crash failover takes ([\d.]+ ms)", page)
    assert f"| 3 | 10,000 | {ten_thousand} |" in (REPOSITORY / "benchmarks" / "RESULTS.md").read_text()


def _table(text, head):
    """Return the rows of a table by their first cell, each by the heads of its columns (the first of equal ones)."""
    lines = text[text.index(head) :].split("\n\n")[0].splitlines()
    heads, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(reversed([*zip(heads[1:], row[1:], strict=True)])) for row in rows}
