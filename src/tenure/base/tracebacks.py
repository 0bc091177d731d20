"""Raises errors without the local variables of the calls in their tracebacks.

Error reporters (Sentry, rich, ``traceback`` with ``capture_locals=True``) show the local variables of every call in a
traceback. A call that takes a URL or a password has it in a variable, and so have the calls that it makes.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def without_locals(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise its errors with the whole traceback, but without local variables in its frames."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        before = sys.exc_info()[1]
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            _forget_variables(error, before)
            del args, kwargs, before
            raise

    return wrapped


def _forget_variables(error: BaseException, before: BaseException | None) -> None:
    """Clear the frames of an error and of its causes, except an error that the caller was already handling."""
    todo, seen = [error], [before]
    while todo:
        found = todo.pop()
        if not any(found is other for other in seen):
            seen.append(found)
            traceback.clear_frames(found.__traceback__)
            todo += filter(None, (found.__cause__, found.__context__))
