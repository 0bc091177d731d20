"""A Django project whose periodic tasks are in its tables: `celery -A tests.integrations.celery_django beat|worker …`.

`python -m tests.integrations.celery_django` makes the tables and three tasks: every second, once at a time, and once
after a while. The beats elect one of them on Django's own database.
"""

from __future__ import annotations

import os
import sys
from datetime import datetime, timedelta, timezone

import django
import psycopg
from celery import Celery
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict

from tests.integrations.cluster import INSERT_RUN

URL = os.environ["RUNS_URL"]
ROLE = "django-beat"
KEYS = {"dbname": "NAME", "user": "USER", "host": "HOST", "port": "PORT"}

if not settings.configured:
    database = {KEYS[name]: value for name, value in conninfo_to_dict(URL).items()}
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **database}},
        INSTALLED_APPS=["django.contrib.contenttypes", "django_celery_beat"],
        DEFAULT_AUTO_FIELD="django.db.models.AutoField",
        USE_TZ=True,
        CELERY_BROKER_URL="sqla+" + URL.replace("postgresql://", "postgresql+psycopg://"),
        CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP=True,
        CELERY_RESULT_EXPIRES=None,
        CELERY_TENURE_ROLE=ROLE,
    )
    django.setup()

app = Celery("celery_django")
app.config_from_object(settings, namespace="CELERY")


@app.task(name="write", bind=True)
def write(self, job: str) -> None:
    due, token = datetime.fromisoformat(self.request.tenure_due), self.request.tenure_token
    with psycopg.connect(URL, autocommit=True) as connection:
        connection.execute(INSERT_RUN, (job, due, token, "worker", os.getpid()))


def main() -> None:
    from django.core.management import call_command
    from django_celery_beat.models import ClockedSchedule, IntervalSchedule, PeriodicTask

    call_command("migrate", verbosity=0)
    soon = ClockedSchedule.objects.create(clocked_time=datetime.now(timezone.utc) + timedelta(seconds=6))
    for name, schedule in (
        ("tick", {"interval": IntervalSchedule.objects.create(every=1, period="seconds")}),
        ("at a time", {"clocked": soon, "one_off": True}),
        ("after a while", {"interval": IntervalSchedule.objects.create(every=4, period="seconds"), "one_off": True}),
    ):
        PeriodicTask.objects.create(name=name, task="write", args=f'["{name}"]', **schedule)


if __name__ == "__main__":
    sys.exit(main())
