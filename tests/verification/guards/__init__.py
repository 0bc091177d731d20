"""Freezes the leader of an application whose author forgot the fence, before a guarded table.

    make forgotten WRITES=1000                 two to four minutes for each framework
    make forgotten ARGS=--no-guard             the control run, in which stale writes land

``freezes`` says what is counted, ``applications`` has the programs. A few freezes are among the long tests.
"""
