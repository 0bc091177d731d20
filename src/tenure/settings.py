"""What a node is told, checked before anything is connected.

Settings come from arguments, else from ``TENURE_URL``, ``TENURE_NAMESPACE``, ``TENURE_NAME`` and ``TENURE_TTL``, else
from defaults. The default URL is a SQLite file in the user's state directory: no server, and the same file from
whichever directory one starts.
"""

from __future__ import annotations

import json
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

MAX_NAME_BYTES = 255
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
    checked_ttl = _ttl(ttl if ttl is not None else os.environ.get("TENURE_TTL", timing.DEFAULT_TTL_S))
    return NodeSettings(
        url=_url(url or os.environ.get("TENURE_URL") or _default_url()),
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


def _url(url: str) -> str:
    scheme = url.partition(":")[0].partition("+")[0]
    if scheme == "sqlite":
        if not url.startswith("sqlite:///"):
            raise ConfigError("a SQLite URL is sqlite:///relative.db or sqlite:////absolute/path.db")
    elif scheme not in ("postgresql", "postgres"):
        # Quoted only if it is no more than a scheme: a connection string in another form may hold a password.
        is_scheme = re.match(r"[a-z]\w*(\+\w+)?://", url)
        shown = f"unknown database {scheme!r} in the URL" if is_scheme else "no database URL"
        raise ConfigError(f"{shown}: use postgresql://… or sqlite:///…")
    return url


def _default_url() -> str:
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return f"sqlite:///{Path(state, 'tenure', 'tenure.db')}"


def _ttl(ttl: object) -> float:
    value = _number("ttl", ttl)
    if not timing.MIN_TTL_S <= value <= timing.MAX_TTL_S:
        raise ConfigError(f"ttl={ttl!r} must be {timing.MIN_TTL_S:g} to {timing.MAX_TTL_S:g} seconds")
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
