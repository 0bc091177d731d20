"""The scheduler of django-celery-beat: run any number of beat processes; only the leader sends.

    celery -A project beat -S tenure.integrations.django_celery_beat:LeaderScheduler

The entries come from Django's tables, as always; Tenure's tables keep when each was last sent. The models'
``last_run_at`` and ``total_run_count`` are still written, for people and for one-off tasks. If neither Celery's
configuration nor the environment has the URL of the node's database, the node uses Django's database, by the settings
of ``tenure.integrations.django``.
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

from tenure import ConfigError, JobRecord, Term
from tenure.base.tracebacks import without_locals
from tenure.integrations import extra
from tenure.integrations.celery import LeadingMixin

with extra("celery"):
    from celery.utils.time import maybe_make_aware
with extra("django"):
    from django.db import Error, close_old_connections
try:
    from django_celery_beat.schedulers import DatabaseScheduler
except ModuleNotFoundError as error:
    raise ConfigError(f"{error.name} is not installed: pip install django-celery-beat") from error

__all__ = ["LeaderScheduler"]


class LeaderScheduler(LeadingMixin, DatabaseScheduler):  # type: ignore[misc]
    """The periodic tasks of Django's tables, sent by one beat at a time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Write a model after each of its runs, so that the next leader does not take a one-off task for a new one.
        self.sync_every_tasks: int = self.sync_every_tasks or 1

    @without_locals
    def node_settings(self) -> dict[str, Any]:
        """Return the settings of the node: Celery's, and Django's if Celery's have no URL."""
        given = super().node_settings()
        if "url" in given or os.environ.get("TENURE_URL"):
            return given
        from tenure.integrations.django import node_arguments  # noqa: PLC0415 - needs Django's settings

        return {**node_arguments(), **given}

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send what is due; wait if Django's database cannot be reached."""
        try:
            return super().tick(*args, **kwargs)
        except Error as error:
            close_old_connections()
            return self._wait_for_database(error)

    def _take_over(self, term: Term) -> None:
        """Begin a term: read the models again, since another beat may have written them."""
        super()._take_over(term)
        self._dirty.clear()
        self._initial_read = True

    def first_seen(self, entry: Any) -> datetime:
        """Return the model's last run, to continue where a beat without Tenure stopped."""
        seen: datetime = maybe_make_aware(entry.last_run_at)
        return seen

    def resume(self, entry: Any, record: JobRecord) -> None:
        """Count a run that was claimed after the model was written: the beat died in between."""
        if record.claimed is not None and record.claimed > maybe_make_aware(entry.model.date_changed):
            entry.model.total_run_count += 1
            entry.total_run_count = entry.model.total_run_count
