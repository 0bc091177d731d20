"""Django: real projects, real servers, and real tests of Django's own kinds.

Each project runs in its own processes: Django can be configured only once in a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from tenure import Node, Registry, TenureError
from tests.conftest import missing
from tests.integrations.cluster import PATIENCE_S, ROOT, Process, Replicas
from tests.support.secrets import CANARY
from tests.support.servers import free_port

HERE = ROOT / "tests" / "integrations" / "django_project"
SETTINGS = "tests.integrations.django_project.settings"
DOCUMENT = ROOT / "docs" / "how-to" / "django.md"

Done = subprocess.CompletedProcess


def python(*arguments: object, url: str = "", cwd: Path = ROOT, timeout: float = 100, **environment: str) -> Done[str]:
    """Run a Python program to its end."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TENURE_URL": url, **environment}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=cwd, timeout=timeout, check=False)


def manage(url: str, *arguments: str) -> Done[str]:
    return python(HERE / "manage.py", *arguments, url=url)


@contextlib.contextmanager
def running(directory: Path, *arguments: object, name: str = "server", **environment: str) -> Iterator[Process]:
    """A Python program that goes on; what it said is printed, for pytest to show beside a failure."""
    process = Process(name, [sys.executable, *map(str, arguments)], environment, directory)
    try:
        yield process
    finally:
        process.close()
        print(process.output())


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """Wait until it holds, and return what it returned."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what}"
        time.sleep(0.05)
    return found


def members(url: str) -> dict[int, tuple[str, ...]]:
    """The pids of the living members, and what they lead."""
    try:
        with Registry(url) as registry:
            return {member.pid: member.leads for member in registry.members()}
    except TenureError:  # no tables yet
        return {}


def leader(url: str, role: str) -> int | None:
    return next((pid for pid, leads in members(url).items() if role in leads), None)


# --- the fence ----------------------------------------------------------------------------------------------


def test_the_fence_in_atomic_blocks_and_in_djangos_own_test_cases(one_url):
    done = manage(one_url, "test", "tests.integrations.django_project.ledger.fence_cases")
    assert done.returncode == 0, done.stderr
    assert "Ran 26 tests" in done.stderr


# --- settings -----------------------------------------------------------------------------------------------

PROGRAM = """
import json, os
from django.conf import settings
given = json.loads(os.environ.pop("GIVEN"))  # not in the list of processes, which other tests search for passwords
if any(database["ENGINE"].endswith("mysql") for database in given["DATABASES"].values()):
    import pymysql
    pymysql.install_as_MySQLdb()
settings.configure(**given, INSTALLED_APPS=["tenure.integrations.django"])
import django
django.setup()
"""


def arguments_of(tenure: dict[str, Any], **databases: dict[str, Any]) -> str:
    """What a node would be made with; or what is wrong, on the last line."""
    program = PROGRAM + textwrap.dedent("""
        from tenure.integrations.django import node_arguments
        arguments = node_arguments()
        if "password" in arguments:
            arguments["password"] = arguments["password"]()
        print(json.dumps(arguments))
    """)
    done = python("-c", program, GIVEN=json.dumps({"TENURE": tenure, "DATABASES": databases}))
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


POSTGRES = {"ENGINE": "django.db.backends.postgresql", "NAME": "app", "USER": "me", "PASSWORD": CANARY}
MYSQL = {"ENGINE": "django.db.backends.mysql", "NAME": "app", "USER": "m@e", "PASSWORD": CANARY, "HOST": "db"}
SQLITE = {"ENGINE": "django.db.backends.sqlite3", "NAME": "app.db"}


def test_postgres_is_taken_over_with_its_options_and_the_password_apart():
    options = {"sslmode": "verify-full", "assume_role": "app owner", "isolation_level": 2, "client_encoding": "UTF8"}
    database = POSTGRES | {"HOST": "/run/postgresql", "PORT": 5433, "OPTIONS": options}
    arguments = json.loads(arguments_of({"TTL": 5, "NAMESPACE": "blue"}, default=database))
    parameters = psycopg.conninfo.conninfo_to_dict(arguments.pop("url"))
    assert arguments == {"ttl": 5, "namespace": "blue", "password": CANARY}
    assert parameters == {
        "dbname": "app",
        "user": "me",
        "host": "/run/postgresql",
        "port": "5433",
        "sslmode": "verify-full",
        "options": r"-c role=app\ owner",
    }


def test_mariadb_is_taken_over_with_its_options_and_the_password_apart():
    options = {"ssl": {"ca": "/ca.pem"}, "ssl_mode": "VERIFY_CA", "connect_timeout": 3, "init_command": "set x = 1"}
    arguments = json.loads(arguments_of({}, default=MYSQL | {"PORT": "3307", "OPTIONS": options}))
    assert arguments == {
        "url": "mysql://m%40e@db:3307/app?connect_timeout=3&ssl_ca=%2Fca.pem&ssl_verify_cert=true"
        "&ssl_verify_identity=false",
        "password": CANARY,
    }


def test_mariadb_by_a_socket():
    arguments = json.loads(arguments_of({}, default=MYSQL | {"HOST": "/run/mysqld.sock"}))
    assert arguments["url"] == "mysql://m%40e@localhost/app?unix_socket=%2Frun%2Fmysqld.sock"


def test_sqlite_is_taken_over_as_an_absolute_path():
    assert json.loads(arguments_of({}, default=SQLITE)) == {"url": f"sqlite:///{ROOT}/app.db"}


def test_another_database_can_be_named_or_given():
    one, other = SQLITE, SQLITE | {"NAME": "/other.db"}
    assert "/other.db" in arguments_of({"DATABASE": "other"}, default=one, other=other)
    assert json.loads(arguments_of({"URL": "sqlite:///mine.db"}, default=POSTGRES)) == {"url": "sqlite:///mine.db"}


@pytest.mark.parametrize(
    ("tenure", "database", "complaint"),
    [
        ({"ttl": 5}, SQLITE, "TENURE has the unknown key 'ttl': use only DATABASE, URL,"),
        ({"DATABASE": "other"}, SQLITE, "TENURE['DATABASE'] is 'other', which is not in DATABASES"),
        ({"DATABASE": "default", "URL": "sqlite:///x"}, SQLITE, "both DATABASE and URL: leave one"),
        ({"PASSWORD": CANARY}, POSTGRES, "TENURE has PASSWORD without URL"),
        ({}, SQLITE | {"NAME": ":memory:"}, "in memory or a file: URI"),
        ({}, POSTGRES | {"OPTIONS": {"tracing": 1}}, "the option 'tracing', which only its driver understands"),
        ({}, MYSQL | {"OPTIONS": {"read_default_file": "/my.cnf"}}, "the option 'read_default_file', which"),
        ({}, MYSQL | {"OPTIONS": {"ssl": {"cipher": "x"}}}, "has options about TLS, which only its driver"),
        ({}, POSTGRES | {"NAME": ""}, "DATABASES['default'] cannot be used"),
        ({}, {"ENGINE": "django.db.backends.dummy"}, "is on unknown, but Tenure needs PostgreSQL"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_cannot_be_taken_over_is_named_with_a_remedy(tenure, database, complaint):
    said = arguments_of(tenure, default=database)
    assert said.startswith("tenure.errors.ConfigError: ")
    assert complaint in said
    assert CANARY not in said


@pytest.mark.parametrize(
    ("call", "tenure", "database"),
    [
        ("node_arguments()", {"URL": f"postgresql://me:{CANARY}@host/db", "ttl": 5}, SQLITE),
        ("node_arguments()", {"URL": f"postgresql://me:{CANARY}@host/db", "DATABASE": "default"}, SQLITE),
        ("node_arguments()", {"PASSWORD": CANARY}, POSTGRES),
        ("node_arguments()", {}, POSTGRES | {"OPTIONS": {"tracing": 1, "sslpassword": CANARY}}),
        ("call_command('tenure_status')", {"URL": f"postgresql://me:{CANARY}@host:port/db"}, SQLITE),
        ("call_command('tenure_status')", {"URL": "postgresql://host/db", "PASSWORD": CANARY + "\0"}, SQLITE),
    ],
)
def test_an_error_has_no_password_in_the_variables_of_its_traceback(call, tenure, database):
    program = PROGRAM + textwrap.dedent(f"""
        from django.core.management import call_command
        from tenure.integrations.django import node_arguments
        from tests.support.secrets import PIECE, _told_by
        try:
            {call}
        except Exception as error:
            error = error.with_traceback(error.__traceback__.tb_next)  # without this program, which knows it
            print([text for text in _told_by(error) if PIECE in text])
    """)
    done = python("-c", program, GIVEN=json.dumps({"TENURE": tenure, "DATABASES": {"default": database}}))
    assert done.stdout == "[]\n", done.stderr


def test_a_password_is_asked_for_anew_with_each_connection_of_the_node():
    """As of a backend that makes up tokens."""
    program = PROGRAM + textwrap.dedent("""
        from django.db.backends.postgresql.base import DatabaseWrapper
        from tenure.integrations.django import node_arguments
        plain, tokens = DatabaseWrapper.get_connection_params, iter("abc")
        DatabaseWrapper.get_connection_params = lambda self: plain(self) | {"password": next(tokens)}
        arguments = node_arguments()
        print(arguments["password"](), arguments["password"]())
    """)
    done = python("-c", program, GIVEN=json.dumps({"DATABASES": {"default": POSTGRES}}))
    assert done.stdout.split() == ["b", "c"], done.stderr


def test_check_warns_of_settings_that_cannot_work():
    program = PROGRAM + "from django.core.management import call_command; call_command('check')"
    for tenure, found in (({"TTL": 5}, False), ({"TTL": "five"}, True)):
        done = python("-c", program, GIVEN=json.dumps({"TENURE": tenure, "DATABASES": {"default": SQLITE}}))
        assert done.returncode == 0
        assert ("(tenure.W001) Tenure cannot elect a leader: ttl='five'" in done.stderr) is found, done.stderr


def test_tls_that_django_requires_is_required_of_the_node(mariadb_url):
    url = urlsplit(mariadb_url)
    if "ssl_" in url.query:
        missing("MariaDB without TLS")
    database = MYSQL | {"HOST": url.hostname, "PORT": url.port, "USER": url.username, "PASSWORD": url.password or ""}
    database |= {"NAME": url.path[1:], "OPTIONS": {"ssl_mode": "REQUIRED"}}
    arguments = json.loads(arguments_of({}, default=database))
    with pytest.raises(TenureError, match=r"(?i)ssl|tls"), Node(**arguments):
        pass


# --- the node of a process ----------------------------------------------------------------------------------


def test_neither_commands_nor_imports_start_an_election(sqlite_url):
    for arguments in (["migrate", "--run-syncdb"], ["check"], ["shell", "-c", "import tests.integrations"]):
        assert manage(sqlite_url, *arguments).returncode == 0
    assert "no tables of Tenure" in manage(sqlite_url, "tenure_status").stderr


def test_a_process_has_one_node_and_a_forked_child_its_own(sqlite_url):
    program = textwrap.dedent("""
        import os, django
        django.setup()
        from tenure import NodeClosed
        from tenure.integrations.django import get_node, start, stop
        node = get_node()
        assert get_node() is node
        try:
            node.election("scheduler")
        except NodeClosed as error:
            print("not started:", "call start()" in str(error))
        assert start() is start() is node
        name = node.name
        if os.fork() == 0:
            print("in the child:", get_node() is node, get_node().name == name, flush=True)
            os._exit(0)
        os.wait()
        print("in the parent:", get_node() is node)
        stop()
        print("after stop:", get_node() is node)
    """)
    done = python("-W", "ignore", "-c", program, url=sqlite_url, DJANGO_SETTINGS_MODULE=SETTINGS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "not started: True", "in the child: False False", "in the parent: True", "after stop: False",
    ]  # fmt: skip


def test_services_run_on_the_leader_and_close_djangos_connections_when_they_end(postgres_url):
    program = textwrap.dedent("""
        import gc, threading, django
        django.setup()
        from django.db import connection
        from tenure.integrations.django import everywhere, get_node, leader_only, process, start, stop
        process._services.clear()  # those of the project

        @leader_only("books", on_failure="resign")
        def books(term):
            with connection.cursor() as cursor:
                cursor.execute("select 1")
            leads.set()
            term.wait_lost()

        @everywhere(name="always")
        def serve(until):
            serves.set()
            until.wait()

        leads, serves = threading.Event(), threading.Event()
        start()
        print(leads.wait(60), serves.wait(60), sorted(info.name for info in get_node().services()))
        print(get_node().election("books").is_leader)
        stop()
        gc.collect()
    """)
    warn = ("-W", "always::ResourceWarning")
    done = python(*warn, "-c", program, url=postgres_url, DJANGO_SETTINGS_MODULE=SETTINGS)
    assert done.stdout == "True True ['always', 'books']\nTrue\n", done.stderr
    assert "still open" not in done.stderr


def test_without_django_the_import_says_what_to_install():
    done = python("-c", "import sys; sys.modules['django'] = None; import tenure.integrations.django")
    assert "ConfigError: django is not installed: pip install 'tenure[django]'" in done.stderr


def test_a_database_that_is_away_keeps_no_server_from_starting():
    program = textwrap.dedent("""
        from tenure.integrations.django import start
        start()
        print("started")
    """)
    database = POSTGRES | {"HOST": "127.0.0.1", "PORT": free_port()}
    for tenure, said in (({}, "started\n"), ({"START": "raise"}, "")):
        done = python("-c", PROGRAM + program, GIVEN=json.dumps({"TENURE": tenure, "DATABASES": {"default": database}}))
        assert done.stdout == said
        assert done.returncode == (0 if said else 1), done.stderr
        assert CANARY not in done.stderr


# --- commands -----------------------------------------------------------------------------------------------


def test_a_leader_command_runs_on_the_leader_and_says_why_not_elsewhere(postgres_url, tmp_path):
    assert manage(postgres_url, "migrate", "--run-syncdb").returncode == 0
    with running(tmp_path, HERE / "manage.py", "close_books", "--for", "1000", TENURE_URL=postgres_url) as process:
        eventually(lambda: "closed" in process.output(), "the command to work")
        name = re.search(r"(\S+): elected role books", process.output())[1]
        done = manage(postgres_url, "close_books")
        assert done.returncode == 75, done.stderr
        assert f"CommandError: role 'books': {name} leads; nothing was done" in done.stderr
        assert not done.stdout
        status = json.loads(manage(postgres_url, "tenure_status", "--json").stdout)
        assert [role["leader"]["name"] for role in status["roles"]] == [name]
        assert name in manage(postgres_url, "tenure_status").stdout
    assert manage(postgres_url, "close_books").stdout == "closed\n"


def test_a_leader_command_waits_if_told_to_and_ends_when_leadership_is_lost(sqlite_url, tmp_path):
    program = textwrap.dedent("""
        import sys, django
        django.setup()
        from django.core.management.base import BaseCommand
        from tenure.integrations.django import leader_command
        wait = eval(sys.argv[1])

        @leader_command("books", wait=wait)
        class Command(BaseCommand):
            def handle(self, **options):
                self.stdout.write(f"leads with token {self.term.token}")
                self.stdout.flush()
                self.term.wait_lost()
                self.term.ensure()

        Command().run_from_argv(["manage.py", "books"])
    """)
    environment = {"TENURE_URL": sqlite_url, "DJANGO_SETTINGS_MODULE": SETTINGS}
    with Node(sqlite_url, name="the-other") as node, running(tmp_path, "-c", program, "True", **environment) as waiting:
        with node.lead("books"):
            eventually(lambda: "role 'books': the-other leads; waiting" in waiting.output(), "a word")
            done = python("-c", program, "0.2", url=sqlite_url, DJANGO_SETTINGS_MODULE=SETTINGS)
            assert done.returncode == 124, done.stderr
            assert "leads with" not in waiting.output()
        eventually(lambda: "leads with token 2" in waiting.output(), "its turn")
        with Registry(sqlite_url) as registry:
            registry.resign("books")
        assert waiting.wait() == 76
        assert "the term with token 2 is over (resigned)" in waiting.output()


def test_tenure_run_runs_a_management_command_while_it_leads(postgres_url, tmp_path):
    arguments = ["tenure_run", "--role", "worker", "work", "--say", "a b"]
    with running(tmp_path, HERE / "manage.py", *arguments, name="one", TENURE_URL=postgres_url) as one:
        said = eventually(lambda: re.search(r'^\{"say".*', one.output(), re.MULTILINE), "the command to work")[0]
        surroundings = json.loads(said)
        assert surroundings["say"] == "a b"
        assert surroundings["TENURE_ROLE"] == "worker"
        assert manage(postgres_url, "tenure_run", "--no-wait", *arguments[1:]).returncode == 75
        with running(tmp_path, HERE / "manage.py", *arguments, name="other", TENURE_URL=postgres_url) as other:
            os.kill(one.process.pid, signal.SIGKILL)
            eventually(lambda: '{"say"' in other.output(), "the other's command to work")
            eventually(lambda: not Path(f"/proc/{surroundings['pid']}").exists(), "the first command to be gone")
            other.process.send_signal(signal.SIGTERM)
            assert other.wait() == 128 + signal.SIGTERM


def test_tenure_run_says_what_it_cannot_run(sqlite_url):
    for arguments, code, said in (
        (["nothing"], 1, "there is no management command 'nothing'"),
        (["--restart", "--no-wait", "work"], 1, "--restart never exits"),
        (["--hold", "-1", "work"], 2, "-1.0 is not in the range"),
    ):
        done = manage(sqlite_url, "tenure_run", *arguments)
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    done = python("-m", "django", "tenure_run", "work", "--no-wait", url=sqlite_url, DJANGO_SETTINGS_MODULE=SETTINGS)
    assert done.returncode == 2
    assert "work: error: unrecognized arguments: --no-wait" in done.stderr  # what follows the command is its own


def test_the_password_is_in_no_process_list_and_no_log(postgres_server, tmp_path):
    place = urlsplit(postgres_server.create_database("with_password"))
    postgres_server.execute(f"create role canary login superuser password '{CANARY}'")
    url = f"postgresql://canary:{CANARY.replace('+', '%2B')}@{place.hostname}:{place.port}/with_password"
    try:
        with running(tmp_path, HERE / "manage.py", "tenure_run", "-v", "2", "work", TENURE_URL=url) as process:
            eventually(lambda: '{"say"' in process.output(), "the command to work")
            for pid in process.pids:
                assert CANARY not in Path(f"/proc/{pid}/cmdline").read_text()
            said = [line for line in process.output().splitlines() if not line.startswith('{"say"')]
            assert CANARY not in "".join(said)
    finally:
        postgres_server.drop_database("with_password")
        postgres_server.execute("drop role canary")


# --- the documents, on real servers -------------------------------------------------------------------------


def blocks() -> dict[str, str]:
    """The files that the document shows, by their names."""
    found = re.findall(r"^```py\n# (\S+)\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    assert len(found) == DOCUMENT.read_text().count("```py\n"), "a block without the name of its file"
    return dict(found)


class Shop:
    """The project of the document, on top of what `startproject` and `startapp` make."""

    def __init__(self, directory: Path, url: str, *, preload: bool = False) -> None:
        place = urlsplit(url)
        self.root, self.url = directory / "shop", url
        self.root.mkdir()
        self.run("-m", "django", "startproject", "shop", self.root)
        self.run("manage.py", "startapp", "billing")
        written = blocks()
        settings = self.root / "shop" / "settings.py"
        database = POSTGRES | {"NAME": place.path[1:], "USER": place.username, "PASSWORD": place.password or ""}
        database |= {"HOST": place.hostname, "PORT": place.port}
        more = f"DATABASES = {{'default': {database}}}\nTENURE = {{'TTL': 3}}\nUSE_TZ = True\n"
        settings.write_text(settings.read_text() + written.pop("shop/settings.py") + more)
        (self.root / "billing" / "models.py").write_text(
            "from django.db import models\n\n\nclass Reminder(models.Model):\n    token = models.BigIntegerField()\n"
        )
        (self.root / "shop" / "urls.py").write_text(
            "from django.urls import path\n\nfrom billing.views import leader\n\nurlpatterns = [path('', leader)]\n"
        )
        migration = written.pop("billing/migrations/0002_tenure.py")
        if preload:
            del written["shop/wsgi.py"]
        for name, text in written.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.run("manage.py", "makemigrations", "billing")
        (self.root / "billing" / "migrations" / "0002_tenure.py").write_text(migration)
        self.run("manage.py", "migrate")

    def run(self, *arguments: object) -> Done[str]:
        done = python(*arguments, cwd=self.root)
        assert done.returncode == 0, done.stderr
        return done

    def gunicorn(self, port: int) -> list[object]:
        configuration = ["--config", self.root / "gunicorn.conf.py", "--chdir", self.root, "--no-control-socket"]
        return ["-m", "gunicorn", *configuration, "--bind", f"127.0.0.1:{port}", "shop.wsgi"]

    def reminders(self, token: int) -> int:
        with psycopg.connect(self.url) as connection:
            return connection.execute("select count(*) from billing_reminder where token = %s", (token,)).fetchone()[0]

    def token(self) -> int:
        with Registry(self.url) as registry:
            return registry.roles()[0].token


def ask(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=PATIENCE_S) as answer:
        return json.load(answer)


def test_what_the_document_shows_works(postgres_url, tmp_path):
    shop = Shop(tmp_path, postgres_url)
    assert "no issues" in shop.run("manage.py", "check").stdout
    done = shop.run("manage.py", "test")
    assert "Ran 2 tests" in done.stderr
    shop.run("manage.py", "close_books")
    assert "books" in shop.run("manage.py", "tenure_status").stdout


def test_under_gunicorn_with_preload_one_of_four_workers_leads_and_another_if_it_is_killed(postgres_url, tmp_path):
    shop = Shop(tmp_path, postgres_url, preload=True)
    port = free_port()
    with running(tmp_path, *shop.gunicorn(port)) as server:
        eventually(lambda: len(members(shop.url)) == 4, "four workers to stand")
        first = eventually(lambda: leader(shop.url, "scheduler"), "one to lead")
        assert server.process.pid not in members(shop.url)
        eventually(lambda: shop.reminders(1), "the service to write")
        assert ask(port)["leader"].endswith(f"-{first}")
        os.kill(first, signal.SIGKILL)
        second = eventually(lambda: (leader(shop.url, "scheduler") or first) != first, "another to lead")
        assert second
        eventually(lambda: shop.reminders(2), "its service to write")
        eventually(lambda: len(members(shop.url)) == 4, "the replacement to stand")
        assert shop.reminders(1) + shop.reminders(2) == sum(map(shop.reminders, range(1, shop.token() + 1)))
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    assert members(shop.url) == {}, "the workers left without a word"


def test_start_in_gunicorns_master_is_refused_with_a_remedy(postgres_url, tmp_path):
    shop = Shop(tmp_path, postgres_url)  # wsgi.py calls start()
    with running(tmp_path, *shop.gunicorn(free_port())) as server:
        assert server.wait() != 0
        assert "with preload_app, call it in the post_worker_init of gunicorn.conf.py" in server.output()


def test_under_runserver_one_process_stands_and_a_reload_hands_over(postgres_url, tmp_path):
    shop = Shop(tmp_path, postgres_url)
    port = free_port()
    with running(tmp_path, shop.root / "manage.py", "runserver", port) as server:
        first = eventually(lambda: leader(shop.url, "scheduler"), "the server to lead")
        assert first != server.process.pid, "the reloader's parent stands"
        assert ask(port)["leads"] is True
        assert list(members(shop.url)) == [first]
        eventually(lambda: shop.reminders(1), "the service to write")
        jobs = shop.root / "billing" / "jobs.py"
        jobs.write_text(jobs.read_text() + "\n# changed\n")
        second = eventually(lambda: leader(shop.url, "scheduler") not in (first, None), "the reloaded server to lead")
        assert second
        eventually(lambda: shop.reminders(2), "its service to write")
        assert list(members(shop.url)) == [leader(shop.url, "scheduler")]
        with Registry(shop.url) as registry:
            assert [past.reason for past in registry.history("scheduler", 2)] == [None, "resigned"]


# --- the example, and the cluster ---------------------------------------------------------------------------


def test_the_example_runs_as_it_says(tmp_path):
    example = ROOT / "examples" / "django_app.py"
    assert len(example.read_text().splitlines()) < 40
    port, other, url = free_port(), free_port(), f"sqlite:///{tmp_path}/django_app.db"
    start = [
        "-c",
        "import os, sys; os.chdir(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])",
        tmp_path,
        sys.executable,
    ]
    gunicorn = ["-m", "gunicorn", "--pythonpath", example.parent, "--workers", "2", "--no-control-socket"]

    def ticks(token: int) -> bool:
        connected = contextlib.closing(sqlite3.connect(f"{tmp_path}/django_app.db"))
        with connected as connection, contextlib.suppress(sqlite3.OperationalError):  # no table yet
            return bool(connection.execute("select 1 from ticks where token = ?", (token,)).fetchone())
        return False

    with (
        running(tmp_path, *start, example, "runserver", port, name="runserver"),
        running(tmp_path, *start, *gunicorn, "--bind", f"127.0.0.1:{other}", "django_app", name="gunicorn"),
    ):
        eventually(lambda: len(members(url)) == 3, "three to stand")
        before = eventually(lambda: leader(url, "ticker"), "one to lead")
        eventually(lambda: ticks(1), "it to tick")
        assert sum(ask(at)["leads"] for at in (port, other)) <= 1
        os.kill(before, signal.SIGKILL)
        eventually(lambda: ticks(2), "another to tick")
    assert "ticker" in python(*start, example, "tenure_status").stdout


def test_four_replicas_under_torment_run_every_due_second_at_most_once(postgres_url, tmp_path, record_property):
    wsgi = "tests.integrations.django_project.wsgi"
    command = [sys.executable, "-m", "gunicorn", "--workers", "1", "--no-control-socket", "--bind", "127.0.0.1:0", wsgi]
    environment = {"DJANGO_SETTINGS_MODULE": SETTINGS}
    with Replicas(postgres_url, tmp_path, command, role="scheduler", environment=environment) as replicas:
        runs = replicas.torment(record_property)
        assert runs.duplicates == []
        assert runs.stale == []
