"""Celery beat: one, which a supervisor starts again at once after a crash; or three with RedBeat, which has a lock.

A run is a message that the beat has sent to the broker (Redis). Its due time is the second in which the beat took the
entry: of several due times that have passed a beat sends one, as with a crontab. Celery's crontab has no seconds, so
one beat has the same rule for seconds here, and RedBeat has its own.

Beat writes its file after the first message, every three minutes and when it ends, so a crash leaves an old one. A
container that is made anew has none. RedBeat's lock lasts five times the longest sleep of the beat: 25 minutes as it
comes, and 5 s here.
"""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
from celery import Celery, beat, schedules

from benchmarks.scheduler_peers import write

NAME = "Celery beat"
PACKAGES = ("celery", "celery-redbeat")
SERVER = "redis"
VARIANTS: dict[str, dict[str, Any]] = {
    "one, restarted at once, its file kept": {},
    "one, restarted at once, its file gone": {"keep": False},
    "three, RedBeat, lock of 5 s": {"redbeat": True},
}
REPLICAS = {variant: 1 for variant, options in VARIANTS.items() if "redbeat" not in options}


class EverySecond(schedules.schedule):
    """A crontab for seconds: due in the first second after the one in which it was last sent."""

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        due = self.maybe_make_aware(last_run_at).replace(microsecond=0) + timedelta(seconds=1)
        return due - self.maybe_make_aware(self.now())


class Recording:
    """Writes each message that a scheduler has sent, with the second from which the next due time is counted."""

    work: Any
    due_s = 0

    def reserve(self, entry: Any) -> Any:
        taken = super().reserve(entry)  # type: ignore[misc]
        self.due_s = int(taken.last_run_at.timestamp())
        return taken

    def apply_async(self, *arguments: Any, **options: Any) -> Any:
        result = super().apply_async(*arguments, **options)  # type: ignore[misc]
        write(self.work, self.due_s)
        print("elected", flush=True)
        return result


def run(url: str, redis_url: str, directory: str, *, keep: bool = True, redbeat: bool = False) -> None:
    app = Celery("peer", broker=redis_url)
    if redbeat:
        # Not above: with it, every beat looks for its lock.
        from redbeat import RedBeatScheduler
        from redbeat.schedules import rrule

        scheduler, every_second = RedBeatScheduler, rrule("SECONDLY", app=app)
    else:
        scheduler, every_second = beat.PersistentScheduler, EverySecond(1.0, relative=True, app=app)
    app.conf.update(
        beat_schedule={"tick": {"task": "tick", "schedule": every_second}},
        beat_max_loop_interval=1,
        redbeat_redis_url=redis_url,
        worker_redirect_stdouts=False,
    )
    with psycopg.connect(url, autocommit=True) as work:
        recording = type("RecordingScheduler", (Recording, scheduler), {"work": work})
        file = Path(directory) / ("beat" if keep else f"beat-{uuid.uuid4()}")
        app.Beat(scheduler=recording, schedule=str(file), quiet=True).run()
