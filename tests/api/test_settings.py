"""What a node is told: where it comes from, and what may be said. What may not is in test_bad_input."""

from __future__ import annotations

import os
import subprocess
import sys
import unicodedata

import pytest

import tenure
from tenure import ConfigError, manual
from tenure.settings import check_name


def settings(url="sqlite:///app.db", **arguments):
    return tenure.Node(url, **arguments)._settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    for name in ("TENURE_URL", "TENURE_REQUIRE_URL", "TENURE_NAMESPACE", "TENURE_NAME", "TENURE_TTL"):
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


WITHOUT_URL = {
    "Node": tenure.Node,
    "AsyncNode": tenure.AsyncNode,
    "Registry": tenure.Registry,
    "manual.use": manual.use,
    "manual.register_candidate": lambda: manual.register_candidate("me"),
}


@pytest.fixture
def unused_manual(monkeypatch):
    """Step by step, as in a process that has not elected anybody yet."""
    monkeypatch.setattr(manual, "_settings", manual._Settings())


@pytest.mark.parametrize("value", ["1", "true", "YES", "on"])
@pytest.mark.parametrize("make", WITHOUT_URL.values(), ids=WITHOUT_URL)
def test_a_required_url_that_is_missing_is_an_error_and_makes_no_file(
    monkeypatch, tmp_path, unused_manual, make, value
):
    monkeypatch.setenv("TENURE_REQUIRE_URL", value)
    with pytest.raises(ConfigError, match=f"no URL given, and TENURE_REQUIRE_URL={value} .*: set TENURE_URL"):
        make()
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("value", ["1", "0", "", None])
def test_a_url_that_is_given_satisfies_the_requirement(monkeypatch, tmp_path, value):
    if value is not None:
        monkeypatch.setenv("TENURE_REQUIRE_URL", value)
    assert settings("sqlite:///x.db").sqlite_path == "x.db"
    monkeypatch.setenv("TENURE_URL", "sqlite:///y.db")
    assert settings(None).sqlite_path == "y.db"


@pytest.mark.parametrize("value", ["0", "false", "No", "off", ""])
def test_no_url_is_required_where_the_variable_says_no(monkeypatch, tmp_path, value):
    monkeypatch.setenv("TENURE_REQUIRE_URL", value)
    assert settings(None).sqlite_path == f"{tmp_path}/state/tenure/tenure.db"


@pytest.mark.parametrize("value", ["2", "ja", " ", "TENURE_URL", "\udcff"])
@pytest.mark.parametrize("url", [None, "sqlite:///x.db"])
def test_a_requirement_that_is_neither_yes_nor_no_is_an_error_with_a_url_too(monkeypatch, url, value):
    monkeypatch.setenv("TENURE_REQUIRE_URL", value)
    with pytest.raises(ConfigError, match=r"TENURE_REQUIRE_URL=.* must be one of 1, true, yes, on, 0,") as told:
        settings(url)
    assert repr(value) in str(told.value)


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


# --- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", "é" * 127, "n" * 255, "a b", "%s {0} :x '\"; drop", "🦭", "\u200d"])
def test_any_text_of_255_bytes_is_a_name(name):
    assert check_name("role", name) == unicodedata.normalize("NFC", name)


def test_odd_names_travel_unharmed(store_url):
    role = 'it\'s {a} %s :role "quoted" \\ 🦭'
    with tenure.Node(store_url, name=role, namespace=role, metadata={role: role}) as node, node.lead(role) as term:
        election = node.election(role)
        assert election.leader().name == role
        assert election.candidates()[0].metadata == {role: role}
        with term.transaction() as transaction:
            transaction.execute("select 1")
