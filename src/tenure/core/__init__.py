"""The protocol: every decision of a node, without I/O, clock or thread.

# Overview

Several processes want the same role, and only one of them may hold it. Each process has a *node*. A node has one
*membership* at a time: a row in the table ``members``. It renews that row by adding one to a count in it. The row of a
role names the member that holds it and a *token*, which is higher for each term.

The database is the authority. A node uses only its own clock, and only to measure how long something lasted. It never
compares that clock with another one.

``NodeProtocol`` (``protocol``) makes the decisions of one node. The engine asks it what to do next, does it, and
hands the answer back. ``now`` is always an argument, and randomness comes from a seed. So the simulator and the
explorer in ``tests/verification`` run this very code, in virtual time, against every failure that they can inject.

# A membership

    NONE ──join──> JOINING ──joined──> LIVE ──sentinel lost──> DOUBT
     ^               │ failed           │ ^                    │  │ restarted
     │<──────────────┘                  │ └──────resumed─── RESUMING
     │<───────────────over──────────────┴───────────over──────┘

    from NONE: leave ──> GONE; from every other phase: leave ──> LEAVING ──left──> GONE

A node leads only in LIVE. ``membership.TABLE`` is the complete table, and the code runs it.

# The trust window

A leader trusts its lease for nine tenths of the TTL. It counts from the moment just *before* it sent the last renewal
that succeeded. The other nodes wait for 1.02 TTL, and count from the moment *after* they received the answer that
showed the renewal. So the leader stops before another node may act, although the two clocks are never compared.
Clocks may run fast or slow by five percent (``timing``).

A renewal that failed, or whose answer was lost or late, extends nothing. When trust runs out, the terms *lapse*. A
term that has lapsed is never taken up again: the node acquires the role anew, under a new token.

# Failures

The leader dies
    Its server frees its *sentinel*, a lock that lasts as long as the leader's connection. The next node in the ring
    waits for that lock. A fallen sentinel is only a suspicion, because a server that shuts down frees locks, too. If
    the server accepts a fresh connection, the suspicion is a proof (``evidence``). The node ends the member and takes
    its roles.

The leader hangs, or its network fails
    Its count of renewals stops growing. After 1.02 TTL the other nodes end the member for its silence.

The leader's connection is lost
    The node cannot know whether its sentinel has fallen. It is in *doubt*: it does not count as leader, but nothing
    is lost yet. It connects again. If the server was restarted, no node had proof, and the term goes on (*resumed*).
    If the server was not restarted, the others have proof, and the term is lost. In strict mode there is no sentinel
    and no doubt.

The server is replaced by a replica
    The replica may lack the last commits, and with them a lease. So no node acquires a role there before every lease
    that may have been given elsewhere is over (``confirmation``).

A node was paused
    It checks its own deadline before it acts on anything else. After a long pause its terms have lapsed. The writes of
    an old leader that has not noticed this yet are refused by the fence, which checks the token in the database.

The rules have numbers, R0 to R24, which the code and the tests cite. ``docs/explanation/protocol.md`` lists them,
each with its code, its tests, and the mutation that shows why it is needed.

# What is not promised

In instant mode, if the server's end of a living leader's connection is cut and the leader does not notice, two nodes
may believe that they lead, for one TTL at most. Their writes are still safe if they are fenced. Strict mode has no
such case.

# The modules

    timing         every duration, derived from the TTL
    messages       requests to the database and their answers
    servers        which server it is, and where its tables are trusted
    protocol       NodeProtocol: what is due, and what an answer means
    membership     phases, trust, doubt, expiry
    confirmation   what may be done on a promoted server
    roles          standing, leading, resigning, handing over
    watch_lane     what to watch, and which members to end
    evidence       silence and death
    leaders        who leads the roles that are observed
    backoff        when to try again
"""
