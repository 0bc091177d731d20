"""What the dashboard shows, reads and does, without a browser."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import tenure
from tenure import reports
from tenure.cli import main
from tenure.dashboard import User, dashboard, snapshot, threads, users_from_file
from tests.dashboard.client import act, ask
from tests.dashboard.conftest import OPERATOR, three
from tests.support import starter
from tests.support.store_by_hand import Desk, execute, table, until

TENURE = str(Path(sys.executable).with_name("tenure"))
HAND_OVER = {"what": "hand-over", "role": "scheduler", "to": "worker-2", "token": "1"}
PAGES = ("/", "/role", "/members", "/jobs", "/waits", "/doctor", "/actions")


@pytest.fixture
def operated(store_url):
    return dashboard(store_url, access=lambda _: ("operate", "olga"))


def cli(url, *arguments):
    return json.loads(CliRunner().invoke(main, [*arguments, "--json", "--url", url]).stdout)


def shape(value):
    """The fields of JSON, without the values, which change with time."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else type(value).__name__


@pytest.mark.usefixtures("three_nodes")
def test_every_page_answers_and_api_has_the_json_of_the_command_line(store_url, operated):
    for path in PAGES:
        answer = ask(operated, path, query={"name": "scheduler"})
        assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8"), path
    assert "worker-1" in ask(operated).text
    compared = {
        "status": ("status",),
        "members": ("members",),
        "history?role=scheduler": ("history", "scheduler"),
        "jobs": ("jobs",),
        "runs": ("runs",),
        "doctor": ("doctor",),
    }
    for path, command in compared.items():
        name, _, query = path.partition("?")
        asked = dict([query.split("=")]) if query else None
        assert shape(json.loads(ask(operated, f"/api/{name}", query=asked).text)) == shape(cli(store_url, *command)), (
            path
        )
    assert json.loads(ask(operated, "/api/waits").text) == []


def test_hand_over_ends_with_the_new_leader_and_is_recorded(three_nodes, operated, caplog):
    caplog.set_level("INFO", "tenure.dashboard")
    answer = act(operated, None, HAND_OVER)
    location, _, done = answer.headers["location"].rpartition("=")
    assert (answer.status, location, len(done)) == (303, "role?name=scheduler&done", 16)
    page = ask(operated, "/role", query={"name": "scheduler", "done": done}).text
    assert "<b>worker-2</b> leads" in page
    assert "worker-2 leads, token 2" in page
    assert "resigned" in page
    said = ask(operated, "/actions").text
    assert "olga" in said
    assert "hand over role &#39;scheduler&#39; to &#39;worker-2&#39;" in said
    asked, ended = [record.getMessage() for record in caplog.records]
    assert asked == "'olga' asks through the dashboard: hand over role 'scheduler' to 'worker-2'"
    assert ended.endswith("worker-2 leads, token 2")
    assert three_nodes[1].election("scheduler").is_leader


def test_hand_over_works_with_the_long_tokens_after_a_promotion(store_url):
    with Desk(store_url, join=False):
        role = (
            f"insert into {table(store_url, 'roles')} (namespace, name, token) values ('default', 'scheduler', {2**40})"
        )
        execute(store_url, role)
    with three(store_url) as nodes:
        operated = dashboard(store_url, access=lambda _: ("operate", "olga"))
        act(operated, None, {**HAND_OVER, "token": str(2**40 + 1)})
        until(lambda: nodes[1].election("scheduler").is_leader, "worker-2 knows that it leads")
        assert f"worker-2 leads, token {2**40 + 2}" in ask(operated, "/actions").text


def test_form_that_is_sent_twice_acts_once(three_nodes, operated):
    act(operated, None, HAND_OVER)
    act(operated, None, {**HAND_OVER, "to": "worker-3"})
    until(lambda: three_nodes[1].election("scheduler").is_leader, "worker-2 knows that it leads")
    said = ask(operated, "/actions").text
    assert "nothing was done: the leader of role &#39;scheduler&#39; has changed meanwhile" in said


def test_worker_that_did_not_act_shows_no_notice_of_another_action(sqlite_url):
    with three(sqlite_url):
        one, other = (dashboard(sqlite_url, access=lambda _: ("operate", "olga")) for _ in range(2))
        acted = act(one, None, {**HAND_OVER, "token": "999"}).headers["location"].rpartition("=")[2]
        act(other, None, {**HAND_OVER, "token": "998"})
        shown = ["nothing was done" in ask(app, query={"done": acted}).text for app in (one, other)]
        assert shown == [True, False]


@pytest.mark.parametrize("form", [{}, {"what": "destroy"}, {"what": "hand-over", "role": "scheduler"}])
@pytest.mark.twin("postgres")
def test_form_that_is_not_complete_does_nothing(operated, three_nodes, form):
    assert act(operated, None, form).status == 400
    assert "No action yet" in ask(operated, "/actions").text


def test_jobs_are_run_paused_and_resumed(sqlite_url):
    schedule, ran = tenure.Schedule(), threading.Event()
    schedule.every("1 h", name="invoices")(lambda _: ran.set())
    node = tenure.Node(sqlite_url, name="worker-1")
    node.leader_only("scheduler", schedule)
    app = dashboard(sqlite_url, access=lambda _: ("operate", "olga"))
    with node, tenure.Registry(sqlite_url) as registry:
        until(registry.jobs, "the job")
        form = {"role": "scheduler", "job": "invoices"}
        assert act(app, None, {"what": "trigger", **form}).headers["location"].startswith("jobs?role=scheduler")
        assert ran.wait(20)
        act(app, None, {"what": "pause", **form})
        assert registry.jobs()[0].paused is not None
        assert "paused" in ask(app, "/waits").text
        act(app, None, {"what": "resume", **form})
        assert registry.jobs()[0].paused is None
        assert "Nothing waits" in ask(app, "/waits").text


def test_page_shows_the_first_line_of_an_error(sqlite_url):
    def fail(_):
        raise ValueError("no such table\nLINE 1: insert")

    schedule = tenure.Schedule()
    schedule.every("1 h", name="invoices")(fail)
    node = tenure.Node(sqlite_url, name="worker-1")
    node.leader_only("scheduler", schedule)
    with node, tenure.Registry(sqlite_url) as registry:
        until(registry.jobs, "the job")
        registry.trigger("invoices")
        until(lambda: [run.outcome for run in registry.runs()] == ["failed"], "the run")
        page = ask(dashboard(sqlite_url), "/jobs").text
        assert "ValueError: no such table</td>" in page


def test_page_of_one_job_does_not_repeat_its_name(sqlite_url):
    schedule, ran = tenure.Schedule(), threading.Event()
    schedule.every("1 h", name="invoices")(lambda _: ran.set())
    node = tenure.Node(sqlite_url, name="worker-1")
    node.leader_only("scheduler", schedule)
    with node, tenure.Registry(sqlite_url) as registry:
        until(registry.jobs, "the job")
        registry.trigger("invoices")
        assert ran.wait(20)
        app = dashboard(sqlite_url)
        heading = '<th scope="col">Job</th>'
        assert ask(app, "/jobs").text.count(heading) == 2
        page = ask(app, "/jobs", query={"role": "scheduler", "job": "invoices"}).text
        assert (heading in page, page.count(">invoices<")) == (False, 1)


def test_sentences_about_one_role_and_about_no_waits(sqlite_url):
    with tenure.Node(sqlite_url, name="worker-1") as node:
        node.election("scheduler").wait(20)
        app = dashboard(sqlite_url)
        assert "1 role, and it has a leader." in ask(app).text
        assert "Nothing waits: every role has a leader, no job is paused, overdue" in ask(app, "/waits").text
    until(lambda: "1 of 1 role without a leader, 0 overdue." in ask(app).text, "nobody leads")


def test_members_and_candidates_are_in_the_order_of_their_names(sqlite_url):
    with Desk(sqlite_url, name="c") as c, Desk(sqlite_url, name="a") as a, Desk(sqlite_url, name="b") as b:
        for desk in (c, a, b):
            desk.stand("scheduler")
        app = dashboard(sqlite_url)
        for page in ("/members", "/role"):
            text = ask(app, page, query={"name": "scheduler"}).text
            assert re.findall('<th scope="row" class="name">(.)</th>', text) == ["a", "b", "c"]


def test_names_beside_the_picture_differ_where_pods_differ(sqlite_url):
    pods = [f"payments-scheduler-7d9c6bf7b9-{end}" for end in ("x2x4q", "k9j2z")]
    with Desk(sqlite_url, name=pods[0]) as first, Desk(sqlite_url, name=pods[1]) as second:
        first.lead("r")
        second.succeed(first, "r")
        page = ask(dashboard(sqlite_url), "/role", query={"name": "r"}).text
        assert re.findall(r'<text x="0" .*>(.*)</text>', page) == ["payments…bf7b9-k9j2z", "payments…bf7b9-x2x4q"]


def test_many_who_look_cost_one_reading_a_second(sqlite_url, monkeypatch):
    readers = []
    real = tenure.Registry.overview
    monkeypatch.setattr(tenure.Registry, "overview", lambda self: readers.append(threading.get_ident()) or real(self))
    with three(sqlite_url):
        app = dashboard(sqlite_url)
        begin, asked = time.monotonic(), 0
        while time.monotonic() - begin < 2.5:
            assert ask(app).status == 200
            asked += 1
        lasted = time.monotonic() - begin
        readings = readers.count(app._reader._thread.ident)  # those of other tests may still be reading
        assert 2 <= readings <= 2 + lasted
        assert asked > 2 * readings


def test_page_that_asks_during_a_reading_asks_again_soon(sqlite_url, monkeypatch):
    """Otherwise what is being read would be on the screen a second later."""
    monkeypatch.setattr(snapshot, "EVERY_S", 60)
    reading, read = threading.Event(), threading.Event()
    with three(sqlite_url):
        app = dashboard(sqlite_url)
        assert ask(app).status == 200
        until(lambda: int(ask(app).headers["tenure-next"]) > 30_000, "the end of the first round")
        real = tenure.Registry.overview
        monkeypatch.setattr(tenure.Registry, "overview", lambda self: reading.set() or (read.wait(20) and real(self)))
        again = threading.Thread(target=app._reader.read_again)
        again.start()
        assert reading.wait(20)
        try:
            assert int(ask(app).headers["tenure-next"]) < 30_000
        finally:
            read.set()
            again.join()


def test_nobody_who_looks_costs_nothing(sqlite_url, monkeypatch):
    monkeypatch.setattr(snapshot, "UNWATCHED_S", 0.1)
    with three(sqlite_url):
        app = dashboard(sqlite_url)
        assert ask(app).status == 200
        reader = app._reader
        until(lambda: reader._thread is None, "the thread to end")
        assert ask(app).status == 200


def test_only_so_many_requests_wait_for_the_database(sqlite_url, monkeypatch):
    tenure.Registry(sqlite_url).create()
    app = dashboard(sqlite_url)
    with monkeypatch.context() as patch:
        patch.setattr(threads, "AT_ONCE", 0)
        refused = ask(app)
        assert (refused.status, "many requests wait" in refused.text) == (503, True)
    assert ask(app).status == 200


def test_page_that_the_browser_has_is_not_sent_again(sqlite_url, monkeypatch):
    monkeypatch.setattr(snapshot, "EVERY_S", 60)
    with three(sqlite_url):
        app = dashboard(sqlite_url)
        etag = ask(app).headers["etag"]
        again = ask(app, if_none_match=etag)
        assert (again.status, again.body) == (304, b"")
        assert ask(app, query={"find": "x"}, if_none_match=etag).status == 200


def test_page_says_so_when_the_database_is_gone(postgres_server, postgres_url):
    with three(postgres_url):
        app = dashboard(postgres_url)
        assert "stale" not in ask(app).text
        for path in ("/role", "/jobs", "/waits"):
            ask(app, path, query={"name": "scheduler"})
        postgres_server.stop()
        try:
            until(lambda: 'class="stale"' in ask(app).text, "the page to be grey")
            assert "worker-1" in ask(app).text
            assert "may no longer be true" in ask(app, "/role", query={"name": "scheduler"}).text
            for path in ("status", "members", "history", "jobs", "runs", "waits"):
                assert ask(app, f"/api/{path}", query={"role": "scheduler"}).status == 503, path
            fresh = ask(dashboard(postgres_url))
            assert fresh.status == 503
            assert "worker-1" not in fresh.text
        finally:
            postgres_server.start()
        until(lambda: 'class="stale"' not in ask(app).text, "the page to be up to date again")


def test_page_that_nobody_looked_at_is_read_again_before_it_is_shown(sqlite_url, monkeypatch):
    """The overview is fresh because somebody looks at another page; the history is not."""
    monkeypatch.setattr(snapshot, "WANTED_S", 0.2)
    monkeypatch.setattr(snapshot, "STALE_S", 2.0)
    with three(sqlite_url) as nodes, tenure.Registry(sqlite_url) as registry:
        app = dashboard(sqlite_url)
        assert len(json.loads(ask(app, "/api/history", query={"role": "scheduler"}).text)) == 1
        registry.resign("scheduler", to="worker-2")
        until(lambda: nodes[1].election("scheduler").is_leader, "the hand-over")
        for _ in range(10):
            time.sleep(0.3)
            assert ask(app).status == 200
        assert len(json.loads(ask(app, "/api/history", query={"role": "scheduler"}).text)) == 2


def test_job_that_is_not_there_is_not_asked_for(sqlite_url, monkeypatch):
    asked = []
    real = tenure.Registry.runs
    monkeypatch.setattr(tenure.Registry, "runs", lambda self, *a, **k: asked.append(a) or real(self, *a, **k))
    tenure.Registry(sqlite_url).create()
    app = dashboard(sqlite_url)
    for path in ("/jobs", "/api/runs"):
        assert ask(app, path, query={"job": "no-such-job"}).status == 404
    assert ("no-such-job", 100) not in asked


def test_one_subject_that_fails_leaves_the_other_pages_alone(sqlite_url, monkeypatch):
    def lost(*_arguments, **_options):
        raise tenure.StoreUnavailable("this statement took too long")

    with three(sqlite_url):
        app = dashboard(sqlite_url)
        monkeypatch.setattr(tenure.Registry, "jobs", lost)
        assert ask(app, "/jobs").status == 503
        for _ in range(10):
            time.sleep(0.2)
            roles = ask(app)
            assert (roles.status, 'class="stale"' in roles.text) == (200, False)
            app._reader.known("jobs", lost)
        assert ask(app, "/role", query={"name": "scheduler"}).status == 200


@pytest.mark.parametrize("method", ["overview", "jobs"])
def test_defect_is_logged_and_the_thread_goes_on(sqlite_url, monkeypatch, caplog, method):
    def broken(_):
        raise ZeroDivisionError("a defect")

    with three(sqlite_url):
        app = dashboard(sqlite_url)
        with monkeypatch.context() as patch:
            patch.setattr(tenure.Registry, method, broken)
            refused = ask(app, "/jobs")
            assert (refused.status, "ZeroDivisionError" in refused.text) == (503, True)
        assert "ZeroDivisionError: a defect" in caplog.text
        until(lambda: ask(app, "/jobs").status == 200, "the page")


def test_dashboard_is_no_member_and_holds_no_lock(postgres_url):
    import psycopg

    with three(postgres_url), psycopg.connect(postgres_url, autocommit=True) as connection:
        app = dashboard(postgres_url)
        names = "select pid from pg_locks where locktype = 'advisory' and granted"
        before = connection.execute(f"select count(*) from ({names}) as held").fetchone()
        for path in PAGES:
            ask(app, path, query={"name": "scheduler"})
        with tenure.Registry(postgres_url) as registry:
            assert [member.name for member in registry.members()] == ["worker-1", "worker-2", "worker-3"]
        held = connection.execute(f"select count(*) from ({names}) as held").fetchone()
        assert held == before


@pytest.mark.twin("postgres")
def test_gap_is_counted_from_the_last_sign_of_life(store_url, tmp_path):
    from tests.support.cluster import Cluster

    with Cluster(store_url, tmp_path, ttl=5) as cluster:
        cluster.start(2)
        leader, token = cluster.wait_for_leader()
        leader.kill()
        cluster.wait_for_leader(token)
        with tenure.Registry(store_url) as registry:
            (role,) = registry.roles()
            newest, oldest = reports.with_gaps(registry.history(role.role))
        assert oldest.reason in ("death", "silence")
        assert oldest.began <= oldest.last_seen <= oldest.ended
        assert 0 <= newest.gap <= newest.silence
        page = ask(dashboard(store_url), "/role", query={"name": role.role}).text
        assert newest.gap_before() in page


def test_role_with_thousand_others_is_found_and_paged(sqlite_url):
    with tenure.Node(sqlite_url, name="worker-1") as node:
        for number in range(120):
            node.election(f"role-{number:03}")
        with tenure.Registry(sqlite_url) as registry:
            until(lambda: sum(role.leader is not None for role in registry.roles()) == 120, "all roles led")
        app = dashboard(sqlite_url)
        first, last = ask(app).text, ask(app, query={"page": "3"}).text
        assert ("role-000" in first, "role-119" in first, "role-119" in last) == (True, False, True)
        assert "Page 3 of 3" in ask(app, query={"page": "99999"}).text
        assert "Page 1 of 3" in ask(app, query={"page": "0"}).text
        found = ask(app, query={"find": "ROLE-11"}).text
        assert ("role-119" in found, "role-000" in found) == (True, False)
        assert "x" * 201 not in ask(app, query={"find": "x" * 5000}).text


def test_settings_are_checked_at_once(tmp_path):
    with pytest.raises(tenure.ConfigError, match="exclude each other"):
        dashboard("sqlite:///x.db", access=lambda _: "view", users=[User("o", OPERATOR)])
    users = tmp_path / "users"
    users.write_text(f"# name, right, token\n\nolga operate {OPERATOR}\n")
    assert [(user.name, user.right) for user in users_from_file(users)] == [("olga", "operate")]
    for text, said in (
        ("", "no users"),
        ("olga operate", "line 1: .*; it has 2 words"),
        (f"olga own {OPERATOR}", "its second word is neither `view` nor `operate`"),
        ("olga view short", "its third word is not such a token"),
    ):
        users.write_text(text)
        with pytest.raises(tenure.ConfigError, match=said):
            users_from_file(users)
    for line in (f"olga {OPERATOR} operate", f"{OPERATOR} operate olga", f"{OPERATOR} olga operate"):
        users.write_text(f"# name, right, token\n{line}\n")
        with pytest.raises(tenure.ConfigError, match="line 2") as refused:
            users_from_file(users)
        assert OPERATOR not in str(refused.value)
    with pytest.raises(tenure.ConfigError, match="cannot be read"):
        users_from_file(tmp_path / "nowhere")


def test_access_object_may_return_an_awaitable(sqlite_url):
    class Who:
        async def __call__(self, request):
            return "view" if request.headers.get("x-user") == "vera" else None

    tenure.Registry(sqlite_url).create()
    app = dashboard(sqlite_url, access=Who())
    assert (ask(app, x_user="vera").status, ask(app).status) == (200, 403)


def test_access_function_may_be_async_and_its_wrong_answer_is_an_error(sqlite_url):
    async def who(request):
        return ("view", "vera") if request.headers.get("x-user") == "vera" else None

    with three(sqlite_url):
        app = dashboard(sqlite_url, access=who)
        assert ask(app, x_user="vera", client=("192.0.2.7", 1), host="admin.example").status == 200
        assert ask(app).status == 403
        with pytest.raises(tenure.ConfigError, match=r"access\(\) must return"):
            ask(dashboard(sqlite_url, access=lambda _: "admin"))


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "192.0.2.1:0", "[::]:0", "example.com:80"])
def test_ui_that_others_could_reach_needs_users(sqlite_url, bind):
    tenure.Registry(sqlite_url).create()
    done = starter.run("tenure", "ui", "--url", sqlite_url, "--bind", bind, env=os.environ)
    assert done.returncode == 2
    assert b"give --users-file" in done.stderr


@pytest.mark.parametrize(
    ("bind", "said"), [("nonsense", b"is not HOST:PORT"), ("127.0.0.1:99999", b"is not HOST:PORT")]
)
def test_ui_names_a_wrong_address(sqlite_url, bind, said):
    done = starter.run("tenure", "ui", "--url", sqlite_url, "--bind", bind, env=os.environ)
    assert (done.returncode, said in done.stderr) == (2, True)


def test_ui_on_a_database_without_tables_is_an_error(sqlite_url):
    done = subprocess.run([TENURE, "ui", "--url", sqlite_url], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("number", ["", "-1", "x", "9" * 6000, "\u0663", "1e3", "0"])
def test_number_that_is_none_is_no_error_of_the_server(sqlite_url, number):
    with three(sqlite_url):
        app = dashboard(sqlite_url)
        for page in ("/", "/role", "/members", "/jobs", "/actions"):
            assert ask(app, page, query={"name": "scheduler", "page": number, "done": number}).status == 200
        assert ask(app, "/api/history", query={"role": "scheduler", "limit": number}).status == 400
        assert ask(app, "/api/history", query={"role": number}).status == 404


def test_waits_of_nodes_roles_and_jobs_are_listed_together(sqlite_url, monkeypatch):
    told = [tenure.WaitInfo("a promotion", None, None), tenure.WaitInfo("a lease", "scheduler", None)]
    monkeypatch.setattr(tenure.Registry, "waits", lambda _: told)
    with tenure.Node(sqlite_url, name="worker-1") as node:
        node.election("scheduler").wait(20)
    app = dashboard(sqlite_url)
    found = [(wait["what"], wait["name"], wait["reason"]) for wait in json.loads(ask(app, "/api/waits").text)]
    vacant = ("role", "scheduler", "no leader; no candidates stand for it")
    assert found == [("namespace", "default", "a promotion"), ("role", "scheduler", "a lease"), vacant]
    assert "a promotion" in ask(app, "/waits").text
    assert len(json.loads(ask(app, "/api/status").text)["waits"]) == 2
