"""What is wrong with built pages: links that lead nowhere, requests to other hosts, heads of columns that are empty."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {("link", "href"), ("use", "href"), ("image", "href"), ("object", "data")}
"""Beside every `src`: what a browser fetches without being asked. (An `a` is fetched when it is followed.)"""

IN_STYLES = re.compile(r"""(?:@import\s+|url\()\s*["']?([^"')\s;]+)""")


EMPTY_HEAD = re.compile(r"<th\b[^>]*>(<p>)?\s*(</p>)?</th>")
"""The head of a column that a screen reader could not name."""


class Page(HTMLParser):
    """The names and the addresses in a page or a picture."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.nameless_column = EMPTY_HEAD.search(text) is not None
        self._style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._style = self._style or tag == "style"
        attributes = {name.removeprefix("xlink:"): value or "" for name, value in attrs}
        self.names.update(attributes[name] for name in ("id", "name") if name in attributes)
        # These two tell a search engine where a page is, and are not fetched.
        if tag == "link" and attributes.get("rel") in ("canonical", "alternate"):
            return
        for name, value in attributes.items():
            if name in ("src", "poster") or (tag, name) in FETCHED:
                self.fetched.append(value)
            elif name == "srcset":
                self.fetched += [part.split()[0] for part in value.split(",") if part.strip()]
            elif name == "style":
                self.fetched += IN_STYLES.findall(value)
            elif (tag, name) == ("a", "href"):
                self.links.append(value)

    def handle_endtag(self, tag: str) -> None:
        self._style = self._style and tag != "style"

    def handle_data(self, data: str) -> None:
        if self._style:
            self.fetched += IN_STYLES.findall(data)


def faults(site: Path) -> list[str]:
    """Return what is wrong with a folder of pages, a line for each."""
    pages = {path: Page(path.read_text()) for kind in ("html", "svg") for path in sorted(site.rglob(f"*.{kind}"))}
    found = []
    for path, page in pages.items():
        if page.nameless_column:
            found.append(f"{path.relative_to(site)}: a column of a table has an empty head")
        for address in page.links:
            found += [f"{path.relative_to(site)}: {fault}" for fault in _leads_nowhere(path, address, pages)]
        for address in page.fetched:
            found += [f"{path.relative_to(site)}: {fault}" for fault in _not_ours(path, address)]
    for path in sorted(site.rglob("*.css")):
        for address in IN_STYLES.findall(path.read_text()):
            found += [f"{path.relative_to(site)}: {fault}" for fault in _not_ours(path, address)]
    return sorted(set(found))


def _leads_nowhere(path: Path, address: str, pages: dict[Path, Page]) -> Iterator[str]:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        yield f"a link leads to {address}, and there is no such file"
    elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].names:
        yield f"a link leads to {address}, and the page has no such anchor"


def _not_ours(path: Path, address: str) -> Iterator[str]:
    parts = urlsplit(address)
    if parts.scheme == "data" or (not parts.path and not parts.netloc):
        return
    if parts.scheme or parts.netloc:
        yield f"fetches {address} from another host"
    elif not (path.parent / unquote(parts.path)).resolve().is_file():
        yield f"fetches {address}, and there is no such file"
