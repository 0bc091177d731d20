"""Deletes what operators want to be rid of: a whole namespace, or one role of it.

A namespace goes with its tokens. A role leaves its row behind, and in it the last token: a role that comes back goes on
from there, because the fence and the application may know the old tokens. The row says that the role is forgotten, and
is not shown until a member stands for the role again. It says so in ``reserved_for``, where releases that know nothing
of this see a member that does not exist, and take the role as any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tenure.errors import ConfigError
from tenure.store import records, statements
from tenure.store.records import Tables
from tenure.store.session import Step

FORGET_ROLES = (
    "delete from {runs} where namespace = :namespace",
    "delete from {jobs} where namespace = :namespace",
    "delete from {candidates} where namespace = :namespace",
    "delete from {terms} where namespace = :namespace",
    "delete from {roles} where namespace = :namespace",
)

FORGET_MEMBERS = (
    "delete from {members} where namespace = :namespace",
    "delete from {namespaces} where name = :namespace",
)

LOCK_ROLE = "update {roles} set token = token where namespace = :namespace and name = :role"
"""Changes nothing, but lets no node take the role, and what is read afterwards is as of then."""

ROLE_HOLDER = """
select m.name from {roles} r join {members} m on m.id = r.holder and m.ended_at is null
where r.namespace = :namespace and r.name = :role
"""

FORGET_ROLE = (
    "delete from {runs} where namespace = :namespace and role = :role",
    "delete from {jobs} where namespace = :namespace and role = :role",
    "delete from {terms} where namespace = :namespace and role = :role",
    # Not those of living members: one may have begun to stand meanwhile.
    """
delete from {candidates} where namespace = :namespace and role = :role and member_id not in (
    select m.id from {members} m where m.namespace = :namespace and m.ended_at is null)
""",
    f"""
update {{roles}} set holder = null, reserved_for = '{statements.FORGOTTEN}', request_token = null, request_to = null
where namespace = :namespace and name = :role
""",
)


def forget_namespace(tables: Tables) -> None:
    """Delete the namespace in one transaction, which keeps nodes out; raise ConfigError if it has members."""
    session, schema = tables.session, tables.session.schema
    if schema.before_shut_out:
        session.read(Step(schema.before_shut_out, {}))
    with session.transaction() as run:
        run(*_steps(tables, FORGET_ROLES), *_steps(tables, schema.shut_out))
        (members,) = run(*_steps(tables, [statements.MEMBERS]))
        if members.rows:
            raise ConfigError(namespace_refusal(tables.namespace, [name for _, name, *_ in members.rows]))
        run(*_steps(tables, FORGET_MEMBERS))


@records.readable()
def forget_role(tables: Tables, role: str) -> None:
    """Delete all of a role but its last token; raise ConfigError if a living member leads it or stands for it."""
    with tables.session.transaction() as run:
        run(*_steps(tables, [LOCK_ROLE], role=role))
        holder, standing = run(*_steps(tables, [ROLE_HOLDER, statements.CANDIDATES], role=role))
        leaders = [name for (name,) in holder.rows]
        others = [name for _, name, *_ in standing.rows if name not in leaders]
        if leaders or others:
            raise ConfigError(role_refusal(tables.namespace, role, leaders, others))
        run(*_steps(tables, FORGET_ROLE, role=role))


def namespace_refusal(namespace: str, members: list[str]) -> str:
    """Return why a namespace that has living members is not forgotten."""
    return f"namespace {namespace!r} has living members: stop them first ({', '.join(map(repr, members))})"


def role_refusal(namespace: str, role: str, leaders: list[str], others: list[str]) -> str:
    """Return why a role that living members use is not forgotten."""
    led = f"{leaders[0]!r} leads it" if leaders else ""
    names = ", ".join(map(repr, others))
    stand = f"{names} {'stands' if len(others) == 1 else 'stand'} for it" if others else ""
    return (
        f"role {role!r} of namespace {namespace!r} is in use: {' and '.join(filter(None, (led, stand)))}; stop these "
        "nodes, or let them withdraw from the role (a dead node counts until a running node of the namespace ends it, "
        "within its TTL)"
    )


def _steps(tables: Tables, texts: Iterable[str], **parameters: Any) -> list[Step]:
    return [Step(text, {"namespace": tables.namespace, **parameters}) for text in texts]
