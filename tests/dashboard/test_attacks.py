"""Twelve attacks, each refused: what a stranger, a website or a visitor without the right may try."""

from __future__ import annotations

import threading

import pytest

import tenure
from tenure.dashboard import User, access, dashboard
from tests.dashboard.client import FOREIGN, SAME_ORIGIN, act, ask
from tests.dashboard.conftest import OPERATOR, VIEWER, three
from tests.support.store_by_hand import until

HAND_OVER = {"what": "hand-over", "role": "scheduler", "to": "worker-2", "token": "1"}
USERS = [User("olga", OPERATOR, "operate"), User("vera", VIEWER)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The URL of three nodes, and the nodes."""
    url = f"sqlite:///{tmp_path_factory.mktemp('dashboard')}/app.db"
    with three(url) as nodes:
        yield url, nodes


@pytest.fixture(scope="module")
def url(cluster):
    return cluster[0]


@pytest.fixture(scope="module")
def guarded(url):
    return dashboard(url, users=USERS)


@pytest.fixture
def nobody_acted(cluster):
    """Whatever the test tried, the role stayed where it was."""
    yield
    assert cluster[1][0].election("scheduler").is_leader


def signed_in(app, token=VIEWER, path="/", **more):
    return ask(app, path, cookie=f"tenure_dashboard={token}", **more)


# 1 and 2: another website ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example", "sec_fetch_site": "cross-site"},
        {"origin": "https://evil.example"},
        {"origin": "null", "sec_fetch_site": "same-origin"},
        {"origin": "http://localhost:8377", "sec_fetch_site": "cross-site"},
        {"origin": "http://localhost:9999", "sec_fetch_site": "same-site"},
        {"origin": "http://localhost:9999"},
        {"origin": "http://localhost:8377.evil.example"},
        {"origin": "http://["},
        {},
    ],
    ids=lambda headers: headers.get("origin", "none") + " " + headers.get("sec_fetch_site", ""),
)
@pytest.mark.usefixtures("nobody_acted")
def test_form_of_another_website_is_refused(guarded, headers):
    answer = ask(guarded, "/act", "POST", form=HAND_OVER, cookie=f"tenure_dashboard={OPERATOR}", **headers)
    assert answer.status == 403
    assert "set-cookie" not in ask(guarded, "/sign-in", "POST", form={"token": VIEWER}, **headers).headers


@pytest.mark.parametrize("path", ["/", "/api/status", "/static/live.js"])
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_fetch_of_another_website_is_refused(guarded, path, site):
    answer = signed_in(guarded, OPERATOR, path, sec_fetch_site=site, sec_fetch_mode="cors", sec_fetch_dest="empty")
    assert answer.status == 403
    assert "scheduler" not in answer.text
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_link_of_another_website_leads_here(guarded):
    arrived = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert signed_in(guarded, VIEWER, **arrived).status == 200
    framed = {**arrived, "sec_fetch_dest": "iframe"}
    assert signed_in(guarded, VIEWER, **framed).status == 403


# 3: clickjacking ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/role", "/nowhere", "/api/status", "/static/style.css", "/act"])
def test_no_answer_can_be_framed_or_bring_something_from_elsewhere(guarded, path):
    for answer in (signed_in(guarded, VIEWER, path), ask(guarded, path), ask(guarded, path, client=FOREIGN)):
        policy = answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"


# 4: script in every name --------------------------------------------------------------------------------------

NASTY = """<script>alert(1)</script>"'><img src=x onerror=alert(1)>{{7*7}}"""


def test_script_in_every_name_is_shown_as_text(sqlite_url):
    schedule = tenure.Schedule()
    schedule.every("1 h", name=NASTY)(lambda _: None)
    node = tenure.Node(sqlite_url, name=NASTY, namespace=NASTY, metadata={NASTY: NASTY})
    node.leader_only(NASTY, schedule)
    with node, tenure.Registry(sqlite_url, namespace=NASTY) as registry:
        until(lambda: [job.job for job in registry.jobs()] == [NASTY], "the job")
        registry.pause(NASTY, NASTY)
        app = dashboard(sqlite_url, namespace=NASTY, access=lambda _: ("operate", NASTY))
        failing = act(app, None, {**HAND_OVER, "role": NASTY, "to": NASTY})
        assert failing.status == 303
        queries = [{"name": NASTY}, {"find": NASTY}, {"name": NASTY, "done": "1", "span": NASTY, "page": NASTY}]
        for path in ("/", "/role", "/members", "/jobs", "/waits", "/doctor", "/actions", "/nowhere"):
            for query in queries:
                text = ask(app, path, query=query).text
                assert "<script>alert" not in text
                assert "<img" not in text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in ask(app, "/role", query={"name": NASTY}).text
        for path in ("/", "/members", "/jobs", "/waits", "/actions"):
            assert "&lt;script&gt;" in ask(app, path).text.partition("<main")[2], path


# 5: path traversal --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../application.py",
        "..%2fapplication.py",
        "/etc/passwd",
        "....//application.py",
        "style.css/../../access.py",
        "%00",
    ],
)
def test_path_leads_to_no_other_file(url, name):
    app = dashboard(url)
    for path in (f"/static/{name}", f"/{name}", f"/api/{name}"):
        answer = ask(app, path)
        assert answer.status == 404
        assert "import" not in answer.text
        assert "root:" not in answer.text


# 6 and 7: tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "token", ["", "wrong", VIEWER[:-1], VIEWER + "x", VIEWER.upper(), "viewer", "\udcff", "x" * 5000], ids=range(8)
)
def test_wrong_or_missing_token_shows_nothing(guarded, token):
    cookie = f"tenure_dashboard={token}".encode("utf-8", "surrogateescape")
    for path in ("/", "/role", "/members", "/jobs", "/waits", "/doctor", "/actions", "/api/status", "/api/doctor"):
        for header in ((b"cookie", cookie), (b"authorization", b"Bearer " + cookie[17:])):
            answer = ask(guarded, path, raw_headers=[header])
            assert answer.status == 401
            assert "worker" not in answer.text
            assert "scheduler" not in answer.text
    said = ask(guarded, "/sign-in", "POST", form={"token": token.encode("utf-8", "replace").decode()}, **SAME_ORIGIN)
    assert (said.status, "set-cookie" in said.headers) == (401, False)


def test_right_token_signs_in_with_a_cookie_that_scripts_and_other_sites_cannot_use(guarded):
    answer = ask(guarded, "/sign-in", "POST", form={"token": VIEWER}, **SAME_ORIGIN)
    cookie = answer.headers["set-cookie"]
    assert answer.status == 303
    assert {"HttpOnly", "SameSite=strict"} <= set(cookie.split("; "))
    assert "scheduler" in ask(guarded, cookie=cookie.partition(";")[0]).text
    assert "scheduler" in ask(guarded, "/api/status", authorization=f"Bearer {VIEWER}").text


def test_every_token_is_compared_to_the_end(monkeypatch):
    """The time says nothing, because the work is the same: a digest of what was given, and one comparison a user."""
    compared = []
    real = access.hmac.compare_digest
    monkeypatch.setattr(access.hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or real(a, b))
    users = access.Users([*USERS, User("third", "third-token-of-many-characters")])
    for token in (OPERATOR, OPERATOR[:-1] + "x", "x", ""):
        compared.clear()
        users.of_token(token)
        assert compared == [(32, 32)] * 3


def test_short_or_unknown_settings_are_refused():
    with pytest.raises(tenure.ConfigError, match="at least 20"):
        User("olga", "short")
    with pytest.raises(tenure.ConfigError, match="'view' or 'operate'"):
        User("olga", OPERATOR, "own")
    with pytest.raises(tenure.ConfigError, match="empty"):
        access.Users([])
    assert OPERATOR not in repr(USERS)


# 8 and 9: slow clients, large headers ------------------------------------------------------------------------


def test_slow_form_is_given_up_and_holds_no_one_else(guarded, monkeypatch):
    import anyio

    from tenure.dashboard import application

    monkeypatch.setattr(application, "FORM_WITHIN_S", 0.3)
    answers = []

    def slowly():
        async def run():
            async def receive():
                await anyio.sleep(0.2)
                return {"type": "http.request", "body": b"w", "more_body": True}

            async def send(message):
                answers.append(message)

            headers = [(b"host", b"localhost:8377"), (b"origin", b"http://localhost:8377")]
            headers += [(b"cookie", f"tenure_dashboard={OPERATOR}".encode())]
            scope = {"type": "http", "method": "POST", "path": "/act", "root_path": "", "scheme": "http"}
            scope |= {"query_string": b"", "headers": headers, "client": ("127.0.0.1", 1), "http_version": "1.1"}
            await guarded(scope, receive, send)

        anyio.run(run)

    thread = threading.Thread(target=slowly)
    thread.start()
    assert signed_in(guarded).status == 200
    thread.join(20)
    assert not thread.is_alive()
    assert answers[0]["status"] == 400


def test_header_that_is_too_large_is_refused(guarded):
    assert signed_in(guarded, x_large="x" * 20_000).status == 431
    assert (
        ask(
            guarded, "/act", "POST", form={"what": "x" * 20_000}, cookie=f"tenure_dashboard={OPERATOR}", **SAME_ORIGIN
        ).status
        == 400
    )


# 10 and 11: acting without the right -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE"])
@pytest.mark.usefixtures("nobody_acted")
def test_nothing_but_post_acts(guarded, method):
    headers = SAME_ORIGIN | {"cookie": f"tenure_dashboard={OPERATOR}"}
    assert ask(guarded, "/act", method, query=HAND_OVER, form=HAND_OVER, **headers).status == 405
    for path in ("/", "/role", "/jobs"):
        ask(guarded, path, "GET", query={**HAND_OVER, "name": "scheduler"}, **headers)


@pytest.mark.usefixtures("nobody_acted")
def test_viewer_does_not_operate(guarded, url, caplog):
    assert act(guarded, VIEWER, HAND_OVER).status == 403
    assert "'vera' may only view" in caplog.text
    assert "<button>Hand over" not in signed_in(guarded, VIEWER, "/role", query={"name": "scheduler"}).text
    assert "<button>Hand over" in signed_in(guarded, OPERATOR, "/role", query={"name": "scheduler"}).text
    assert act(dashboard(url), None, HAND_OVER).status == 403
    assert act(dashboard(url, access=lambda _: "view"), None, HAND_OVER).status == 403


# 12: the Host header, and who counts as this machine ---------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8377", "localhost.evil.example", "127.0.0.1.nip.io", "192.0.2.1:8377"]
)
def test_name_that_leads_here_is_not_this_machine(url, host):
    answer = ask(dashboard(url), host=host)
    assert answer.status == 403
    assert "scheduler" not in answer.text


@pytest.mark.parametrize("host", ["", "a b", "localhost/..", "user@localhost", "localhost:8377, evil.example", "<x>"])
def test_host_that_is_none_is_refused(guarded, host):
    assert signed_in(guarded, host=host).status == 400
    assert signed_in(guarded, host="localhost", raw_headers=[(b"host", b"evil.example")]).status == 400


def test_redirects_name_no_host(guarded):
    answer = act(guarded, OPERATOR, {**HAND_OVER, "token": "999"}, host="evil.example", origin="http://evil.example")
    assert answer.headers["location"].startswith("role?")
    assert ask(guarded, "/sign-in", "POST", form={"token": VIEWER}, **SAME_ORIGIN).headers["location"] == "./"


@pytest.mark.parametrize("header", [*access.PASSED_ON, "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto"])
def test_request_that_a_proxy_passed_on_is_foreign(url, header):
    app = dashboard(url)
    assert ask(app).status == 200
    refused = ask(app, raw_headers=[(header.encode(), b"127.0.0.1")])
    assert refused.status == 403
    assert "scheduler" not in refused.text


@pytest.mark.parametrize("client", [FOREIGN, ("10.0.0.1", 1), ("::ffff:10.0.0.1", 1), None, ("testclient", 1)])
def test_only_this_machine_is_answered_without_users(url, client):
    app = dashboard(url)
    for path in ("/", "/api/status", "/static/style.css", "/doctor"):
        answer = ask(app, path, client=client)
        assert answer.status == 403
        assert "neither users nor an access function" in answer.text
    for ours in (("127.0.0.1", 1), ("127.9.9.9", 1), ("::1", 1)):
        assert ask(app, client=ours).status == 200
