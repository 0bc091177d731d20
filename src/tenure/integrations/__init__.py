"""Tenure in the frameworks that people have. Each module needs its extra, and is imported by whoever uses it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

from tenure.errors import ConfigError
from tenure.settings import check_name


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Import a framework in the block, and say how to install it where it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "tenure":
            raise
        raise ConfigError(f"{missing} is not installed: pip install 'tenure[{name}]'") from error


def job_name(identifier: str) -> str:
    """Return the name under which runs of a scheduler's job are claimed: its own, where that can be one."""
    try:
        return check_name("job", identifier)
    except ConfigError:
        return hashlib.sha256(identifier.encode(errors="surrogatepass")).hexdigest()
