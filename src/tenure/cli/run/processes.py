"""Find, signal and kill processes. The guard loads this file by its path, so it imports no other part of Tenure."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

TYPE_CHECKING = False
# This module is slow to import.
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> bool:
    """Become the parent of every descendant whose parent dies; False if the system cannot do that."""
    return prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int) -> bool:
    """Set a property of this process; False if that failed."""
    if sys.platform != "linux":
        return False
    import ctypes  # noqa: PLC0415 - the rest of the command line starts without it

    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)


def sees(child: int) -> bool:
    """Whether /proc shows this process and its child: /proc may be missing, or belong to another PID namespace."""
    try:
        me = os.readlink("/proc/self")  # noqa: PTH115 - pathlib is slow to import
        return me == str(os.getpid()) and child in descendants(os.getpid())
    except OSError:
        return False


def descendants(root: int, spared: Collection[int] = ()) -> list[int]:
    """Return the descendants of the process ``root``, parents before their children, without those in ``spared``."""
    found = [root]
    for parent in found:
        try:
            for thread in os.listdir(f"/proc/{parent}/task"):  # noqa: PTH208 - as below
                with open(f"/proc/{parent}/task/{thread}/children") as file:  # noqa: PTH123 - pathlib is slow to import
                    found.extend(pid for pid in map(int, file.read().split()) if pid not in spared)
        except OSError:
            # The process has ended, and its children have another parent. The next scan finds them there.
            continue
    return found[1:]


def kill_all(find: Callable[[], list[int]]) -> dict[int, int]:
    """Kill the processes that ``find`` returns, until this process has no child left; return how its children ended.

    One scan can miss a process that is just forking. But when this process has no child left, it has no grandchild
    either. While a scan finds new processes there is no pause: a process may fork faster than it is killed.
    """
    ended: dict[int, int] = {}
    known: set[int] = set()
    pause = 0.0005
    while True:
        try:
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                ended[child[0]] = child[1]
        except ChildProcessError:
            return ended
        found = find()
        signal_all(found, signal.SIGKILL)
        if known.issuperset(found):
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        known.update(found)


def signal_all(processes: list[int], number: int) -> None:
    """Send a signal to processes, and to process groups (negative numbers)."""
    for pid in processes:
        # The process may have ended, or this user may not signal it.
        with contextlib.suppress(OSError):
            os.kill(pid, number)
