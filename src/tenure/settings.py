"""The settings of a node, checked before anything is connected.

Settings come from arguments, else from ``TENURE_URL``, ``TENURE_NAMESPACE``, ``TENURE_NAME`` and ``TENURE_TTL``, else
from defaults. The default URL is a SQLite file in the user's state directory: it needs no server, and it is the same
file whatever the current directory is. ``TENURE_REQUIRE_URL=1`` forbids that default: a machine that lacks its URL then
gets an error instead of its own leader.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, get_args

from tenure.core import timing
from tenure.errors import ConfigError

log = logging.getLogger("tenure.settings")

MAX_NAME_BYTES = 255
MAX_METADATA_BYTES = 65535
"""MariaDB's type ``text`` holds no more bytes."""
MAX_LIMIT = 2**31 - 1
"""Every database can count to this number."""
MAX_WRITTEN = 200
SHOWN_NAMES = 5
MIN_BOUND_S = 0.1
MIN_RENEW_EVERY_S = 0.05
"""It is also the smallest time limit of a statement. There, zero would mean no limit."""
MAX_TIMEOUT_S = 365 * 86400.0
"""The waits of the operating system can count to this number."""
YES = ("1", "true", "yes", "on")
NO = ("0", "false", "no", "off")

Takeover = Literal["instant", "strict"]
Mode = Literal["auto", "hybrid", "lease", "lock"]
Start = Literal["raise", "wait"]
Password = str | Callable[[], str]
"""A password, or a function without arguments that returns the current one."""


T = TypeVar("T")

if TYPE_CHECKING:

    class NodeOptions(TypedDict, total=False):
        """The settings of a node besides its database."""

        name: str | None
        namespace: str | None
        ttl: float | None
        renew_every: float | None
        takeover: Takeover
        mode: Mode
        direct_url: str | None
        schema: str
        metadata: Mapping[str, Any] | None
        start: Start


@dataclass(frozen=True)
class NodeSettings:
    """A node's settings, all checked. The URL may contain a password, so it is shown nowhere."""

    url: str = field(repr=False)
    direct_url: str | None = field(repr=False)
    """The URL of the node's own connections, if ``url`` leads through a pooler."""
    password: Password | None = field(repr=False)
    name: str
    namespace: str
    ttl: float
    renew_every: float
    takeover: Takeover
    mode: Mode
    schema: str
    metadata: str
    start: Start
    ttl_source: str = ""
    """Where the TTL comes from, for people; empty if it was given."""

    @property
    def database(self) -> str:
        """``sqlite``, ``postgresql`` or ``mysql``, which includes MariaDB."""
        return _database(self.url)

    @property
    def sqlite_path(self) -> str:
        """The file that a sqlite URL names."""
        return self.url.partition(":///")[2]


def node_settings(
    url: str | None,
    *,
    direct_url: str | None = None,
    password: Password | None = None,
    name: str | None = None,
    namespace: str | None = None,
    ttl: float | None = None,
    renew_every: float | None = None,
    takeover: Takeover = "instant",
    mode: Mode = "auto",
    schema: str = "tenure",
    metadata: Mapping[str, Any] | None = None,
    start: Start = "raise",
) -> NodeSettings:
    """Return the settings, or raise ConfigError with the wrong value and the remedy."""
    checked_ttl = _ttl(ttl)
    settings = NodeSettings(
        url=_url(url),
        direct_url=_checked_url("direct_url", direct_url) if direct_url is not None else None,
        password=password if password is None or callable(password) else check_password(password),
        name=_named("name", name, default_name(os.getpid())),
        namespace=_named("namespace", namespace, "default"),
        ttl=checked_ttl,
        renew_every=_renew_every(renew_every, checked_ttl),
        takeover=check_choice("takeover", takeover, get_args(Takeover)),
        mode=check_choice("mode", mode, get_args(Mode)),
        schema=check_schema(schema),
        metadata=_metadata(metadata),
        start=check_choice("start", start, get_args(Start)),
        ttl_source="the default" if ttl is None and not os.environ.get("TENURE_TTL") else "",
    )
    _check_together(settings)
    return settings


def _check_together(settings: NodeSettings) -> None:
    """Raise ConfigError if settings contradict each other."""
    if settings.direct_url is not None and not settings.database == _database(settings.direct_url) == "postgresql":
        raise ConfigError("direct_url is for PostgreSQL behind a pooler: both URLs must be postgresql://…")
    if settings.password is not None and settings.database == "sqlite":
        raise ConfigError("password= is for PostgreSQL and MariaDB, but the URL names sqlite: leave it out")
    if settings.schema != "tenure" and settings.database != "postgresql":
        raise ConfigError(
            f"schema={settings.schema!r} is only for PostgreSQL, but the URL names {settings.database}: leave it out"
        )
    if settings.mode == "lock" and settings.database != "postgresql":
        raise ConfigError(f"mode='lock' needs PostgreSQL, but the URL names {settings.database}: use mode='auto'")
    if settings.mode == "lock" and settings.takeover == "strict":
        raise ConfigError(
            "mode='lock' has no lease to wait for, so takeover='strict' is not available: use mode='hybrid'"
        )


def short_repr(value: object) -> str:
    """Return a short ``repr`` of a value: a message about a wrong value must not fail, or fill a log."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # The number has too many digits, or the value is nested too deep.
        return f"<{type(value).__name__}>"
    return text if len(text) <= MAX_WRITTEN else text[:MAX_WRITTEN] + "…"


def check_name(what: str, value: str) -> str:
    """Return a name (of a role, node or namespace) in NFC, or raise ConfigError."""
    if not isinstance(value, str):
        raise ConfigError(f"{what}={short_repr(value)} must be text")
    shown = value if len(value) <= MAX_NAME_BYTES else value[:40] + "…"
    text = unicodedata.normalize("NFC", value)
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise ConfigError(f"{what}={shown!r} contains control characters or lone surrogates: leave them out")
    size = len(text.encode())
    if not 1 <= size <= MAX_NAME_BYTES:
        raise ConfigError(f"{what}={shown!r} is {size} bytes long: use 1 to {MAX_NAME_BYTES} bytes")
    if text.isspace():
        raise ConfigError(f"{what}={shown!r} is blank: use at least one visible character")
    return text


def check_encoding(what: str, name: str, encoding: str) -> str:
    """Return a name if a database with this encoding (a Python codec) can store it, or raise ConfigError."""
    try:
        name.encode(encoding)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{what}={name!r} cannot be stored in this database, whose encoding ({encoding}) has no "
            f"{name[error.start]!r}: choose another name, or a database in UTF8"
        ) from None
    return name


def check_password(password: object) -> str:
    """Return a password, or raise ConfigError without showing it."""
    if not isinstance(password, str):
        raise ConfigError(
            f"password must be text, or a function without arguments that returns text, not {type(password).__name__}"
        )
    if not password:
        raise ConfigError("password is empty: give a password, or leave it out")
    _check_characters("password", password)
    return password


def check_timeout(timeout: float | None) -> float | None:
    """Return how long to wait, in seconds, or raise ConfigError. None means for ever."""
    if timeout is None:
        return None
    value = _number("timeout", timeout)
    if value < 0:
        raise ConfigError(f"timeout={short_repr(timeout)} must be 0 or more seconds, or None to wait for ever")
    return min(value, MAX_TIMEOUT_S)


def check_seconds(what: str, seconds: object) -> float:
    """Return a number of seconds above 0, or raise ConfigError."""
    value = _number(what, seconds)
    if value <= 0:
        raise ConfigError(f"{what}={seconds!r} must be a number of seconds above 0")
    return min(value, MAX_TIMEOUT_S)


def check_stop_within(seconds: object, settings: NodeSettings) -> float:
    """Return the seconds of trust that are reserved for stopping services, or raise ConfigError."""
    value = check_seconds("stop_within", seconds)
    most = timing.trust(settings.ttl) - 2 * settings.renew_every
    if value > most:
        raise ConfigError(
            f"stop_within={value:g} must be at most {most:g} (with ttl={settings.ttl:g} and "
            f"renew_every={settings.renew_every:g}), so that one lost renewal does not end the leader's term"
        )
    return value


def check_callback(callback: Callable[..., object]) -> None:
    """Raise ConfigError if the callback is not a plain function: nothing would await a coroutine."""
    import inspect  # noqa: PLC0415 - it takes long to load, and most nodes have no callback

    if not callable(callback):
        raise ConfigError(f"callback={callback!r} must be a function")
    if any(map(inspect.iscoroutinefunction, (callback, type(callback).__call__))):
        raise ConfigError(
            f"callback={callback!r} must be a plain function, since nothing would await this one: read "
            "election.events() in your own task, or await term.wait_lost()"
        )


def check_lock_id(lock_id: object) -> int:
    """Return the number of an advisory lock, given as a number or as text (decimal or 0x…), or raise ConfigError."""
    try:
        number = int(lock_id, 0) if isinstance(lock_id, str) else lock_id
    except ValueError:
        number = None
    if not isinstance(number, int) or isinstance(number, bool) or not -(2**63) <= number < 2**63:
        raise ConfigError(
            f"lock_id={short_repr(lock_id)} must be a signed 64-bit integer, -2**63 to 2**63-1, as PostgreSQL's "
            "advisory locks are; to convert an unsigned id >= 2**63, subtract 2**64"
        )
    return number


def check_limit(limit: object) -> int:
    """Return the largest number of rows to read, or raise ConfigError."""
    if not isinstance(limit, int) or limit < 1:
        raise ConfigError(f"limit={short_repr(limit)} must be a whole number above 0")
    return min(limit, MAX_LIMIT)


def default_name(pid: int) -> str:
    """Return the default name of a node in the process ``pid``."""
    return f"{socket.gethostname()}-{pid}"


def _named(what: str, given: str | None, default: str) -> str:
    variable = f"TENURE_{what.upper()}"
    from_environment = os.environ.get(variable)
    if given is None and from_environment:
        return check_name(variable, from_environment)
    return check_name(what, default if given is None else given)


def _check_characters(what: str, text: str) -> None:
    """Refuse characters that no driver accepts, without showing the text: the driver's error would show it."""
    if any(unicodedata.category(character) == "Cs" or character == "\0" for character in text):
        raise ConfigError(f"{what} contains NUL or lone surrogates (bytes that are not UTF-8): leave them out")


def _url(given: str | None) -> str:
    # TENURE_REQUIRE_URL is read even if it is not needed, so that a wrong value is always an error.
    _url_required()
    url = os.environ.get("TENURE_URL") if given is None else given
    if url is None:
        path = default_file()
        log.warning("no URL given, so only processes on this machine elect a leader together: using %s", path)
        return f"sqlite:///{path}"
    return _checked_url("TENURE_URL" if given is None else "the URL", url)


def _url_required() -> bool:
    """Whether TENURE_REQUIRE_URL forbids the default file. An empty value counts as none."""
    value = os.environ.get("TENURE_REQUIRE_URL") or NO[0]
    if value.lower() not in (*YES, *NO):
        allowed = ", ".join((*YES, *NO))
        raise ConfigError(f"TENURE_REQUIRE_URL={short_repr(value)} must be one of {allowed}")
    return value.lower() in YES


def _checked_url(what: str, url: str) -> str:
    if not isinstance(url, str):
        raise ConfigError(f"{what} must be text, not {type(url).__name__}")
    if not url.strip():
        raise ConfigError(f"{what} is empty: give postgresql://…, mysql://… or sqlite:///…, or leave it out")
    _check_characters(what, url)
    scheme, separator, rest = url.partition(":")
    scheme = scheme.lower().partition("+")[0]
    if scheme == "sqlite":
        if not rest.startswith("///"):
            raise ConfigError(
                f"{what} is not a valid SQLite URL: use sqlite:///relative.db or sqlite:////absolute/path.db"
            )
    elif scheme not in ("postgresql", "postgres", "mysql", "mariadb"):
        # Shown only if it is a scheme: a connection string in another form may contain a password.
        is_scheme = re.match(r"[a-z]\w*(\+\w+)?://", url)
        shown = f"unknown database {short_repr(scheme)} in the URL" if is_scheme else "not a database URL"
        if re.fullmatch(r"[\w./\\-]+\.(db|sqlite3?)", url):
            # This is a path. No other form of a URL has only these characters.
            raise ConfigError(f"{what} {short_repr(url)} is a path, not a database URL: use sqlite:///{url}")
        raise ConfigError(f"{shown}: use postgresql://…, mysql://… or sqlite:///…")
    return scheme + separator + rest


def _database(url: str) -> str:
    scheme = url.partition(":")[0].partition("+")[0]
    return {"postgres": "postgresql", "mariadb": "mysql"}.get(scheme, scheme)


def default_file() -> Path:
    """Return this user's file on this machine, and create its directory; raise ConfigError if a URL is required."""
    if _url_required():
        raise ConfigError(
            f"no URL given, and TENURE_REQUIRE_URL={os.environ['TENURE_REQUIRE_URL']} forbids the default file on "
            "this machine: set TENURE_URL, or give a URL"
        )
    try:
        path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "tenure", "tenure.db")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"no URL given, and the default file cannot be used ({error}): give a URL") from None
    return path


def _ttl(given: float | None) -> float:
    from_environment = os.environ.get("TENURE_TTL") or None
    what = "ttl" if given is not None or from_environment is None else "TENURE_TTL"
    return check_ttl(what, next(ttl for ttl in (given, from_environment, timing.DEFAULT_TTL_S) if ttl is not None))


def check_ttl(what: str, ttl: object) -> float:
    """Return a TTL in seconds, or raise ConfigError."""
    value = _number(what, ttl)
    if not timing.MIN_TTL_S <= value <= timing.MAX_TTL_S:
        raise ConfigError(f"{what}={value:g} must be {timing.MIN_TTL_S:g} to {timing.MAX_TTL_S:g} seconds")
    return value


def check_bound(bound: float) -> float:
    """Return how long a fenced transaction may last, in seconds, or raise ConfigError."""
    value = _number("bound", bound)
    if not MIN_BOUND_S <= value <= timing.MAX_TTL_S:
        raise ConfigError(f"bound={short_repr(bound)} must be {MIN_BOUND_S:g} to {timing.MAX_TTL_S:g} seconds")
    return value


def _renew_every(renew_every: float | None, ttl: float) -> float:
    if renew_every is None:
        return timing.renewal_interval(ttl)
    value = _number("renew_every", renew_every)
    if not MIN_RENEW_EVERY_S <= value <= timing.trust(ttl) / 2:
        raise ConfigError(
            f"renew_every={short_repr(renew_every)} must be {MIN_RENEW_EVERY_S:g} to {timing.trust(ttl) / 2:g} seconds "
            f"(with ttl={ttl:g}), so that one lost renewal does not end the leader's term"
        )
    return value


def some_names(names: Iterable[str]) -> str:
    """Return names for a message: the first few, and how many more there are."""
    known = [repr(name) for name in names]
    more = len(known) - SHOWN_NAMES
    return ", ".join(known[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def _number(what: str, value: object) -> float:
    if isinstance(value, bool):
        raise ConfigError(f"{what}={short_repr(value)} must be a number of seconds")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{what}={short_repr(value)} must be a number of seconds") from None
    if not math.isfinite(number):
        raise ConfigError(f"{what}={short_repr(value)} must be a finite number of seconds")
    return number


def check_choice(what: str, value: T, allowed: tuple[T, ...]) -> T:
    """Return the value if it is one of those allowed, or raise ConfigError with the list of them."""
    if value not in allowed:
        raise ConfigError(f"{what}={short_repr(value)} must be one of {', '.join(map(repr, allowed))}")
    return value


LOSES_NOTHING = "loses-nothing"
PROMOTIONS = (LOSES_NOTHING, "may-lose")
"""What an operator can say about the promotion of a replica (R17). A namespace without a word may lose commits."""


def check_promotion(word: str, database: str) -> str:
    """Return the word; raise ConfigError if there is no such word, or if it cannot be true on the database."""
    if word not in PROMOTIONS:
        raise ConfigError(f"promotion={word!r} must be one of {', '.join(map(repr, PROMOTIONS))}")
    if database == "sqlite":
        raise ConfigError("promotion= is for databases with replicas, which SQLite does not have: leave it out")
    if database == "mysql":
        raise ConfigError(
            "promotion= is for PostgreSQL: a MariaDB server whose replica does not answer in time acknowledges a "
            "commit without it, and does not tell the client; leave it out"
        )
    return word


def check_schema(schema: object) -> str:
    """Return the name of a schema, or raise ConfigError."""
    if not isinstance(schema, str) or not re.fullmatch(r"(?!pg_)[^\W\d]\w*", schema) or len(schema.encode()) > 63:
        raise ConfigError(
            f"schema={short_repr(schema)} must be an identifier of letters, digits and underscores, at most 63 bytes "
            "long, and not begin with a digit or pg_"
        )
    return schema


def _metadata(metadata: Mapping[str, Any] | None) -> str:
    try:
        text = json.dumps(dict(metadata or {}), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"metadata={short_repr(metadata)} must be a mapping that JSON can hold: {error}") from None
    if len(text) > MAX_METADATA_BYTES:
        raise ConfigError(
            f"metadata={short_repr(metadata)} is {len(text)} bytes long as JSON: shorten it to at most "
            f"{MAX_METADATA_BYTES}"
        )
    return text
