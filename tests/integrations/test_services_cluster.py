"""Services under torment: four replicas, of which one at a time runs the service, whatever happens to it."""

from __future__ import annotations

import sys

from tests.integrations.cluster import Replicas

APP = [sys.executable, "-m", "tests.integrations.service_app"]


def test_a_coroutine_that_claims_each_second_runs_it_at_most_once(postgres_url, tmp_path, record_property):
    with Replicas(postgres_url, tmp_path, [*APP, "coroutine"]) as replicas:
        runs = replicas.torment(record_property)
        assert runs.duplicates == []
        assert runs.stale == []


def test_a_thread_that_goes_on_where_the_table_ends_runs_each_second_exactly_once(
    postgres_url, tmp_path, record_property
):
    with Replicas(postgres_url, tmp_path, [*APP, "thread"]) as replicas:
        runs = replicas.torment(record_property)
        assert runs.duplicates == []
        assert runs.missing == []
        assert runs.stale == []
