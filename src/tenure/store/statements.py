"""Every statement that decides who leads, as a text that a database administrator can read.

Words of the dialect are in braces, parameters after a colon. Three rules hold throughout:

- every write is scoped to the membership or the term that it is about;
- no timestamp decides anything: ``*_at`` columns are for operators to read;
- a check and the write that depends on it are one statement, or come after a row lock.
"""

from __future__ import annotations

# Members -----------------------------------------------------------------------------------------------------

HERE = "m.incarnation = {incarnation} and coalesce(m.place, {place}) = {place}"
"""Whether the member joined on this line of data, and in these tables. Older releases write no place on MariaDB."""

JOIN = """
insert into {members} (namespace, id, name, host, pid, version, metadata, takeover, ttl_ms, renewals,
                       sentinel_key, sentinel_epoch, server_start, incarnation,
                       control_pid, control_start, watch_pid, watch_start, joined_at, renewed_at, place)
values (:namespace, :id, :name, :host, :pid, :version, :metadata, :takeover, :ttl_ms, 0,
        :key, 0, :server_start, :incarnation, :control_pid, :control_start, :watch_pid, :watch_start, {now}, {now},
        {place})
"""

RENEW = """
update {members}
set renewals = renewals + 1, renewed_at = {now}, control_pid = :control_pid, control_start = :control_start,
    watch_pid = :watch_pid, watch_start = :watch_start
where id = :id and ended_at is null
"""

RESUME = """
update {members}
set renewals = renewals + 1, renewed_at = {now}, control_pid = :control_pid, control_start = :control_start,
    watch_pid = :watch_pid, watch_start = :watch_start,
    sentinel_key = :key, sentinel_epoch = :epoch, server_start = :server_start, incarnation = :incarnation
where id = :id and ended_at is null and incarnation in (:was, :incarnation) and coalesce(place, {place}) = {place}
  and sentinel_epoch < :epoch
"""
"""A request that was delayed on its way has a lower epoch than the one that replaced it, and changes nothing. The row
has its new incarnation already if an earlier request took effect, and its answer was lost."""

END_SILENT = """
update {members} set ended_at = {now}, end_reason = 'silence'
where id = :id and ended_at is null and renewals = :renewals
"""

END_DEAD = """
update {members} set ended_at = {now}, end_reason = 'death'
where id = :id and ended_at is null and sentinel_epoch = :epoch and server_start = :server_start
"""

END_SELF = """
update {members} set ended_at = {now}, end_reason = :reason
where id = :id and ended_at is null
"""

LIVE_KEYS = """
select sentinel_key from {members} where ended_at is null and sentinel_key is not null
"""

# Roles -------------------------------------------------------------------------------------------------------

HELD = """
select name, token, request_token, request_to from {roles}
where namespace = :namespace and holder = :id
"""

HOLDS = "select 1 from {roles} r where r.holder = :id limit 1"
"""Whether to notify the others when the member goes: if it held nothing, nothing is vacant."""

REQUESTED = HELD + "  and request_token is not null\n"

VACANT = """
select r.name, r.token, w.id
from {candidates} c
join {roles} r on r.namespace = c.namespace and r.name = c.role
left join {members} m on m.id = r.holder and m.ended_at is null
left join {members} w on w.id = r.reserved_for and w.ended_at is null
where c.namespace = :namespace and c.member_id = :id and m.id is null
"""

ENDED_HOLDERS = """
select m.id from {members} m
where m.namespace = :namespace and m.ended_at is not null
  and (select r.holder from {roles} r where r.holder >= m.id order by r.holder limit 1) = m.id
"""
"""One step in an index for each ended member. A plain join would read all roles where nested loops are off."""

VACATED = f"""
select r.name, r.token, w.id
from {{candidates}} c
join {{roles}} r on r.namespace = c.namespace and r.name = c.role
left join {{members}} w on w.id = r.reserved_for and w.ended_at is null
where c.namespace = :namespace and c.member_id = :id and r.holder is null
union all
select r.name, r.token, w.id
from ({ENDED_HOLDERS}) as ended
join {{roles}} r on r.holder = ended.id
join {{candidates}} c on c.namespace = r.namespace and c.role = r.name and c.member_id = :id
left join {{members}} w on w.id = r.reserved_for and w.ended_at is null
where exists ({ENDED_HOLDERS})
"""
"""As VACANT, but by indexes: the cost depends on how many roles are vacant, not on how many there are. It lacks the
roles whose last holder's row was deleted."""

LEFT_OVER = """
select 1 from {roles} r
where r.holder = :ended and not exists (
    select 1 from {candidates} c where c.namespace = r.namespace and c.role = r.name and c.member_id = :id)
limit 1
"""

LOCK_LEFT = """
{keep} select r.name from {roles} r
where r.namespace = :namespace and r.holder {in_few} {listed} {end_few} and exists (
    select 1 from {candidates} c where c.namespace = r.namespace and c.role = r.name and c.member_id = :id)
order by r.name {skip_locked} {end_keep}
"""
"""The roles of members that are ended in the same transaction, as far as no open transaction has locked them."""

CONTESTED = """
select distinct c.role from {candidates} c
join {members} m on m.id = c.member_id and m.ended_at is null
where c.namespace = :namespace and c.role {in_few} {listed} {end_few} and c.member_id <> :id
"""

LOCK_MEMBER = f"""
select 1 from {{members}} m where m.id = :id and m.ended_at is null and {HERE} {{for_share}}
"""

LOCK_FREE = """
{keep} select name from {roles} where namespace = :namespace and name in {listed} order by name {skip_locked} {end_keep}
"""
"""``{locked}`` in later statements of the transaction are the names that a statement with ``{keep}`` has locked."""

LOCK_PATIENTLY = """
{keep} select name from {roles} where namespace = :namespace and name in {listed} {wait_for_role}
order by name {patiently} {end_keep}
"""

_LIVING = f"exists (select 1 from {{members}} m where m.id = :id and m.ended_at is null and {HERE})"

_BEGIN = f"""
update {{roles}} as r
set token = {{greatest}}(token + 1, :floor, coalesce(
        (select t.token + 1 from {{terms}} t where t.namespace = r.namespace and t.role = r.name
         order by t.token desc limit 1), 0)),
    holder = :id, reserved_for = null, request_token = null, request_to = null
where namespace = :namespace and name in {{locked}} and token <> 9223372036854775807
  and {_LIVING}
"""
"""The token is also above every token in the history, in case a role's row was changed or deleted by hand."""

TAKE = (
    _BEGIN
    + """  and (holder is null or holder = :id
       or not exists (select 1 from {members} m where m.id = holder and m.ended_at is null))
  and (reserved_for is null or reserved_for = :id or name in {unreserved}
       or not exists (select 1 from {members} w where w.id = reserved_for and w.ended_at is null))
"""
)
CLAIM = _BEGIN + "  and (holder = :id or token < :floor)\n"
"""For a node that led the roles when it met this promoted server, which may lack that (R22). Every token that was
issued here is at or above the floor. A lower one shows that no node has led here."""

TAKEN = f"""
select name, token from {{roles}} where namespace = :namespace and holder = :id and name in {{locked}} and {_LIVING}
"""

HOLDS_SOME = """
select 1 from {roles} where namespace = :namespace and holder = :id and name in {listed}
"""
"""Whether to notify the others after an acquisition: a candidate that came too late has nothing to tell."""

RECORD = f"""
insert into {{terms}} (namespace, role, token, member_id, member_name, began_at)
select namespace, name, token, :id, :name, {{now}} from {{roles}}
where namespace = :namespace and holder = :id and name in {{locked}} and {_LIVING}
"""

MARK_RESIGNED = """
update {terms} set resigned_at = {now}
where namespace = :namespace and role = :role and token = :token and member_id = :id
"""

MINE = """
select name from {roles} where namespace = :namespace and name = :role and token = :token and holder = :id
"""

VACATE = """
update {roles} set holder = null, reserved_for = :reserved_for, request_token = null, request_to = null
where namespace = :namespace and name = :role and token = :token and holder = :id and name in {locked}
"""

_SUCCESSOR = """
select r.name, (
    select c.member_id from {candidates} c join {members} m on m.id = c.member_id and m.ended_at is null
    where c.namespace = r.namespace and c.role = r.name and c.member_id <> :id
      and m.control_pid <> 0 and m.takeover <> 'manual'
    order by case when c.member_id = :reserved_for then 0 when c.member_id {bytewise} > :id then 1 else 2 end,
             c.member_id {bytewise} limit 1)
from {roles} r where r.namespace = :namespace
"""
"""Some roles, and for each the candidate that should take it from this member: the one for whom it is reserved, if that
lives, or else the next one on the ring; and in any case one that hears it (R24)."""

SUCCESSOR = _SUCCESSOR + "  and r.name = :role and r.token = :token and r.holder is null\n"
"""For a role that this member has vacated, unless another has it already."""

SUCCESSORS = _SUCCESSOR + "  and r.holder = :id order by r.name limit :limit\n"

# Candidates --------------------------------------------------------------------------------------------------

ADD_ROLES = """
{insert} into {roles} (namespace, name, token)
select :namespace, value, 0 from {from_listed}
where not exists (select 1 from {roles} r where r.namespace = :namespace and r.name = value)
order by value
{or_nothing}
"""

ADD_CANDIDACIES = """
{insert} into {candidates} (namespace, role, member_id)
select :namespace, value, :id from {from_listed} where true
{or_nothing}
"""

REMOVE_CANDIDACIES = """
delete from {candidates} where namespace = :namespace and member_id = :id and role in {listed}
"""

# The confirmed server ----------------------------------------------------------------------------------------

WHERE = """
select {incarnation}, {place}, {was_replica}
"""

ADD_NAMESPACE = """
{insert} into {namespaces} (name, incarnation, base, max_ttl_ms, ripe_ttl_ms, limit_set_at, place, waited_on,
                             limit_by)
select :namespace,
       case when waited.line is not null
                 or (:promoted = 0 and not exists (select 1 from {namespaces} o where o.place <> {place}))
            then :incarnation else :unconfirmed end,
       0, :max_ttl_ms, :ripe_ttl_ms, {now}, {place}, waited.line, :limit_by
from (select max(w.waited_on) as line from {namespaces} w where w.waited_on = :line) as waited
where true
{or_nothing}
"""
"""A namespace that is missing may have existed: a promotion may have lost it, or it was created after the dump that
these tables came from. So no node is elected in the new one until every lease that the lost one may have granted is
over, unless a node has already waited that long on this line of data, for another namespace (R15)."""

SETTLE_MAX_TTL = """
update {namespaces}
set ripe_ttl_ms = {least}(:ripe_ttl_ms, max_ttl_ms), limit_by = 'nodes', limit_set_at = {now},
    max_ttl_ms = {greatest}(:max_ttl_ms, coalesce(
        (select max(m.ttl_ms) from {members} m where m.namespace = :namespace and m.ended_at is null), 0))
where name = :namespace and limit_by = 'open'
"""
"""The first node sets the limit that `tenure init` has left open (R16). Older releases join without setting it."""

RAISE_MAX_TTL = """
update {namespaces}
set ripe_ttl_ms = {ripe}, limits = limits + 1, limit_set_at = {now}, max_ttl_ms = :ttl_ms
where name = :namespace and limit_by = 'nodes' and max_ttl_ms < :ttl_ms
"""
"""A node raises the limit for its own TTL, unless an operator has set the limit. The raise ripens (R14, R16)."""

CONFIRMED = """
select incarnation, base, max_ttl_ms, {ripe}, limits, coalesce(place, {place}), {place},
       (select value from {meta} where name = 'oldest'), promotion, {standbys}, {replicated}, requests, {now_us}
from {namespaces} where name = :namespace
"""

PROMOTION = """
select promotion, {replicated} from {namespaces} where name = :namespace {for_key_share}
"""
"""Reads what an operator says about promotions. If they lose nothing, the commit waits for the replica (R17). The lock
makes sure that a transaction which does not wait is committed before the operator's word."""

CONFIRM = """
update {namespaces}
set base = case when :same_tokens = 1 then base else 4294967296 + {serial} + {greatest}(base, coalesce(
        (select max(token) from {roles} where namespace = :namespace), 0) - :above) end,
    incarnation = :incarnation, place = :place, waited_on = :waited_on
where name = :namespace and incarnation = :old and coalesce(place, {place}) = :old_place and {place} = :place
"""
"""Each timeline has its own tokens. A copy on another system, or in another place, has the tokens of its original,
which may have issued more since the copy was made. So the tokens of a copy begin 2^32 higher. Among several copies of
one dump on one server, a later one begins higher by ``serial``, which counts transactions."""

RIPEN = """
update {namespaces} set ripe_ttl_ms = max_ttl_ms
where name = :namespace and max_ttl_ms = :max_ttl_ms and limits = :limits and incarnation = :incarnation
"""

# The fence ---------------------------------------------------------------------------------------------------

IS_LATEST = f"""
    r.namespace = :namespace and r.name = :role and r.token = :token and r.holder = :id
    and exists (select 1 from {{members}} m where m.id = r.holder and m.ended_at is null
                and {HERE})
    and not exists (select 1 from {{terms}} t where t.namespace = r.namespace and t.role = r.name
                    and t.token = r.token and t.resigned_at is not null)
"""

FENCE_BY_LOOK = "select 1 from {roles} r where " + IS_LATEST
"""Locks nothing: for a transaction that is never committed."""

FENCE_BY_UPDATE = "\nupdate {roles} as r set token = r.token where " + IS_LATEST
"""Changes nothing, but takes the write lock, and opens a transaction where a SELECT would not open one."""

# What operators read ---------------------------------------------------------------------------------------------

LEADERS = """
select r.name, r.token, m.id, m.name
from {roles} r left join {members} m on m.id = r.holder and m.ended_at is null
where r.namespace = :namespace and r.name in {listed}
"""

LEADER = """
select m.id, m.name, r.token, coalesce(t.began_at, m.joined_at), m.renewed_at, {now}
from {roles} r
join {members} m on m.id = r.holder and m.ended_at is null
left join {terms} t on t.namespace = r.namespace and t.role = r.name and t.token = r.token
where r.namespace = :namespace and r.name = :role and t.resigned_at is null
"""

CANDIDATES = """
select m.id, m.name, m.host, m.pid, m.takeover, m.ttl_ms, m.renewed_at, {now}, m.metadata
from {candidates} c join {members} m on m.id = c.member_id and m.ended_at is null
where c.namespace = :namespace and c.role = :role
order by m.joined_at, m.id
"""

HISTORY = """
select t.token, t.member_id, t.member_name, t.began_at,
       coalesce(t.ended_at, t.resigned_at, m.ended_at),
       coalesce(t.end_reason, case when t.resigned_at is not null then 'resigned' end, m.end_reason),
       m.renewed_at, m.ttl_ms, {now}
from {terms} t left join {members} m on m.id = t.member_id
where t.namespace = :namespace and t.role = :role
order by t.token desc limit :limit
"""

FORGOTTEN = "forgotten"
"""What stands in ``reserved_for`` of a role that an operator has forgotten. No member has that id."""

CLOCK = """
select {now}
"""

ROLES = (
    """
select r.name, r.token, m.id, m.name, coalesce(t.began_at, m.joined_at), m.renewed_at, m.ttl_ms, {now},
       (select count(*) from {candidates} c join {members} s on s.id = c.member_id and s.ended_at is null
        where c.namespace = r.namespace and c.role = r.name)
from {roles} r
left join {terms} t on t.namespace = r.namespace and t.role = r.name and t.token = r.token
left join {members} m on m.id = r.holder and m.ended_at is null and t.resigned_at is null
where r.namespace = :namespace
  and (r.reserved_for is null or r.reserved_for <> '"""
    + FORGOTTEN
    + """' or exists (
      select 1 from {candidates} c join {members} s on s.id = c.member_id and s.ended_at is null
      where c.namespace = r.namespace and c.role = r.name))
order by r.name
"""
)

MEMBERS = """
select id, name, host, pid, version, sentinel_key, takeover, ttl_ms, joined_at, renewed_at, {now}
from {members} where namespace = :namespace and ended_at is null order by joined_at, id
"""

# What operators do -------------------------------------------------------------------------------------------

REQUEST = """
update {roles} set request_token = token, request_to = :to
where namespace = :namespace and name = :role and token = :token and holder is not null
"""

NAMESPACES = """
select name from {namespaces} order by name
"""

SET_MAX_TTL = """
update {namespaces}
set ripe_ttl_ms = {least}({ripe}, :max_ttl_ms), limits = limits + 1, limit_set_at = {now}, limit_by = 'operator',
    max_ttl_ms = :max_ttl_ms
where name = :namespace and (max_ttl_ms <> :max_ttl_ms or coalesce(limit_by, '') <> 'operator')
"""
"""MariaDB assigns the columns in the order of the text, so the limit comes last."""

SET_PROMOTION = (
    "select value from {meta} where name = 'oldest' for update",
    "select promotion, {replicated} from {namespaces} where name = :namespace for update",
    """
update {namespaces} set promotion = :promotion
where name = :namespace and (:promotion = 'may-lose'
                             or incarnation = {incarnation} and coalesce(place, {place}) = {place})
""",
    """
update {meta} set value = {greatest}(:oldest, case when exists (
    select 1 from {namespaces} where promotion = 'loses-nothing') then 6 else 0 end) where name = 'oldest'
""",
)
"""The commit that takes the word back waits for the replica: a replica that lacks it would still be trusted at once.

A promotion that is being waited for came before the word, so the word must not shorten that wait. Releases before
version 6 do not know the word, and begin terms by commits whose wait for the replica was cancelled: they are refused
as long as a namespace has it."""
