"""Services that run on the leader, or on every node: when they start, when they stop, and how long that may take.

    standby ──elected──> start, in order ──> keep running ──term over──> stop, in reverse order ──> standby

A node has one supervisor. It runs a group of services for each role, and one group for the services that run
everywhere. All groups share one event loop. A group starts and stops its own services; nothing else does.

**When a group stops its services.** A group of a role stops them when the term is over. The group that runs everywhere
stops them when the node is closed, after all other groups.

**How long they have.** It depends on why the term is over.

- Trust ran out, because the database is unreachable or slow: ``stop_within`` seconds. The node stops trusting its lease
  that much before the lease ends, so the services stop while the lease still keeps other nodes out.
- The term was resigned, or the node is closed: ``drain_within`` seconds. The node keeps the role in the database until
  the services have stopped, or this time is over. If trust runs out meanwhile, they have ``stop_within`` from then on.
- The process was paused past that time: ``GRACE_S`` seconds. Another node may lead already.

**A service that does not stop.** A coroutine can swallow its cancellation, a thread can hang, an event loop can be
blocked. The lease ends all the same, and another node leads while the service still runs here. ``on_stuck="log"`` logs
that and goes on: the fence refuses the service's writes, and the node does not stand for the role again before the
service has ended. ``on_stuck="exit"`` ends the process, from a thread that no event loop can block.

**A service that fails.** ``on_failure="restart"`` starts it again under the same term, after a pause that grows.
``on_failure="resign"`` hands over, and the node stands again after that pause. A service cannot be started again while
a part of it still runs. The node then resigns in any case, because it must not lead a role that it cannot serve. The
node also pauses after a term that was given up within a second, so that a service which resigns in its own ``start()``
does not cause a hundred terms a second.

**A service that returns.** That is a failure, unless ``on_return`` says otherwise. ``on_return="done"`` means that it
has finished: the node goes on leading, and starts the service again in its next term.
"""
