"""The commands for guarded tables: what they print, what they leave with, and what the doctor says about guards."""

from __future__ import annotations

import json
import subprocess

import pytest

import tenure
from tests.cli.test_cli import Answer, cron, tell
from tests.cli.test_cli_doctor import Visit, permit
from tests.support.store_by_hand import Desk, connected, execute

NOT_YET = "no node has stood for role 'billing' in namespace 'default' yet\n"


@pytest.fixture(params=["postgres", "mariadb"])
def url(request):
    """A database with tables of Tenure, and a table of the application."""
    url = request.getfixturevalue(f"{request.param}_url")
    with Desk(url, join=False):
        execute(url, "create table invoices (n int)")
    return url


@pytest.fixture
def postgres(postgres_url):
    with Desk(postgres_url, join=False):
        execute(postgres_url, "create table invoices (n int)")
    return postgres_url


def refuses(url: str, table: str = "invoices") -> bool:
    with connected(url) as connection:
        try:
            with tenure.translate_unfenced():
                connection.execute(f"insert into {table} values (1)")
        except tenure.Unfenced:
            return True
    return False


def guarded(url: str) -> list[tuple[str, str, str]]:
    found = json.loads(tell("guards", "--json", url=url).out)
    assert all(set(one) == {"table", "namespace", "role", "leaks"} for one in found)
    return [(one["table"].removeprefix("public."), one["namespace"], one["role"]) for one in found]


# --- guard --------------------------------------------------------------------------------------------------


def test_guard_and_remove_say_what_they_did(url):
    answer = Answer("guards", url=url)
    assert (answer.code, answer.out, answer.err) == (0, "", "no table is guarded\n")
    assert guarded(url) == []
    with Desk(url) as desk:
        desk.stand("billing")
    answer = tell("guard", "invoices", "--role", "billing", url=url)
    assert answer.out == "invoices: only the leader of role 'billing' can write to it now\n"
    assert refuses(url)
    assert guarded(url) == [("invoices", "default", "billing")]
    assert tell("guard", "invoices", "--remove", url=url).out == "invoices: not guarded any more\n"
    assert not refuses(url)
    answer = Answer("guard", "invoices", "--remove", url=url)
    assert (answer.code, answer.out) == (2, "")
    assert "table 'invoices' is not guarded" in answer.err


def test_guard_for_a_role_that_no_node_has_stood_for_says_so(url):
    answer = Answer("guard", "invoices", "--role", "billing", url=url)
    assert (answer.code, answer.err) == (0, NOT_YET)
    assert refuses(url)


@pytest.mark.parametrize("role", ["it's; a:role/%s {x}", "rôle 1"])
def test_awkward_names_are_shown_as_they_are_and_fenced_writes_pass(url, role):
    answer = Answer("guard", "invoices", "--role", role, "--namespace", "blue's", url=url)
    assert answer.code == 0
    assert guarded(url) == [("invoices", "blue's", role)]
    with tenure.Node(url, namespace="blue's") as node, node.lead(role) as term, term.transaction() as transaction:
        transaction.execute("insert into invoices values (1)")
    assert refuses(url)
    answer = Answer("forget", "blue's", "--yes", url=url)
    assert answer.code == 2
    assert "remove the guards first" in answer.err


@pytest.mark.parametrize("arguments", [(), ("--role", "billing", "--remove")])
def test_guard_takes_either_a_role_or_remove(url, arguments):
    answer = Answer("guard", "invoices", *arguments, url=url)
    assert (answer.code, answer.out) == (2, "")
    assert "give either --role, to guard the table, or --remove" in answer.err
    assert guarded(url) == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("nothing", "--role", "billing"), "table 'nothing'"),
        (("", "--role", "billing"), "table=''"),
        (("invoices", "--role", ""), "role=''"),
        (("nothing", "--remove"), "nothing"),
    ],
)
def test_what_cannot_be_guarded_is_one_line(url, arguments, why):
    answer = Answer("guard", *arguments, url=url)
    assert (answer.code, answer.out) == (2, "")
    assert why in answer.err
    assert len(answer.err.splitlines()) == 1
    assert guarded(url) == []


@pytest.mark.parametrize(
    "command", [("guard", "invoices", "--role", "r"), ("guard", "invoices", "--remove"), ("guards",)]
)
@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_database_without_tables_is_one_line(kind, command, request):
    answer = Answer(*command, url=request.getfixturevalue(f"{kind}_url"))
    assert (answer.code, answer.out) == (2, "")
    assert "there are no tables of Tenure" in answer.err


def test_sqlite_is_refused(sqlite_url):
    with Desk(sqlite_url, join=False):
        for arguments in (("--role", "billing"), ("--remove",)):
            answer = Answer("guard", "invoices", *arguments, url=sqlite_url)
            assert (answer.code, answer.out) == (2, "")
            assert answer.err.startswith("tenure: SQLite cannot guard a table")
        assert guarded(sqlite_url) == []


# --- the statements -----------------------------------------------------------------------------------------


def run_in_psql(server, url: str, script: str) -> None:
    psql = [str(server.installation.bindir / "psql"), "-X", "-v", "ON_ERROR_STOP=1", url]
    done = subprocess.run(psql, input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("role", ["billing", "it's; a:role \\"])
def test_printed_statements_guard_and_remove_in_psql(postgres, postgres_server, role):
    run_in_psql(postgres_server, postgres, Answer("guard", "invoices", "--role", role, "--sql").out)
    assert guarded(postgres) == [("invoices", "default", role)]
    assert refuses(postgres)
    run_in_psql(postgres_server, postgres, Answer("guard", "invoices", "--remove", "--sql").out)
    assert guarded(postgres) == []


def statements_of(script: str) -> list[str]:
    """Read a script as MariaDB's client does: a line `delimiter` says what ends a statement."""
    found, delimiter, open_ = [], ";", ""
    for line in script.splitlines(keepends=True):
        if line.startswith("delimiter "):
            delimiter = line.split()[1]
            continue
        open_ += line
        while delimiter in open_:
            statement, _, open_ = open_.partition(delimiter)
            found.append(statement)
    assert not open_.strip()
    return found


@pytest.mark.parametrize("role", ["billing", "it's; a:role // \\"])
def test_printed_statements_guard_and_remove_on_mariadb(mariadb_url, role):
    with Desk(mariadb_url, join=False):
        execute(mariadb_url, "create table invoices (n int)")
    script = Answer("guard", "invoices", "--role", role, "--sql", "--dialect", "mysql").out
    execute(mariadb_url, *statements_of(script))
    assert guarded(mariadb_url) == [("invoices", "default", role)]
    assert refuses(mariadb_url)
    script = Answer("guard", "invoices", "--remove", "--sql", "--dialect", "mysql").out
    execute(mariadb_url, *statements_of(script))
    assert guarded(mariadb_url) == []


def test_statements_need_no_database_and_no_url(tmp_path):
    done = cron("guard", "invoices", "--role", "billing", "--sql", home=tmp_path, TENURE_REQUIRE_URL="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "select \"tenure\".guard_table('invoices', 'default', 'billing');\n"
    answer = Answer("guard", "invoices", "--role", "b", "--namespace", "blue", "--schema", "other", "--sql")
    assert answer.out == "select \"other\".guard_table('invoices', 'blue', 'b');\n"
    answer = Answer("guard", "invoices", "--role", "b", "--sql", "--dialect", "sqlite")
    assert answer.code == 2


# --- guards, and the doctor ---------------------------------------------------------------------------------


def test_guards_shows_each_table_with_its_leaks(postgres):
    execute(postgres, "create table parts (n int) partition by range (n)", "create table low (n int)")
    for table in ("invoices", "parts"):
        Answer("guard", table, "--role", "billing", url=postgres)
    header, *rows = tell("guards", url=postgres).lines
    assert header == ["TABLE", "NAMESPACE", "ROLE", "LEAKS"]
    assert [row[:3] for row in rows] == [
        ["public.invoices", "default", "billing"],
        ["public.parts", "default", "billing"],
    ]
    assert all("is a superuser" in row[3] for row in rows)


def test_doctor_says_that_no_table_is_guarded(url):
    visit = Visit(url)
    assert (visit.levels["guards"], visit.texts["guards"]) == ("ok", "no table is guarded")


@pytest.fixture
def worker(postgres, postgres_server):
    """A user of the application, who owns nothing, and the URL under which it connects."""
    database = postgres.rpartition("/")[2]
    name = f"guards-{database}"
    execute(postgres, f'create role "{name}" login', f'grant insert, truncate on invoices to "{name}"')
    permit(postgres, name)
    yield postgres_server.url(database, user=name)
    execute(postgres, f'drop owned by "{name}"', f'drop role "{name}"')


def test_doctor_finds_a_tight_guard_in_order(postgres, worker):
    Answer("guard", "invoices", "--role", "billing", url=postgres)
    visit = Visit(worker)
    assert (visit.levels["guards"], visit.texts["guards"]) == ("ok", "public.invoices (role 'billing')")
    assert refuses(worker)
    assert guarded(worker) == [("invoices", "default", "billing")]


@pytest.mark.parametrize(
    ("leak", "says"),
    [
        ("alter table invoices disable trigger tenure_guard", "is disabled"),
        ("alter table invoices enable trigger tenure_guard", "is not ENABLE ALWAYS"),
    ],
)
def test_doctor_warns_of_a_leak_and_its_remedy_mends_it(postgres, worker, leak, says):
    Answer("guard", "invoices", "--role", "billing", url=postgres)
    execute(postgres, leak)
    visit = Visit(worker)
    assert visit.levels["guards"] == "warning"
    assert visit.texts["guards"].startswith("public.invoices (role 'billing'): trigger tenure_guard")
    assert says in visit.texts["guards"]
    assert visit.remedies["guards"] == "guard the table again"
    assert Visit(worker, "--strict").code == 1
    assert Answer("guard", "invoices", "--role", "billing", url=postgres).code == 0
    assert Visit(worker).levels["guards"] == "ok"


def test_doctor_warns_of_a_partition_that_was_attached_later(postgres, worker):
    execute(postgres, "create table parts (n int) partition by range (n)", "create table low (n int)")
    Answer("guard", "parts", "--role", "billing", url=postgres)
    execute(postgres, "alter table parts attach partition low for values from (0) to (10)")
    visit = Visit(worker)
    assert "public.low, a part of it, can be truncated" in visit.texts["guards"]
    Answer("guard", "parts", "--role", "billing", url=postgres)
    assert Visit(worker).levels["guards"] == "ok"


def test_doctor_warns_a_superuser(postgres):
    Answer("guard", "invoices", "--role", "billing", url=postgres)
    visit = Visit(postgres)
    assert visit.levels["guards"] == "warning"
    assert "is a superuser" in visit.texts["guards"]


def test_doctor_and_guards_work_for_a_user_of_mariadb_who_sees_no_trigger(mariadb_server, mariadb_url):
    with Desk(mariadb_url, join=False):
        execute(mariadb_url, "create table invoices (n int)")
    Answer("guard", "invoices", "--role", "billing", url=mariadb_url)
    assert "may TRUNCATE" in Visit(mariadb_url).texts["guards"]
    database = mariadb_url.rpartition("/")[2]
    mariadb_server.execute("create user 'worker'@'127.0.0.1'")
    mariadb_server.execute(f"grant select, insert, update, delete on `{database}`.* to 'worker'@'127.0.0.1'")
    try:
        url = mariadb_server.url(database, user="worker")
        assert guarded(url) == [("invoices", "?", "?")]
        visit = Visit(url)
        assert (visit.levels["guards"], visit.texts["guards"]) == ("ok", "invoices (role '?')")
        assert refuses(url)
    finally:
        mariadb_server.execute("drop user 'worker'@'127.0.0.1'")
