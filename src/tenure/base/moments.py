"""Moments as the database stores them, and as ``datetime``."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from tenure.errors import ConfigError

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def time_of(value: datetime | str) -> datetime:
    """Return a time from the database with its time zone. MariaDB's times have no zone and are in UTC."""
    time = value if isinstance(value, datetime) else datetime.fromisoformat(value.replace("Z", "+00:00"))
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)


def moment(us: int) -> datetime:
    """Return microseconds since 1970 as a time in UTC."""
    return EPOCH + timedelta(microseconds=us)


def microseconds(at: datetime, what: str = "at") -> int:
    """Return a moment as microseconds since 1970; raise ConfigError if ``at`` is not a datetime with a zone."""
    if not isinstance(at, datetime):
        raise ConfigError(f"{what}={at!r} must be a datetime with a time zone")
    if at.utcoffset() is None:
        raise ConfigError(
            f"{what}={at!r} has no time zone, so it means a different moment on each machine: give it one, as in "
            "datetime.now(timezone.utc)"
        )
    try:
        return (at.astimezone(timezone.utc) - EPOCH) // timedelta(microseconds=1)
    except OverflowError:
        raise ConfigError(f"{what}={at!r} is not within the years 1 to 9999 in UTC: use a moment that is") from None


def seconds_between(earlier: datetime | str, later: datetime | str) -> float:
    """Return the seconds from one time to another."""
    return (time_of(later) - time_of(earlier)).total_seconds()
