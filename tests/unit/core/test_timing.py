"""The order of the durations is the argument for the safety of the lease: see the docstring of tenure.core.timing."""

from __future__ import annotations

import pytest

from tenure.core import timing

TTLS = [timing.MIN_TTL_S, 2.5, timing.DEFAULT_TTL_S, timing.DEFAULT_MAX_TTL_S, timing.MAX_TTL_S]
SLOW, FAST = 1 - timing.DRIFT, 1 + timing.DRIFT


@pytest.mark.parametrize("ttl", TTLS)
def test_leader_stops_trusting_before_anybody_else_may_act(ttl):
    """The leader's clock is as slow as it may be, the other's as fast."""
    trusted_for = timing.trust(ttl) / SLOW
    assert trusted_for < timing.silence(ttl) / FAST
    assert trusted_for < timing.server_patience(ttl) / FAST


@pytest.mark.parametrize("ttl", TTLS)
def test_one_lost_renewal_costs_nothing(ttl):
    assert 2 * timing.renewal_interval(ttl) < timing.trust(ttl)


@pytest.mark.parametrize("ttl", TTLS)
def test_leader_has_time_to_stop_what_it_runs(ttl):
    assert timing.margin(ttl) > 0
    assert timing.trust(ttl) + timing.margin(ttl) == pytest.approx(ttl)
    assert timing.silence(ttl) - timing.trust(ttl) > timing.margin(ttl)


@pytest.mark.parametrize("ttl", TTLS)
def test_server_is_told_a_patience_in_whole_units_that_is_not_shorter(ttl):
    """PostgreSQL takes whole seconds for keepalives and whole milliseconds for tcp_user_timeout."""
    pytest.importorskip("psycopg")
    from tenure.databases.postgres.connect import PostgresConnector

    told = PostgresConnector("postgresql://host/db", "tenure", ttl, "test")._server_keepalive()
    idle, interval, count, user_ms = (int(value) for value in told.values())
    assert idle + interval * count >= timing.server_patience(ttl) > timing.trust(ttl) / SLOW
    assert user_ms / 1000 >= timing.server_patience(ttl) - 0.001


def test_wait_slice_is_a_second_at_most():
    assert timing.SLICE_S <= 1
