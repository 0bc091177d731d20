"""When a job is due: a cron expression in a time zone, or an interval. No I/O, no clock.

Every moment is a whole number of microseconds since 1970, in UTC. Only the cron engine works with wall clock times.
There, two different moments can show the same time, and adding to a time can lead back to the first of the two.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import hashlib
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from tenure.base.durations import exact
from tenure.base.moments import EPOCH, microseconds, moment
from tenure.errors import ConfigError
from tenure.schedule.durations import check_duration

SECOND_US = 1_000_000
SHORTEST_INTERVAL_S = 1.0
LONGEST_EXPRESSION = 150

NICKNAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}

# Every clock change of these years counts for the digest of a zone, so that it does not depend on today's date.
_FIRST_YEAR, _LAST_YEAR = 2000, 2037
_WEEK = timedelta(days=7)
_DAY = timedelta(days=1)
_LONGEST_SEARCH = timedelta(days=50 * 366)
"""An expression that matches no day within this time is never due."""


class DueTimes(abc.ABC):
    """The due times of a job. They never change, so every node computes the same ones."""

    text: str
    """The definition, as the database keeps it; :func:`from_text` reads it."""

    @abc.abstractmethod
    def after(self, us: int) -> int | None:
        """Return the first due time after a moment; None if there is none."""

    @abc.abstractmethod
    def latest(self, since: int, until: int) -> int | None:
        """Return the last due time after ``since`` and up to ``until``; None if there is none."""

    @abc.abstractmethod
    def count(self, since: int, until: int) -> int:
        """Return how many due times there are after ``since`` and up to ``until``, quickly even for years."""

    @abc.abstractmethod
    def explain(self) -> str:
        """Return the definition in words."""

    @property
    def zone_data(self) -> str:
        """What identifies the clock changes of the zone, as this host knows them; empty if there are none."""
        return ""


class Interval(DueTimes):
    """Every so many seconds, counted from 1970 in UTC: an interval of 5 minutes is due at 10:00, 10:05 and so on."""

    def __init__(self, seconds: float) -> None:
        self._step = round(seconds * SECOND_US)
        self.text = f"every {seconds:.6f}".rstrip("0").rstrip(".")

    def after(self, us: int) -> int:
        """Return the first due time after a moment."""
        return (us // self._step + 1) * self._step

    def latest(self, since: int, until: int) -> int | None:
        """Return the last due time of a stretch."""
        last = until // self._step * self._step
        return last if last > since else None

    def count(self, since: int, until: int) -> int:
        """Return how many due times a stretch has."""
        return max(0, until // self._step - since // self._step)

    def explain(self) -> str:
        """Return the definition in words."""
        return f"every {exact(self._step / SECOND_US)}"


class Cron(DueTimes):
    """A cron expression, in a time zone.

    Where clocks change, a job at a fixed time runs once a day, as with Debian's cron: after the gap if the time is
    skipped, and at the first of two equal times. A job whose minute or hour begins with ``*`` follows the clock.

    cronsim reads the expression and knows which days match. It does not compute the due times: where clocks change at
    midnight, or by half an hour, some of its answers are wrong.
    """

    def __init__(self, expression: str, zone: tzinfo) -> None:
        self.expression = expression
        self.zone = zone
        self.text = f"cron {expression} {_zone_name(zone)}"
        self._fields = CronSim(expression, EPOCH)
        self._hours, self._minutes = sorted(self._fields.hours), sorted(self._fields.minutes)
        self._seconds = sorted(self._fields.seconds)
        minute, hour = expression.split()[-5:-3]
        self._follows_the_clock = minute.startswith("*") or hour.startswith("*")

    def after(self, us: int) -> int | None:
        """Return the first due time after a moment."""
        return next(self._from(us), None)

    def latest(self, since: int, until: int) -> int | None:
        """Return the last due time of a stretch.

        It searches back in growing steps. The steps that found nothing are short compared with the last one, so the
        last one has few due times.
        """
        step = 60 * SECOND_US
        while self.count(since, until):
            last = None
            for due in self._from(max(since, until - step)):
                if due > until:
                    break
                last = due
            if last is not None:
                return last
            step *= 4
        return None

    def count(self, since: int, until: int) -> int:
        """Return how many due times a stretch has, day by day. Only days near a clock change are gone through."""
        if until <= since:
            return 0
        total, near_a_change = 0, set[int]()
        day, end, was_plain = self._first_day(since), self._local(until).date() + _DAY, True
        while day <= end:
            plain = self._is_plain(day)
            if self._matches(day):
                # A due time in a gap moves to its end, which may be the midnight of the next day.
                if plain and was_plain:
                    total += self._up_to(day, until) - self._up_to(day, since)
                else:
                    near_a_change.update(self._of_plain_day(day, since) if plain else self._of_day(day))
            day, was_plain = day + _DAY, plain
        return total + sum(since < due <= until for due in near_a_change)

    def explain(self) -> str:
        """Return the definition in words."""
        return f"{self._fields.explain()}, in {_zone_name(self.zone)}"

    @property
    def zone_data(self) -> str:
        """What identifies the clock changes of the zone."""
        return _digest(self.zone)

    # Day by day

    def _from(self, us: int) -> Iterator[int]:
        """Yield the due times after a moment."""
        last, held = us, list[int]()
        day = self._first_day(us)
        end = min(day, date.max - _LONGEST_SEARCH) + _LONGEST_SEARCH - _DAY
        while day < end:
            matches = self._matches(day)
            if (matches or held) and self._is_plain(day):
                for due in itertools.chain(sorted(held), self._of_plain_day(day, last) if matches else ()):
                    if due > last:
                        yield due
                        last = due
                held = []
            elif matches:
                # The times of two such days may be mixed up, so they are sorted together.
                held += self._of_day(day)
            day += _DAY

    def _first_day(self, us: int) -> date:
        """Return a day on which no clock changes, and whose due times are before those of the moment's day."""
        day = self._local(us).date() - _DAY
        while not self._is_plain(day):
            day -= _DAY
        return day

    def _matches(self, day: date) -> bool:
        return day.month in self._fields.months and self._fields.match_day(day)

    def _of_plain_day(self, day: date, since: int) -> Iterator[int]:
        """Yield the due times of a day without a clock change, but for those well before ``since``."""
        midnight = self._midnight(day)
        for hour in self._hours:
            begun = midnight + hour * 3600 * SECOND_US
            if begun + 3600 * SECOND_US < since:
                continue
            for minute in self._minutes:
                for second in self._seconds:
                    yield begun + (minute * 60 + second) * SECOND_US

    def _of_day(self, day: date) -> list[int]:
        """Return the due times of a day on which clocks change, or may."""
        times = itertools.product(self._hours, self._minutes, self._seconds)
        found = {moment for wall in times for moment in self._moments(datetime.combine(day, time(*wall)))}
        return sorted(found)

    def _moments(self, wall: datetime) -> list[int]:
        """Return the moments at which a job is due whose time the clock shows once, twice or never."""
        first, second = (microseconds(wall.replace(tzinfo=self.zone, fold=fold)) for fold in (0, 1))
        if first == second:
            return [first]
        if first < second:
            return [first, second] if self._follows_the_clock else [first]
        # The clock never shows this time. It jumps between the two moments.
        return [] if self._follows_the_clock else [self._change_between(second, first)]

    def _change_between(self, early: int, late: int) -> int:
        """Return the second in which the clock jumps."""
        before = self._local(early).utcoffset()
        while late - early > SECOND_US:
            middle = (early + late) // 2 // SECOND_US * SECOND_US
            early, late = (middle, late) if self._local(middle).utcoffset() == before else (early, middle)
        return late

    def _local(self, us: int) -> datetime:
        return moment(us).astimezone(self.zone)

    def _midnight(self, day: date) -> int:
        return microseconds(datetime.combine(day, time(), self.zone))

    def _is_plain(self, day: date) -> bool:
        """Whether no clock changes on this day, so that every time of the day exists once."""
        ends = [datetime.combine(end, time(fold=fold), self.zone) for end in (day, day + _DAY) for fold in (0, 1)]
        return len({end.utcoffset() for end in ends}) == 1

    def _up_to(self, day: date, us: int) -> int:
        """Return how many due times a plain day that matches has up to a moment."""
        seconds_of_day = (us - self._midnight(day)) // SECOND_US
        if seconds_of_day < 0:
            return 0
        minutes_of_day, second = divmod(min(seconds_of_day, 86399), 60)
        hour, minute = divmod(minutes_of_day, 60)
        earlier_hours = bisect_left(self._hours, hour) * len(self._minutes) * len(self._seconds)
        if hour not in self._fields.hours:
            return earlier_hours
        earlier_minutes = bisect_left(self._minutes, minute) * len(self._seconds)
        of_minute = bisect_right(self._seconds, second) if minute in self._fields.minutes else 0
        return earlier_hours + earlier_minutes + of_minute


def interval(every: object) -> Interval:
    """Return the due times of an interval, or raise ConfigError."""
    return Interval(check_duration("every", every, SHORTEST_INTERVAL_S))


def cron(expression: object, zone: tzinfo) -> Cron:
    """Return the due times of a cron expression, or raise ConfigError."""
    if not isinstance(expression, str) or len(expression) > LONGEST_EXPRESSION:
        raise ConfigError(f"cron={expression!r} must be an expression with five fields, such as '30 2 * * *'")
    nickname = expression.strip().lower()
    if nickname == "@reboot":
        raise ConfigError("cron='@reboot' has no due times: start the work where your program starts")
    if nickname.startswith("@") and nickname not in NICKNAMES:
        raise ConfigError(
            f"cron={expression!r} must be one of {', '.join(NICKNAMES)}, or an expression with five fields"
        )
    text = " ".join(NICKNAMES.get(expression.strip().lower(), expression).split())
    try:
        found = Cron(text, zone)
        never = found.after(0) is None
    except CronSimError as error:
        raise ConfigError(
            f"cron={expression!r} is not a cron expression ({error}): write minute, hour, day of the month, month and "
            "day of the week, such as '30 2 * * *'"
        ) from None
    if never:
        raise ConfigError(f"cron={expression!r} is never due: no such day exists")
    fields = text.split()
    if len(fields) == 6 and fields[2] != "*" and _digest(zone):
        raise ConfigError(
            f"cron={expression!r} has a field for seconds, and the clocks of {_zone_name(zone)} change: the job would "
            "run twice or not at all on those days. Leave the seconds out, let the hour be *, or use zone='UTC'"
        )
    return found


def zone_of(name: object) -> tzinfo:
    """Return the time zone of that name, or raise ConfigError."""
    name = name.key if isinstance(name, ZoneInfo) else name
    if isinstance(name, str) and name.upper() == "UTC":
        return timezone.utc
    if isinstance(name, str) and name:
        # It raises KeyError for an unknown name, and the others for a name that is not one of a file.
        with contextlib.suppress(KeyError, ValueError, OSError):
            return ZoneInfo(name)
    raise ConfigError(f"zone={name!r} is not a time zone: use a name such as 'Europe/Paris' or 'UTC'")


def from_text(text: str) -> DueTimes | None:
    """Return the due times of a definition in the database; None if this release or this host does not know it."""
    kind, _, rest = text.partition(" ")
    try:
        if kind == "every":
            return interval(float(rest))
        if kind == "cron":
            expression, _, zone = rest.rpartition(" ")
            return cron(expression, zone_of(zone))
    except (ConfigError, ValueError):
        pass
    return None


def _zone_name(zone: tzinfo) -> str:
    return getattr(zone, "key", "UTC")


@functools.lru_cache(maxsize=64)
def _digest(zone: tzinfo) -> str:
    """Return a digest of the clock changes of a zone; empty if its clocks never change."""
    changes: list[str] = []
    at, end = datetime(_FIRST_YEAR, 1, 1, tzinfo=timezone.utc), datetime(_LAST_YEAR + 1, 1, 1, tzinfo=timezone.utc)
    while at < end:
        if _offset(zone, at) != _offset(zone, at + _WEEK):
            early, late = at, at + _WEEK
            while late - early > timedelta(seconds=1):
                middle = early + (late - early) // 2
                early, late = (middle, late) if _offset(zone, middle) == _offset(zone, early) else (early, middle)
            changes.append(f"{late:%Y-%m-%dT%H:%M} {_offset(zone, late)}")
        at += _WEEK
    return hashlib.sha256("\n".join(changes).encode()).hexdigest()[:12] if changes else ""


def _offset(zone: tzinfo, at: datetime) -> timedelta | None:
    return at.astimezone(zone).utcoffset()
