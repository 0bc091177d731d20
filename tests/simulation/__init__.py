"""A discrete-event simulator of whole clusters: the real protocol and the real SQL, in virtual time, under faults.

What is real: ``Protocol`` with everything below it, and (with ``--sql``) ``Store``, ``Watch`` and every statement, run
on in-memory SQLite. What is simulated: time, the clocks of the nodes, the network, the server with its connections
and locks, and the engine's few rules (one ask at a time a lane; the connection is cut when trust lapses while an ask
is under way). What a seed shows once it shows again: all chance comes from it.

    core       virtual time, the queue of events, the trace
    network    links with delays, stalls and cuts; connections that keep their order
    server     connections, locks, waits, notifications; stop, crash, promotion
    databases  what a server stores: the real SQL on SQLite, or the plain-Python model of ``model``
    node       one node as the engine would run it, with a clock of its own
    oracles    what must never happen, checked at every instant at which it could begin
    faults     random faults for the scenarios that try everything at once
    scenarios  whole stories: what is set up, what goes wrong, what must hold in the end
    runner     one seed, or many on all cores
"""
