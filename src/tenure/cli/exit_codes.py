"""The exit codes of the command line. The management commands of Django exit with the same codes."""

from __future__ import annotations

WARNINGS = 1
"""No check of ``tenure doctor --strict`` failed, but there are warnings."""
USAGE = 2
"""An error that the caller can fix: a wrong argument or URL, or a database that cannot be used."""
ANOTHER_LEADS = 75
LEADERSHIP_LOST = 76
TIMED_OUT = 124
NOT_EXECUTABLE = 126
NOT_FOUND = 127
SIGNALLED = 128
"""The exit code is this plus the number of the signal."""
INTERRUPTED = 130

DECIDED_WITHIN_S = 5.0
"""How long a command waits for the election to be decided before it exits with ANOTHER_LEADS. A database may answer
slowly, and the row of the role may be locked."""
