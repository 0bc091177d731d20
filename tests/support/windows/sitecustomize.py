"""Takes away what Windows lacks, in every Python process that has this folder on its PYTHONPATH.

The names are missing for Tenure, for the tests and for programs of theirs (`python -c`). The standard library,
installed packages and what the tests stand on (`tests/support`, `conftest.py`) still have them, and start real servers
on a real Linux. So this shows which names Tenure uses. It does not show how files, clocks and processes behave on
Windows.
"""

from __future__ import annotations

import builtins
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = str(Path(__file__).resolve().parents[3])
ON_WINDOWS = (f"{ROOT}/src/tenure/", f"{ROOT}/tests/", f"{ROOT}/examples/", "<string>")
ON_LINUX = (f"{ROOT}/tests/support/", f"{ROOT}/tests/conftest.py")

MODULES = {"fcntl", "grp", "pty", "pwd", "resource", "termios"}
SIGNALS = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM"}
NAMES: dict[ModuleType, set[str]] = {
    os: {
        *("O_CLOEXEC", "WNOHANG", "chown", "fork", "forkpty", "getegid", "geteuid", "getgid", "getpgid", "getuid"),
        *("killpg", "mkfifo", "openpty", "posix_spawn", "posix_spawnp", "register_at_fork", "setpgid", "setsid"),
    },
    select: {"epoll", "poll"},
    signal: {
        *(name for name in vars(signal) if name.startswith("SIG") and name.isalnum() and name not in SIGNALS),
        *("alarm", "pause", "pthread_kill", "pthread_sigmask", "setitimer", "sigtimedwait", "sigwait"),
    },
    socket: {"AF_UNIX", "MSG_DONTWAIT", "recv_fds", "send_fds"},
    time: {"CLOCK_BOOTTIME", "CLOCK_MONOTONIC", "clock_gettime", "tzset"},
}
VALUES: dict[ModuleType, dict[str, str]] = {os: {"name": "nt"}, sys: {"platform": "win32"}}


def _is_on_windows() -> bool:
    """Whether the code that asked is Tenure's or a test's."""
    file = sys._getframe(2).f_code.co_filename
    return file.startswith(ON_WINDOWS) and not file.startswith(ON_LINUX)


def _take_away(module: ModuleType, names: set[str], values: dict[str, str]) -> None:
    kept = {name: vars(module).pop(name) for name in names | values.keys() if name in vars(module)}

    def lookup(name: str) -> Any:
        if name in kept and not (name in names and _is_on_windows()):
            return values[name] if name in values and _is_on_windows() else kept[name]
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}: Windows lacks it", name=name)

    vars(module)["__getattr__"] = lookup


def _import(name: str, *arguments: Any, **named: Any) -> Any:
    if name in MODULES and _is_on_windows():
        raise ModuleNotFoundError(f"No module named {name!r}: Windows lacks it", name=name)
    imported = _original_import(name, *arguments, **named)
    loops = sys.modules.get("asyncio.unix_events")
    if loops is not None and hasattr(loops, "_UnixSelectorEventLoop"):
        loops._UnixSelectorEventLoop.add_signal_handler = _no_signal_handlers
    return imported


def _no_signal_handlers(*_: object) -> None:
    raise NotImplementedError


def _socketpair(*arguments: Any) -> tuple[socket.socket, socket.socket]:
    """Return two ends of a connection by TCP, as on Windows."""
    if not _is_on_windows():
        return _original_socketpair(*(arguments or (socket.AF_UNIX,)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


_original_socketpair = socket.socketpair
socket.socketpair = _socketpair  # type: ignore[assignment]
_original_import = builtins.__import__
builtins.__import__ = _import
for _module in {*NAMES, *VALUES}:
    _take_away(_module, NAMES.get(_module, set()), VALUES.get(_module, {}))
