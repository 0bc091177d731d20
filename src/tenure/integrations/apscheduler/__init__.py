"""APScheduler 3 (``pip install 'tenure[apscheduler]'``): a scheduler on every replica, at work on the leader.

    from tenure.integrations.apscheduler import leader_only

    node = tenure.Node("postgresql://…")
    scheduler = BackgroundScheduler()
    scheduler.add_job(report, "interval", minutes=5, id="report")
    leader_only(scheduler, node)
    node.run()

The scheduler is started, paused, with the node; resumed when the node is elected; paused and drained when its term is
over. Each run is claimed under the fence before it begins, by the job's id and the moment at which it is due, in the
node's database; so whatever a replica believes, and whatever its job store says, a run that somebody has claimed is
nobody else's. See ``docs/how-to/apscheduler.md``.
"""

from __future__ import annotations

from typing import Any

from tenure.async_node import AsyncNode
from tenure.errors import ConfigError
from tenure.integrations import extra
from tenure.node import Node

with extra("apscheduler"):
    from apscheduler.executors.pool import ProcessPoolExecutor
    from apscheduler.schedulers.asyncio import AsyncIOScheduler
    from apscheduler.schedulers.background import BackgroundScheduler
    from apscheduler.schedulers.base import BaseScheduler

from tenure.integrations.apscheduler.leading import Leading, Paused, PausedOnLoop
from tenure.integrations.apscheduler.runs import AlreadyRan, Run, current_run

__all__ = ["AlreadyRan", "Run", "current_run", "leader_only"]

DELIVERIES = ("at-most-once", "at-least-once")


def leader_only(
    scheduler: BaseScheduler,
    node: Node | AsyncNode,
    role: str = "scheduler",
    *,
    delivery: str = "at-most-once",
    catch_up: int = 100,
    **options: Any,
) -> None:
    """Let ``scheduler`` work only while ``node`` leads ``role``. Call it before the node is started.

    Leave ``scheduler.start()`` and ``scheduler.shutdown()`` to the node. Every job needs an id of its own, the same on
    every replica.

    Args:
        scheduler: a BackgroundScheduler, or an AsyncIOScheduler, which runs on the event loop of an AsyncNode.
        node: a node that has not been started.
        role: the role to lead.
        delivery: ``at-most-once``: a run is claimed, then it runs; ``at-least-once``: it is marked as done after it
            ran, and what is not done when another node is elected runs there.
        catch_up: how many missed runs of a job are made up for at most: the newest.
        options: as for ``node.leader_only()``.

    Raises:
        ConfigError: for a scheduler, an executor or a job that cannot be led.
    """
    if delivery not in DELIVERIES:
        raise ConfigError(f"delivery={delivery!r} must be one of {', '.join(map(repr, DELIVERIES))}")
    if catch_up < 1:
        raise ConfigError(f"catch_up={catch_up!r} must be a whole number above 0")
    _check(scheduler, node)
    leading = Leading(scheduler, role, catch_up, repeats=delivery == "at-least-once")
    paused = PausedOnLoop(scheduler) if isinstance(scheduler, AsyncIOScheduler) else Paused(scheduler)
    name = options.pop("name", f"apscheduler-{role}")
    node.everywhere(paused, name=name)
    node.leader_only(role, leading, name=name, **options)
    leading.take_over()


def _check(scheduler: BaseScheduler, node: Node | AsyncNode) -> None:
    kind = type(scheduler).__name__
    if not isinstance(scheduler, (BackgroundScheduler, AsyncIOScheduler)):
        raise ConfigError(
            f"a {kind} cannot be led: use a BackgroundScheduler (with node.run() where the program has nothing else to "
            "do), or an AsyncIOScheduler"
        )
    if isinstance(scheduler, AsyncIOScheduler) and not isinstance(node, AsyncNode):
        raise ConfigError("an AsyncIOScheduler runs on the event loop of its node: use an AsyncNode")
    if scheduler.running:
        raise ConfigError("this scheduler runs already: leave scheduler.start() out, the node starts it")
    for alias, executor in scheduler._executors.items():  # noqa: SLF001 - it has no public list
        if isinstance(executor, ProcessPoolExecutor):
            raise ConfigError(
                f"executor {alias!r} is a process pool, and runs are claimed in this process: use threads, and start "
                "processes in the job"
            )
