"""A campaign: a candidacy for one ``lead()`` or ``terms()``.

A node has one campaign for a role at a time: with two, the end of one would hand over the role that the other leads.
"""

from __future__ import annotations

import contextlib
from typing import Any, Generic, TypeVar

from tenure.election import BaseElection
from tenure.engine.candidacy import Candidacy
from tenure.errors import ConfigError, NodeClosed
from tenure.term import BaseTerm

ElectionT = TypeVar("ElectionT", bound=BaseElection[Any])


class Campaign(Generic[ElectionT]):
    """A candidacy for as long as one user in the application wants it."""

    def __init__(self, election: ElectionT, candidacy: Candidacy, campaigns: set[str], *, withdraw: bool) -> None:
        """Begin. ``campaigns`` are the roles that have one; ``withdraw`` says whether the node withdraws at the end."""
        self.election = election
        self.candidacy = candidacy
        self.engine = candidacy.engine
        self._campaigns = campaigns
        self._withdraw = withdraw
        self._term: BaseTerm | None = None
        self._over = False
        campaigns.add(candidacy.role)

    def stand_down(self, _: object = None) -> None:
        """Withdraw when the term is lost, because its block may take long to end.

        This is a callback, and it may come late: after the end of this campaign, when another one has begun.
        """
        with contextlib.suppress(NodeClosed):
            # The check comes first, because a forked child must not touch the lock.
            self.engine.check_own()
            with self.engine.lock:
                if self._withdraw and not self._over:
                    self.candidacy.withdraw()

    def end(self) -> None:
        """Hand over, without waiting for the database. May be called twice."""
        with contextlib.suppress(NodeClosed):
            self.engine.check_own()
            with self.engine.lock:
                if not self._over:
                    self._over = True
                    self._campaigns.discard(self.candidacy.role)
                    (self.candidacy.withdraw if self._withdraw else self.candidacy.resign)()

    # For terms()

    def check_over(self) -> None:
        """Raise ConfigError if a loop over ``terms()`` goes on while its term is not over: it would wait for ever."""
        term = self._term
        self.engine.check_own()
        self.engine.announce_expiry()
        if term is not None and term.lost_reason is None:
            raise ConfigError(
                f"role {term.role!r}: the loop over terms() went on before the term with token {term.token} was over: "
                "do the work inside `with term:` (or `async with term:`), which hands over, or call term.resign()"
            )

    @property
    def has_next(self) -> bool:
        """Whether there is a new term, or none will come because the node is not running."""
        return self.election.term not in (None, self._term) or not self.engine.running

    def take_next(self) -> Any:
        """Return the new term; None if it was lost after :attr:`has_next` had become True."""
        before, self._term = self._term, self.election.term
        return None if self._term is before else self._term
