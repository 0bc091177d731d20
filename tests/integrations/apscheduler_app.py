"""An application with APScheduler in every replica: `threads` (in memory, at most once) or `asyncio` (a shared store,
at least once). Jobs that are due every second."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

import psycopg
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler

import tenure
from tenure.integrations.apscheduler import current_run, leader_only
from tests.integrations.cluster import INSERT_RUN

URL = os.environ["TENURE_URL"]


def row() -> tuple[object, ...]:
    run = current_run()
    return run.job, run.due, run.term.token, os.environ["TENURE_NAME"], os.getpid()


def fenced() -> None:
    """Claimed before, and written under the fence."""
    with current_run().term.transaction() as transaction:
        transaction.execute(INSERT_RUN, row())


def bare() -> None:
    """Written by a connection that knows nothing of terms."""
    with psycopg.connect(URL, autocommit=True) as connection:
        connection.execute(INSERT_RUN, row())


async def exactly_once() -> None:
    """Written and marked as done in one transaction."""
    async with current_run().transaction() as transaction:
        await transaction.execute(INSERT_RUN, row())


def threads() -> None:
    node, scheduler = tenure.Node(), BackgroundScheduler()
    scheduler.add_job(fenced, "interval", seconds=1, id="tick")
    scheduler.add_job(bare, "interval", seconds=1, id="bare")
    leader_only(scheduler, node)
    node.run()


async def on_a_loop() -> None:
    node = tenure.AsyncNode()
    store = SQLAlchemyJobStore(URL.replace("postgresql:", "postgresql+psycopg:"))
    scheduler = AsyncIOScheduler(jobstores={"default": store})
    scheduler.add_job(exactly_once, "interval", seconds=1, id="tick", replace_existing=True)
    scheduler.add_job(bare, "interval", seconds=1, id="bare", replace_existing=True)
    leader_only(scheduler, node, delivery="at-least-once")
    await node.run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(threadName)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("apscheduler").setLevel(logging.WARNING)
    if sys.argv[1] == "threads":
        threads()
    else:
        asyncio.run(on_a_loop())
