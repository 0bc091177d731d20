"""``tenure run``: a command that runs only while this process leads."""

from __future__ import annotations

import errno
import os
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from tenure.cli.options import Seconds, database, lock_option
from tenure.cli.posix import require_posix

INSTEAD = "use node.leader_only() in a Python program"


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--role", required=True, help="The role to lead.")
@lock_option
@click.option("--ttl", type=float, help="Seconds for which the lease is good; else TENURE_TTL, else 10.")
@click.option("--takeover", type=click.Choice(["instant", "strict"]), default="instant", show_default=True,
              help="Act on the death of a leader in milliseconds (instant) or after its TTL (strict).")  # fmt: skip
@click.option("--name", help="The name of this node, for people; else TENURE_NAME, else host and process id.")
@click.option("--restart", is_flag=True, help="Never exit: lead again and run COMMAND again, whenever it has ended.")
@click.option("--no-wait", is_flag=True, help="Exit with 75 at once if another node leads.")
@click.option("--wait-timeout", type=Seconds(), help="Exit with 124 if not elected within this time.")
@click.option("--hold", type=Seconds(), help="Keep the role for at least this long: see above about cron.")
@click.option("--claim", metavar="JOB", help="Run COMMAND only if no machine has run JOB for --due: see above.")
@click.option(
    "--due", metavar="TIME", help="With --claim: minute, hour or day (the present one), or a time with its zone."
)
@click.option("--grace", type=Seconds(), default=10.0, show_default=True,
              help="Seconds between SIGTERM and SIGKILL; fewer if the lease ends before.")  # fmt: skip
@click.option("--group-only", is_flag=True,
              help="End only COMMAND's process group: for systems without /proc.")  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="Report on stderr what happens.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@database
def run(**options: Any) -> None:
    """Run COMMAND only while this process leads ROLE.

    For any program that must run once among several machines: start the same command line on each of them. One of them
    is elected and runs COMMAND; the others wait. When the leader ends or dies, another is elected and runs COMMAND.

    \b
    tenure run --role scheduler --restart -- python -m scheduler
    tenure run --role worker --restart --url postgresql://db.internal/app -- ./worker
    tenure run --role backup --no-wait --hold 60 --url-file /etc/app/url -- ./backup    # cron

    The machines elect a leader through the database that they share. Without a URL, only processes of this machine take
    part, through a file: a line on stderr says so, and --no-wait is refused.

    COMMAND finds TENURE_ROLE, TENURE_TOKEN, TENURE_NAMESPACE and TENURE_MEMBER in its environment, and TENURE_URL if a
    URL was given. Its input and output are not touched, and signals are passed on.

    When leadership is lost or in danger, COMMAND and every process that it started are ended before another node can
    lead: by SIGTERM if there is time, then by SIGKILL. The same happens if `tenure run` itself is killed or stopped. If
    COMMAND is frozen together with its guard (a paused container or machine), it may wake up late: only fenced writes
    protect against that. The processes that COMMAND started are found in /proc. If /proc does not show them,
    `tenure run` exits with 2, unless you give --group-only.

    Without --restart, `tenure run` exits when COMMAND has ended, and when leadership is lost (also by `tenure resign`).
    With --restart it also waits for a database that cannot be reached yet.

    For cron, use --no-wait and --hold. --no-wait alone keeps COMMAND from running twice at the same time. But cron
    starts it on every machine at about the same time, and a short COMMAND may have ended before the next machine
    tries: --hold 60 keeps the role for a minute, so that one machine runs it per tick. Cron does not pass its
    environment on: give --url-file, or write TENURE_URL=… on a separate line of the crontab.

    Or use --claim, with which the database records that a run was made: each machine tries in turn, and the first one
    runs COMMAND. The others exit with 0 when it has ended, or its machine has died. --due names the run.

    \b
    tenure run --role backup --claim backup --due day --url-file /etc/app/url -- ./backup    # cron

    \b
    Exit codes: that of COMMAND (128+n for signal n); 75 another node leads (--no-wait);
    76 leadership lost; 124 --wait-timeout; 126 and 127 COMMAND cannot be run; 128+n ended
    by signal n; 2 usage, the database cannot be used, or COMMAND cannot be guarded.
    """
    require_posix("tenure run", INSTEAD)
    from tenure.cli.run.runner import Runner, RunOptions  # noqa: PLC0415 - names signals that Windows lacks

    settings = {name: options.pop(name) for name in ("url", "namespace", "schema", "ttl", "takeover", "name")}
    check_command(options["command"][0])
    for option, given in (("--no-wait", options["no_wait"]), ("--hold", options["hold"] is not None)):
        if options["restart"] and given:
            raise click.UsageError(f"--restart never exits, and {option} is for a single run: give one of them")
    if (options["claim"] is None) != (options["due"] is None):
        raise click.UsageError("--claim and --due belong together: give both, as in --claim backup --due day")
    if options["restart"] and options["claim"]:
        raise click.UsageError("--restart never exits, and --claim is for a single run: give one of them")
    options["due"] = None if options["due"] is None else due_time(options["due"])
    sys.exit(Runner(RunOptions(**options, url=absolute_url(settings["url"])), settings).run())


def check_command(name: str) -> None:
    """Exit now if the command cannot be run, rather than hours later, when this process is elected."""
    from tenure.cli.run.guard_process import cannot_run  # noqa: PLC0415 - as above

    if not name:
        raise click.UsageError("COMMAND is empty: give the command to run")
    places = [name] if os.sep in name else [os.path.join(place, name) for place in os.get_exec_path()]  # noqa: PTH118
    found = [place for place in places if os.path.exists(place)]  # noqa: PTH110 - pathlib decodes
    if not any(os.access(place, os.X_OK) and not os.path.isdir(place) for place in found):  # noqa: PTH112
        raise cannot_run(name, errno.EACCES if found else errno.ENOENT)


def due_time(text: str) -> datetime:
    """Return the time that ``--due`` names; refuse one without a zone, which is another moment on each machine."""
    now = datetime.now(timezone.utc).replace(second=0, microsecond=0)
    units = {"minute": now, "hour": now.replace(minute=0), "day": now.replace(hour=0, minute=0)}
    if text in units:
        return units[text]
    try:
        due = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        due = None
    if due is None or due.utcoffset() is None:
        raise click.UsageError(
            f"--due {text!r} must be minute, hour, day, or a time with its zone, such as 2026-01-31T02:30+01:00"
        )
    return due


def absolute_url(url: str | None) -> str | None:
    """Return a URL that names the same SQLite file from any directory."""
    scheme, separator, path = (url or "").partition(":///")
    if scheme.startswith("sqlite") and separator:
        return f"{scheme}{separator}{Path(path).absolute()}"
    return url
