"""APScheduler in a cluster of processes that are killed, stopped and cut off."""

from __future__ import annotations

import sys

from tests.integrations.cluster import Replicas


def command(variant):
    return [sys.executable, "-m", "tests.integrations.apscheduler_app", variant]


def test_every_due_second_runs_at_most_once(postgres_url, tmp_path, record_property):
    """In threads, with the jobs in the memory of each replica. Every replica has the same phase."""
    with Replicas(postgres_url, tmp_path, command("threads")) as replicas:
        runs = replicas.torment(record_property)
        assert runs.jobs == ["bare", "tick"]
        assert runs.duplicates == []
        assert runs.out_of_phase == []
        assert [words for words in runs.stale if "'tick'" in words] == []


def test_every_due_second_runs_at_least_once_and_in_the_runs_own_transaction_exactly_once(
    postgres_url, tmp_path, record_property
):
    """On event loops, with a job store in the database that all replicas share."""
    with Replicas(postgres_url, tmp_path, command("asyncio")) as replicas:
        runs = replicas.torment(record_property)
        assert runs.jobs == ["bare", "tick"]
        assert runs.missing == []
        assert runs.out_of_phase == []
        assert [words for words in (*runs.duplicates, *runs.stale) if "'tick'" in words] == []
