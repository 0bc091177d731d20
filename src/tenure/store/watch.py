"""The watch lane's requests: wait for a sentinel, read some members, knock before a member is ended, and evict it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tenure.core import messages, timing
from tenure.core.messages import MANUAL, Sighting
from tenure.store.dialects import listed
from tenure.store.session import Result, Sentinel, Session, Step
from tenure.store.statements import ENDED_HOLDERS

# What a look reads (R19). The rules of `statements` hold here, too.

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


class WatchActions:
    """What the watch connection can do to other connections. By default nothing: databases override what they can."""

    def slice_s(self) -> float:
        """Return how long a wait may last without being written to the server's log."""
        return timing.SLICE_S

    def evict(self, namespace: str, member_ids: tuple[str, ...]) -> None:
        """Terminate the connections of members that were ended. Best effort: the lease holds in any case."""

    def unblock(self, namespace: str, control_pid: int, bound_s: float) -> None:
        """Terminate transactions that have blocked the control connection for longer than their bound."""


class NoSentinel:
    """The sentinel of a connection that can neither hold nor see sentinels.

    The sentinels of other members count as held, so a member is ended only for its silence.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def hold(self, key: int) -> bool:
        """Return False: no sentinel can be held."""
        return False

    def release(self, key: int) -> None:
        """Do nothing: ``hold()`` takes no lock."""

    def sweep(self, keys: set[int]) -> None:
        """Do nothing: a dead member leaves no sentinel behind."""

    def abandon(self) -> None:
        """Do nothing: a forked child inherits no sentinel."""

    def wait(self, key: int, seconds: float) -> None:
        """Wait for the time to pass, or for the node to be closed."""
        self._stop.wait(seconds)

    def duplicates(self) -> list[int]:
        """Return an empty list: no descriptor carries a sentinel."""
        return []

    def standing(self, keys: Sequence[int]) -> set[int]:
        """Return all the keys: each counts as held."""
        return set(keys)


class WatchStore:
    """Carries out the watch lane's requests for one namespace, on the watch connection."""

    def __init__(
        self,
        session: Session,
        sentinel: Sentinel,
        watcher: WatchActions,
        namespace: str,
        knock: Callable[[], str | None],
    ) -> None:
        """Work on an open session; ``knock`` opens a new connection and returns the server's start time."""
        self.session = session
        self.sentinel = sentinel
        self.watcher = watcher
        self.namespace = namespace
        self.knock = knock
        self.control_pid = 0

    def perform(self, request: messages.WatchRequest) -> messages.WatchReply:
        """Carry out a request and return the reply; raise ``Gone`` or ``Failed``."""
        if isinstance(request, messages.Look):
            return self.look(request)
        if isinstance(request, messages.Knock):
            return messages.Knocked(self.knock() == request.server_start)
        if isinstance(request, messages.Evict):
            self.watcher.evict(self.namespace, request.member_ids)
        elif isinstance(request, messages.Unblock):
            self.watcher.unblock(self.namespace, self.control_pid, request.bound_s)
        return messages.Done()

    def waits(self, request: messages.Look) -> bool:
        """Whether the look waits on the server. Otherwise the caller waits first."""
        return request.wait_for is not None

    def look(self, request: messages.Look) -> messages.Looked:
        """Wait for a sentinel to be released; read some members; then read which of their sentinels are held.

        The order matters. A member takes its sentinel before its row names it, so the sentinel of a row that was read
        is held, unless its owner is gone.
        """
        server = self.session.server()
        mine = {"namespace": self.namespace, "id": request.member_id}
        roster = Step(ROSTER, {**mine, "reach": request.reach, "names": listed(request.roles)})
        members, vacancy = self._survey(request, roster, Step(ANY_VACANCY, mine))
        return messages.Looked(server, members, bool(vacancy.rows), self.watcher.slice_s())

    def _survey(self, request: messages.Look, roster: Step, vacancy: Step) -> tuple[tuple[Sighting, ...], Result]:
        """Wait, then read. Return the members and the other step's result."""
        if request.wait_for is not None:
            self.sentinel.wait(request.wait_for, request.seconds)
        members, vacancies = self.session.read(roster, vacancy)
        standing = self.sentinel.standing([row[3] for row in members.rows if row[3] is not None])
        return tuple(sighting(row, stands=row[3] in standing) for row in members.rows), vacancies


def sighting(row: Sequence[Any], *, stands: bool) -> Sighting:
    """Return a member as a look saw it, from its row in the roster."""
    member_id, ttl_ms, renewals, key, epoch, server_start, _, takeover, holds = row
    looks = takeover != MANUAL
    return Sighting(member_id, ttl_ms / 1000, renewals, key, epoch, server_start, stands, looks, bool(holds))
