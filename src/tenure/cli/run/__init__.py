"""``tenure run``: a command that runs only while this process leads.

    command.py         the options
    runner.py          waits to be elected, and passes signals on
    guard_process.py   starts the guard, and reports the state of the term to it
    guard.py           the guard: a process between ``tenure run`` and the command
    channel.py         the messages between the two
    processes.py       finds and kills the descendants of a process

The guard runs ``guard.py`` by its path. That file imports ``channel.py`` and ``processes.py``, and no other part of
Tenure.
"""
