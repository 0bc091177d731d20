"""Crontabs: what is read from each line, and what is refused."""

from __future__ import annotations

import hashlib

import pytest

from tenure import ConfigError
from tenure.cli.cron.crontab import Entry, digest, parse

CRONTAB = r"""
# the night
CRON_TZ=Europe/Paris
MODE = "full"
30 2 * * *   ./backup --mode "$MODE"   # backup
@hourly      ./clean-up $(date +\%F)   # clean-up

CRON_TZ=UTC
*/5 * * * *  ./sync; echo done #1 # sync.all
"""


def test_entries_have_name_expression_command_and_zone():
    backup, clean_up, sync = parse(CRONTAB, "UTC")
    variables = {"CRON_TZ": "Europe/Paris", "MODE": "full"}
    assert backup == Entry(
        "backup", "30 2 * * *", ("/bin/sh", "-c", './backup --mode "$MODE"'), "Europe/Paris", variables
    )
    assert (clean_up.expression, clean_up.command[2]) == ("@hourly", "./clean-up $(date +%F)")
    assert (sync.name, sync.command[2], sync.zone) == ("sync.all", "./sync; echo done #1", "UTC")


def test_zone_of_the_command_line_is_the_default():
    assert parse("0 0 * * * ./x # x", "Asia/Tokyo")[0].zone == "Asia/Tokyo"


@pytest.mark.parametrize(("text", "zone"), [("", "UTC"), ("CRON_TZ=Europe/Paris\n", "Europe/Paris")])
def test_tz_is_for_the_command_and_moves_no_schedule(text, zone):
    (entry,) = parse(f"{text}TZ=America/New_York\n30 2 * * * ./x # x", "UTC")
    assert (entry.zone, entry.environment["TZ"]) == (zone, "America/New_York")


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("plain", "plain"),
        ("", ""),
        ('""', ""),
        ("'full'", "full"),
        ('"  blanks  "', "  blanks  "),
        ("\"he said 'hi'\"", "he said 'hi'"),
        ("'x \"y\"'", 'x "y"'),
        ('--name="a b"', '--name="a b"'),
        ("\"it's", "\"it's"),
        ("\"mixed'", "\"mixed'"),
        ("'\"both\"'", '"both"'),
        ('"', '"'),
    ],
)
def test_variable_loses_one_pair_of_quotes_around_its_value(written, value):
    (entry,) = parse(f"A={written}\n30 2 * * * ./x # x", "UTC")
    assert entry.environment == {"A": value}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no entries"),
        ("# only a comment\n", "no entries"),
        ("\n30 2 * * * ./backup", "line 2 of the crontab has no name"),
        ("30 2 * * # backup", "line 1 of the crontab has no command"),
        ("@daily # backup", "line 1 of the crontab has no command"),
        ("30 2 * * * date +%F # day", "line 1 of the crontab has a % in its command"),
        ("0 30 2 * * * ./backup # backup", "line 1 of the crontab has six fields"),
        ("@daily ./a # a\n\n@daily ./b # a", "line 3 of the crontab: there are two jobs with the name 'a'"),
    ],
)
def test_line_that_is_wrong_is_named(text, words):
    with pytest.raises(ConfigError, match=words):
        parse(text, "UTC")


def test_digest_depends_on_what_runs_and_not_on_blanks_and_order():
    one = parse("0 0 * * * ./a # a\n1 0 * * * ./b # b", "UTC")
    same = parse("# night\n1  0 * * *  ./b # b\n0 0 * * * ./a   # a\n", "UTC")
    other = parse("0 0 * * * ./a # a\n2 0 * * * ./b # b", "UTC")
    assert digest(one) == digest(same) != digest(other)


def test_digest_depends_on_the_variables_that_commands_find():
    job = "0 0 * * * ./a # a"
    prod, test, none = (digest(parse(f"{text}{job}", "UTC")) for text in ("TARGET=prod\n", "TARGET=test\n", ""))
    assert len({prod, test, none}) == 3
    assert prod == digest(parse(f"# night\nTARGET = 'prod'\n{job}\nLATER=1", "UTC"))
    both = [digest(parse(f"{text}{job}", "UTC")) for text in ("A=1\nB=2\n", "B=2\nA=1\n", "A=1\nB=0\nB=2\n")]
    assert len(set(both)) == 1, "the order of the variables does not matter"


def test_variables_are_not_shown_and_not_easily_guessed():
    entries = [entry] = parse("PASSWORD=secret\n0 0 * * * ./a # a", "UTC")
    assert "secret" not in repr(entries)
    identity = f"a 0 0 * * * UTC {entry.command} {[('PASSWORD', 'secret')]}"
    plain = hashlib.sha256(identity.encode()).hexdigest()[:12]
    assert digest(entries) != plain
    assert digest(entries) == hashlib.pbkdf2_hmac("sha256", identity.encode(), b"tenure cron", 200_000).hex()[:12]


def test_digest_without_variables_is_that_of_older_nodes():
    """So an upgrade of one machine after the other warns of nothing, unless the crontab sets variables."""
    assert digest(parse("0 0 * * * ./a # a", "Europe/Paris")) == "7fe6630aae7e"
    assert digest(parse("CRON_TZ=Europe/Paris\n0 0 * * * ./a # a", "UTC")) == "7fe6630aae7e"
