"""The log of the engine's threads."""

from __future__ import annotations

import contextlib
import logging
from typing import Any


class EngineLog(logging.LoggerAdapter[logging.Logger]):
    """A log that never raises: an error of the application's handlers and filters would end the engine's thread."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message, if the application's handlers and filters can take it."""
        # Two levels up, past this method, is the call that logs.
        with contextlib.suppress(Exception):
            super().log(level, msg, *args, **{"stacklevel": 2, **kwargs})
