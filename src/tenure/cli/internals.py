"""The internals of Tenure that the command line uses because no public name offers the same.

No other module of ``cli`` uses them directly: ``tests/architecture/test_packages.py`` checks that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tenure.core.backoff import Backoff
from tenure.internals import engine_of, holding_of

if TYPE_CHECKING:
    from datetime import datetime

    from tenure import Election, Node, Registry, RoleInfo, Run, Term

T = TypeVar("T")


def restart_pauses() -> Backoff:
    """Return the pauses before a command is started again, as for a service."""
    return Backoff()


def trusted_until(term: Term) -> float:
    """Return when the term lapses unless its lease is renewed, on the clock of ``tenure.base.clock``."""
    return holding_of(term).lease.deadline


def sentinel_descriptors(node: Node) -> list[int]:
    """Return duplicates of the descriptors that hold the node's sentinel; the caller closes them.

    The sentinel is held as long as any process has one of them open, even after this process has died.
    """
    return engine_of(node).sentinel_descriptors()


def is_decided(election: Election) -> bool:
    """Whether the election is decided for now: the node has checked suspected members, and tried for a vacant role."""
    return engine_of(election).election_decided


def wait_for(election: Election, condition: Callable[[], bool], timeout: float | None = None) -> bool:
    """Wait until the condition holds; it is checked whenever the node's state changes. False after ``timeout``."""
    return engine_of(election).wait_for(condition, timeout)


def hold_role(election: Election, *, held: bool) -> None:
    """Set whether a command runs under the role. Until it has ended, no other node gets the role, even if given up."""
    candidacy = engine_of(election).candidacy(election.role)
    if held:
        candidacy.begin_work()
    else:
        candidacy.end_work()


def stop_standing(election: Election) -> None:
    """Stop standing for the role, and do not wait until another node may have it: a command may still hold it."""
    engine_of(election).candidacy(election.role).withdraw()


def promotion_is_kept(registry: Registry) -> bool:
    """Whether commits wait for a replica, if an operator said that a promotion loses nothing."""
    from tenure.store import namespaces  # noqa: PLC0415 - `tenure run` imports this module, but not that one

    with registry:
        return namespaces.promotion_is_kept(registry)


def refuse_to_forget(registry: Registry, info: RoleInfo | None) -> None:
    """Raise ConfigError if a role is in use, or a namespace (if ``info`` is None). To be asked before the operator."""
    from tenure.errors import ConfigError  # noqa: PLC0415 - as above
    from tenure.store import forgetting  # noqa: PLC0415

    if info is None:
        if names := [member.name for member in registry.members()]:
            raise ConfigError(forgetting.namespace_refusal(registry.namespace, names))
        return
    leaders = [info.leader.name] if info.leader is not None else []
    others = [one.name for one in registry.candidates(info.role) if one.name not in leaders]
    if leaders or others:
        raise ConfigError(forgetting.role_refusal(registry.namespace, info.role, leaders, others))


def claim_run(term: Term, job: str, due: datetime) -> Run | None:
    """Claim a run of a job under a term; None if it was claimed before."""
    from tenure.schedule.run import AlreadyRan, Run, claim  # noqa: PLC0415 - slow to import

    run = Run(job, due, term)
    try:
        claim(run, repeats=False)
    except AlreadyRan:
        return None
    return run


def end_run(run: Run, code: int) -> None:
    """Record how the command of a run ended."""
    from tenure.schedule.run import record_end  # noqa: PLC0415 - as above

    record_end(run, "done" if code == 0 else "failed", None if code == 0 else f"exit code {code}", over=True)


async def run_in_thread(blocking: Callable[[], T]) -> T:
    """Run a blocking call in a thread, without blocking the event loop of the node's services."""
    from tenure.aio import bridge  # noqa: PLC0415 - only `tenure cron` has an event loop

    return await bridge.run_in_thread(blocking)


def run_statement(registry: Registry, text: str) -> Any:
    """Run an SQL statement on the connection of a registry, for the table of the demo; return its result."""
    from tenure.errors import StoreUnavailable  # noqa: PLC0415 - `tenure run` imports this module, but not these
    from tenure.store.session import Failed, Gone, Step  # noqa: PLC0415

    try:
        return registry.session.run(Step(text, {}))[0]
    except (Failed, Gone) as error:
        raise StoreUnavailable(str(error)) from None


def unguard_sql(table: str, schema: str, database: str) -> list[str]:
    """Return the statements that remove the guard of a table."""
    from tenure.databases.guards import unguard_sql  # noqa: PLC0415 - as above

    return unguard_sql(table, schema, database)


def grants_sql(user: str, database: str, schema: str) -> list[str]:
    """Return the statements that give a database user the privileges that a node needs, and no others."""
    from tenure.databases.schema import schema_for  # noqa: PLC0415 - as above
    from tenure.store.dialects import for_name  # noqa: PLC0415

    return schema_for(for_name(database, schema)).grants(user)
