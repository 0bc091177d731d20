"""A log for code that must go on, whatever the application's handlers and filters raise."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, MutableMapping
from typing import Any


class SafeLog(logging.LoggerAdapter[logging.Logger]):
    """A log that never raises: an error of a handler would end the thread that logs, or skip what comes after it."""

    def __init__(self, name: str, fields: Mapping[str, object] | None = None) -> None:
        """``fields`` become attributes of each record."""
        super().__init__(logging.getLogger(name), fields or {})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the fields to those of the call."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message, if the application's handlers and filters can take it."""
        # Two levels up, past this method, is the call that logs.
        with contextlib.suppress(Exception):
            super().log(level, msg, *args, **{"stacklevel": 2, **kwargs})
