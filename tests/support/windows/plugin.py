"""Skips, by name and reason, the tests that need what Windows lacks: `make test WINDOWS=1`.

A test that itself uses such a name is skipped. If Tenure's code uses it, the test fails.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path

import pytest

import tenure
from tenure.databases.sqlite.sentinel import UNSUPPORTED

SOURCES = Path(tenure.__file__).parent
LACKING = re.compile(r"(?:module '(\w+)' has no attribute|No module named) '(\w+)': Windows lacks it")
NO_SQLITE = "Tenure refuses SQLite on Windows"
NO_GUARD = "needs `tenure run` or `tenure cron`, which Windows lacks"
NO_SIGSTOP = "needs signal.SIGSTOP, which Windows lacks"
REFUSALS = {
    UNSUPPORTED: NO_SQLITE,
    "does not run on this system": NO_GUARD,
    "add_signal_handler(signal.SIGTERM, main_task.cancel)": "the page's program needs a handler of signals on the loop",
}
"""What a command or a program that a test started says, and why the test is skipped then."""
BY_NAME = {
    "test_claim_in_a_block_is_one_message_without_a_second_fence": "libpq traces on Linux only",
    "test_claimed_run_is_made_by_one_machine_only": NO_GUARD,
    "test_commands_never_overlap_and_no_due_time_runs_twice_on_four_machines": NO_GUARD,
    "test_every_command_that_elects_or_looks_in_the_default_file_says_so": NO_SQLITE,
    "test_interrupted_wait_closes_the_connection": "needs signal.pthread_kill, which Windows lacks",
    "test_missing_file_is_not_created": NO_SQLITE,
    "test_node_that_hangs_while_it_stops_listening_connects_again": NO_SIGSTOP,
    "test_on_stuck_exit_ends_the_process_before_another_node_may_lead": NO_SQLITE,
    "test_run_ends_with_a_signal_and_hands_over": NO_SQLITE,
    "test_signal_that_interrupts_no_wait_ends_run_while_it_waits_for_the_database": (
        "needs signal.pthread_kill, which Windows lacks"
    ),
    "test_sqlite_needs_a_file": NO_SQLITE,
    "test_the_program_of_the_how_to_runs_until_it_is_told_to_end": NO_SQLITE,
    "test_unix_socket_leads_there_too": "needs Unix sockets, which Windows lacks",
    "test_wait_that_times_out_as_the_lock_is_granted_leaves_nothing_held": NO_SIGSTOP,
}
"""Tests that do not show what the processes that they started have said, or that cannot be left half-way."""


def _reason(error: pytest.ExceptionInfo[BaseException] | None) -> str | None:
    """Return what the test needs and Windows lacks; None if it failed for another reason, or by Tenure's fault."""
    if error is None:
        return None
    for refusal, reason in REFUSALS.items():
        if refusal in str(error.value):
            return reason
    lacking = LACKING.search(str(error.value))
    frames = [Path(frame.path) for frame in error.traceback if Path(frame.path).name != "sitecustomize.py"]
    if lacking is None or SOURCES in frames[-1].parents:
        return None
    return f"needs {'.'.join(filter(None, lacking.groups()))}, which Windows lacks"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests on SQLite, and those that are known by name."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    if reason := BY_NAME.get(getattr(item, "originalname", item.name)):
        pytest.skip(reason)
    if "sqlite_url" in getattr(item, "fixturenames", ()) or "sqlite" in parameters:
        pytest.skip(NO_SQLITE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a failure for want of a name into a skip that says which name."""
    report = yield
    reason = _reason(call.excinfo) if report.failed else None
    if reason is not None:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), (item.location[1] or 0) + 1, f"Skipped: {reason}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a whole file that imports what Windows lacks."""
    report = yield
    lacking = LACKING.search(str(report.longrepr or ""))
    if report.failed and lacking is not None:
        report.outcome = "skipped"
        report.longrepr = (
            str(collector.path),
            1,
            f"Skipped: the file needs {'.'.join(filter(None, lacking.groups()))}, which Windows lacks",
        )
    return report
