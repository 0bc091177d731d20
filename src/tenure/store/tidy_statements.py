"""The statements that keep the tables small."""

from __future__ import annotations

LAST_KEPT_END = """
select ended_at from {members} where namespace = :namespace and ended_at is not null
order by ended_at desc limit 1 offset :kept
"""

CLOSE_TERMS = """
update {terms}
set ended_at = (select m.ended_at from {members} m where m.id = member_id),
    end_reason = (select m.end_reason from {members} m where m.id = member_id)
where namespace = :namespace and ended_at is null and resigned_at is null and member_id in (
    select m.id from {members} m where m.namespace = :namespace and m.ended_at is not null and m.ended_at <= :before)
"""

DELETE_CANDIDACIES = """
delete from {candidates} where namespace = :namespace and member_id in (
    select m.id from {members} m where m.namespace = :namespace and m.ended_at is not null)
"""

DELETE_MEMBERS = """
delete from {members} where namespace = :namespace and ended_at is not null and ended_at <= :before
"""

LONG_HISTORIES = """
select role from {terms} where namespace = :namespace group by role having count(*) > :kept
"""

DELETE_TERMS = """
delete from {terms} where namespace = :namespace and role = :role and token < (
    select min(token) from (select token from {terms} where namespace = :namespace and role = :role
                            order by token desc limit :kept) as kept)
"""
