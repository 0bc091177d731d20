"""What a look reads (R19). The rules of ``statements`` hold here, too."""

from __future__ import annotations

from tenure.store.statements import ENDED_HOLDERS

_SEEN = "id, ttl_ms, renewals, sentinel_key, sentinel_epoch, server_start, control_pid, takeover"

_WATCHED = f"""
select {_SEEN} from (
    select {_SEEN}, below from (
        select {_SEEN}, 1 as below from {{members}}
        where namespace = :namespace and ended_at is null and id {{bytewise}} < :id
        order by id {{bytewise}} desc limit :reach) as lower_ones
    union all
    select {_SEEN}, below from (
        select {_SEEN}, 0 as below from {{members}}
        where namespace = :namespace and ended_at is null and id {{bytewise}} > :id
        order by id {{bytewise}} desc limit :reach) as higher_ones
    order by below desc, id desc limit :reach) as neighbours
union
select {_SEEN} from {{members}}
where namespace = :namespace and ended_at is null and id {{in_few}} (
    select holder from (
        select r.holder from {{roles}} r
        where r.namespace = :namespace and r.name {{in_few}} {{listed}} {{end_few}} and r.holder <> :id
        group by r.holder
        order by case when r.holder {{bytewise}} < :id then 0 else 1 end, r.holder {{bytewise}} desc limit 8) as holders
) {{end_few}}
"""
"""The members that come before this one on the ring, by id (R19), and the nearest living holders of some roles.

After the first member comes the last one. The member itself is not among them."""

ROSTER = f"""
select {_SEEN}, exists (select 1 from {{roles}} h where h.holder = watched.id) from ({_WATCHED}) as watched
"""
"""The same, and whether each of them holds a role."""

ANY_VACANCY = f"""
select 1 where exists (
    select 1 from {{roles}} r
    join {{candidates}} c on c.namespace = r.namespace and c.role = r.name and c.member_id = :id
    where r.namespace = :namespace and r.holder is null
) or exists (
    select 1 from ({ENDED_HOLDERS}) as ended
    join {{roles}} r on r.holder = ended.id
    join {{candidates}} c on c.namespace = r.namespace and c.role = r.name and c.member_id = :id
) or exists (
    select 1 from {{roles}} r where r.holder = :id and r.request_token is not null and r.request_token = r.token)
"""
"""The last part finds a request to resign: a renewal has to see it, whether or not a notification arrived."""
