"""What a node accepts as a service, and what it can be told about it, for type checkers.

``service.py`` checks the same while the program runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol, TypedDict, TypeVar

if TYPE_CHECKING:
    import threading
    from collections.abc import Coroutine
    from typing import Any, TypeAlias

    from tenure.aio.term import AsyncTerm
    from tenure.term import Term

    # A plain function returns None. Anything else would also permit generators, and coroutine functions that expect
    # the wrong kind of term.
    Running: TypeAlias = Coroutine[Any, Any, object]
    LeaderService: TypeAlias = (
        Callable[[AsyncTerm], Running] | Callable[[], Running] | Callable[[Term], None] | "ServiceObject"
    )
    EverywhereService: TypeAlias = Callable[[], Running] | Callable[[threading.Event], None] | "ServiceObject"

OnFailure = Literal["restart", "resign"]
OnReturn = Literal["restart", "done", "resign"]
OnStuck = Literal["log", "exit"]

LeaderServiceT = TypeVar("LeaderServiceT", bound="LeaderService")
EverywhereServiceT = TypeVar("EverywhereServiceT", bound="EverywhereService")


class ServiceObject(Protocol):
    """An object that is started and stopped. Each method is a coroutine function or a plain one."""

    @property
    def start(self) -> Callable[..., object]:
        """Called to start the service. It may take the term."""

    @property
    def stop(self) -> Callable[..., object]:
        """Called to stop the service, without an argument."""


class EverywherePolicy(TypedDict, total=False):
    """The options of ``everywhere()``."""

    name: str | None
    start_within: float
    drain_within: float


class LeaderPolicy(EverywherePolicy, total=False):
    """The options of ``leader_only()``."""

    on_failure: OnFailure
    on_return: OnReturn | None
    on_stuck: OnStuck
    stop_within: float | None
    lock_id: int | str | None
