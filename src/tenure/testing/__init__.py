"""For the tests of applications that use Tenure: nodes that lead at once, without a database.

>>> from tenure.testing import LocalNode
>>> with LocalNode() as node, node.lead("scheduler") as term:
...     node.lose("scheduler")
...     assert not term.valid
"""

from __future__ import annotations

from tenure.testing.nodes import LocalAsyncNode, LocalNode
from tenure.testing.schedules import due_times, run_job

__all__ = ["LocalAsyncNode", "LocalNode", "due_times", "run_job"]
