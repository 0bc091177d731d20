"""Which servers speak PostgreSQL's protocol and cannot be used, by what they say of themselves."""

from __future__ import annotations

OLDEST_VERSION = 140000

_USE = "use PostgreSQL itself, or MariaDB"


def why_unusable(version: int, release: str, cockroach: str | None) -> str | None:
    """Return why no leader can be elected on a server, and what to do; None if there is no reason.

    ``version`` is the number that libpq makes of ``release``, which is what the server calls itself. ``cockroach`` is
    the parameter ``crdb_version``, which only CockroachDB reports.
    """
    if cockroach:
        return (
            f"is CockroachDB, where a session's advisory lock holds nothing and a shared row lock may be lost: {_USE}"
        )
    if "-YB-" in release:
        return f"is YugabyteDB ({release}), on which neither the fence nor the proof of a death was ever tested: {_USE}"
    if version < OLDEST_VERSION:
        return f"has version {version // 10000}: upgrade the server to 14 or newer"
    return None


def why_no_primary(*, aurora: bool) -> str:
    """Return why no leader is elected on a server that is in recovery, and what to do."""
    if aurora:
        return (
            "is a reader of Aurora, which takes no writes; leaders are elected on the writer: give the end point of "
            "the cluster, which leads to the writer"
        )
    return (
        "is a hot standby; leaders are elected on the primary: give Tenure the primary's URL, or a URL of all hosts "
        "with target_session_attrs=read-write"
    )
