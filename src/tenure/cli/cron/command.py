"""The command ``tenure cron``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tenure.cli.cron.crontab import Entry, digest, parse
from tenure.cli.options import Seconds, database, lock_option
from tenure.cli.posix import require_posix
from tenure.cli.run.command import absolute_url, check_command
from tenure.errors import ConfigError


@click.command()
@click.option("--file", "file", type=click.Path(dir_okay=False, path_type=Path), help="A crontab: see above.")
@click.option("--name", "job", help="The name of the job, if EXPRESSION and COMMAND are given.")
@click.option("--role", default="cron", show_default=True, help="The role to lead.")
@lock_option
@click.option("--zone", default="UTC", show_default=True, help="The time zone, unless the crontab sets CRON_TZ.")
@click.option("--missed", type=click.Choice(["once", "each", "skip"]), default="once", show_default=True,
              help="What to do about due times that passed while no machine led.")  # fmt: skip
@click.option("--within", help="How late a run may begin, such as '2 h'; `--missed each` needs it.")
@click.option("--overlap", type=click.Choice(["skip", "wait"]), default="skip", show_default=True,
              help="What to do about due times that pass while a run is under way.")  # fmt: skip
@click.option("--delivery", type=click.Choice(["at-most-once", "at-least-once"]), default="at-most-once",
              show_default=True, help="Whether a run that did not end is run again.")  # fmt: skip
@click.option("--attempts", type=click.IntRange(1, 100), default=1, show_default=True,
              help="How many times a run is attempted if COMMAND fails.")  # fmt: skip
@click.option("--jitter", default="0 s", show_default=True, help="Delay runs by up to this much.")
@click.option("--grace", type=Seconds(), default=10.0, show_default=True,
              help="Seconds between SIGTERM and SIGKILL; fewer if the lease ends before.")  # fmt: skip
@click.option("--ttl", type=float, help="Seconds for which the lease is good; else TENURE_TTL, else 10.")
@click.option("--takeover", type=click.Choice(["instant", "strict"]), default="instant", show_default=True,
              help="Act on the death of a leader in milliseconds (instant) or after its TTL (strict).")  # fmt: skip
@click.option(
    "--node", "node_name", help="The name of this node, for people; else TENURE_NAME, else host and process id."
)
@click.option("--group-only", is_flag=True, help="End only COMMAND's process group: for systems without /proc.")
@click.option("-v", "--verbose", is_flag=True, help="Report on stderr what happens.")
@click.argument("expression", required=False)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@database
def cron(**options: Any) -> None:
    """Run commands at their due times, on one of several machines.

    Start the same command line on each machine. They elect a leader, which runs the commands; when it dies, another
    machine takes over and continues where it stopped. Every due time is accounted for: `tenure runs` shows it.

    \b
    tenure cron --file /etc/app/crontab --url-file /etc/app/url
    tenure cron '*/5 * * * *' --name sync -- ./sync

    The crontab has five fields and a command in each line, as cron does, and a name after #, by which the machines know
    that it is the same job. CRON_TZ=Europe/Paris sets the time zone of the lines below it. Other variables, also TZ,
    are for the commands. If the crontabs of two machines differ, the leader warns.

    \b
    CRON_TZ=Europe/Paris
    30 2 * * *   ./backup --full    # backup
    @hourly      ./clean-up         # clean-up

    COMMAND finds TENURE_JOB, TENURE_DUE, TENURE_ATTEMPT, TENURE_ROLE, TENURE_TOKEN, TENURE_NAMESPACE and TENURE_MEMBER
    in its environment. It is guarded as under `tenure run`: when leadership is lost, COMMAND and every process that it
    started are ended before another machine can run it.

    \b
    Exit codes: 0 after SIGTERM or SIGINT; 2 usage, or commands cannot be guarded; 126 and
    127 a command cannot be run.
    """
    require_posix("tenure cron", "give node.leader_only() a tenure.Schedule in a Python program")
    from tenure.cli.cron.runner import CronRunner  # noqa: PLC0415 - slow to import

    if options["missed"] == "each" and options["within"] is None:
        raise click.UsageError("--missed each needs --within: say how late a run may begin, as in --within '2 h'")
    entries = _entries(**{name: options.pop(name) for name in ("file", "job", "expression", "command", "zone")})
    for entry in entries:
        check_command(entry.command[0])
    settings = {name: options.pop(name) for name in ("url", "namespace", "schema", "ttl", "takeover")}
    settings |= {"name": options.pop("node_name"), "metadata": {"crontab": digest(entries)}}
    CronRunner(entries, options, settings, absolute_url(settings["url"])).run()


def _entries(
    file: Path | None, job: str | None, expression: str | None, command: tuple[str, ...], zone: str
) -> list[Entry]:
    if (file is None) == (expression is None):
        raise click.UsageError("give either --file CRONTAB, or --name NAME 'EXPRESSION' -- COMMAND")
    if file is not None:
        try:
            # Editors on Windows begin a file with a byte order mark.
            return parse(file.read_text(encoding="utf-8-sig"), zone)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--file cannot be read: {error}") from None
    if job is None:
        raise click.UsageError("give --name NAME, by which the machines know that it is the same job")
    if not command:
        raise click.UsageError("COMMAND is missing: write it after --")
    assert expression is not None
    return [Entry(job, expression, command, zone)]
