"""What the doctor says about a server that refuses the connection: one remedy for each cause."""

from __future__ import annotations

import json
from urllib.parse import urlsplit, urlunsplit

import pytest

from tests.cli.test_cli import Answer

NOBODY = "tenure_test_refused"
SECRET = "canary-7f3a"


def changed(url, *, login=None, host=None, database=None, query=None):
    """A URL with some parts replaced."""
    parts = urlsplit(url)
    old_login, _, old_host = parts.netloc.rpartition("@")
    netloc = f"{login or old_login}@{host or old_host}"
    path = parts.path if database is None else f"/{database}"
    return urlunsplit((parts.scheme, netloc, path, query or parts.query, ""))


def refusal(url):
    """The one finding about a URL that leads nowhere: its text and its remedy."""
    answer = Answer("doctor", "--json", url=url)
    (finding,) = json.loads(answer.out)
    assert (answer.code, finding["check"], finding["level"]) == (2, "reachable", "error")
    assert SECRET not in answer.out + answer.err
    return finding["text"], finding["remedy"]


CASES = {
    "database": ({"database": "ap"}, "(createdb ap), or correct the name after the last / of the URL"),
    "host": ({"host": "nohost.invalid:1"}, "correct the host name in the URL"),
    "port": ({"host": "127.0.0.1:1"}, "start the server, or correct host and port in the URL"),
}


@pytest.mark.parametrize("case", CASES)
def test_remedy_is_for_the_cause_on_postgresql(postgres_url, case):
    change, remedy = CASES[case]
    text, said = refusal(changed(postgres_url, **change))
    assert said.endswith(remedy)
    assert text.count("127.0.0.1") <= 1, "the address is there once"
    assert "Is the server running" not in text


@pytest.mark.parametrize("case", CASES)
def test_remedy_is_for_the_cause_on_mariadb(mariadb_url, case):
    change, remedy = CASES[case]
    _, said = refusal(changed(mariadb_url, **change))
    if case == "database":
        # The server tells only a user who may use it that there is no such database.
        remedy = "grant user tenure the database ap, or correct the name after the last / of the URL"
    assert said.endswith(remedy)


def test_wrong_parameter_user_and_password_have_a_remedy_on_postgresql(postgres_url):
    assert refusal(changed(postgres_url, query="sslmode=requre"))[1] == "correct the parameter after the ? of the URL"
    said = refusal(changed(postgres_url, login=f"{NOBODY}:{SECRET}"))[1]
    password = f"correct the password of user {NOBODY} in the URL, the password file or PGPASSWORD, or the name of the"
    assert said in (f"correct the user in the URL, or create it (createuser {NOBODY})", f"{password} user in the URL")


def test_wrong_password_has_a_remedy_on_mariadb(mariadb_url):
    said = refusal(changed(mariadb_url, login=f"tenure:{SECRET}"))[1]
    assert said == "correct the password of user tenure in the URL, or the name of the user in the URL"
