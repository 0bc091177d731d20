"""Why no connection to a server could be opened, and what to do about it.

MariaDB's errors have numbers. libpq gives the server's text without an SQLSTATE while it connects, so a server that
answers in another language gets the general remedy.
"""

from __future__ import annotations

import re
import socket
from enum import Enum, auto


class Cause(Enum):
    """Why a connection was refused."""

    PASSWORD = auto()
    USER = auto()
    DATABASE = auto()
    PRIVILEGE = auto()
    HOST = auto()
    REFUSED = auto()
    PARAMETER = auto()


NO_ROLE = re.compile(r'role "[^"]*" does not exist')
"""PostgreSQL's words for a user that it does not know."""

_STATES = {"28P01": Cause.PASSWORD, "28000": Cause.USER, "3D000": Cause.DATABASE}
_TEXTS: dict[str | re.Pattern[str], Cause] = {
    r"password authentication failed|no password supplied": Cause.PASSWORD,
    NO_ROLE: Cause.USER,
    r'database "[^"]*" does not exist': Cause.DATABASE,
    r'invalid \w+ value: "': Cause.PARAMETER,
    r"failed to resolve host|could not translate host name": Cause.HOST,
    r"Connection refused|No such file or directory": Cause.REFUSED,
}
_NUMBERS = {1045: Cause.PASSWORD, 1698: Cause.PASSWORD, 1049: Cause.DATABASE, 1044: Cause.PRIVILEGE}
_GENERAL = "start the server, or correct the URL, the network or the password"


def of_postgres(error: BaseException) -> Cause | None:
    """Return why PostgreSQL, or libpq, refused a connection; None if that is not known."""
    state = _STATES.get(getattr(error, "sqlstate", None) or "")
    return state or next((cause for text, cause in _TEXTS.items() if re.search(text, str(error))), None)


def of_mysql(error: BaseException) -> Cause | None:
    """Return why MariaDB, or the network, refused a connection; None if that is not known."""
    below = getattr(error, "original_exception", error)
    if isinstance(below, socket.gaierror):
        return Cause.HOST
    if isinstance(below, (ConnectionRefusedError, FileNotFoundError)):
        return Cause.REFUSED
    return _NUMBERS.get(error.args[0]) if error.args else None


def remedy(cause: Cause | None, user: str | None, database: str | None, *, postgres: bool) -> str:
    """Return what to do about a refused connection."""
    who = f"user {user}" if user else "the user"
    name = database or user or "NAME"
    places = "the URL, the password file or PGPASSWORD" if postgres else "the URL"
    make_user, make_database = "create user", "create database"
    if postgres:
        make_user, make_database = "createuser", "createdb"
    remedies = {
        Cause.PASSWORD: f"correct the password of {who} in {places}, or the name of the user in the URL",
        Cause.USER: f"correct the user in the URL, or create it ({make_user} {user or 'NAME'})",
        Cause.DATABASE: f"create it ({make_database} {name}), or correct the name after the last / of the URL",
        Cause.PRIVILEGE: f"grant {who} the database {name}, or correct the name after the last / of the URL",
        Cause.HOST: "correct the host name in the URL",
        Cause.REFUSED: "start the server, or correct host and port in the URL",
        Cause.PARAMETER: "correct the parameter after the ? of the URL",
    }
    return remedies[cause] if cause is not None else _GENERAL


def brief(text: str) -> str:
    """Return libpq's message in one line, without the address and the advice: the finding has both."""
    text = " ".join(text.split())
    text = re.sub(r"connection (failed|is bad): ", "", text)
    text = re.sub(r'connection to server (at|on socket) "[^"]*"( \([^)]*\))?(, port \d+)? failed: ', "", text)
    return re.sub(r" Is the server running [^?]*\?", "", text)
