"""An application whose beats are tormented: `celery -A tests.integrations.celery_beats beat|worker …`.

The broker is a table in the same PostgreSQL (kombu's SQLAlchemy transport): no other server is needed, and a message is
there as a whole or not at all, whenever its sender was killed.
"""

from __future__ import annotations

import os
from datetime import datetime

import psycopg
from celery import Celery

from tests.integrations.cluster import INSERT_RUN

URL = os.environ["RUNS_URL"]

app = Celery("celery_beats", broker="sqla+" + URL.replace("postgresql://", "postgresql+psycopg://"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    beat_schedule={
        "tick": {"task": "write", "schedule": 1.0, "args": ["tick"]},
        "phase": {"task": "write", "schedule": 5.0, "args": ["phase"]},
    },
)


@app.task(name="write", bind=True)
def write(self, job: str) -> None:
    """Write down when this run was due, and under which term it was sent."""
    due, token = datetime.fromisoformat(self.request.tenure_due), self.request.tenure_token
    with psycopg.connect(URL, autocommit=True) as connection:
        connection.execute(INSERT_RUN, (job, due, token, "worker", os.getpid()))
