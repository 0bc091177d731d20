"""What a node is told, checked before anything is connected.

Settings come from arguments, else from ``TENURE_URL``, ``TENURE_NAMESPACE``, ``TENURE_NAME`` and ``TENURE_TTL``, else
from defaults. The default URL is a SQLite file in the user's state directory: no server, and the same file from
whichever directory one starts.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tenure import timing
from tenure.errors import ConfigError

log = logging.getLogger("tenure.settings")

MAX_NAME_BYTES = 255
MIN_BOUND_S = 0.1
TAKEOVERS = ("instant", "strict")
MODES = ("auto", "hybrid", "lease")
STARTS = ("raise", "wait")


@dataclass(frozen=True)
class NodeSettings:
    """A node's settings, all checked. The URL may hold a password and is shown nowhere."""

    url: str = field(repr=False)
    name: str
    namespace: str
    ttl: float
    renew_every: float
    takeover: str
    mode: str
    schema: str
    metadata: str
    start: str

    @property
    def database(self) -> str:
        """``sqlite`` or ``postgresql``."""
        scheme = self.url.partition(":")[0].partition("+")[0]
        return "postgresql" if scheme == "postgres" else scheme

    @property
    def sqlite_path(self) -> str:
        """The file that a sqlite URL names."""
        return self.url.partition(":///")[2]


def node_settings(
    url: str | None,
    *,
    name: str | None,
    namespace: str | None,
    ttl: float | None,
    renew_every: float | None,
    takeover: str,
    mode: str,
    schema: str,
    metadata: Mapping[str, Any] | None,
    start: str,
) -> NodeSettings:
    """Return the settings, or raise ConfigError with the value and what would be right."""
    checked_ttl = _ttl(ttl)
    return NodeSettings(
        url=_url(url),
        name=check_name("name", name or os.environ.get("TENURE_NAME") or f"{socket.gethostname()}-{os.getpid()}"),
        namespace=check_name("namespace", namespace or os.environ.get("TENURE_NAMESPACE") or "default"),
        ttl=checked_ttl,
        renew_every=_renew_every(renew_every, checked_ttl),
        takeover=_one_of("takeover", takeover, TAKEOVERS),
        mode=_one_of("mode", mode, MODES),
        schema=_schema(schema),
        metadata=_metadata(metadata),
        start=_one_of("start", start, STARTS),
    )


def check_name(what: str, value: str) -> str:
    """Return a name (of a role, node or namespace) in NFC, or say what is wrong with it."""
    if not isinstance(value, str):
        raise ConfigError(f"{what}={value!r} must be text")
    text = unicodedata.normalize("NFC", value)
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise ConfigError(f"{what}={value!r} contains control characters or lone surrogates: leave them out")
    size = len(text.encode())
    if not 1 <= size <= MAX_NAME_BYTES:
        shown = value if size <= MAX_NAME_BYTES else value[:40] + "…"
        raise ConfigError(f"{what}={shown!r} has {size} bytes: give it 1 to {MAX_NAME_BYTES}")
    return text


def check_limit(limit: object) -> int:
    """Return how many of something are wanted, or say what is wrong with it."""
    if not isinstance(limit, int) or limit < 1:
        raise ConfigError(f"limit={limit!r} must be a whole number above 0")
    return limit


def _url(given: str | None) -> str:
    url = os.environ.get("TENURE_URL") if given is None else given
    if url is None:
        return _default_url()
    if not isinstance(url, str):
        raise ConfigError(f"the URL must be text, not {type(url).__name__}")
    if not url.strip():
        where = "TENURE_URL" if given is None else "the URL"
        raise ConfigError(f"{where} is empty: give postgresql://… or sqlite:///…, or leave it out for a local file")
    scheme, separator, rest = url.partition(":")
    scheme = scheme.lower().partition("+")[0]
    if scheme == "sqlite":
        if not rest.startswith("///"):
            raise ConfigError("a SQLite URL is sqlite:///relative.db or sqlite:////absolute/path.db")
    elif scheme not in ("postgresql", "postgres"):
        # Quoted only if it is no more than a scheme: a connection string in another form may hold a password.
        is_scheme = re.match(r"[a-z]\w*(\+\w+)?://", url)
        shown = f"unknown database {scheme!r} in the URL" if is_scheme else "not a database URL"
        raise ConfigError(f"{shown}: use postgresql://… or sqlite:///…")
    return scheme + separator + rest


def _default_url() -> str:
    """Return the file of this user on this machine, and make its directory."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    path = Path(state, "tenure", "tenure.db")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    log.warning("no URL given, so only processes on this machine elect a leader together: using %s", path)
    return f"sqlite:///{path}"


def _ttl(given: float | None) -> float:
    from_environment = os.environ.get("TENURE_TTL") or None
    what = "ttl" if given is not None or from_environment is None else "TENURE_TTL"
    value = _number(what, next(ttl for ttl in (given, from_environment, timing.DEFAULT_TTL_S) if ttl is not None))
    if not timing.MIN_TTL_S <= value <= timing.MAX_TTL_S:
        raise ConfigError(f"{what}={value:g} must be {timing.MIN_TTL_S:g} to {timing.MAX_TTL_S:g} seconds")
    return value


def check_bound(bound: float) -> float:
    """Return how long a fenced transaction may last, in seconds, or say what is wrong with it."""
    value = _number("bound", bound)
    if not MIN_BOUND_S <= value <= timing.MAX_TTL_S:
        raise ConfigError(f"bound={bound!r} must be {MIN_BOUND_S:g} to {timing.MAX_TTL_S:g} seconds")
    return value


def _renew_every(renew_every: float | None, ttl: float) -> float:
    if renew_every is None:
        return timing.renewal_interval(ttl)
    value = _number("renew_every", renew_every)
    if not 0 < value <= timing.trust(ttl) / 2:
        raise ConfigError(
            f"renew_every={renew_every!r} must be above 0 and at most {timing.trust(ttl) / 2:g} (with ttl={ttl:g}), "
            "so that one lost renewal does not cost the leadership"
        )
    return value


def _number(what: str, value: object) -> float:
    if isinstance(value, bool):
        raise ConfigError(f"{what}={value!r} must be a number of seconds")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigError(f"{what}={value!r} must be a number of seconds") from None
    if not math.isfinite(number):
        raise ConfigError(f"{what}={value!r} must be a finite number of seconds")
    return number


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"{what}={value!r} must be one of {', '.join(map(repr, allowed))}")
    return value


def _schema(schema: str) -> str:
    if not re.fullmatch(r"[^\W\d]\w{0,62}", schema):
        raise ConfigError(f"schema={schema!r} must be an identifier of at most 63 letters, digits and underscores")
    return schema


def _metadata(metadata: Mapping[str, Any] | None) -> str:
    try:
        return json.dumps(dict(metadata or {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metadata={metadata!r} must be a mapping that JSON can hold: {error}") from None
