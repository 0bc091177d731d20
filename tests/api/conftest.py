"""Fixtures of several files of this folder."""

from __future__ import annotations

import contextlib
import gc

import anyio
import anyio.from_thread
import pytest

import tenure
from tests.api.hosted import TTL, Hosted
from tests.api.loops import tenures_threads
from tests.support.store_by_hand import until


@pytest.fixture
def _no_thread_is_left():
    yield
    until(lambda: not tenures_threads(), "the end of all threads")


@pytest.fixture(scope="module")
def _nothing_is_left_to_the_garbage_collector():
    """What was never awaited, or never closed, warns when it is collected; and warnings are errors."""
    yield
    gc.collect()


@pytest.fixture(params=["sqlite", "postgres"])
def one_url(request):
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture(params=["threads", "asyncio", pytest.param("trio", marks=pytest.mark.long)])
def host(request, tmp_path):
    """Make nodes on one SQLite file, or another database, to be closed in the end."""
    with contextlib.ExitStack() as stack:
        portal = None
        if request.param != "threads":
            portal = stack.enter_context(anyio.from_thread.start_blocking_portal(request.param))

        def make(name="a", url=f"sqlite:///{tmp_path}/s.db", **settings):
            facade = tenure.AsyncNode if portal else tenure.Node
            hosted = Hosted(facade(url, name=name, **({"ttl": TTL} | settings)), portal)
            stack.callback(hosted.close)
            return hosted

        yield make
