"""Threads around the core: they ask it which request is due, run the request on the database, and publish the outcome.

    keeper thread    does no I/O: ends trust on time, and cuts a connection on which a call hangs
    control thread   runs the requests of the control lane, and waits on that lane's connection when nothing is due
    watch thread     runs the requests of the watch lane

A lane (``lane.py``) is one connection, and the thread that works on it. All three threads call the protocol under one
lock, for microseconds, and publish what it decided before they release the lock. A thread holds the lock neither
while it waits for the database nor while it runs code of the application.

The engine makes decisions visible in this order:

1. the deadline of the lease, which is all that ``is_leader`` and ``term.valid`` compare with the clock;
2. the term that an event begins or ends (``Holding``), of which ``Term`` and ``AsyncTerm`` are views;
3. the event: to the node, which logs it, then to every listener of its role;
4. a wake-up for every thread and task that waits for a change.

A lease whose terms were lost is dead: its deadline stays in the past, and new terms get a new lease. So a thread that
was paused in the middle of a check never compares the clock with the deadline of a later term.
"""
