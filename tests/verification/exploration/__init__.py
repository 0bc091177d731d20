"""The protocol on a small world, looked through to the end: every state that a few faults can lead to.

The simulator (``tests.simulation``) draws long histories by lot. Here nothing is drawn: two or three nodes, a TTL of a
few ticks, and from every state every step that is possible, until no new state comes up. What is real: ``Protocol``,
``Candidacy`` and ``Observation``, and the model of the tables which ``tests/test_model.py`` holds equal to the SQL.

    forms      when two states are the same: times as distances from now, in ticks
    names      ids, keys and counts, so few that states come round
    lines      a connection, and what is on its way in it
    record     what a node has announced and believed, and what must never come next
    node       one node: its protocol, its lanes and connections
    options    what can happen to one node in a state
    server     the one server: tables, identity, how it stops
    worlds     who is there, which faults may happen, and how many
    moves      from one state of the whole to the next ones, and what must never be true of any
    explorer   all states, breadth first; whether somebody can lead again from each of them
    story      the way to a state, as a numbered list that a person can read
    mutations  rules taken away, and the world in which that shows

README.md says what is explored and what is not.
"""
