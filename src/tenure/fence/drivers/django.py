"""Django's connections: its cursor, its atomic blocks, and those of its TestCase.

Everything goes through Django's own cursor, so the driver may be any that Django supports. The adapter does not roll an
atomic block back itself: it marks the block as Django does (``set_rollback``). Django then refuses further statements
in the block, rolls back at its end, and drops its ``on_commit`` hooks.

A TestCase wraps everything in a transaction that is never committed, so an ``atomic()`` block of the application is a
savepoint there. The application's outermost block then counts as its transaction, as it does for Django's ``durable``.
In a TestCase the fence only checks and does not lock: nothing is committed that a lock could protect, and the lock
would last until the test is over.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tenure.errors import ConfigError
from tenure.fence.adapter import Adapter
from tenure.fence.verdicts import DJANGO_AUTOCOMMIT, TermIdentity
from tenure.store.dialects import Dialect, for_name
from tenure.store.session import FetchedResult, Result, Step


class DjangoAdapter(Adapter):
    """A connection of django.db.connections."""

    def __init__(self, connection: Any, term: TermIdentity) -> None:
        super().__init__(connection, term)
        own = [block for block in connection.atomic_blocks if not block._from_testcase]  # noqa: SLF001
        self.ever_commits = len(own) == len(connection.atomic_blocks)
        self._has_transaction = own or (self.ever_commits and not connection.get_autocommit())

    def find_dialect(self) -> Dialect:
        # Django converts parameters of this form for its driver, so any other % in a text is written twice.
        dialect = for_name(self.connection.vendor, self.term.schema)
        words = {name: word.replace("%", "%%") for name, word in dialect.words.items()}
        return replace(dialect, parameter="%({})s", words=words)

    async def check_transaction(self) -> None:
        if not self._has_transaction:
            raise ConfigError(DJANGO_AUTOCOMMIT)

    def in_savepoint(self) -> bool:
        fenced = any(hook is _fenced for _, hook, _ in self.connection.run_on_commit)
        return any(self.connection.savepoint_ids) and not fenced

    def mark_fenced(self) -> None:
        # Django forgets the hooks of a transaction together with the transaction.
        if self.connection.in_atomic_block and not any(self.connection.savepoint_ids):
            self.connection.on_commit(_fenced)

    async def execute(self, step: Step) -> Result:
        with self.connection.cursor() as cursor:
            cursor.execute(self.dialect.text(step.text), step.parameters or None)
            return FetchedResult(list(cursor.fetchall()) if cursor.description else [], cursor.rowcount)

    def roll_back(self) -> None:
        if self.connection.in_atomic_block:
            self.connection.set_rollback(True)
        else:
            self.connection.rollback()


class ProxyAdapter(DjangoAdapter):
    """django.db.connection: the connection of the current thread."""

    def __init__(self, proxy: Any, term: TermIdentity) -> None:
        super().__init__(proxy._connections[proxy._alias], term)  # noqa: SLF001


def _fenced() -> None:
    """Do nothing on commit: this hook only marks the transaction as fenced."""


KINDS = {"django.BaseDatabaseWrapper": DjangoAdapter, "django.ConnectionProxy": ProxyAdapter}
