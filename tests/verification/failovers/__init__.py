"""Failovers of a real Patroni cluster, measured: the database's own gap, and the time without a leader beside it.

`make failovers` runs it (tests/verification/failovers/__main__.py).
"""
