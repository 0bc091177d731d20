"""What a node is told is checked before anything is connected, and no message repeats a password."""

from __future__ import annotations

import os
import subprocess
import sys
import unicodedata

import pytest

import tenure
from tenure import ConfigError
from tenure.settings import check_name

CANARY = "c4n4ry"


def settings(url="sqlite:///app.db", **arguments):
    return tenure.Node(url, **arguments)._settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    for name in ("TENURE_URL", "TENURE_NAMESPACE", "TENURE_NAME", "TENURE_TTL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


# --- where they come from -----------------------------------------------------------------------------------


def test_defaults():
    told = settings()
    assert (told.namespace, told.ttl, told.renew_every, told.takeover, told.schema) == (
        "default",
        10.0,
        2.5,
        "instant",
        "tenure",
    )
    assert told.name.endswith(f"-{os.getpid()}")
    assert told.metadata == "{}"


def test_environment_is_used_and_arguments_win(monkeypatch, tmp_path):
    monkeypatch.setenv("TENURE_URL", f"sqlite:///{tmp_path}/from-environment.db")
    monkeypatch.setenv("TENURE_NAMESPACE", "jobs")
    monkeypatch.setenv("TENURE_NAME", "worker-1")
    monkeypatch.setenv("TENURE_TTL", "20")
    told = settings(None)
    assert told.sqlite_path == f"{tmp_path}/from-environment.db"
    assert (told.namespace, told.name, told.ttl) == ("jobs", "worker-1", 20.0)
    told = settings("sqlite:///x.db", namespace="n", name="m", ttl=3)
    assert (told.sqlite_path, told.namespace, told.name, told.ttl) == ("x.db", "n", "m", 3.0)


def test_wrong_ttl_in_the_environment_is_an_error(monkeypatch):
    monkeypatch.setenv("TENURE_TTL", "soon")
    with pytest.raises(ConfigError, match="TENURE_TTL='soon' must be a number of seconds"):
        settings()


def test_default_database_is_the_same_file_from_every_directory(monkeypatch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    here = settings(None).url
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert settings(None).url == here == f"sqlite:///{tmp_path}/state/tenure/tenure.db"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings(None).url == f"sqlite:///{tmp_path}/.local/state/tenure/tenure.db"


def test_nodes_without_any_setting_meet_in_the_default_database(tmp_path):
    with tenure.Node() as node, node.lead("r") as term:
        program = "import tenure\nwith tenure.Node() as node: print(node.election('r').leader().token)"
        command = [sys.executable, "-c", program]
        said = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True, timeout=60)
        assert said.stdout.strip() == str(term.token)
    directory = tmp_path / "state" / "tenure"
    assert (directory / "tenure.db").exists()
    assert directory.stat().st_mode & 0o077 == 0, "others have no business there"


# --- URLs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///relative.db", "relative.db"),
        ("sqlite:////absolute/path.db", "/absolute/path.db"),
        ("sqlite:///dir/with space.db", "dir/with space.db"),
    ],
)
def test_sqlite_urls_are_written_as_sqlalchemy_writes_them(url, path):
    assert settings(url).sqlite_path == path


@pytest.mark.parametrize("url", ["postgresql://h/d", "postgres://h/d", "postgresql+psycopg://h/d"])
def test_postgresql_has_three_names(url):
    assert settings(url).database == "postgresql"


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:app.db", "sqlite:///", "sqlite:///:memory:"])
def test_sqlite_needs_a_file(url):
    with pytest.raises(ConfigError, match="sqlite:///"):
        settings(url)


@pytest.mark.parametrize(
    "url",
    [
        f"oracle://me:{CANARY}@host/db",
        f"me:{CANARY}@host/db",
        f"//me:{CANARY}@host/db",
        f"host=db user=me password={CANARY}",
        f"password={CANARY} host=db",
        f"{CANARY}",
        f"postgresql//me:{CANARY}@host/db",
        f"postgresql:/me:{CANARY}@host/db",
        f"postgresql:me:{CANARY}@host/db",
        f"postgresql://me:{CANARY}@[::1/db",
        f"postgresql://me:{CANARY}%zz@host/db",
        f"postgresql://me:{CANARY}@host:notaport:7/db?x",
        f"postgresql://me:{CANARY}@host/db?no_such_option=1",
        f"postgresql://me:{CANARY}@host/db?sslmode",
        f"postgresql+psycopg://me:{CANARY}%@host/db",
        f"sqlite://{CANARY}",
    ],
)
def test_malformed_url_is_refused_without_repeating_it(url):
    with pytest.raises(ConfigError) as error:
        settings(url)
    seen = "".join(map(repr, (error.value, error.value.args, error.value.__cause__)))
    assert CANARY not in seen + str(error.value)
    assert error.value.__suppress_context__ or error.value.__context__ is None


# --- names --------------------------------------------------------------------------------------------------


def test_names_are_normalised_so_that_one_spelling_is_one_role(sqlite_url):
    composed, decomposed = unicodedata.normalize("NFC", "Zoë"), unicodedata.normalize("NFD", "Zoë")
    assert composed != decomposed
    with tenure.Node(sqlite_url, name=decomposed) as node:
        assert node.name == composed
        assert node.election(decomposed) is node.election(composed)
        assert node.election(composed).role == composed


@pytest.mark.parametrize("name", ["x", "é" * 127, "n" * 255, "a b", "%s {0} :x '\"; drop", "🦭", "\u200d"])
def test_any_text_of_255_bytes_is_a_name(name):
    assert check_name("role", name) == unicodedata.normalize("NFC", name)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("", "has 0 bytes: give it 1 to 255"),
        ("n" * 256, "has 256 bytes"),
        ("é" * 128, "has 256 bytes"),
        ("a\nb", "control characters"),
        ("a\x00b", "control characters"),
        ("\x7f", "control characters"),
        ("\ud800", "lone surrogates"),
        (7, "must be text"),
        (None, "must be text"),
    ],
)
def test_names_that_cannot_be(name, complaint):
    with pytest.raises(ConfigError, match=complaint):
        check_name("role", name)


def test_every_name_is_checked(sqlite_url):
    for argument in ("name", "namespace"):
        with pytest.raises(ConfigError, match=f"{argument}='a.+b' contains control characters"):
            settings(**{argument: "a\tb"})
    with tenure.Node(sqlite_url) as node, pytest.raises(ConfigError, match="role="):
        node.election("a\tb")


def test_odd_names_travel_unharmed(store_url):
    role = 'it\'s {a} %s :role "quoted" \\ 🦭'
    with tenure.Node(store_url, name=role, namespace=role, metadata={role: role}) as node, node.lead(role) as term:
        election = node.election(role)
        assert election.leader().name == role
        assert election.candidates()[0].metadata == {role: role}
        with term.transaction() as transaction:
            transaction.execute("select 1")


# --- numbers and words --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ttl", [0, 0.5, -1, 3601, float("inf"), float("nan"), "x", [1]])
def test_ttl_has_limits(ttl):
    with pytest.raises(ConfigError, match="ttl="):
        settings(ttl=ttl)


def test_renewals_must_leave_room_for_a_lost_one():
    assert settings(ttl=10, renew_every=4.5).renew_every == 4.5
    for renew_every in (0, -1, 4.6, 100, "often"):
        with pytest.raises(ConfigError, match="renew_every="):
            settings(ttl=10, renew_every=renew_every)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("takeover", "never"),
        ("mode", "magic"),
        ("start", "later"),
        ("schema", ""),
        ("schema", "a-b"),
        ("schema", 'x"; drop table y; --'),
        ("schema", "x" * 64),
        ("metadata", {"x": object()}),
        ("metadata", 7),
    ],
)
def test_wrong_value_is_refused_by_name(argument, value):
    with pytest.raises(ConfigError, match=f"{argument}="):
        settings(**{argument: value})


def test_configuration_errors_are_value_errors_too():
    with pytest.raises(ValueError, match="takeover="):
        settings(takeover="never")
