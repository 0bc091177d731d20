"""Whatever is given as a URL, name, number, word or environment variable: it works, or an error of ours says why.

No message carries a password, accepted values come back as they were given, and what was accepted once is accepted
again, unchanged. `tests/support/fuzzing.py` says how to run more examples.
"""

from __future__ import annotations

import json
import math
import os
import unicodedata
from unittest import mock
from urllib.parse import quote

import pytest
import sqlalchemy
from click.testing import CliRunner
from hypothesis import assume, example, given
from hypothesis import strategies as st

import tenure
from tenure import ConfigError, settings
from tenure.cli import COMMANDS, main
from tenure.core import timing
from tenure.databases import handover
from tenure.databases.mysql import connect as mysql_connect
from tenure.databases.postgres import connect as postgres_connect
from tests.support.fuzzing import ANY_TEXT, JUNK, fuzzed, only_our_errors
from tests.support.secrets import CANARY, PIECE

ODD = st.text(st.sampled_from("ab%@:/?#[]&=+ \\'\"\0\n\udcffé☃.,;{}$~"), max_size=8)
SCHEMES = st.sampled_from(
    [
        "postgresql",
        "postgres",
        "postgresql+psycopg",
        "mysql",
        "mariadb",
        "mysql+pymysql",
        "sqlite",
        "oracle",
        "Mysql",
        "",
    ]
)
SECRETS = st.builds(lambda before, after: before + CANARY + after, ODD, ODD)
"""A password as people write it into a URL: percent-encoded or not."""
PLACES = st.one_of(ODD, st.sampled_from(["host", "h:5432", "[::1]", "[::1", "h:99999", "h:x", "a,b", "", "h:", ":1"]))
QUERIES = st.one_of(
    st.just(""),
    ODD.map(lambda text: f"?{text}"),
    st.sampled_from(["?sslmode=require", "?ssl_ca=x", "?connect_timeout=nan", "?port=0", "?a", "?user=x", "?x=%zz"]),
)
URLS = st.builds(
    lambda scheme, sep, user, secret, place, database, query: f"{scheme}{sep}{user}:{secret}@{place}{database}{query}",
    SCHEMES,
    st.sampled_from(["://", ":///", ":", "//", ":/"]),
    ODD,
    st.one_of(SECRETS, SECRETS.map(lambda text: quote(text, safe="", errors="surrogatepass"))),
    PLACES,
    st.one_of(st.just("/db"), st.just(""), ODD.map(lambda text: f"/{text}")),
    QUERIES,
)


@pytest.fixture(autouse=True, scope="module")
def _no_settings_from_outside(tmp_path_factory):
    here = {"XDG_STATE_HOME": str(tmp_path_factory.mktemp("state"))}
    with mock.patch.dict(os.environ, here):
        yield


# --- URLs ---------------------------------------------------------------------------------------------------


@fuzzed(80)
@given(url=URLS)
@example(url=f"mysql://me:a?{CANARY}@host/db")
@example(url=f"postgresql://me:a?{CANARY}@host/db")
def test_url_works_or_is_refused_without_a_word_about_its_password(url):
    with only_our_errors(ConfigError):
        assume(not url.lower().startswith("sqlite"))  # a file may be named as one likes, and is shown
        node = tenure.Node(url)
        assert PIECE not in repr(node) + repr(node._settings) + repr(node._engine.backend._connector)
        checked = settings._checked_url("the URL", url)
        assert settings._checked_url("the URL", checked) == checked, "the normal form is its own"


@fuzzed(60)
@given(url=st.one_of(JUNK, URLS), direct=st.one_of(JUNK, URLS), password=st.one_of(JUNK, SECRETS))
def test_arguments_about_the_database_are_refused_by_us_and_nobody_else(url, direct, password):
    with only_our_errors(ConfigError):
        tenure.Node(url, direct_url=direct, password=password)


TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=20)
HOSTS = st.sampled_from(["localhost", "db.example.org", "::1", "fe80::1%eth0", "192.0.2.7", "a-b"])
PORTS = st.integers(1, 65535)


def quoted(text: str) -> str:
    return quote(text, safe="")


@fuzzed(80)
@given(user=TEXTS, password=TEXTS, host=HOSTS, port=PORTS, database=TEXTS)
def test_what_is_percent_encoded_arrives_as_it_was_meant(user, password, host, port, database):
    place = f"[{quoted(host)}]" if ":" in host else host
    address = f"{quoted(user)}:{quoted(password)}@{place}:{port}/{quoted(database)}"
    told = mysql_connect.parse_url(f"mysql://{address}")
    assert told == {"user": user, "password": password, "host": host, "port": port, "database": database}
    told = postgres_connect.parse_url(f"postgresql://{address}")
    assert told == {"user": user, "password": password, "host": host, "port": str(port), "dbname": database}


DRIVERS = st.sampled_from(["postgresql+psycopg", "postgresql+psycopg2", "postgresql+asyncpg", "mysql+pymysql"])


@fuzzed(60)
@given(driver=DRIVERS, user=TEXTS, password=TEXTS, host=st.one_of(HOSTS, TEXTS), port=PORTS, database=TEXTS)
@example(driver="mysql+pymysql", user="u", password="p", host="fe80::1%ee0", port=1, database="d")
def test_engine_and_node_lead_to_the_same_place(driver, user, password, host, port, database):
    url = sqlalchemy.URL.create(driver, user, password, host, port, database)
    engine = sqlalchemy.create_engine(url)
    with only_our_errors(ConfigError) as refused:
        way = handover.target_of(engine)
        told = tenure.Node.from_engine(engine)._engine.backend._connector._parameters
        assert way.password == password
        assert (told["user"], told["host"], int(told["port"])) == (user, host, port)
        assert told.get("database", told.get("dbname")) == database
    assert not refused or host not in ("localhost", "db.example.org", "::1"), "and that takes over any good one"


@fuzzed(60)
@given(
    driver=DRIVERS, name=st.one_of(st.sampled_from(["sslmode", "ssl", "options", "port", "host"]), TEXTS), value=JUNK
)
def test_connect_arguments_of_an_engine_are_taken_over_or_refused(driver, name, value):
    engine = sqlalchemy.create_engine(f"{driver}://me:{CANARY}@host/db", connect_args={name: value})
    with only_our_errors(ConfigError):
        tenure.Node.from_engine(engine)


# --- names --------------------------------------------------------------------------------------------------


@fuzzed(80)
@given(name=st.one_of(ANY_TEXT, JUNK, st.text(min_size=60, max_size=300)))
def test_name_is_in_normal_form_and_stays_so(name):
    with only_our_errors(ConfigError):
        checked = settings.check_name("role", name)
        assert checked == unicodedata.normalize("NFC", name) == settings.check_name("role", checked)
        assert 1 <= len(checked.encode()) <= 255
        assert tenure.Node("sqlite:///x.db", name=name, namespace=name).name == checked


def test_every_name_that_is_accepted_comes_back_from_every_database(store_url):
    """One row each, in one transaction: the same text, and not the same as any other."""
    found: set[str] = set()

    @fuzzed(200)
    @given(name=ANY_TEXT)
    def collect(name):
        with only_our_errors(ConfigError):
            found.add(settings.check_name("role", name))

    collect()
    with tenure.Node(store_url, ttl=30) as node:
        elections = {role: node.election(role) for role in sorted(found)}
        assert {role: election.wait(20).role for role, election in elections.items()} == {role: role for role in found}
        for role in sorted(found)[::20]:
            assert elections[role].leader().role == role
    with tenure.Registry(store_url) as registry:
        assert {info.role for info in registry.roles()} == found


# --- numbers, words, metadata -------------------------------------------------------------------------------

NUMBERS = st.one_of(JUNK, st.floats(0, 4000), st.floats(0, 4000).map(str), st.integers(-5, 4000))


@fuzzed(80)
@given(ttl=NUMBERS, renew_every=NUMBERS, bound=NUMBERS, timeout=NUMBERS)
def test_number_of_seconds_is_within_its_bounds(ttl, renew_every, bound, timeout):
    with only_our_errors(ConfigError):
        told = tenure.Node("sqlite:///x.db", ttl=ttl, renew_every=renew_every)._settings
        assert timing.MIN_TTL_S <= told.ttl <= timing.MAX_TTL_S
        assert settings.MIN_RENEW_EVERY_S <= told.renew_every <= timing.trust(told.ttl) / 2
        assert ttl is None or told.ttl == float(ttl)
    with only_our_errors(ConfigError):
        assert settings.MIN_BOUND_S <= settings.check_bound(bound) <= timing.MAX_TTL_S
    with only_our_errors(ConfigError):
        seconds = settings.check_timeout(timeout)
        assert seconds is None or 0 <= seconds <= settings.MAX_TIMEOUT_S


@fuzzed(80)
@given(limit=JUNK, lock_id=st.one_of(JUNK, st.integers().map(hex), st.integers().map(str)))
def test_number_that_is_counted_by_the_database_fits_it(limit, lock_id):
    with only_our_errors(ConfigError):
        assert 1 <= settings.check_limit(limit) < 2**31
    with only_our_errors(ConfigError):
        number = settings.check_lock_id(lock_id)
        assert -(2**63) <= number < 2**63
        assert settings.check_lock_id(str(number)) == settings.check_lock_id(number) == number


@fuzzed(80)
@given(what=st.sampled_from(["takeover", "mode", "start", "schema"]), value=JUNK)
def test_word_is_one_of_those_that_there_are(what, value):
    with only_our_errors(ConfigError):
        told = tenure.Node("postgresql://host/db", **{what: value})._settings
        assert getattr(told, what) == value


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), ANY_TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(ANY_TEXT, inner, max_size=4)),
    max_leaves=10,
)


@fuzzed(80)
@given(
    metadata=st.one_of(
        st.dictionaries(ANY_TEXT, JSON, max_size=4),
        st.dictionaries(JUNK.filter(lambda one: not isinstance(one, list)), JUNK),
        JUNK,
    )
)
@example(metadata={"a": 10**5000})
@example(metadata={"a": math.nan})
@example(metadata={"a": "x" * 70_000})
def test_metadata_is_json_that_every_database_can_hold(metadata):
    with only_our_errors(ConfigError):
        text = tenure.Node("sqlite:///x.db", metadata=metadata)._settings.metadata
        assert text.isascii()
        assert len(text) <= settings.MAX_METADATA_BYTES
        loaded = json.loads(text)
        if all(isinstance(key, str) for key in metadata or {}):
            assert loaded == dict(metadata or {})


def test_metadata_too_deep_for_json_is_refused():
    deep: dict = {}
    for _ in range(100_000):
        deep = {"in": deep}
    with only_our_errors(ConfigError) as refused:
        tenure.Node("sqlite:///x.db", metadata=deep)
    assert refused


def test_metadata_comes_back_as_it_was_given(store_url):
    largest = {"\0\ud800☃\\": [None, -1.5e300, {"": "x" * 65_000}]}
    with tenure.Node(store_url, metadata=largest) as node, node.lead("r", timeout=20):
        assert node.election("r").candidates()[0].metadata == largest


def test_as_much_history_as_one_likes_can_be_asked_for(store_url):
    with tenure.Node(store_url) as node, node.lead("r", timeout=20):
        assert len(node.election("r").history(limit=10**30)) == 1


# --- the environment and the command line -------------------------------------------------------------------

ENVIRONMENT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=30)


@fuzzed(80)
@given(
    url=st.one_of(URLS.filter(lambda url: "\0" not in url and "\udcff" not in url), st.just("sqlite:///x.db")),
    name=ENVIRONMENT,
    namespace=ENVIRONMENT,
    ttl=st.one_of(ENVIRONMENT, st.floats().map(str)),
)
def test_environment_variables_are_checked_like_arguments(url, name, namespace, ttl):
    told = {"TENURE_URL": url, "TENURE_NAME": name, "TENURE_NAMESPACE": namespace, "TENURE_TTL": ttl}
    with mock.patch.dict(os.environ, told), only_our_errors(ConfigError) as refused:
        assert tenure.Node()._settings.ttl > 0
    for error in refused:
        assert url.startswith("sqlite") or "TENURE_" in str(error) or "URL" in str(error)


WORDS = st.one_of(
    st.sampled_from([*COMMANDS, "--help", "--json", "--", "-n", "--count", "--limit", "--timeout", "--ttl", "--to"]),
    st.sampled_from(["--url", "--namespace", "--schema", "--role", "--hold", "--grants", "--fence", "--dialect"]),
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.just(f"postgresql://me:{CANARY}@[::1/db"),
)
QUIET = sorted(set(COMMANDS) - {"demo", "run", "watch"})


@fuzzed(80)
@given(command=st.sampled_from(QUIET), words=st.lists(WORDS, max_size=5))
def test_command_line_answers_in_its_own_words(command, words, tmp_path_factory):
    with mock.patch.dict(os.environ, {"TENURE_URL": f"sqlite:///{tmp_path_factory.getbasetemp()}/none.db"}):
        answer = CliRunner().invoke(main, [command, *words])
    assert answer.exception is None or isinstance(answer.exception, SystemExit), (answer.exc_info, words)
    assert answer.exit_code in (0, 1, 2, 130)  # the last where it asks and nobody answers
    if command != "sql":  # which prints what it is given, as SQL
        assert PIECE not in answer.output
    if answer.exit_code == 2:
        assert len(answer.stderr) > 10
