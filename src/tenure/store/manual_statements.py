"""The statements of an election step by step. The rules of ``statements`` hold here, too."""

from __future__ import annotations

from tenure.store.statements import HERE

LOCK_NAMESPACE = """
update {namespaces} set base = base where name = :namespace
"""
"""Changes nothing, but lets only one candidate at a time join: two of the same name must become one member."""

LOCK_DATABASE = """
update {meta} set value = value where name = 'version'
"""
"""Changes nothing, but takes SQLite's write lock: a transaction that reads first may be refused when it writes."""

MANUAL_MEMBERS = f"""
select id, name, ttl_ms, renewals, case when {HERE} then 1 else 0 end, renewed_at, {{now}} from {{members}} m
where namespace = :namespace and takeover = 'manual' and ended_at is null
"""

MANUAL_MEMBER = MANUAL_MEMBERS + "  and name = :name\n"

LAST_TTL = """
select ttl_ms from {members} where namespace = :namespace and takeover = 'manual' and name = :name
order by joined_at desc limit 1
"""

SET_TTL = """
update {members} set ttl_ms = :ttl_ms where id = :id and ended_at is null
"""

LOCK_SILENT = """
select id from {members} where id = :id and renewals = :renewals and ended_at is null {skip_locked}
"""

HOLDER = f"""
select r.token, r.reserved_for, r.request_token, r.request_to, m.id, m.name, m.takeover, m.ttl_ms, m.renewals,
       m.sentinel_key, m.sentinel_epoch, m.server_start, case when {HERE} then 1 else 0 end,
       coalesce(t.began_at, m.joined_at), t.resigned_at, m.renewed_at, {{now}}
from {{roles}} r
left join {{members}} m on m.id = r.holder and m.ended_at is null
left join {{terms}} t on t.namespace = r.namespace and t.role = r.name and t.token = r.token
where r.namespace = :namespace and r.name = :role
"""

STANDS = """
select 1 from {candidates} where namespace = :namespace and role = :role and member_id = :id
"""

FIRST_JOINED = f"""
select min(joined_at), {{now}} from {{members}} m where namespace = :namespace and {HERE}
"""

LIMIT_SET = """
select limit_set_at, {now} from {namespaces} where name = :namespace
"""
