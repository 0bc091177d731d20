"""Failovers of a real Patroni cluster, measured: the database's own gap, and the time without a leader beside it.

    make failovers COUNT=20                    20 s a switchover
    make failovers COUNT=20 FAULT=machine      45 s a lost machine

Its options are in ``__main__``. One switchover is among the long tests.
"""
