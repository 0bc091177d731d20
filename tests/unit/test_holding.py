"""What a term reads about itself, on any thread, without a lock."""

from __future__ import annotations

from tenure.base import clock
from tenure.engine.candidacy import Holding, Lease


def test_thread_that_is_stopped_between_its_two_reads_does_not_find_an_old_term_valid(monkeypatch):
    """After each read the thread stands still for longer than the lease lasts."""
    time = 0.0

    def stand_still():
        nonlocal time
        time += 20.0

    def read_clock():
        seen = time
        stand_still()
        return seen

    class ReadLease(Lease):
        @property
        def deadline(self):
            stand_still()
            return 10.0

        @deadline.setter
        def deadline(self, _):
            pass

    monkeypatch.setattr(clock, "now", read_clock)
    assert not Holding("r", 1, "me", "default", "tenure", "", ReadLease()).valid
