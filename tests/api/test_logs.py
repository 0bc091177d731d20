"""What is logged is what docs/how-to/logs.md says: the loggers, the fields, the lines that one looks for."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import tenure
from tests.support.store_by_hand import until

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "how-to" / "logs.md").read_text()
PATIENT = {"ttl": 30, "renew_every": 0.3}
WITH_FIELDS = ("tenure.node", "tenure.services", "tenure.engine", "tenure.backends")


def rows(heading):
    """The cells of the table below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for cells in lines[2:]]


def names(cell):
    return re.findall(r"`([^`]+)`", cell)


FIELDS = {names(field)[0]: names(loggers) for field, loggers, _ in rows("The fields")}


def test_the_page_names_every_logger_and_no_other():
    sources = [path for path in (REPOSITORY / "src").rglob("*.py") if "cli" not in path.parts]
    ours = {
        name for path in sources for name in re.findall(r'(?:getLogger|SafeLog)\("(tenure\.\w+)"', path.read_text())
    }
    assert {name for cells in rows("All loggers") for name in names(cells[0])} == ours


@pytest.fixture
def logged(postgres_server, postgres_url, caplog):
    """What two nodes with services log: elected, not elected, in doubt, resumed, resigned; and a service that fails."""
    caplog.set_level(logging.INFO, "tenure")
    first = tenure.Node(postgres_url, name="first", **PATIENT)
    second = tenure.Node(postgres_url, name="second", **PATIENT)
    for node in (first, second):
        node.leader_only("r", poll)
    first.everywhere(fail)
    with first:
        until(lambda: first.stats().roles and first.stats().roles[0].is_leader, "the first leads")
        with second:
            until(lambda: said(caplog, "Not leader"), "the other says that it does not")
            postgres_server.stop()
            until(lambda: said(caplog, "trying again until it is back"), "the outage noticed")
            postgres_server.start()
            until(lambda: said(caplog, "resumed role"), "the term goes on")
            first.close()
            until(lambda: second.stats().roles[0].is_leader, "the second leads")
    return caplog.records


async def poll():
    import anyio

    await anyio.sleep_forever()


async def fail():
    raise RuntimeError("no luck")


def said(caplog, text):
    return any(text in record.getMessage() for record in caplog.records)


def test_lines_carry_the_documented_fields_with_their_values_and_no_others(logged):
    assert {record.name for record in logged} >= set(WITH_FIELDS)
    for record in logged:
        documented = {field for field, on in FIELDS.items() if record.name in on}
        assert {name for name in vars(record) if name.startswith("tenure_")} == documented, record.getMessage()

    def one(logger, text):
        return next(record for record in logged if record.name == logger and text in record.getMessage())

    elected = one("tenure.node", "elected role r, token 1")
    assert (elected.levelname, elected.tenure_node, elected.tenure_namespace) == ("INFO", "first", "default")
    assert (elected.tenure_role, elected.tenure_token, elected.tenure_reason) == ("r", 1, None)
    assert elected.tenure_event == tenure.Elected("r", 1)
    assert one("tenure.node", "suspended role r").tenure_token == 1
    deposed = one("tenure.node", "first: deposed role r, token 1")
    assert deposed.tenure_reason == deposed.tenure_event.reason
    assert deposed.getMessage().endswith(deposed.tenure_reason)

    acquired = one("tenure.services", "Acquired leadership, starting poll")
    assert (acquired.tenure_role, acquired.tenure_token, acquired.tenure_service) == ("r", 1, None)
    assert one("tenure.services", "Not leader, poll not started: first leads").tenure_reason == "first leads"
    assert one("tenure.services", "Gave up leadership").tenure_reason
    failed = one("tenure.services", "starting it again in")
    assert (failed.levelname, failed.tenure_role, failed.tenure_service) == ("ERROR", None, "fail")
    assert "no luck" in failed.tenure_reason

    assert one("tenure.engine", "trying again until it is back").levelname == "WARNING"
    assert one("tenure.engine", "the database is back").tenure_node in ("first", "second")
    assert one("tenure.backends", "mode hybrid").tenure_namespace == "default"
