"""Every statement about jobs and their runs. The rules of ``statements`` hold here, too.

``jobs`` has one row for each job of a role: its definition, the run that was claimed last and the one that was done
last. ``runs`` accounts for every due time. A row is one of these:

    attempt 1, 2, …     an attempt at the run that was due at ``due_us``
    outcome 'skipped'   due times that were not run, from ``first_us`` to ``due_us``; ``detail`` says why
    attempt 0           a run that an operator asked for, at ``due_us``
    attempt -1          older rows, folded into one; ``detail`` says how they ended: ``done 850, lost 2, skipped 48``

``covers`` is the number of due times that a row accounts for. It is 0 for a second attempt and for a run that an
operator asked for, so the sum over a job's rows is the number of its due times up to the last claim.
"""

from __future__ import annotations

_JOB = "namespace = :namespace and role = :role and job = :job"
_MEMBER = "(select m.name from {members} m where m.id = :id)"

ADD_JOB = """
insert into {jobs} (namespace, role, job, token) values (:namespace, :role, :job, :token) {or_lock}
"""

CLAIM = f"""
update {{jobs}} set claimed_us = :us, token = :token
where {_JOB} and (claimed_us is null or claimed_us < :us)
"""

CLAIM_DUE = CLAIM + "  and paused_us is null and :us <= {now_us}\n"
"""Claims nothing that is still in the future by the database's clock, and no run of a paused job."""

RECORD_CLAIM = f"""
{{insert}} into {{runs}} (namespace, role, job, due_us, attempt, first_us, covers, outcome, token, member, began_at)
select namespace, role, job, claimed_us, 1, claimed_us, 1, 'begun', token, {_MEMBER}, {{now}} from {{jobs}}
where {_JOB} and claimed_us = :us and token = :token
{{or_nothing}}
"""
"""Follows a claim, and does nothing if that was refused."""

LOSE_RUN = f"""
update {{runs}} set outcome = 'lost', ended_at = {{now}}
where {_JOB} and due_us = :us and outcome = 'begun' and token < :token
"""

LOSE_EARLIER = f"""
update {{runs}} set outcome = 'lost', ended_at = {{now}} where {_JOB} and outcome = 'begun' and token < :token
"""

_ATTEMPTS = """select {what} from {{runs}} r where r.namespace = j.namespace and r.role = j.role and r.job = j.job
    and r.due_us = j.claimed_us and r.attempt > 0"""

RECORD_ATTEMPT = f"""
insert into {{runs}} (namespace, role, job, due_us, attempt, first_us, covers, outcome, token, member, began_at)
select namespace, role, job, claimed_us, ({_ATTEMPTS.format(what="coalesce(max(r.attempt), 0) + 1")}), claimed_us,
    ({_ATTEMPTS.format(what="case when count(*) = 0 then 1 else 0 end")}), 'begun', :token, {_MEMBER}, {{now}}
from {{jobs}} j where {_JOB} and claimed_us = :us and not exists ({_ATTEMPTS.format(what="1")}
    and r.outcome = 'begun' and r.token = :token)
"""
"""One more attempt at the run that was claimed last, unless this term has begun one."""

ATTEMPT = f"""
select max(attempt) from {{runs}} where {_JOB} and due_us = :us and attempt > 0
"""

FINISH = f"""
update {{jobs}} set done_us = :us, token = :token
where {_JOB} and (done_us is null or done_us < :us)
"""

FINISH_CLAIMED = FINISH + "  and claimed_us = :us\n"
"""For runs that are not repeated: what is claimed is over."""

RECORD_DONE = f"""
update {{runs}} set outcome = 'done', ended_at = {{now}} where {_JOB} and due_us = :us and outcome = 'begun'
"""

RECORD_END = f"""
update {{runs}} set outcome = :outcome, detail = :detail, ended_at = {{now}}
where {_JOB} and due_us = :us and outcome = 'begun'
"""

STATE = f"""
select claimed_us, paused_us, {{now_us}}, (select r.outcome from {{runs}} r where r.namespace = :namespace
    and r.role = :role and r.job = :job and r.due_us = :us and r.attempt = 1 and r.token = :token)
from {{jobs}} where {_JOB}
"""
"""The last column is what this term has recorded about the run."""

EXTEND_SKIPPED = f"""
update {{runs}} set due_us = :last, covers = covers + :number, token = :token, ended_at = {{now}}
where {_JOB} and due_us = :mark and attempt = 1 and outcome = 'skipped' and detail = :reason
"""
"""Lengthens the stretch that ends where the last claim left off, so that a paused job does not fill the table."""

RECORD_SKIPPED = f"""
{{insert}} into {{runs}} (namespace, role, job, due_us, attempt, first_us, covers, outcome, detail, token, member,
                    began_at, ended_at)
values (:namespace, :role, :job, :last, 1, :first, :number, 'skipped', :reason, :token, {_MEMBER}, {{now}}, {{now}})
{{or_nothing}}
"""
"""Where the database's clock was ahead, and the marks were reset, a row may be there from that time."""

PASS_OVER = f"""
update {{jobs}} set claimed_us = :last, done_us = :last, token = :token
where {_JOB} and (claimed_us is null or claimed_us < :last)
"""
"""Moves the marks over due times that are skipped."""

# What a schedule does when its node is elected ----------------------------------------------------------------

BEGUN = """
select distinct job from {runs}
where namespace = :namespace and role = :role and job in {listed} and outcome = 'begun'
"""

LOSE = """
update {runs} set outcome = 'lost', ended_at = {now}
where namespace = :namespace and role = :role and job in {listed} and outcome = 'begun'
"""

DEFINE = f"""
update {{jobs}} set spec = :spec, since_us = :since, token = :token, listed_token = :token where {_JOB}
"""

LIST = """
update {jobs} set listed_token = :token
where namespace = :namespace and role = :role and job in {listed}
"""

DESCRIBE = f"""
update {{jobs}} set zone_data = :zone_data, jitter_us = :jitter where {_JOB}
"""

NOW = "\nselect {now_us}\n"

# Runs that operators ask for ----------------------------------------------------------------------------------

REQUEST_RUN = f"""
update {{jobs}} set requested_us = {{now_us}} where {_JOB} and spec is not null and requested_us is null
"""

CALL = """
update {namespaces} set requests = requests + 1 where name = :namespace
"""
"""Lets the leaders of the namespace see, with their next renewal, that there is something to read."""

TAKE_REQUEST = f"""
update {{jobs}} set requested_us = null, token = :token where {_JOB} and requested_us = :us
"""

REQUEST_TAKEN = f"""
select 1 from {{runs}} where {_JOB} and due_us = :us and attempt = 0 and token = :token and outcome = 'begun'
"""

RECORD_REQUESTED = f"""
insert into {{runs}} (namespace, role, job, due_us, attempt, first_us, covers, outcome, token, member, began_at)
values (:namespace, :role, :job, :us, 0, :us, 0, 'begun', :token, {_MEMBER}, {{now}})
"""

PAUSE = f"""
update {{jobs}} set paused_us = {{now_us}}, paused_reason = :reason where {_JOB} and spec is not null
"""

RESUME_JOB = f"""
update {{jobs}} set paused_us = null, paused_reason = null where {_JOB} and spec is not null
"""

RESET_MARKS = f"""
update {{jobs}} set claimed_us = {{now_us}}, done_us = {{now_us}}, since_us = {{now_us}}
where {_JOB} and claimed_us > {{now_us}}
"""
"""For a job whose last run is in the future, because the database's clock was ahead when it was claimed."""

# Jobs without a schedule --------------------------------------------------------------------------------------

SET_ANCHOR = f"""
update {{jobs}} set anchor_us = :us, token = :token where {_JOB} and anchor_us is null
"""

ANCHOR = f"""
select anchor_us from {{jobs}} where {_JOB} {{for_share}}
"""

FORGET_RUNS = f"""
delete from {{runs}} where {_JOB}
"""

FORGET_JOB = f"""
delete from {{jobs}} where {_JOB}
"""

# What is read -------------------------------------------------------------------------------------------------

_JOBS = """
select job, anchor_us, claimed_us, done_us, token, spec, since_us, zone_data, paused_us, paused_reason, requested_us,
       role, listed_token, jitter_us, {now_us}
from {jobs} where namespace = :namespace
"""

JOBS = _JOBS + "and role = :role order by job\n"

ALL_JOBS = _JOBS + "order by role, job\n"

RUNS = """
select role, job, due_us, attempt, first_us, covers, outcome, detail, token, member, began_at, ended_at
from {runs} where namespace = :namespace and role = :role and job = :job
order by due_us desc, attempt desc limit :limit
"""

LATEST_RUNS = """
select role, job, due_us, attempt, first_us, covers, outcome, detail, token, member, began_at, ended_at
from {runs} where namespace = :namespace order by due_us desc, attempt desc, role, job limit :limit
"""

LAST_RUNS = """
select r.role, r.job, r.due_us, r.attempt, r.first_us, r.covers, r.outcome, r.detail, r.token, r.member, r.began_at,
       r.ended_at
from {runs} r
join (select role, job, max(due_us) as due_us from {runs} where namespace = :namespace group by role, job) as l
  on l.role = r.role and l.job = r.job and l.due_us = r.due_us
where r.namespace = :namespace order by r.attempt
"""

# Keeping the table small --------------------------------------------------------------------------------------

LONG_RUNS = """
select role, job from {runs} where namespace = :namespace group by role, job having count(*) > :kept + 1
"""
"""One more than are kept: that one may be the row into which older ones were folded."""

LOCK_JOB = f"""
select job from {{jobs}} where {_JOB} {{skip_locked}}
"""
"""Two nodes that folded the same rows would count them twice."""

LAST_KEPT_RUN = f"""
select due_us from {{runs}} where {_JOB} and attempt <> -1 order by due_us desc, attempt desc limit 1 offset :kept
"""

OLD_RUNS = f"""
select outcome, detail, case when outcome = 'skipped' then sum(covers) else count(*) end
from {{runs}} where {_JOB} and due_us <= :before group by outcome, detail
"""
"""How the rows ended that are folded: the number of attempts, or of due times that were skipped."""

FOLD = f"""
insert into {{runs}} (namespace, role, job, due_us, attempt, first_us, covers, outcome, detail, token, began_at,
                    ended_at)
select namespace, role, job, max(due_us), -1, min(first_us), sum(covers), 'folded', :detail, max(token), min(began_at),
       {{now}}
from {{runs}} where {_JOB} and due_us <= :before group by namespace, role, job
"""

DELETE_FOLDED = f"""
delete from {{runs}} where {_JOB} and due_us <= :before and not (due_us = :before and attempt = -1)
"""
