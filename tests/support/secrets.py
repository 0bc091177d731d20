"""A password that nobody may get to see, and everywhere that it could come out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

import tenure
from tenure import manual

CANARY = "c4n4ry+s3cret"
PIECE = "s3cret"
"""Of the password; no piece of it may come out either."""
TESTS = str(Path(__file__).parents[1])


def assert_untold(
    *errors: BaseException, records: Iterable[logging.LogRecord] = (), things: Iterable[object] = ()
) -> None:
    """The canary is in no error or what hangs on it, no log record, no representation, and no process list."""
    said = [text for error in errors for text in _told_by(error)]
    said += [record.getMessage() + repr(vars(record)) for record in records]
    said += [text for record in records for error in (record.exc_info or ())[1:2] if error for text in _told_by(error)]
    said += [repr(thing) + str(thing) for thing in things]
    said += [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    for text in said:
        assert PIECE not in text, text


def ways_in(url: str, **arguments: Any) -> Iterator[Callable[[], object]]:
    """Every call that connects."""
    yield tenure.Node(url, **arguments).start
    yield lambda: asyncio.run(tenure.AsyncNode(url, **arguments).start())
    yield tenure.Registry(url, **arguments).connect
    manual.use(url, **arguments)
    yield manual.leader
    manual._settings.place = None


def _told_by(error: BaseException) -> Iterator[str]:
    yield "".join(traceback.format_exception(error))
    for one in _chain(error):
        yield f"{one} {one!r} {one.args} {vars(one)}"
        yield from _variables(one)


def _variables(error: BaseException) -> Iterator[str]:
    """The variables of every call in the traceback, which reporters of errors send along; but for the tests' own."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith(TESTS):
            for name, value in frame.f_locals.items():
                with contextlib.suppress(Exception):  # half made, too deep, too many digits: it shows nothing
                    yield f"{frame.f_code.co_filename}:{line}: {name} = {value!r}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those behind it. `raise … from None` hides the context and keeps it."""
    todo: list[BaseException | None] = [error]
    seen: list[BaseException] = []
    while todo:
        one = todo.pop()
        if one is not None and one not in seen:
            seen.append(one)
            todo += [one.__cause__, one.__context__]
            yield one
