"""Which nemeses there are for each database."""

from __future__ import annotations

from tests.verification.torture.neighbour_nemeses import (
    LogSettings,
    MariaDbTwoPhase,
    NotifyFlood,
    SquatterKill,
    SquatterRestart,
    TwoPhase,
)
from tests.verification.torture.nemeses import PROCESSES, WIRES, Nemesis
from tests.verification.torture.other_nemeses import (
    FileLocked,
    FileReplaced,
    MariaDbConnectionLimit,
    MariaDbKill,
    MariaDbMigrationLock,
    MariaDbPrivileges,
    MariaDbTerminate,
    WaitTimeout,
    WriterKilled,
    WriterStopped,
)
from tests.verification.torture.patroni_nemeses import PATRONI
from tests.verification.torture.server_nemeses import (
    CableCut,
    CableOneWay,
    ClockBack,
    ClockFast,
    ClockForward,
    ConnectionLimit,
    DiskFull,
    IdleSessionTimeout,
    KillBackend,
    KillPostmaster,
    MigrationLock,
    Outage,
    PoolerRestart,
    Privileges,
    RestartFast,
    RestartImmediate,
    Terminate,
)

CATALOGUES: dict[str, tuple[type[Nemesis], ...]] = {
    "postgres": (
        *PROCESSES, *WIRES, CableCut, CableOneWay, RestartFast, RestartImmediate, Outage, KillBackend, KillPostmaster,
        Terminate, ConnectionLimit, IdleSessionTimeout, DiskFull, PoolerRestart, MigrationLock, Privileges,
        ClockForward, ClockBack, ClockFast, NotifyFlood, SquatterKill, SquatterRestart, LogSettings, TwoPhase,
    ),
    "mariadb": (
        *PROCESSES, *WIRES, RestartFast, MariaDbKill, Outage, MariaDbTerminate, MariaDbConnectionLimit, WaitTimeout,
        MariaDbMigrationLock, MariaDbPrivileges, ClockForward, ClockBack, ClockFast, MariaDbTwoPhase,
    ),
    "patroni": (*PROCESSES, *PATRONI),
    "sqlite": (*PROCESSES, WriterStopped, WriterKilled, FileLocked, FileReplaced),
}  # fmt: skip


def catalogue(kind: str, missing: dict[str, str]) -> tuple[type[Nemesis], ...]:
    """The nemeses for a database, without those for which this machine lacks something."""
    return tuple(one for one in CATALOGUES[kind] if one.needs not in missing)
