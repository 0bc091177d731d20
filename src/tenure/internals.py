"""Access to the parts of a node and a term that the public interface does not offer.

The facades, ``schedule``, ``testing`` and ``cli.internals`` use this module, so that no private name of another class
is used anywhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenure.election import BaseElection
    from tenure.engine.candidacy import Holding
    from tenure.engine.engine import Engine
    from tenure.node import BaseNode
    from tenure.term import BaseTerm


def engine_of(facade: BaseNode[Any] | BaseElection[Any] | BaseTerm) -> Engine:
    """Return the engine of a node: its waits, its sentinel, its candidacies, and whether elections are decided."""
    return facade._engine  # noqa: SLF001


def holding_of(term: BaseTerm) -> Holding:
    """Return what the engine knows about a term: its lease, and why it is over."""
    return term._holding  # noqa: SLF001
