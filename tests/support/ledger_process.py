"""A node as in tests/support/node_process.py that writes all the time: numbered, and fenced, into a ledger.

`python -m tests.support.ledger_process '{"name": "a", …}'`. It also runs on release 0.1, so it uses only what that
release has.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import tenure
from tests.support import history, node_process

_COLUMNS = "role text, token bigint, node text, element text"
LEDGERS = {
    "sqlite": f"create table ledger (n integer primary key autoincrement, {_COLUMNS})",
    "postgresql": f"create table ledger (n bigserial primary key, {_COLUMNS})",
    "mysql": f"create table ledger (n bigint auto_increment primary key, {_COLUMNS})",
}


class LedgerProgram(node_process.Program):
    """Writes under each term until the database refuses. Each write has an element, so that a lost one is missed."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.elements = (f"{self.name}.{number}" for number in itertools.count(1))
        self.mark = "?" if "?" in self.insert else "%s"
        self.insert = f"insert into ledger (role, token, node, element) values ({', '.join([self.mark] * 4)})"

    def start(self, at_ns: str | None = None) -> dict[str, Any]:
        reply = super().start(at_ns)
        self.writing.set()
        return reply

    def write_under(self, term: tenure.Term) -> dict[str, Any]:
        element = next(self.elements)
        at_before = history.now_ns()
        reply: dict[str, Any] = {}
        try:
            with term.transaction() as transaction:
                transaction.execute(self.insert, (self.role, term.token, self.name, element))
                at_before = history.now_ns()  # just before the COMMIT
        except Exception as error:  # noqa: BLE001 - the server may go at any point
            retryable = getattr(error, "retryable", False)
            reply = {"error": type(error).__name__, "message": str(error), "retryable": retryable}
        details = {"error": reply["error"]} if reply else {}
        self.recorder.write(self.role, term.token, ok=not reply, at_before=at_before, element=element, **details)
        time.sleep(0.03)
        return reply


if __name__ == "__main__":
    node_process.main(LedgerProgram)
