"""Integrations with common frameworks. Each module needs its extra, and is imported only by code that uses it.

They use only Tenure's public names, with the exceptions that ``tests/architecture/test_packages.py`` lists.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

from tenure import ConfigError
from tenure.settings import check_name


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Wrap a block that imports a framework: if it is missing, raise a ConfigError that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "tenure":
            raise
        raise ConfigError(f"{missing} is not installed: pip install 'tenure[{name}]'") from error


def job_name(identifier: str) -> str:
    """Return the name under which a job's runs are claimed: its id, or a hash of an id that cannot be a name."""
    try:
        return check_name("job", identifier)
    except ConfigError:
        return hashlib.sha256(identifier.encode(errors="surrogatepass")).hexdigest()
