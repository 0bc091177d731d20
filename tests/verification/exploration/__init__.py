"""The protocol in a small world, searched to the end: every state that a few faults can lead to.

The simulator (``tests.verification.simulation``) makes long random histories. Here nothing is random: two or three
nodes, a TTL of a few ticks, and from every state every possible step, until no new state appears. ``tenure.core`` is
real. The tables are a model, which ``tests/verification/simulation/test_model.py`` compares with the SQL.

    forms      when two states are the same: times as distances from now, in ticks
    names      ids, keys and counts, so few that states repeat
    lines      a connection, and what is on its way in it
    record     what a node has announced and believed, and what must never come next
    node       one node: its protocol, its lanes and connections
    options    what can happen to one node in a state
    server     the one server: tables, identity, how it stops
    worlds     which nodes there are, which faults may happen, and how many
    moves      from one state of the whole to the next ones, and what must never be true of any
    explorer   all states, breadth first; whether some node can lead again from each of them
    story      the way to a state, as a numbered list that a person can read
    mutations  rules taken away, and the world in which that shows

    make explore                               every world, then every rule taken away: half an hour
    make explore ARGS="--world strict"         one world: one to three minutes

README.md says what is explored and what is not. The ordinary run has the worlds that take seconds.
"""
