"""What a schedule does next with a job: the rules by example. Times are seconds; the job is due every ten seconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure import ConfigError
from tenure.schedule.due_times import SECOND_US, Interval, zone_of
from tenure.schedule.jobs import make_job
from tenure.schedule.plan import LATE, MISSED, OVERLAP, Busy, Make, Stretch, Wait, decide
from tests.support.fuzzing import fuzzed


def report(run):
    pass


def job(every=10, **options):
    return make_job(report, Interval(every), zone_of("UTC"), **options)


def at(seconds):
    return round(seconds * SECOND_US)


def plan(job, mark, now, busy=None):
    """The decision, in seconds."""
    found = decide(job, at(mark), at(now), None if busy is None else Busy(*map(at, busy)))
    if isinstance(found, Wait):
        return "wait", None if found.until is None else found.until / SECOND_US
    stretches = [(one.first // SECOND_US, one.last // SECOND_US, one.number, one.reason) for one in found.skipped]
    return "make", found.due / SECOND_US, stretches


def test_next_due_time_after_the_mark_is_waited_for():
    assert plan(job(), mark=100, now=105) == ("wait", 110)


def test_due_time_that_has_come_is_run():
    assert plan(job(), mark=100, now=110) == ("make", 110, [])


def test_once_runs_the_latest_and_records_the_others():
    assert plan(job(), mark=100, now=145) == ("make", 140, [(110, 130, 3, MISSED)])


def test_each_runs_one_after_the_other():
    assert plan(job(missed="each", within=1000), mark=100, now=145) == ("make", 110, [])


def test_each_leaves_out_what_is_too_late():
    assert plan(job(missed="each", within=20), mark=100, now=145) == ("make", 130, [(110, 120, 2, LATE)])


def test_once_leaves_out_what_is_too_late():
    assert plan(job(every=100, within=20), mark=100, now=250) == ("wait", 300)
    assert plan(job(every=100, within=20), mark=100, now=305) == ("make", 300, [(200, 200, 1, LATE)])


def test_skip_runs_what_a_change_of_the_leader_delayed():
    assert plan(job(every=100, missed="skip"), mark=100, now=229) == ("make", 200, [])


def test_skip_runs_nothing_after_an_outage():
    assert plan(job(every=100, missed="skip"), mark=100, now=250) == ("wait", 300)
    assert plan(job(every=100, missed="skip"), mark=100, now=300) == ("make", 300, [(200, 200, 1, MISSED)])


def test_overlap_skips_what_passed_during_a_run():
    assert plan(job(), mark=100, now=135, busy=(100, 134)) == ("wait", 140)
    assert plan(job(), mark=100, now=140, busy=(100, 134)) == ("make", 140, [(110, 130, 3, OVERLAP)])


def test_one_run_for_missed_due_times_is_not_made_if_the_next_is_due_while_a_lost_run_is_repeated():
    repeated = (135, 142)
    assert plan(job(), mark=100, now=139, busy=(135, 139)) == ("make", 130, [(110, 120, 2, MISSED)])
    assert plan(job(), mark=100, now=142, busy=repeated) == ("wait", 150)
    assert plan(job(), 100, 150, repeated) == ("make", 150, [(110, 130, 3, MISSED), (140, 140, 1, OVERLAP)])


def test_overlap_wait_runs_the_latest_when_the_run_has_ended():
    assert plan(job(overlap="wait"), mark=100, now=135, busy=(100, 134)) == ("make", 130, [(110, 120, 2, OVERLAP)])


def test_run_that_was_missed_does_not_overlap_with_one_that_was_made_up_for():
    """Due times before a run began are missed, whenever the run ends; the one at 150 passed during the run."""
    each = job(missed="each", within=1000)
    assert plan(each, mark=110, now=151, busy=(145, 151)) == ("make", 120, [])
    assert plan(each, mark=140, now=151, busy=(145, 151)) == ("wait", 160)
    assert plan(each, mark=140, now=160, busy=(145, 151)) == ("make", 160, [(150, 150, 1, OVERLAP)])


def test_jitter_delays_every_run_by_the_same_amount_on_every_node():
    one, other = job(jitter=5), job(jitter=5)
    starts = [one.start_of(at(due)) - at(due) for due in range(10, 1000, 10)]
    assert starts == [other.start_of(at(due)) - at(due) for due in range(10, 1000, 10)]
    assert 0 <= min(starts) < at(1)
    assert at(4) < max(starts) < at(5)


def test_jitter_does_not_make_a_run_late():
    """A delay that is longer than the time within which a run may begin: it begins all the same."""
    delayed = job(every=300, missed="skip", within=30, jitter=200)
    for due in range(300, 9000, 300):
        start = delayed.start_of(at(due)) / SECOND_US
        assert plan(delayed, mark=due - 300, now=start)[:2] == ("make", due)


def test_jitter_stays_below_the_time_between_two_due_times():
    long = job(jitter=100)
    assert all(long.start_of(at(due)) < at(due + 10) for due in range(10, 1000, 10))


@fuzzed(200)
@given(
    st.sampled_from(["once", "each", "skip"]),
    st.sampled_from(["skip", "wait"]),
    st.one_of(st.none(), st.integers(1, 300)),
    st.integers(0, 12),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 60)), min_size=1, max_size=20),
)
def test_every_due_time_is_run_or_skipped_exactly_once(missed, overlap, within, jitter, steps):
    """Whatever the options, the pauses and the lengths of the runs: nothing is lost, and nothing is counted twice."""
    subject = job(missed=missed, overlap=overlap, within=within or 50, jitter=jitter)
    mark = now = at(1000)
    busy, accounted, waited = None, [], True
    for pause, length in steps:
        now += at(pause)
        for _ in range(100):
            decision = decide(subject, mark, now, busy)
            if isinstance(decision, Wait):
                assert decision.until > now
                waited = True
                break
            assert mark < decision.due <= now
            for stretch in decision.skipped:
                accounted += range(stretch.first, stretch.last + 1, at(10))
                assert stretch.number == (stretch.last - stretch.first) // at(10) + 1
            accounted.append(decision.due)
            mark = decision.due
            began, waited = now if waited or busy is None else busy.since, False
            now += at(length)
            busy = Busy(began, now)
    assert accounted == list(range(at(1010), mark + 1, at(10)))


# --- options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"missed": "never"}, "missed='never' must be one of 'once', 'each', 'skip'"),
        ({"missed": "each"}, "missed='each' needs within="),
        ({"within": "soon"}, "within='soon' is not a duration: write a number and a unit"),
        ({"overlap": "cancel"}, "overlap='cancel' must be one of"),
        ({"delivery": "exactly-once"}, "delivery='exactly-once' must be one of"),
        ({"attempts": 0}, "attempts=0 must be a whole number"),
        ({"attempts": True}, "attempts=True must be a whole number"),
        ({"timeout": "0 s"}, "timeout='0 s' must be"),
        ({"jitter": -1}, "jitter=-1 must be"),
        ({"on_handover": "wait"}, "on_handover='wait' must be one of"),
        ({"name": ""}, "name="),
        ({"name": "x" * 300}, "name="),
    ],
)
def test_options_that_cannot_work_are_refused(options, words):
    with pytest.raises(ConfigError) as caught:
        job(**options)
    assert words in str(caught.value)


@pytest.mark.parametrize("function", [lambda _: None, 5, "report", type("C", (), {}), (n for n in ())])
def test_job_without_a_stable_name_is_refused(function):
    with pytest.raises(ConfigError):
        make_job(function, Interval(10), zone_of("UTC"))


def test_stretch_says_what_it_is():
    assert Make(5, (Stretch(1, 3, 3, MISSED), Stretch(4, 4, 1, LATE))).missed == 4
