"""django-celery-beat's scheduler, as many beats as you like, of which one beats.

    celery -A project beat -S tenure.integrations.django_celery_beat:LeaderScheduler

The entries come from Django's tables, as always. What was sent last comes from Tenure's; the models' ``last_run_at``
and ``total_run_count`` are still written, for people and for one-off tasks. Where neither Celery nor the
environment knows where the node's database is, it is Django's, by the settings of ``tenure.integrations.django``.
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

from tenure.errors import ConfigError
from tenure.integrations import extra
from tenure.integrations.celery import LeadingMixin
from tenure.term import Term
from tenure.values import JobRecord

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
        """Write a model after each of its runs: the next leader must not find a one-off task that looks new."""
        super().__init__(*args, **kwargs)
        self.sync_every_tasks: int = self.sync_every_tasks or 1

    def node_settings(self) -> dict[str, Any]:
        """Return Celery's settings of the node; Django's, where those do not say where the database is."""
        told = super().node_settings()
        if "url" in told or os.environ.get("TENURE_URL"):
            return told
        from tenure.integrations.django import node_arguments  # noqa: PLC0415 - only where it is needed

        return {**node_arguments(), **told}

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """As it is, but for a database of Django's that is away: it will be back."""
        try:
            return super().tick(*args, **kwargs)
        except Error as error:
            close_old_connections()
            return self._wait_for_database(error)

    def _take_over(self, term: Term) -> None:
        """Read the models anew: another beat has written them meanwhile."""
        super()._take_over(term)
        self._dirty.clear()
        self._initial_read = True

    def first_seen(self, entry: Any) -> datetime:
        """Go on where a beat without Tenure has stopped."""
        seen: datetime = maybe_make_aware(entry.last_run_at)
        return seen

    def resume(self, entry: Any, record: JobRecord) -> None:
        """Count a run that was claimed after the model was written: its beat died in between."""
        if record.claimed is not None and record.claimed > maybe_make_aware(entry.model.date_changed):
            entry.model.total_run_count += 1
            entry.total_run_count = entry.model.total_run_count
