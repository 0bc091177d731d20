"""Build the website from the pages of the repository, and check it: python -m scripts.website (or `make site`).

`build/pages` holds the pages as Sphinx reads them, `build/site` is the website. Whatever Sphinx warns of is an error.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import main as sphinx

from scripts.website import check, pages

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = REPOSITORY / "build"


MENDED = {
    'role="heading"><span class="caption-text">': 'role="heading" aria-level="2"><span class="caption-text">',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="Pages">',
    '<aside class="toc-drawer">': '<aside class="toc-drawer" aria-label="On this page">',
    "<pre>": '<pre tabindex="0">',
    "<dl>\n<dd>": '<dl role="none">\n<dd>',  # the parameters of a long signature, which are no list of definitions
    '<div id="search-results">': '<h1>Search</h1>\n<div id="search-results">',
    '<div class="table-wrapper colwidths-auto docutils container">': (
        '<div class="table-wrapper colwidths-auto docutils container" tabindex="0">'
    ),
}
"""What the theme leaves out, and people need who use a keyboard or hear the page. axe finds it; see tests/website."""


def mend(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        for found, mended in MENDED.items():
            text = text.replace(found, mended)
        page.write_text(text)


def build(into: Path) -> int:
    source, site = into / "pages", into / "site"
    shutil.rmtree(site, ignore_errors=True)
    shutil.rmtree(source, ignore_errors=True)
    pages.write(REPOSITORY, source)
    # A new environment each time: Sphinx keeps the pages that it has read, and does not repeat what it warned of there.
    told = ["-b", "html", "-c", str(Path(__file__).parent), "-d", str(into / "doctrees"), "-E"]
    code = sphinx([*told, "--fail-on-warning", "--quiet", str(source), str(site)])
    if code:
        return code
    mend(site)
    faults = check.faults(site)
    print(*faults, sep="\n", end="\n" if faults else "", file=sys.stderr)
    print(f"{site}: {len([*site.rglob('*.html')])} pages, {len(faults)} faults")
    return 1 if faults else 0


def serve(site: Path, port: int) -> None:
    """Show what was built, on loopback only."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.website", description=__doc__)
    parser.add_argument(
        "--serve", type=int, metavar="PORT", help="build nothing, and show what was built (0: any port)"
    )
    parser.add_argument("--into", type=Path, default=BUILD, metavar="FOLDER", help="where to build (default: build)")
    options = parser.parse_args()
    if options.serve is None:
        return build(options.into)
    serve(options.into / "site", options.serve)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
