"""Whatever cannot work is refused by the call that caused it, with an error that names the value and the remedy."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import traceback
import unicodedata
from pathlib import Path

import pytest
from click.testing import CliRunner

import tenure
from tenure import ConfigError, NotLeader, StoreUnavailable, manual
from tenure.cli import main
from tenure.databases.sqlite.filesystem import network_file_system
from tenure.settings import check_name
from tests.conftest import missing
from tests.support.secrets import CANARY, assert_untold
from tests.support.servers import Scratch, server_account
from tests.support.store_by_hand import Nodes, connected, execute, until

COMPOSED, DECOMPOSED = unicodedata.normalize("NFC", "Zoë"), unicodedata.normalize("NFD", "Zoë")


def settings(url="sqlite:///app.db", **arguments):
    return tenure.Node(url, **arguments)._settings


# --- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("", "='' is 0 bytes long: use 1 to 255 bytes"),
        ("n" * 256, "='n{40}…' is 256 bytes"),
        ("é" * 128, "is 256 bytes long"),
        (" ", "=' ' is blank"),
        ("\u3000\u2003", "is blank"),
        ("a\nb", "control characters"),
        ("a\x00b", r"='a\\x00b' contains control characters"),
        ("\x7f", "control characters"),
        ("\ud800", r"='\\ud800' contains .*lone surrogates"),
        (7, "=7 must be text"),
        (b"bytes", "=b'bytes' must be text"),
    ],
)
def test_names_that_cannot_be(name, complaint):
    with pytest.raises(ConfigError, match="role" + complaint if complaint.startswith("=") else complaint):
        check_name("role", name)
    for argument in ("name", "namespace"):
        with pytest.raises(ConfigError, match=f"{argument}="):
            settings(**{argument: name})


def test_every_role_is_checked_where_it_is_named(sqlite_url, monkeypatch):
    monkeypatch.setenv("TENURE_NAME", "a\tb")
    with pytest.raises(ConfigError, match=r"TENURE_NAME='a\\tb' contains control characters"):
        settings()
    monkeypatch.setenv("TENURE_NAME", "")  # as good as none
    with tenure.Node(sqlite_url) as node:
        for call in (node.election, lambda role: next(node.terms(role)), lambda role: node.lead(role).__enter__()):
            for role in ("", " ", "a\x00b", "\udcff", "r" * 256, None):
                with pytest.raises(ConfigError, match="role="):
                    call(role)
        with node.lead("r", timeout=20) as term:
            assert term.valid, "nothing of it did any harm"


def test_two_spellings_of_one_text_are_one_role(store_url):
    assert COMPOSED != DECOMPOSED
    with Nodes(store_url, namespace=DECOMPOSED) as nodes:
        node, other = nodes(DECOMPOSED), nodes("other", namespace=COMPOSED)
        assert node.name == node.namespace == COMPOSED
        assert node.election(DECOMPOSED) is node.election(COMPOSED)
        assert node.election(DECOMPOSED).role == COMPOSED
        with node.lead(COMPOSED, timeout=20) as term:
            with pytest.raises(ConfigError, match=f"role '{COMPOSED}': this node already leads or campaigns for it"):
                next(node.terms(DECOMPOSED))
            assert term.valid
            election = other.election(DECOMPOSED)
            until(lambda: len(election.candidates()) == 2, "both standing")
        assert election.wait(20).token == 2
        election.resign(to=DECOMPOSED)
        assert node.election(DECOMPOSED).wait(20).token == 3


@pytest.fixture
def latin1_url(postgres_server):
    name = "in_latin1"
    create = f"create database {name} encoding 'LATIN1' template template0 lc_ctype 'C' lc_collate 'C'"
    yield postgres_server.url(name), lambda: postgres_server.execute(create)
    postgres_server.drop_database(name)


def test_name_that_the_database_cannot_hold_is_refused_and_keeps_nobody_from_standing(latin1_url):
    url, create = latin1_url
    node = tenure.Node(url, name="Zoë", start="wait")
    starting = threading.Thread(target=node.start)
    starting.start()
    with contextlib.closing(node):
        until(lambda: node._engine.running, "started")
        too_early = node.election("役割")  # no database yet, so nobody knows
        early = node.election("rôle, early")
        create()
        starting.join(20)
        assert early.wait(20).token == 1
        assert not too_early.standing
        with pytest.raises(NotLeader, match="has withdrawn"):
            too_early.wait(20)
        with pytest.raises(ConfigError, match=r"role='役割' cannot be stored .*\(iso8859-1\) has no '役': .* UTF8"):
            node.election("役割")
        with node.lead("rôle", timeout=20):
            assert early.is_leader
    for argument in ("name", "namespace"):
        with pytest.raises(ConfigError, match=f"{argument}='Zoë 役' cannot be stored"):
            tenure.Node(url, **{argument: "Zoë 役"}).start()


def test_job_whose_name_the_database_cannot_hold_is_refused(latin1_url, caplog):
    url, create = latin1_url
    create()
    schedule = tenure.Schedule()
    schedule.every("1 h", name="prix-€")(print)
    node = tenure.Node(url)
    node.leader_only("r", schedule)
    refusal = "the name of a job cannot be stored in this database, whose encoding has no '€'"
    with node:
        until(lambda: refusal in caplog.text, "a refusal")
    command = [Path(sys.executable).with_name("tenure"), "run", "--role", "c", "--claim", "€", "--due", "day"]
    ran = subprocess.run(
        [*command, "--url", url, "--", "true"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 2, ran.stderr
    assert refusal in ran.stderr
    assert "Traceback" not in ran.stderr


# --- numbers and words --------------------------------------------------------------------------------------

NO_NUMBERS = (float("nan"), float("inf"), -float("inf"), "soon", "", None, [1], True)


@pytest.mark.parametrize("ttl", [0, 0.5, -1, 3601, 1e300, 10**400, *(one for one in NO_NUMBERS if one is not None)])
def test_ttl_has_limits(ttl):
    with pytest.raises(ConfigError, match=r"ttl=.* must be"):
        settings(ttl=ttl)


def test_renewals_must_leave_room_for_a_lost_one():
    assert settings(ttl=10, renew_every=4.5).renew_every == 4.5
    for renew_every in (0, -1, 4.6, 100, "often", float("nan")):
        with pytest.raises(ConfigError, match="renew_every="):
            settings(ttl=10, renew_every=renew_every)
    with pytest.raises(ConfigError, match=r"renew_every=6 must be 0\.05 to 2\.25 seconds \(with ttl=5\)"):
        settings(ttl=5, renew_every=6)


def test_waits_and_bounds_have_limits(sqlite_url):
    with tenure.Node(sqlite_url) as node, node.lead("r", timeout=1e300) as term:
        for timeout in (-1, *(one for one in NO_NUMBERS if one is not None)):
            with pytest.raises(ConfigError, match="timeout="):
                node.election("r").wait(timeout)
            with pytest.raises(ConfigError, match="timeout="):
                term.wait_lost(timeout)
        for bound in (0, -1, 3601, *(one for one in NO_NUMBERS if one is not None)):
            with pytest.raises(ConfigError, match="bound="), term.transaction(bound=bound):
                pytest.fail("that is no bound")
        for limit in (0, -1, 1.5, "x"):
            with pytest.raises(ConfigError, match="limit="):
                node.election("r").history(limit)
        assert term.valid


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("takeover", "never"),
        ("mode", "magic"),
        ("mode", None),
        ("start", "later"),
        ("schema", ""),
        ("schema", None),
        ("schema", "a-b"),
        ("schema", "1st"),
        ("schema", "pg_tenure"),
        ("schema", 'x"; drop table y; --'),
        ("schema", "x" * 64),
        ("schema", "é" * 32),
        ("metadata", {"x": object()}),
        ("metadata", {"x": float("nan")}),
        ("metadata", 7),
    ],
)
def test_wrong_value_is_refused_by_name(argument, value):
    with pytest.raises(ConfigError, match=f"{argument}="):
        settings(**{argument: value})


def test_configuration_errors_are_value_errors_too():
    with pytest.raises(ValueError, match="takeover="):
        settings(takeover="never")


# --- URLs and drivers ---------------------------------------------------------------------------------------


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
        f"postgresql://me:{CANARY}",
        f"postgresql://me:{CANARY}@[::1/db",
        f"postgresql://me:{CANARY}@::1]/db",
        f"postgresql://me:{CANARY}%zz@host/db",
        f"postgresql://me:{CANARY}%00@host/db",
        f"postgresql://me:{CANARY}%ff@host/db",
        f"postgresql://me:{CANARY}\0@host/db",
        f"postgresql://me:{CANARY}\udcff@host/db",
        f"postgresql://me:not@escaped@{CANARY}@host/db",
        f"postgresql://me:not/escaped{CANARY}@host/db",
        f"postgresql://me:1/{CANARY}@host/db",
        f"postgresql://me:{CANARY}@host:notaport:7/db?x",
        f"postgresql://me:{CANARY}@host:notaport/db",
        f"postgresql://me:{CANARY}@host:0/db",
        f"postgresql://me:{CANARY}@host:65536/db",
        f"postgresql://me:{CANARY}@host/db?port={CANARY}",
        f"postgresql://me:{CANARY}@host/db?no_such_option=1",
        f"postgresql://me:{CANARY}@host/db?sslmode",
        f"postgresql+psycopg://me:{CANARY}%@host/db",
        f"sqlite://{CANARY}",
        f"sqlite:///{CANARY}\0",
    ],
)
def test_malformed_url_is_refused_without_repeating_it(url):
    for arguments in ({"url": url}, {"url": "postgresql://host/db", "direct_url": url}):
        with pytest.raises(ConfigError, match=r"://|percent-encoded|NUL|SQLite") as error:
            tenure.Node(**arguments)
        assert_untold(error.value)


DOORS = (tenure.Node, tenure.AsyncNode, tenure.Registry, manual.use)
"""Whatever is given a URL and a password."""
SECRETIVE = [f"postgresql://me:{CANARY}@host/db", f"mysql://me:{CANARY}@host/db"]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "arguments",
    [
        *({"url": url, "password": CANARY} for url in SECRETIVE),
        *({"url": url, "schema": "no schema"} for url in SECRETIVE),
        *({"url": f"{url}?no_such_option=1"} for url in SECRETIVE),
        *({"url": url.replace("host", "host:port")} for url in SECRETIVE),
        *({"url": url.replace("me:", "me@")} for url in SECRETIVE),
        *({"url": url.replace("://", ":")} for url in SECRETIVE),
        *({"url": url.replace(f":{CANARY}", ""), "password": CANARY + "\0"} for url in SECRETIVE),
        {"url": "sqlite:///app.db", "password": CANARY},
        {"url": f"sqlite://me:{CANARY}@host/app.db"},
    ],
    ids=str,
)
def test_refusal_has_no_password_in_the_variables_of_its_traceback(door, arguments, monkeypatch):
    with pytest.raises(ConfigError) as error:
        door(**arguments)
    assert_untold(error.value)
    assert len(error.traceback) > 2, "the variables are gone, and the traceback is whole"
    monkeypatch.setenv("TENURE_URL", arguments["url"])
    with pytest.raises(ConfigError) as error:
        door(**{**arguments, "url": None})
    assert_untold(error.value)


def test_wrong_settings_beside_a_url_do_not_show_it():
    for node in (tenure.Node, tenure.AsyncNode):
        for url in SECRETIVE:
            for wrong in ({"ttl": "soon"}, {"mode": "lock", "takeover": "strict"}, {"name": ""}, {"direct_url": "x:y"}):
                with pytest.raises(ConfigError) as error:
                    node(url, **wrong)
                assert_untold(error.value)
        with pytest.raises(ConfigError) as error:
            node("sqlite:///app.db", direct_url=SECRETIVE[0])
        assert_untold(error.value)


def test_first_step_by_step_call_does_not_show_the_url_of_the_environment(monkeypatch):
    monkeypatch.setattr(manual._settings, "place", None)
    monkeypatch.setenv("TENURE_URL", f"postgresql://me:{CANARY}@host:port/db")
    with pytest.raises(ConfigError, match="the port in the PostgreSQL URL") as error:
        manual.elect("me")
    assert_untold(error.value)


def test_error_that_was_being_handled_keeps_its_variables():
    def application():
        precious = "kept"
        raise KeyError(precious)

    try:
        application()
    except KeyError:
        with pytest.raises(ConfigError) as error:
            tenure.Node("oracle://host/db")
    assert isinstance(error.value.__context__, KeyError)
    *_, last = traceback.walk_tb(error.value.__context__.__traceback__)
    assert last[0].f_locals == {"precious": "kept"}


@pytest.fixture(params=["postgresql", "mysql"])
def files_with_bad_urls(request, tmp_path):
    """A URL that is refused, and one where nobody answers."""
    with socket.socket() as taken:  # bound and deaf: whoever connects is refused
        taken.bind(("127.0.0.1", 0))
        files = [tmp_path / "refused", tmp_path / "unreachable"]
        for file, parameter in zip(files, ("no_such_option", "connect_timeout"), strict=True):
            file.write_text(f"{request.param}://me:{CANARY}@127.0.0.1:{taken.getsockname()[1]}/db?{parameter}=2")
        yield files


COMMANDS = ("status", "members", "history r", "watch", "resign r", "init", "forget x --yes", "doctor", "demo --fast")


@pytest.mark.parametrize("command", COMMANDS)
def test_command_has_no_password_in_the_variables_of_its_traceback(command, files_with_bad_urls):
    for file in files_with_bad_urls:
        result = CliRunner().invoke(main, [*command.split(), "--url-file", str(file)])
        assert result.exit_code == 2, result.output
        assert_untold(result.exception)


@pytest.mark.twin("mysql")
def test_run_has_no_password_in_the_variables_of_its_traceback(files_with_bad_urls):
    """In a process of its own, whose signals it handles."""
    program = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from tenure.cli import main\n"
        "from tests.support.secrets import assert_untold\n"
        "result = CliRunner().invoke(main, ['run', '--url-file', sys.argv[1], '--role', 'r', '--', 'true'])\n"
        "assert result.exit_code == 2, result.output\n"
        "assert_untold(result.exception)"
    )
    for file in files_with_bad_urls:
        subprocess.run([sys.executable, "-c", program, str(file)], check=True, timeout=60)


def test_schema_is_for_postgresql_only():
    for url in ("sqlite:///x.db", "mysql://u@h/db"):
        with pytest.raises(tenure.ConfigError, match="schema='other' is only for PostgreSQL, but the URL names"):
            tenure.Node(url, schema="other")


def test_path_instead_of_a_url_is_named_with_the_url_of_its_file():
    with pytest.raises(ConfigError, match=r"'app.db' is a path, not a database URL: use sqlite:///app.db"):
        tenure.Node("app.db")


def test_url_must_be_text():
    for url in (7, b"sqlite:///app.db", Path("app.db")):
        with pytest.raises(ConfigError, match=f"the URL must be text, not {type(url).__name__}"):
            settings(url)
    with pytest.raises(ConfigError, match="the URL is empty"):
        settings(" ")


def test_several_hosts_may_share_the_default_port():
    connector = tenure.Node("postgresql://one:5433,two/db?user=me@corp")._engine.backend._connector
    assert repr(connector) == "PostgreSQL at one,two port 5433, database db as me@corp"


def test_missing_driver_is_named_by_the_extra_that_brings_it():
    program = (
        "import sys; sys.modules['psycopg'] = None\n"
        "import tenure\n"
        "try: tenure.Node('postgresql://me:c4n4ry@host/db')\n"
        "except tenure.ConfigError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout == "PostgreSQL needs psycopg 3: pip install 'tenure[postgres]'\n"
    assert not said.stderr


def test_place_for_the_default_database_is_needed(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("TENURE_URL", raising=False)
    with pytest.raises(ConfigError, match=r"no URL given, and the default file cannot be used .*: give a URL"):
        settings(None)


# --- databases that cannot be used --------------------------------------------------------------------------


def test_server_that_never_answers_is_an_error_after_the_connect_timeout(monkeypatch):
    monkeypatch.setattr("tenure.databases.connecting.CONNECT_TIMEOUT_S", 2)  # libpq's least
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(StoreUnavailable, match="timeout") as error:
            tenure.Node(f"postgresql://me:{CANARY}@127.0.0.1:{silent.getsockname()[1]}/app").start()
        assert_untold(error.value)


def test_file_that_cannot_be_opened_is_an_error(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StoreUnavailable, match=r"cannot open .* the directory .* does not exist; create it"):
        tenure.Node(f"sqlite:///{tmp_path}/file/tenure.db").start()
    (tmp_path / "other.db").write_text("not a database, but long enough to be taken for one" * 100)
    with pytest.raises(StoreUnavailable, match="not a database"):
        tenure.Node(f"sqlite:///{tmp_path}/other.db").start()


def test_database_that_is_read_only_by_default_is_written_to_all_the_same(postgres_url):
    execute(postgres_url, f"alter database {postgres_url.rpartition('/')[2]} set default_transaction_read_only = on")
    with tenure.Node(postgres_url) as node, node.lead("r", timeout=20) as term:
        with term.transaction() as transaction:
            transaction.execute("create table written ()")
        with connected(postgres_url) as connection, pytest.raises(ConfigError, match="read-only: begin it READ WRITE"):
            term.fence(connection)


START_AS = """
import os, sys, tenure
account, fine, *urls = sys.argv[1:]
with tenure.Node(fine) as node: node.election("r").wait(20)  # as whoever can read the sources
if int(account): os.setegid(int(account)); os.seteuid(int(account))
for url in urls:
    try: tenure.Node(url).start()
    except tenure.StoreUnavailable as error: print(error)
"""


def test_file_that_may_not_be_written_is_an_error_at_the_start(tmp_path):
    """Root may write anything, so another user tries."""
    account = server_account()
    scratch = Scratch("tenure-", account)
    try:
        urls, refused = [], []
        for kind in ("file", "directory", "sentinels"):
            path = scratch.path / kind / "tenure.db"
            path.parent.mkdir()
            with tenure.Node(f"sqlite:///{path}") as node:
                node.election("r").wait(20)
            refused.append({"file": path, "directory": path.parent, "sentinels": Path(f"{path}.sentinels")}[kind])
            urls.append(f"sqlite:///{path}")
            for each in [path.parent, *path.parent.rglob("*")]:
                each.chmod(0o777)
            refused[-1].chmod(0o555)
        command = [sys.executable, "-c", START_AS, str(account.uid if account else 0), f"sqlite:///{tmp_path}/fine.db"]
        said = subprocess.run([*command, *urls], capture_output=True, text=True, check=True, timeout=60)
        assert said.stdout.splitlines() == [
            f"cannot open '{url.partition('///')[2]}': this user may not write to '{path}'; give this user the "
            "permission, or use another file"
            for url, path in zip(urls, refused, strict=True)
        ]
    finally:
        scratch.close()


# --- network file systems -----------------------------------------------------------------------------------

MOUNTINFO = r"""
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
22 27 0:21 / /proc rw,relatime - proc proc rw
51 27 0:44 / /home rw,relatime shared:5 - nfs4 server:/home rw,vers=4.2,addr=192.0.2.7
52 51 254:3 / /home/local rw,relatime shared:6 master:2 - xfs /dev/vdb rw
53 27 0:45 / /mnt/my\040share rw,relatime - cifs //server/share rw
54 27 0:46 / /mnt/back\134slash rw - 9p share rw
55 27 0:47 / /srv/data rw - nfs server:/old rw
56 55 0:48 / /srv/data rw - tmpfs tmpfs rw
57 27 0:49 / /srv/remote rw - fuse.sshfs me@host: rw,user_id=0
58 27 0:50 / /srv/disk rw - fuse.mergerfs a:b rw
59 27 0:51 / /srv/host rw - virtiofs tag rw
60 27 0:52 / /srv/box rw - vboxsf share rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/app.db", None),
        ("/home/me/app.db", "nfs4"),
        ("/homeless/app.db", None),
        ("/home/local/app.db", None),
        ("/mnt/my share/app.db", "cifs"),
        ("/mnt/back\\slash/app.db", "9p"),
        ("/srv/data/app.db", None),
        ("/srv/remote/deep/down/app.db", "fuse.sshfs"),
        ("/srv/disk/app.db", None),
        ("/srv/host/app.db", "virtiofs"),
        ("/srv/box/app.db", "vboxsf"),
    ],
)
def test_file_system_is_that_of_the_nearest_mount(tmp_path, path, kind):
    (tmp_path / "mountinfo").write_text(MOUNTINFO.lstrip())
    assert network_file_system(Path(path), tmp_path / "mountinfo") == kind


def test_file_system_is_not_asked_for_where_nobody_tells(tmp_path):
    assert network_file_system(tmp_path / "app.db", tmp_path / "no mountinfo") is None
    assert network_file_system(tmp_path / "app.db") is None, "or the tests themselves could not run"


def test_sqlite_on_a_network_file_system_is_refused(tmp_path):
    """A real mount, of sshfs by name: there is nobody behind it, and nobody is asked."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists() or shutil.which("unshare") is None:
        missing("mounting a file system needs root, /dev/fuse and `unshare` (util-linux)")
    share = tmp_path / "a share"
    share.mkdir()
    (tmp_path / "link").symlink_to(share)
    script = """
        exec 3<>/dev/fuse
        mount -i -t fuse.sshfs -o fd=3,rootmode=040000,user_id=0,group_id=0 host: "$1" || exit 1
        exec 3>&-
        exec "$2" -c "$3" "$1/app.db" "$4/app.db"
    """
    program = (
        "import sys, tenure\n"
        "for path in sys.argv[1:]:\n"
        "    try: tenure.Node('sqlite:///' + path)\n"
        "    except tenure.ConfigError as error: print(error)"
    )
    arguments = ["sh", str(share), sys.executable, program, str(tmp_path / "link")]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"'{path}/app.db' is on a network file system (fuse.sshfs), where SQLite's locks do not hold: give a file on a "
        "local disk, or use PostgreSQL"
        for path in (share, tmp_path / "link")
    ]
