"""A discrete-event simulator of whole clusters: the real protocol and the real SQL, in virtual time, under faults.

Real are ``tenure.core`` and (with ``--sql``) ``ControlStore``, ``WatchStore`` and every statement, run on in-memory
SQLite. Simulated are time, the clocks of the nodes, the network, the server with its connections and locks, and the
engine's few rules (one request at a time per lane; the connection is cut when trust lapses while a request is under
way). All chance comes from the seed, so a seed tells the same story each time.

    core       virtual time, the queue of events, the trace
    network    links with delays, stalls and cuts; connections that keep their order
    server     connections, locks, waits, notifications; stop, crash, promotion
    databases  what a server stores: the real SQL on SQLite, or the plain-Python model of ``model``
    node       one node as the engine would run it, with its own clock
    oracles    what must never happen, checked at every instant at which it could begin
    faults     random faults, and applications that write under fresh and stale terms
    chaos      scenarios in which everything happens at once
    stories    scenarios that make one rule necessary each (verification/mutations takes the rule away)
    bounds     scenarios that measure leaderless time, per fault and mode
    runner     one seed, or many on all cores

Not simulated are the inside of a transaction (a request is executed at one instant, though it may fail or lose its
connection between two transactions), row locks other than the fence's, two servers that both act as the primary,
SQLite's file locks, ``tenure.manual``, and the engine's threads. FOUND.md lists the real faults that the simulator has
found.

    make simulate                              10,000 seeds: about ten minutes on two cores
    make simulate SEED=123                     one of them again, with its trace: a second

The ordinary run has a few seeds of each scenario.
"""
