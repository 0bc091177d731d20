"""Keeps the tables small: old memberships, terms and runs are deleted, or folded into one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tenure.store import job_statements
from tenure.store.session import Session, Step

KEPT_MEMBERS = 100
KEPT_TERMS = 100
KEPT_RUNS = 100
"""How many ended memberships of a namespace, terms of a role and runs of a job are kept for operators to read."""

_LAST_KEPT_END = """
select ended_at from {members} where namespace = :namespace and ended_at is not null
order by ended_at desc limit 1 offset :kept
"""

_CLOSE_TERMS = """
update {terms}
set ended_at = (select m.ended_at from {members} m where m.id = member_id),
    end_reason = (select m.end_reason from {members} m where m.id = member_id)
where namespace = :namespace and ended_at is null and resigned_at is null and member_id in (
    select m.id from {members} m where m.namespace = :namespace and m.ended_at is not null and m.ended_at <= :before)
"""

_DELETE_CANDIDACIES = """
delete from {candidates} where namespace = :namespace and member_id in (
    select m.id from {members} m where m.namespace = :namespace and m.ended_at is not null)
"""

_DELETE_MEMBERS = """
delete from {members} where namespace = :namespace and ended_at is not null and ended_at <= :before
"""

_LONG_HISTORIES = """
select role from {terms} where namespace = :namespace group by role having count(*) > :kept
"""

_DELETE_TERMS = """
delete from {terms} where namespace = :namespace and role = :role and token < (
    select min(token) from (select token from {terms} where namespace = :namespace and role = :role
                            order by token desc limit :kept) as kept)
"""


def tidy(session: Session, namespace: str) -> None:
    """Delete what no node and no operator needs any more."""

    def step(text: str, **parameters: object) -> Step:
        return Step(text, {"namespace": namespace, **parameters})

    _, last_kept, long = session.run(
        step(_DELETE_CANDIDACIES), step(_LAST_KEPT_END, kept=KEPT_MEMBERS), step(_LONG_HISTORIES, kept=KEPT_TERMS)
    )
    for (before,) in last_kept.rows:
        session.run(step(_CLOSE_TERMS, before=before), step(_DELETE_MEMBERS, before=before))
    for (role,) in long.rows:
        session.run(step(_DELETE_TERMS, role=role, kept=KEPT_TERMS))
    (long,) = session.run(step(job_statements.LONG_RUNS, kept=KEPT_RUNS))
    for role, job in long.rows:
        _fold_runs(session, {"namespace": namespace, "role": role, "job": job})


def _fold_runs(session: Session, job: dict[str, Any]) -> None:
    """Fold the oldest runs of a job into one row, which keeps their number of due times and how they ended."""
    with session.transaction() as run:
        (mine,) = run(Step(job_statements.LOCK_JOB, job))
        if not mine.rows:
            # Another node folds the runs, or the leader claims one.
            return
        (last_kept,) = run(Step(job_statements.LAST_KEPT_RUN, job | {"kept": KEPT_RUNS}))
        for (before,) in last_kept.rows:
            old = job | {"before": before}
            (rows,) = run(Step(job_statements.OLD_RUNS, old))
            run(
                Step(job_statements.FOLD, old | {"detail": _outcomes(rows.rows)}),
                Step(job_statements.DELETE_FOLDED, old),
            )


def _outcomes(rows: Sequence[tuple[Any, ...]]) -> str:
    """Return how many runs of each outcome are folded, such as ``done 850, lost 2``; a row may be folded already."""
    numbers: Counter[str] = Counter()
    for outcome, detail, number in rows:
        if outcome != "folded":
            numbers[outcome] += int(number)
        else:
            for part in (detail or "").split(", "):
                name, _, earlier = part.partition(" ")
                numbers[name] += int(earlier) if earlier.isdecimal() else 0
    return ", ".join(f"{outcome} {number}" for outcome, number in sorted(numbers.items()) if number)
