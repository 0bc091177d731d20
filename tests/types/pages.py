"""The Python of the pages, as files that a type checker can read.

A block that is fenced as ``python`` is a whole program. One that is fenced as ``py`` is a part of one: it may use names
that the page does not define, and ``await`` outside a function.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def blocks(kind: str) -> Iterator[tuple[str, str]]:
    """Return the blocks of a kind, by the names of their files: a folder for each page."""
    for page in sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]):
        text = page.read_text()
        for block in re.finditer(rf"^```{kind}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, block.start()) + 2
            yield f"{page.stem.replace('-', '_')}/line_{line}.py", block.group(1)


def write_blocks(kind: str, folder: Path) -> list[Path]:
    """Write each block of a kind into a file of its own, in a package."""
    written = []
    for name, text in blocks(kind):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for package in (folder, path.parent):
            (package / "__init__.py").touch()
        path.write_text(text if _is_module(text) else f"async def block():\n{textwrap.indent(text, '    ')}")
        written.append(path)
    return written


def _is_module(text: str) -> bool:
    try:
        compile(text, "block", "exec")
    except SyntaxError:
        return False
    return True
