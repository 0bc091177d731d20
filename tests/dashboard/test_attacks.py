"""Attacks, each refused: what a stranger, a website or a visitor without the right may try."""

from __future__ import annotations

import threading

import pytest

import tenure
from tenure.dashboard import User, access, dashboard, threads
from tests.dashboard.client import FOREIGN, SAME_ORIGIN, act, ask, cookie_of
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
    return ask(app, path, cookie=cookie_of(app, token), **more)


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
    answer = ask(guarded, "/act", "POST", form=HAND_OVER, cookie=cookie_of(guarded, OPERATOR), **headers)
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
        done = failing.headers["location"].rpartition("=")[2]
        queries = [{"name": NASTY}, {"find": NASTY}, {"name": NASTY, "done": done, "span": NASTY, "page": NASTY}]
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
    "token",
    ["", "wrong", VIEWER[:-1], VIEWER + "x", VIEWER.upper(), "viewer", "\udcff", "x" * 5000, "b2xnYQ.9.x"],
    ids=range(9),
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


def test_cookie_is_safe_behind_a_proxy_with_tls(guarded):
    """The proxy speaks HTTP with the dashboard; the browser says in the Origin what it speaks with the proxy."""
    for origin, safe in (("https://admin.example", True), ("http://admin.example", False)):
        answer = ask(guarded, "/sign-in", "POST", form={"token": VIEWER}, host="admin.example", origin=origin)
        assert ("Secure" in answer.headers["set-cookie"].split("; ")) is safe


def test_cookie_is_not_the_token_and_expires(guarded, url, monkeypatch):
    cookie = ask(guarded, "/sign-in", "POST", form={"token": VIEWER}, **SAME_ORIGIN).headers["set-cookie"]
    cookie = cookie.partition(";")[0]
    assert VIEWER not in cookie
    assert ask(guarded, cookie=f"tenure_dashboard={VIEWER}").status == 401, "a token is no cookie"
    assert ask(guarded, authorization=f"Bearer {cookie.partition('=')[2]}").status == 401, "a cookie is no token"
    name, expiry, proof = cookie.split(".")
    assert ask(guarded, cookie=f"{name}.{int(expiry) + 1}.{proof}").status == 401
    olga = cookie_of(guarded, OPERATOR).partition(".")[0]
    assert ask(guarded, cookie=f"{olga}.{expiry}.{proof}").status == 401
    assert ask(dashboard(url, users=USERS), cookie=cookie).status == 200, "another worker with the same users"
    changed = [User("olga", OPERATOR, "operate"), User("vera", "another-token-of-many-characters")]
    assert ask(dashboard(url, users=changed), cookie=cookie).status == 401, "her token was changed"
    monkeypatch.setattr(access.time, "time", lambda: float(expiry) + 1)
    assert ask(guarded, cookie=cookie).status == 401


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
    with pytest.raises(tenure.ConfigError, match="'olga' and 'vera' have the same token"):
        access.Users([User("olga", OPERATOR), User("vera", OPERATOR)])
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
            headers += [(b"cookie", cookie_of(guarded, OPERATOR).encode())]
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
            guarded, "/act", "POST", form={"what": "x" * 20_000}, cookie=cookie_of(guarded, OPERATOR), **SAME_ORIGIN
        ).status
        == 400
    )


def test_form_with_very_many_fields_is_refused(guarded):
    assert act(guarded, OPERATOR, {f"field-{number}": "x" for number in range(100)}).status == 400
    many = {f"field-{number}": "x" for number in range(100)}
    assert ask(guarded, "/sign-in", "POST", form=many, **SAME_ORIGIN).status == 401


def test_only_so_many_are_asked_about_and_act_at_a_time(url, monkeypatch):
    held, asked = threading.Event(), threading.Semaphore(0)

    def who(_):
        asked.release()
        assert held.wait(20)
        return "operate", "olga"

    app = dashboard(url, access=who)
    monkeypatch.setattr(threads, "AT_ONCE", 2)
    slow = [threading.Thread(target=ask, args=(app,)) for _ in range(2)]
    for one in slow:
        one.start()
    for _ in slow:
        assert asked.acquire(timeout=20)
    refused = ask(app)
    held.set()
    for one in slow:
        one.join(20)
    assert (refused.status, "wait to be let in" in refused.text) == (503, True)
    assert ask(app).status == 200


@pytest.mark.usefixtures("nobody_acted")
def test_only_so_many_actions_are_under_way(url, monkeypatch):
    async def who(_):
        return "operate", "olga"

    app = dashboard(url, access=who)
    monkeypatch.setattr(threads, "AT_ONCE", 0)
    refused = act(app, None, HAND_OVER)
    assert (refused.status, "nothing was done" in refused.text) == (503, True)


# 10 and 11: acting without the right -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE"])
@pytest.mark.usefixtures("nobody_acted")
def test_nothing_but_post_acts(guarded, method):
    headers = SAME_ORIGIN | {"cookie": cookie_of(guarded, OPERATOR)}
    assert ask(guarded, "/act", method, query=HAND_OVER, form=HAND_OVER, **headers).status == 405
    for path in ("/", "/role", "/jobs"):
        ask(guarded, path, "GET", query={**HAND_OVER, "name": "scheduler"}, **headers)


@pytest.mark.usefixtures("nobody_acted")
def test_viewer_does_not_operate(guarded, url, caplog):
    assert act(guarded, VIEWER, HAND_OVER).status == 403
    assert (
        "'vera' may only view, and asked through the dashboard: hand over role 'scheduler' to 'worker-2'" in caplog.text
    )
    assert "No action yet" in signed_in(guarded, OPERATOR, "/actions").text
    assert "<button>Hand over" not in signed_in(guarded, VIEWER, "/role", query={"name": "scheduler"}).text
    assert "<button>Hand over" in signed_in(guarded, OPERATOR, "/role", query={"name": "scheduler"}).text
    assert act(dashboard(url), None, HAND_OVER).status == 403
    assert act(dashboard(url, access=lambda _: "view"), None, HAND_OVER).status == 403


def test_refused_attempts_and_sign_ins_leave_a_line(guarded, caplog):
    caplog.set_level("INFO", "tenure.dashboard")
    ask(guarded, "/act", "POST", form=HAND_OVER, origin="https://evil.example", client=FOREIGN)
    ask(guarded, "/sign-in", "POST", form={"token": "wrong"}, **SAME_ORIGIN)
    ask(guarded, "/sign-in", "POST", form={"token": VIEWER}, **SAME_ORIGIN)
    ask(guarded, "/nowhere")
    cross, wrong, right = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert cross[0] == "WARNING"
    assert cross[1].startswith("refused 'POST', before asking whose it is, from '192.0.2.7': '/act': the Ori")
    assert wrong == ("WARNING", "refused 'POST' of 'unknown' from '127.0.0.1': '/sign-in': no user has this token")
    assert right == ("INFO", "'vera' signs in to the dashboard from '127.0.0.1'")


def test_page_of_a_role_that_does_not_exist_leads_back(guarded):
    link = '<a href="./">All roles</a>'
    answer = signed_in(guarded, VIEWER, "/role", query={"name": "nobody"})
    assert (answer.status, link in answer.text) == (404, True)
    assert link not in ask(guarded).text, "not for those who are not let in"
    assert link not in signed_in(guarded, VIEWER, "/no/where").text, "the link is relative"


def test_version_is_for_those_who_are_let_in(guarded):
    assert f"Tenure {tenure.__version__}" in signed_in(guarded).text
    assert tenure.__version__ not in ask(guarded).text


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


def test_request_in_the_language_of_old_proxies_is_foreign(url):
    """As nginx passes on by default: HTTP/1.0, the Host of its own setting, and no header that tells."""
    assert ask(dashboard(url), http_version="1.0", host="127.0.0.1:8377").status == 403


@pytest.mark.parametrize("host", ["127.0.0.2:8377", "127.0.0.1", "[::1]:8377", "LOCALHOST"])
def test_every_address_of_this_machine_is_its_name(url, host):
    assert ask(dashboard(url), host=host).status == 200


def test_api_is_where_the_dashboard_is_mounted(url):
    """An application below /api/ has pages for people, too."""
    mounted = ask(dashboard(url), "/nowhere", root_path="/api/tenure")
    assert (mounted.status, mounted.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert ask(dashboard(url), "/api/nowhere", root_path="/x").headers["content-type"] == "application/json"


@pytest.mark.parametrize("client", [FOREIGN, ("10.0.0.1", 1), ("::ffff:10.0.0.1", 1), None, ("testclient", 1)])
def test_only_this_machine_is_answered_without_users(url, client):
    app = dashboard(url)
    for path in ("/", "/api/status", "/static/style.css", "/doctor"):
        answer = ask(app, path, client=client)
        assert answer.status == 403
        assert "neither users nor an access function" in answer.text
    for ours in (("127.0.0.1", 1), ("127.9.9.9", 1), ("::1", 1)):
        assert ask(app, client=ours).status == 200
