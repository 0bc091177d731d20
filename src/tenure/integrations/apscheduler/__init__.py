"""APScheduler 3 (``pip install 'tenure[apscheduler]'``): a scheduler on every replica; only the leader's runs jobs.

    from tenure.integrations.apscheduler import leader_only

    node = tenure.Node("postgresql://…")
    scheduler = BackgroundScheduler()
    scheduler.add_job(report, "interval", minutes=5, id="report")
    leader_only(scheduler, node)
    node.run()

The node starts the scheduler paused, resumes it when it is elected, and pauses and drains it when its term is over.
Before a run begins, it is claimed under the fence in the node's database, by the job's id and the moment at which it is
due. So no run is made twice, whatever the state of a replica or its job store. See ``docs/how-to/apscheduler.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from tenure import AsyncNode, ConfigError, Node
from tenure.integrations import extra

with extra("apscheduler"):
    from apscheduler.executors.pool import ProcessPoolExecutor
    from apscheduler.schedulers.asyncio import AsyncIOScheduler
    from apscheduler.schedulers.background import BackgroundScheduler
    from apscheduler.schedulers.base import BaseScheduler

from tenure.integrations.apscheduler.run import current_run
from tenure.integrations.apscheduler.scheduler import Leading, Paused, PausedOnLoop
from tenure.schedule.jobs import Delivery
from tenure.schedule.run import AlreadyRan, NotDone, Run
from tenure.settings import check_choice

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tenure.services.kinds import LeaderPolicy

__all__ = ["AlreadyRan", "NotDone", "Run", "current_run", "leader_only"]


def leader_only(
    scheduler: BaseScheduler,
    node: Node | AsyncNode,
    role: str = "scheduler",
    *,
    delivery: Delivery = "at-most-once",
    catch_up: int = 100,
    **options: Unpack[LeaderPolicy],
) -> None:
    """Let ``scheduler`` work only while ``node`` leads ``role``. Call it before the node is started.

    Leave ``scheduler.start()`` and ``scheduler.shutdown()`` to the node. Every job needs its own id, the same on every
    replica.

    Args:
        scheduler: a BackgroundScheduler, or an AsyncIOScheduler, which runs on the event loop of an AsyncNode.
        node: a node that has not been started.
        role: the role to lead.
        delivery: ``at-most-once``: a run is claimed, and then made. ``at-least-once``: a run is also marked as done
            afterwards; if another node is elected before that, it makes the run again.
        catch_up: how many missed runs of a job are made up for at most: the newest ones.
        options: those of ``node.leader_only()``.

    Raises:
        ConfigError: for a scheduler, an executor or a job that cannot be used.
    """
    check_choice("delivery", delivery, get_args(Delivery))
    if catch_up < 1:
        raise ConfigError(f"catch_up={catch_up!r} must be a whole number above 0")
    _check(scheduler, node)
    leading = Leading(scheduler, role, catch_up, repeats=delivery == "at-least-once")
    paused = PausedOnLoop(scheduler) if isinstance(scheduler, AsyncIOScheduler) else Paused(scheduler)
    name = options.setdefault("name", f"apscheduler-{role}")
    node.everywhere(paused, name=name)
    node.leader_only(role, leading, **options)
    leading.take_over()


def _check(scheduler: BaseScheduler, node: Node | AsyncNode) -> None:
    kind = type(scheduler).__name__
    if not isinstance(scheduler, (BackgroundScheduler, AsyncIOScheduler)):
        raise ConfigError(
            f"a {kind} cannot be used: use a BackgroundScheduler (with node.run() if the program has nothing else to "
            "do), or an AsyncIOScheduler"
        )
    if isinstance(scheduler, AsyncIOScheduler) and not isinstance(node, AsyncNode):
        raise ConfigError("an AsyncIOScheduler runs on the event loop of its node: use an AsyncNode")
    if scheduler.running:
        raise ConfigError("this scheduler is already running: do not call scheduler.start(); the node starts it")
    for alias, executor in scheduler._executors.items():  # noqa: SLF001 - it has no public list
        if isinstance(executor, ProcessPoolExecutor):
            raise ConfigError(
                f"executor {alias!r} is a process pool, but runs are claimed in this process: use a thread pool, and "
                "start processes in the job"
            )
