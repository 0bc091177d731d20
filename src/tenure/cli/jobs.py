"""The commands for schedules: jobs, runs, trigger, pause, resume."""

from __future__ import annotations

from collections.abc import Collection

import click

from tenure import ConfigError, JobRecord, Registry, RunRecord
from tenure.cli.inspect import print_rows
from tenure.cli.options import as_json, database
from tenure.cli.output import (
    Columns,
    brief,
    fitting,
    left_out,
    notes,
    print_json,
    show_newest,
    without_password,
    zone_note,
)
from tenure.reports import (
    about_states,
    attempt,
    awaits_leader,
    definition,
    first_line,
    is_listed,
    led_roles,
    newest_tokens,
    state_of,
    took,
    without_stale_next,
)

role_option = click.option(
    "--role", help="The role whose schedule has the job, if several roles have a job of that name."
)


def _last(run: RunRecord | None) -> str:
    return "-" if run is None else f"{brief(run.due)} {run.outcome}"


def _outcome(run: RunRecord) -> str:
    """Return how a run ended, in one line: the first of what was recorded."""
    why = f": {first_line(run.detail)}" if run.detail else ""
    return run.outcome + why + (f", {run.covers} due times since {brief(run.first)}" if run.covers > 1 else "")


def _nothing(registry: Registry, what: str, role: str | None = None) -> str:
    of_role = "" if role is None else f" of role {role!r}"
    return without_password(f"namespace {registry.namespace!r} has no {what}{of_role}")


JOB_COLUMNS: Columns = {
    "ROLE": lambda job: job.role,
    "JOB": lambda job: job.job,
    "DUE": lambda job: definition(job.spec),
    "NEXT": lambda job: brief(job.next_due) if job.next_due else "-",
    "LAST": lambda job: _last(job.last),
}
RUN_COLUMNS: Columns = {
    "JOB": lambda run: run.job,
    "DUE": lambda run: brief(run.due),
    "ATTEMPT": attempt,
    "OUTCOME": _outcome,
    "TOOK": took,
    "TOKEN": lambda run: run.token,
    "NODE": lambda run: run.member or "-",
}


@click.command()
@click.option("--role", help="Show the jobs of this role only.")
@click.option("--reset", metavar="JOB", help="Let a job continue from now whose last run is in the future.")
@database
@as_json
def jobs(
    role: str | None, reset: str | None, url: str | None, namespace: str | None, schema: str, *, json_: bool
) -> None:
    """Show every job of the schedules: when it is due, its last run, and its state.

    The states are: ok; running, failed and lost (the last run); overdue (a run should have begun more than a minute
    ago); no leader (no node leads the role, or its leader is overdue, so the next run is not known: NEXT says "when
    led"); paused; unknown (the last leader's program does not have the job); and ahead: the last run is in the future,
    because the database's clock was ahead and was set right. Such a job waits until then, unless you give --reset. A
    job that is due "by hand" is in no schedule: a program, or `tenure run --claim`, claims its runs.

    \b
    tenure jobs
    tenure jobs --role scheduler --json
    """
    with Registry(url, namespace=namespace, schema=schema) as registry:
        if reset is not None and not registry.reset(reset, role=role):
            raise ConfigError(f"the last run of job {reset!r} is not in the future: there is nothing to reset")
        if role is not None:
            # An unknown role is an error, as in `tenure status ROLE`.
            registry.role(role)
        found, led = registry.jobs(role), led_roles(registry.overview())
    newest = newest_tokens(found)
    found = found if json_ else without_stale_next(found, newest)
    columns = {
        **JOB_COLUMNS,
        "NEXT": lambda job: "when led" if awaits_leader(job, led) else JOB_COLUMNS["NEXT"](job),
        "STATE": lambda job: state_of(job, newest[job.role], led),
    }
    # What a narrow terminal does not show: STATE says how the last run ended.
    spare = ("ROLE", "LAST", "DUE") if len(newest) == 1 else ("LAST", "ROLE", "DUE")
    shown = columns if json_ else fitting(found, columns, spare)
    print_rows(found, shown, lambda: _nothing(registry, "jobs", role), json_=json_)
    if not json_:
        states = about_states(map(str, map(columns["STATE"], found)))
        notes(*left_out(columns, shown), *states, *_about_zones(found, shown, led))


def _about_zones(found: list[JobRecord], shown: Columns, led: Collection[str]) -> list[str]:
    """Return the note on time zones: a cron expression has a zone of its own, and the other columns do not use it."""
    moments = [job.next_due for job in found if not awaits_leader(job, led)]
    moments += [job.last.due for job in found if job.last is not None and "LAST" in shown]
    if "DUE" not in shown or not any((job.spec or "").startswith("cron ") for job in found):
        return zone_note(moments)
    local = "NEXT and LAST are local times" if "LAST" in shown else "NEXT is local time"
    also = "; DUE is in the zone that it names"
    return [note.replace("times are local", local) + also for note in zone_note(moments)]


@click.command()
@click.argument("job", required=False)
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="How many rows to show.")
@role_option
@database
@as_json
def runs(
    job: str | None, limit: int, role: str | None, url: str | None, namespace: str | None, schema: str, *, json_: bool
) -> None:
    """Show the last runs of JOB, or of all jobs, newest first.

    Due times that were not run are here, too, with the reason: missed (no node led), late (not within the time that the
    job allows), overlap (an earlier run was under way), or paused. One row may stand for many due times. A run whose
    leader died is lost. Rows older than the last hundred of a job are folded into one, which counts how
    they ended. Of an error this shows the first line; --json has the rest. Without --limit, a terminal shows as
    many rows as fit.

    \b
    tenure runs
    tenure runs invoices --limit 100 --json
    """
    with Registry(url, namespace=namespace, schema=schema) as registry:
        found = registry.runs(job, limit, role=role)
    if json_:
        print_json(found)
    elif not found:
        click.echo(_nothing(registry, "runs"), err=True)
    else:
        spare = ("TOKEN", "ATTEMPT", "NODE", "TOOK") if job is None else ("JOB", "TOKEN", "ATTEMPT", "NODE", "TOOK")
        moments = [run.due for run in found] + [run.first for run in found if run.covers > 1]
        show_newest(found, RUN_COLUMNS, spare, lambda _: zone_note(moments))


@click.command()
@click.argument("job")
@role_option
@database
def trigger(job: str, role: str | None, url: str | None, namespace: str | None, schema: str) -> None:
    """Run JOB now, beside its due times.

    The leader makes the run within seconds, even if the job is paused; if no node leads, the next leader does. The
    next due time is not affected. If you ask again before the run has begun, there is one run.

    \b
    tenure trigger invoices
    """
    with Registry(url, namespace=namespace, schema=schema) as registry:
        asked = registry.trigger(job, role=role)
        found, led = registry.jobs(role), led_roles(registry.overview())
    again = "" if asked else "a run was asked for before and has not begun yet; "
    record = next(record for record in found if record.job == job and record.spec is not None)
    who = "the leader runs it within seconds, or the next leader"
    if record.role not in led:
        who = f"no node leads role {record.role!r} now; the next leader runs it"
    if not is_listed(record, newest_tokens(found)[record.role]):
        vacant = "" if record.role in led else f", and no node leads role {record.role!r} now"
        who = f"the program of the last leader does not have this job{vacant}; a leader whose program has it runs it"
    click.echo(without_password(f"{job}: {again}{who}; `tenure runs {job}` shows it"))


@click.command()
@click.argument("job")
@click.option("--reason", default="", help="Why, for people: `tenure jobs` shows it.")
@role_option
@database
def pause(job: str, reason: str, role: str | None, url: str | None, namespace: str | None, schema: str) -> None:
    """Let no run of JOB begin until `tenure resume`.

    A run under way goes on. Due times that pass meanwhile are recorded as skipped.

    \b
    tenure pause invoices --reason "the bank is down"
    """
    with Registry(url, namespace=namespace, schema=schema) as registry:
        registry.pause(job, reason, role=role)
    click.echo(f"{job}: paused")


@click.command()
@click.argument("job")
@role_option
@database
def resume(job: str, role: str | None, url: str | None, namespace: str | None, schema: str) -> None:
    """Let JOB run again after `tenure pause`, from its next due time on.

    \b
    tenure resume invoices
    """
    with Registry(url, namespace=namespace, schema=schema) as registry:
        was_paused = any(record.job == job and record.paused is not None for record in registry.jobs(role))
        registry.resume(job, role=role)
    click.echo(f"{job}: runs again from its next due time on" if was_paused else f"{job}: it was not paused")
