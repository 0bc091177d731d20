"""What the tests of services share: a node of either facade, and services that record what they do."""

from __future__ import annotations

import contextlib

import anyio

from tests.support.store_by_hand import connected, until

TTL = 8.0
"""Long enough that no busy machine lets it lapse; nothing here waits for it."""


class Hosted:
    """A node of either facade, started and closed from a test's thread."""

    def __init__(self, node, portal):
        self.node = node
        self._portal = portal

    def __getattr__(self, name):
        return getattr(self.node, name)

    def _call(self, function, *arguments):
        return self._portal.call(function, *arguments) if self._portal else function(*arguments)

    def start(self):
        self._call(self.node.start)
        return self

    def close(self):
        self._call(self.node.close)

    def resign(self, role):
        self._call(self.node.election(role).resign)

    def candidates(self, role):
        return len(self._call(self.node.election(role).candidates))

    def states(self):
        return {info.name: info.state for info in self.node.services()}


class Thing:
    """A service that records its starts and stops."""

    def __init__(self, name, diary):
        self.__name__ = name
        self.diary = diary

    def start(self):
        self.diary.append(f"start {self.__name__}")

    def stop(self):
        self.diary.append(f"stop {self.__name__}")


def coroutine(diary, name="coroutine"):
    async def run(term):
        diary.append(f"start {name}")
        try:
            await term.wait_lost()
            await anyio.sleep_forever()
        finally:
            diary.append(f"stop {name}")

    run.__name__ = name
    return run


def function(diary, name="function"):
    def run(term):
        diary.append(f"start {name}")
        term.wait_lost()
        diary.append(f"stop {name}")

    run.__name__ = name
    return run


def lead(node, role="r"):
    """Wait until the node leads and everything runs."""
    until(lambda: node.election(role).is_leader, "elected")
    until(lambda: {i.state for i in node.services() if i.role == role} == {"running"}, f"running: {node.services()}")


@contextlib.contextmanager
def writer(url):
    """Keep the node from writing to the file: its renewals fail, and its trust runs out."""
    with connected(url, isolation_level=None) as connection:
        connection.execute("begin immediate")
        yield
        connection.rollback()
