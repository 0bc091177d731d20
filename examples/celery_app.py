"""Celery with any number of beats, of which one sends. `pip install 'tenure[celery,sqlalchemy]'` first.

celery --workdir examples -A celery_app worker --pool solo
celery --workdir examples -A celery_app beat -S tenure.integrations.celery:LeaderScheduler    # again, and again

The beats elect one of them on the database of TENURE_URL. The broker here is a file; BROKER_URL names another.
"""

import os

from celery import Celery, Task

app = Celery("celery_app", broker=os.environ.get("BROKER_URL", "sqla+sqlite:///celery_app.db"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    tenure_role="reports-beat",  # one for each application that shares the database
    beat_schedule={"report": {"task": "report", "schedule": 1.0}},
)


@app.task(name="report", bind=True)
def report(self: Task) -> None:
    """Say which run this is: the moment at which it was due, and the term of the beat that sent it."""
    print(f"report of {self.request.tenure_due}, sent under token {self.request.tenure_token}", flush=True)
