"""The async facade in the clothes of the other one, so that the same tests run over both.

`make test FACADE=async` puts this `Node` in the place of `tenure.Node`, here and in every process that the tests start:
each call of a test goes to an AsyncNode on an event loop in a thread of its own, asyncio's or (`LOOP=trio`) trio's.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import anyio.from_thread
from typing_extensions import Self

import tenure

_running = contextlib.ExitStack()


@functools.cache
def portal() -> anyio.from_thread.BlockingPortal:
    """The way to the event loop of this process."""
    return _running.enter_context(anyio.from_thread.start_blocking_portal(os.environ.get("LOOP") or "asyncio"))


class Wrapper:
    """Reads go straight to the wrapped object; what must be awaited is defined below."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def __repr__(self) -> str:
        return repr(self._wrapped).replace("<Async", "<")


class Node(Wrapper):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(tenure.AsyncNode(*args, **kwargs))
        self._elections: dict[int, Election] = {}

    def start(self) -> Self:
        portal().call(self._wrapped.start)
        return self

    def close(self) -> None:
        portal().call(self._wrapped.close)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def election(self, role: str, **options: Any) -> Election:
        election = self._wrapped.election(role, **options)
        return self._elections.setdefault(id(election), Election(election))

    @contextlib.contextmanager
    def lead(self, role: str, timeout: float | None = None, **options: Any) -> Iterator[Term]:
        with portal().wrap_async_context_manager(self._wrapped.lead(role, timeout, **options)) as term:
            yield term_of(term)

    def terms(self, role: str) -> Iterator[Term]:
        return map(term_of, _iterate(self._wrapped.terms(role)))


class Election(Wrapper):
    @property
    def is_leader(self) -> bool:
        return bool(self._wrapped.is_leader)

    @property
    def term(self) -> Term | None:
        term = self._wrapped.term
        return None if term is None else term_of(term)

    def wait(self, timeout: float | None = None) -> Term:
        return term_of(portal().call(self._wrapped.wait, timeout))

    def leader(self) -> Any:
        return portal().call(self._wrapped.leader)

    def candidates(self) -> Any:
        return portal().call(self._wrapped.candidates)

    def history(self, limit: int = 20) -> Any:
        return portal().call(self._wrapped.history, limit)

    def jobs(self) -> Any:
        return portal().call(self._wrapped.jobs)

    def resign(self, to: str | None = None) -> None:
        portal().call(self._wrapped.resign, to)

    def withdraw(self) -> None:
        portal().call(self._wrapped.withdraw)

    def events(self) -> Iterator[Any]:
        return _iterate(self._wrapped.events())


class Term(Wrapper):
    def ensure(self) -> None:
        portal().call(self._wrapped.ensure)

    def wait_lost(self, timeout: float | None = None) -> bool:
        return bool(portal().call(self._wrapped.wait_lost, timeout))

    def on_lost(self, callback: Any) -> None:
        self._wrapped.on_lost(lambda term: callback(term_of(term)))

    def resign(self, to: str | None = None) -> None:
        portal().call(self._wrapped.resign, to)

    @contextlib.contextmanager
    def transaction(self, **options: Any) -> Iterator[Transaction]:
        with portal().wrap_async_context_manager(self._wrapped.transaction(**options)) as transaction:
            yield Transaction(transaction)

    def __enter__(self) -> Self:
        self._block = portal().wrap_async_context_manager(self._wrapped)
        self._block.__enter__()
        return self

    def __exit__(self, *error: object) -> bool | None:
        return self._block.__exit__(*error)  # type: ignore[arg-type]


class Transaction(Wrapper):
    def execute(self, sql: str, parameters: Any = ()) -> Any:
        return portal().call(self._wrapped.execute, sql, parameters)

    def claim(self, job: str, due: Any) -> bool:
        return bool(portal().call(self._wrapped.claim, job, due))

    def finish(self, job: str, due: Any) -> bool:
        return bool(portal().call(self._wrapped.finish, job, due))

    def anchor(self, job: str, at: Any) -> Any:
        return portal().call(self._wrapped.anchor, job, at)

    def jobs(self) -> Any:
        return portal().call(self._wrapped.jobs)

    def forget(self, job: str) -> bool:
        return bool(portal().call(self._wrapped.forget, job))


def term_of(term: Any) -> Term:
    """The one wrapper of a term: tests compare terms by `is`."""
    wrapper: Term = term.__dict__.setdefault("_wrapper", Term(term))
    return wrapper


def _iterate(iterator: Any) -> Iterator[Any]:
    while True:
        try:
            yield portal().call(iterator.__anext__)
        except StopAsyncIteration:
            return
