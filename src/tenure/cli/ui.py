"""``tenure ui``: the dashboard as a web server of its own."""

from __future__ import annotations

import ipaddress
import logging
import socket
import webbrowser
from pathlib import Path

import click

from tenure import ConfigError, Registry
from tenure.cli.options import database


@click.command()
@click.option("--bind", default="127.0.0.1:8377", show_default=True, metavar="HOST:PORT",
              help="Where to listen; port 0 takes a free one.")  # fmt: skip
@click.option("--users-file", type=click.Path(dir_okay=False, path_type=Path),
              help="Who may use it: lines of a name, `view` or `operate`, and a token.")  # fmt: skip
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@database
def ui(bind: str, users_file: Path | None, *, opens: bool, url: str | None, namespace: str | None, schema: str) -> None:
    """Show who leads, in a browser.

    The page shows roles and their terms, members, jobs and their runs, what the nodes wait for, and what the doctor
    finds. Without a users file, it answers only this machine, and a visitor can only look. With one, users sign in with
    their tokens; those with `operate` can hand a role over, and run, pause and resume jobs, which is logged on stderr.
    The page is not a member. It holds no lock, except for a moment while the doctor tests locks. Ctrl-C ends it.

    To reach it from other machines, put a proxy with TLS before it: a token that travels unencrypted can be read.

    \b
    tenure ui --open
    tenure ui --bind 0.0.0.0:8377 --users-file /etc/tenure/users
    """
    from tenure.dashboard import dashboard, users_from_file  # noqa: PLC0415 - the extra may not be installed
    from tenure.dashboard.server import serve  # noqa: PLC0415

    registry = Registry(url, namespace=namespace, schema=schema)
    users = None if users_file is None else users_from_file(users_file)
    host, port = _address(bind)
    if users is None and not _is_loopback(host):
        raise ConfigError(
            f"--bind {bind} lets other machines in without signing in: give --users-file, or bind to 127.0.0.1"
        )
    with registry:
        # A database without tables, or one that cannot be reached, is an error now and not on the page.
        pass
    application = dashboard(url, namespace=namespace, schema=schema, users=users)
    with _listener(host, port) as listener:
        number = listener.getsockname()[1]
        shown = f"http://{f'[{host}]' if ':' in host else host}:{number}/"
        click.echo(f"{shown}  ({'users sign in' if users else 'this machine only, view only'}; Ctrl-C ends it)")
        if opens:
            webbrowser.open(shown)
        _log_to_stderr()
        serve(application, listener)


def _log_to_stderr() -> None:
    """Show what people do: this log is the record of it."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log = logging.getLogger("tenure.dashboard")
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def _address(bind: str) -> tuple[str, int]:
    host, _, port = bind.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise click.UsageError(f"--bind {bind!r} is not HOST:PORT, such as 127.0.0.1:8377")
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listener(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --bind") from None
