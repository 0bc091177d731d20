"""Celery's beat: one of many sends, and the next leader continues where the last one stopped.

Here are beats inside the test, on a real database, that send real messages to kombu's broker in memory. Beats as people
start them are in tests/integrations/test_celery_cluster.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from queue import Empty
from zoneinfo import ZoneInfo

import pytest
from celery import Celery, schedules

import tenure
from tenure.integrations import job_name
from tenure.integrations.celery import LeaderScheduler, latest_due, next_due
from tests.integrations.cluster import ROOT
from tests.support.secrets import CANARY, assert_untold

PATIENCE_S = 30.0
NOON = datetime(2025, 6, 1, 12, tzinfo=timezone.utc)
PARIS = ZoneInfo("Europe/Paris")


class Beat:
    """A scheduler, ticked by hand, and the messages that its application has got."""

    def __init__(self, url: str, queue: str, **conf: object) -> None:
        self.app = Celery("test", broker="memory://", set_as_current=False)
        self.app.conf.update(task_default_queue=queue, result_expires=None, tenure_url=url, tenure_ttl=2)
        self.app.conf.update(conf)
        self.scheduler = LeaderScheduler(self.app, max_interval=0.05)

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            time.sleep(max(0.0, self.scheduler.tick()))

    def tick_until(self, condition: Callable[[], object], what: str = "messages") -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what}"
            self.tick()


class Inbox:
    """What has arrived at a queue, in order."""

    def __init__(self, queue: str) -> None:
        self._app = Celery("reader", broker="memory://", set_as_current=False)
        self._queue, self.messages = queue, []

    def read(self) -> list:
        with (
            self._app.connection_for_read() as connection,
            contextlib.closing(connection.SimpleQueue(self._queue, no_ack=True)) as queue,
            contextlib.suppress(Empty),
        ):
            while True:
                self.messages.append(queue.get(block=False))
        return self.messages

    def dues(self) -> list[datetime]:
        return [datetime.fromisoformat(message.headers["tenure_due"]) for message in self.read()]

    def tokens(self) -> list[int]:
        return [message.headers["tenure_token"] for message in self.read()]


@pytest.fixture
def inbox() -> Inbox:
    return Inbox(f"test-{uuid.uuid4()}")


@pytest.fixture
def make_beat(inbox: Inbox) -> Iterator[Callable[..., Beat]]:
    with contextlib.ExitStack() as stack:

        def make(url: str, **conf: object) -> Beat:
            beat = Beat(url, inbox._queue, **conf)
            stack.callback(beat.scheduler.close)
            return beat

        yield make


def every(seconds: float, **more: object) -> dict:
    return {"beat_schedule": {"job": {"task": "job", "schedule": seconds, **more}}}


def claim(url: str, job: str, due: datetime) -> None:
    """What a beat that led before has left behind."""
    with tenure.Node(url) as node, node.lead("beat") as term, term.transaction() as transaction:
        assert transaction.claim(job, due)


def now() -> datetime:
    return datetime.now(timezone.utc)


# --- one beats ----------------------------------------------------------------------------------------------


def test_one_beat_sends_and_the_next_goes_on_in_phase(one_url, make_beat, inbox):
    first, second = make_beat(one_url, **every(0.5)), make_beat(one_url, **every(0.5))
    first.tick_until(lambda: len(inbox.read()) >= 2)
    sent = len(inbox.read())
    second.tick(2)
    assert len(inbox.read()) == sent, "a beat that does not lead sends nothing"
    first.scheduler.close()
    second.tick_until(lambda: len(inbox.read()) >= sent + 3)
    dues, tokens = inbox.dues(), inbox.tokens()
    steps = [(due - dues[0]) / timedelta(seconds=0.5) for due in dues]
    assert steps == sorted({round(step) for step in steps}), "each once, in order, and a whole number of steps apart"
    assert tokens == sorted(tokens)
    assert tokens[0] < tokens[-1]


def test_what_was_missed_without_a_leader_is_sent_once(one_url, make_beat, inbox):
    last = now() - timedelta(minutes=65)
    claim(one_url, "job", last)
    beat = make_beat(one_url, **every(600.0))
    beat.tick_until(inbox.read)
    beat.tick(5)
    assert inbox.dues() == [last + timedelta(minutes=60)]


def test_after_a_missed_run_the_next_comes_at_its_own_time(make_beat, inbox, sqlite_url):
    """An hour after the one before it was due, and not an hour after that one was sent."""
    last = now() - timedelta(hours=2) + timedelta(seconds=4)
    claim(sqlite_url, "job", last)
    beat = make_beat(sqlite_url, **every(3600.0))
    beat.tick_until(lambda: len(inbox.read()) >= 2)
    assert inbox.dues() == [last + timedelta(hours=1), last + timedelta(hours=2)]


def test_an_entry_that_was_never_sent_is_counted_from_when_a_leader_first_saw_it(make_beat, inbox, sqlite_url):
    first = make_beat(sqlite_url, **every(2.0))
    first.tick(2)
    [seen] = first.scheduler._election.jobs()
    first.scheduler.close()
    second = make_beat(sqlite_url, **every(2.0))
    second.tick_until(inbox.read)
    assert inbox.dues() == [seen.anchor + timedelta(seconds=2)]


def test_an_entry_that_is_added_by_code_is_sent(make_beat, inbox, sqlite_url):
    beat = make_beat(sqlite_url, beat_schedule={})
    beat.tick(2)
    beat.scheduler.add(name="late", task="job", schedule=0.2)
    beat.tick_until(inbox.read)
    assert "late" in [record.job for record in beat.scheduler._election.jobs()]


def test_a_changed_interval_counts_from_the_last_run(make_beat, inbox, sqlite_url):
    last = now() - timedelta(seconds=3)
    claim(sqlite_url, "job", last)
    beat = make_beat(sqlite_url, **every(3600.0))
    beat.tick(3)
    assert inbox.read() == []
    beat.scheduler.close()
    beat = make_beat(sqlite_url, **every(2.0))
    beat.tick_until(inbox.read)
    assert inbox.dues()[0] == last + timedelta(seconds=2)


def test_a_run_that_was_claimed_before_is_not_sent(make_beat, inbox, sqlite_url):
    """The answer to a commit was lost, and the claim stands."""
    beat = make_beat(sqlite_url, **every(1.0))
    beat.tick(2)
    [seen] = beat.scheduler._election.jobs()
    with beat.scheduler._term.transaction() as transaction:
        assert transaction.claim("job", seen.anchor + timedelta(seconds=2))
    beat.tick_until(inbox.read)
    assert inbox.dues()[0] == seen.anchor + timedelta(seconds=3)


def test_a_crontab_that_was_missed_is_sent_as_of_its_latest_time(make_beat, inbox, sqlite_url):
    half_past = (now() - timedelta(minutes=30)).replace(second=0, microsecond=0)
    claim(sqlite_url, "job", half_past - timedelta(hours=5))
    beat = make_beat(sqlite_url, **every(schedules.crontab(minute=half_past.minute)))
    beat.tick_until(inbox.read)
    beat.tick(3)
    assert inbox.dues() == [half_past]


def test_a_crontab_whose_deadline_has_passed_is_not_made_up_for(make_beat, inbox, sqlite_url):
    half_past = (now() - timedelta(minutes=30)).replace(second=0, microsecond=0)
    claim(sqlite_url, "job", half_past - timedelta(hours=5))
    beat = make_beat(sqlite_url, beat_cron_starting_deadline=60, **every(schedules.crontab(minute=half_past.minute)))
    beat.tick(5)
    assert inbox.read() == []


def test_a_last_run_ahead_of_the_clock_is_said_and_nothing_is_sent(make_beat, inbox, sqlite_url, caplog):
    claim(sqlite_url, "job", now() + timedelta(hours=1))
    beat = make_beat(sqlite_url, **every(1.0))
    beat.tick(4)
    assert inbox.read() == []
    assert "the last run of job is 0:59:" in caplog.text
    assert "compare the clocks of the beats" in caplog.text


def test_entries_that_are_gone_are_forgotten_after_a_week(one_url, make_beat):
    claim(one_url, "gone", now() - timedelta(days=8))
    claim(one_url, "gone just now", now() - timedelta(days=6))
    beat = make_beat(one_url, **every(3600.0))
    beat.tick(2)
    assert [record.job for record in beat.scheduler._election.jobs()] == ["gone just now", "job"]


def test_the_headers_of_an_entry_stay_as_they_are(make_beat, inbox, sqlite_url):
    beat = make_beat(sqlite_url, **every(0.2, options={"headers": {"mine": 1}}))
    entry = beat.scheduler.schedule["job"]
    beat.tick_until(lambda: len(inbox.read()) >= 2)
    headers = [message.headers for message in inbox.read()]
    assert [header["mine"] for header in headers] == [1] * len(headers)
    assert entry.options == beat.scheduler.schedule["job"].options == {"headers": {"mine": 1}}


def test_names_that_the_database_cannot_take_are_claimed_by_their_hash(one_url, make_beat, inbox):
    entries = {name: {"task": "job", "schedule": 0.3} for name in ("x" * 300, "two\nlines", " ")}
    beat = make_beat(one_url, beat_schedule=entries)
    beat.tick_until(lambda: len(inbox.read()) >= 3)
    assert {record.job for record in beat.scheduler._election.jobs()} == {job_name(name) for name in entries}
    assert job_name("tasks.add(2, 2)") == "tasks.add(2, 2)"


def test_a_beat_tells_who_it_is_and_what_it_does(make_beat, caplog, sqlite_url):
    caplog.set_level(logging.INFO, "tenure.services")
    first, second = (
        make_beat(sqlite_url, tenure_name="one"),
        make_beat(sqlite_url, tenure_name="two", tenure_role="beat"),
    )
    first.tick(2)
    second.tick(2)
    first.scheduler.close()
    second.tick_until(lambda: second.scheduler._term)
    second.scheduler._election.resign()
    second.tick_until(lambda: "Gave up leadership" in caplog.text, "the end of its term")
    said = [record for record in caplog.records if record.name == "tenure.services"]
    assert [record.getMessage() for record in said][:4] == [
        "one: Acquired leadership, starting beat",
        "two: Not leader, beat not started: one leads",
        "two: Acquired leadership, starting beat",
        "two: Gave up leadership (resigned), stopping beat",
    ]
    assert said[0].tenure_token < said[2].tenure_token == said[3].tenure_token
    assert (said[3].tenure_role, said[3].tenure_reason, said[3].tenure_service) == ("beat", "resigned", "beat")


# --- a database that is away --------------------------------------------------------------------------------


@pytest.mark.parametrize("takeover", ["instant", "strict"])
def test_a_beat_outlives_its_database(make_postgres_server, make_beat, inbox, caplog, takeover):
    """In doubt it does not lead. A strict leader has no doubts, and cannot claim anything."""
    server = make_postgres_server(fsync=False)
    beat = make_beat(server.create_database(), tenure_takeover=takeover, tenure_ttl=10, **every(0.5))
    beat.tick_until(inbox.read)
    server.stop("immediate")
    sent = len(inbox.read())
    if takeover == "strict":
        beat.tick_until(lambda: "Beat waits for its database" in caplog.text, "a warning")
    beat.tick(3)
    assert len(inbox.read()) == sent, "it cannot know what others have sent meanwhile"
    server.start()
    beat.tick_until(lambda: len(inbox.read()) >= sent + 2)
    dues = inbox.dues()
    assert len(set(dues)) == len(dues)


def test_a_beat_that_starts_before_its_database_waits_for_it(make_postgres_server, make_beat, inbox):
    server = make_postgres_server(fsync=False)
    url = server.create_database()
    server.stop("fast")
    later = threading.Timer(1.5, server.start)
    later.start()
    beat = make_beat(url, **every(0.5))
    beat.tick_until(inbox.read)
    later.join()


# --- what the documents say ---------------------------------------------------------------------------------


def test_the_page_shows_how_to_read_the_last_runs(sqlite_url):
    last = now() - timedelta(minutes=1)
    claim(sqlite_url, "nightly", last)
    (block,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "how-to" / "celery.md").read_text(), re.DOTALL)
    environment = {**os.environ, "TENURE_URL": sqlite_url}
    done = subprocess.run([sys.executable, "-c", block], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"nightly {last} under token 1\n"


# --- settings -----------------------------------------------------------------------------------------------


def test_a_setting_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(tenure.ConfigError, match=r"unknown settings tenure_tll: use only .*tenure_ttl"):
        Beat("sqlite:///:memory:", "queue", tenure_tll=3)
    with pytest.raises(tenure.ConfigError, match="lock_id='seven' must be"):
        Beat("sqlite:///:memory:", "queue", tenure_lock_id="seven")


def test_a_refused_setting_has_no_password_in_the_variables_of_its_traceback():
    for url, conf in (
        (f"postgresql://me:{CANARY}@host/db", {"tenure_tll": 3}),
        (f"postgresql://me:{CANARY}@host:port/db", {}),
        ("postgresql://me@host/db", {"tenure_password": CANARY + "\0"}),
    ):
        with pytest.raises(tenure.ConfigError) as error:
            Beat(url, "queue", **conf)
        assert_untold(error.value)


def test_the_banner_needs_no_database_and_shows_the_role():
    app = Celery("test", broker="memory://", set_as_current=False)
    app.conf.tenure_role = "reports"
    assert "reports" in LeaderScheduler(app, lazy=True).info


def test_a_missing_celery_is_named_with_its_remedy():
    program = "import sys; sys.modules['celery'] = None; import tenure.integrations.celery"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ConfigError: celery is not installed: pip install 'tenure[celery]'" in done.stderr


# --- due times ----------------------------------------------------------------------------------------------


class Sun(schedules.BaseSchedule):
    """Due at noon, a little later or earlier by where one starts to look, as the sun's times are computed."""

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        wobble = timedelta(microseconds=last_run_at.microsecond % 7 - 3 + 250_000)
        day = last_run_at.astimezone(timezone.utc)
        noon = day.replace(hour=12, minute=0, second=0, microsecond=0) + wobble
        return (noon if noon > day else noon + timedelta(days=1)) - self.now()


class Mine(schedules.BaseSchedule):
    """A custom schedule that has is_due() only."""


def app_in(zone: str) -> Celery:
    app = Celery("test", set_as_current=False)
    app.conf.timezone = zone
    return app


def at(text: str, zone: ZoneInfo | timezone = timezone.utc) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=zone).astimezone(timezone.utc)


def test_an_interval_keeps_its_phase_whatever_was_missed():
    ten = schedules.schedule(10.0)
    assert latest_due(ten, NOON, NOON + timedelta(seconds=10)) == NOON + timedelta(seconds=10)
    assert latest_due(ten, NOON, NOON + timedelta(seconds=19.99)) == NOON + timedelta(seconds=10)
    assert latest_due(ten, NOON, NOON + timedelta(days=30, seconds=7)) == NOON + timedelta(days=30)


def test_an_interval_of_nothing_is_due_now():
    assert latest_due(schedules.schedule(0), NOON, NOON + timedelta(seconds=3)) == NOON + timedelta(seconds=3)


def test_a_relative_interval_is_due_at_round_times():
    hourly = schedules.schedule(3600.0, relative=True, app=app_in("UTC"))
    assert latest_due(hourly, at("2025-06-01T12:34:56"), at("2025-06-01T15:10:00")) == at("2025-06-01T15:00:00")


@pytest.mark.parametrize(
    ("last", "now", "due"),
    [
        ("2025-06-01T02:30:00", "2025-06-02T02:30:01", "2025-06-02T02:30:00"),
        ("2025-06-01T02:30:00", "2025-06-02T02:29:59", "2025-06-02T02:30:00"),
        ("2025-06-01T02:30:00", "2025-06-20T02:29:59", "2025-06-19T02:30:00"),
        ("2024-06-01T02:30:00", "2025-12-20T12:00:00", "2025-12-20T02:30:00"),
        ("2025-10-25T02:30:00", "2025-10-27T12:00:00", "2025-10-27T02:30:00"),  # the clocks were changed between
    ],
)
def test_a_crontab_is_due_at_its_latest_time_in_its_time_zone(last, now, due):
    nightly = schedules.crontab(minute=30, hour=2, app=app_in("Europe/Paris"))
    assert latest_due(nightly, at(last, PARIS), at(now, PARIS)) == at(due, PARIS)


def test_a_minutely_crontab_finds_its_latest_time_after_years_without_counting_them():
    minutely = schedules.crontab(app=app_in("UTC"))
    started = time.monotonic()
    assert latest_due(minutely, at("2015-01-01T00:00:00"), at("2025-01-01T00:00:30")) == at("2025-01-01T00:00:00")
    assert time.monotonic() - started < 5, "ten years of minutes, one by one, take minutes"


def test_the_sun_is_not_due_twice_for_being_computed_twice():
    sun = Sun(app=app_in("UTC"))
    due = latest_due(sun, NOON - timedelta(days=3, microseconds=5), NOON + timedelta(hours=1))
    assert due == NOON + timedelta(seconds=1)
    for microseconds in range(7):
        assert next_due(sun, due + timedelta(microseconds=microseconds), NOON) == due + timedelta(days=1)


def test_a_schedule_that_cannot_say_when_is_due_now():
    assert latest_due(Mine(app=app_in("UTC")), NOON, NOON + timedelta(hours=1)) == NOON + timedelta(hours=1)


def test_asking_a_schedule_leaves_it_as_it_was():
    nightly = schedules.crontab(minute=30, hour=2, app=app_in("Europe/Paris"))
    latest_due(nightly, NOON, NOON + timedelta(days=2))
    assert nightly.nowfun is None
