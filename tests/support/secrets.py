"""A password that nobody may get to see, and everywhere that it could come out."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

import tenure

CANARY = "c4n4ry+s3cret"
PIECE = "s3cret"
"""Of the password; no piece of it may come out either."""
SOURCES = str(Path(tenure.__file__).parent)


def assert_untold(
    *errors: BaseException, records: Iterable[logging.LogRecord] = (), things: Iterable[object] = ()
) -> None:
    """The canary is in no error or what hangs on it, no log record, no representation, and no process list."""
    said = [text for error in errors for text in _told_by(error)]
    said += [record.getMessage() + repr(vars(record)) for record in records]
    said += [text for record in records if record.exc_info for text in _told_by(record.exc_info[1])]
    said += [repr(thing) + str(thing) for thing in things]
    said += [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    for text in said:
        assert PIECE not in text


def assert_untold_by_variables(error: BaseException) -> None:
    """Nor in the variables of our own calls in the traceback, which reporters of errors send along."""
    for one in _chain(error):
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if frame.f_code.co_filename.startswith(SOURCES):
                assert PIECE not in repr(frame.f_locals), frame


def _told_by(error: BaseException) -> Iterator[str]:
    yield "".join(traceback.format_exception(error))
    for one in _chain(error):
        yield f"{one} {one!r} {one.args} {vars(one)}"


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
