"""The rules taken away, one by one: a mutation edits a copy of the source, and a checker must notice the loss.

    test_mutations        the rules of the protocol: the simulator tells the story that needs the rule
    test_lock_mutations   roles with a ``lock_id``: a real PostgreSQL shows what breaks
    test_guard_mutations  the triggers of guarded tables, on a real PostgreSQL and a real MariaDB

    make test ARGS="tests/verification/mutations -m 'long or not long'"    about two minutes
    make test ARGS="tests/verification/mutations -m long -k 'no_doubt'"    one of them, in seconds

Those of ``test_mutations`` have the marker ``long``.
"""
