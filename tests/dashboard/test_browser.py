"""The dashboard in a real browser: accessibility, no script, dark, narrow, live, and a hand-over by a click."""

from __future__ import annotations

import contextlib
from urllib.parse import urlencode

import pytest

import tenure
from tests.dashboard.browser import chromium, look, sign_in, ui, violations, wait_for
from tests.dashboard.conftest import OPERATOR, three
from tests.support.cluster import Cluster
from tests.support.store_by_hand import until

pytestmark = pytest.mark.frameworks

PAGES = ("", "role?name=scheduler", "members", "jobs", "waits", "doctor", "actions", "nowhere")
NASTY = "<script>window.attacked = 1</script><img src=x onerror='window.attacked = 1'>"


@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver


@pytest.fixture
def signed_in(browser, postgres_url, tmp_path):
    """A browser in which an operator is signed in, and the address of the dashboard."""
    users = tmp_path / "users"
    users.write_text(f"olga operate {OPERATOR}\n")
    schedule = tenure.Schedule()
    schedule.every("1 h", name="invoices")(lambda _: None)
    with tenure.Node(postgres_url, name="clerk") as node, contextlib.ExitStack() as stack:
        node.election("vacant").wait(20)
        node.close()
        clock = tenure.Node(postgres_url, name="clock")
        clock.leader_only("jobs", schedule)
        stack.enter_context(clock)
        nodes = stack.enter_context(three(postgres_url))
        with tenure.Registry(postgres_url) as registry:
            until(registry.jobs, "the job")
        address = stack.enter_context(ui(postgres_url, "--users-file", str(users)))
        sign_in(browser, address, OPERATOR)
        yield browser, address, nodes
        browser.delete_all_cookies()
        look(browser, dark=False, narrow=False)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
def test_axe_finds_nothing_and_nothing_is_too_wide(signed_in, dark, narrow):
    browser, address, _ = signed_in
    look(browser, dark=dark, narrow=narrow)
    for page in PAGES:
        browser.get(address + page)
        assert violations(browser) == [], page
        wide = browser.execute_script(
            "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert wide <= 0, page


@pytest.mark.parametrize("width", [390, 500])
def test_long_names_are_broken_on_a_narrow_screen_and_dates_are_not(browser, sqlite_url, width):
    pods = [f"payments-scheduler-7d9c6bf7b9-{end}" for end in ("x2x4q", "k9j2z")]
    schedule = tenure.Schedule(zone="Europe/Paris")
    schedule.cron("30 2 * * *", name="customer-statement-export-by-mail")(lambda _: None)
    node = tenure.Node(sqlite_url, name=pods[0])
    node.leader_only("payments", schedule)
    with contextlib.ExitStack() as stack:
        stack.enter_context(node)
        registry = stack.enter_context(tenure.Registry(sqlite_url))
        until(registry.jobs, "the job")
        registry.trigger("customer-statement-export-by-mail")
        until(lambda: [run.outcome for run in registry.runs()] == ["done"], "a run")
        stack.enter_context(tenure.Node(sqlite_url, name=pods[1])).election("payments")
        until(lambda: registry.roles()[0].candidates == 2, "two candidates")
        registry.resign("payments")
        address = stack.enter_context(ui(sqlite_url))
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        stack.callback(look, browser, dark=False, narrow=False)
        for page in ("jobs", "role?name=payments", ""):
            browser.get(address + page)
            cut = "return [...document.querySelectorAll('.scroll')].map((one) => one.scrollWidth - one.clientWidth)"
            assert max(browser.execute_script(cut)) <= 0, page
            heights = "return [...document.querySelectorAll('main time')].map((one) => one.getClientRects().length)"
            assert set(browser.execute_script(heights)) <= {0, 1}, "each date is in one piece"
            assert browser.find_element("css selector", ".left-out").is_displayed(), "it says what is not shown"
        browser.get(address + "role?name=payments")
        right = "return document.querySelector('.timeline .now').getBoundingClientRect().right"
        assert browser.execute_script(right) <= width, "the present term is on the screen"


def test_page_on_which_users_sign_in_is_accessible(signed_in):
    browser, address, _ = signed_in
    browser.delete_all_cookies()
    browser.get(address)
    assert browser.find_element("id", "token")
    assert violations(browser) == []


def test_click_hands_over_and_the_page_says_who_leads(signed_in):
    browser, address, nodes = signed_in
    browser.get(address + "role?name=scheduler")
    button = browser.find_element("xpath", "//button[contains(., 'Hand over to worker-2')]")
    button.click()
    wait_for(browser, "return document.querySelector('#summary')?.innerText.startsWith('worker-2 leads')")
    assert "worker-2 leads, token 2" in browser.find_element("css selector", ".notice").text
    assert nodes[1].election("scheduler").is_leader
    browser.get(address + "actions")
    assert "olga" in browser.find_element("css selector", "main table").text


def test_page_does_not_ask_while_a_form_is_under_way_and_goes_on_if_it_leads_nowhere(signed_in, postgres_url):
    browser, address, _ = signed_in
    browser.get(address + "role?name=scheduler")
    browser.execute_script(
        "addEventListener('submit', (sent) => { sent.preventDefault(); window.sent = performance.now(); })"
    )
    browser.find_element("xpath", "//button[contains(., 'Hand over to worker-2')]").click()
    with tenure.Registry(postgres_url) as registry:
        registry.resign("scheduler", to="worker-3")
    wait_for(browser, "return document.querySelector('#summary').innerText.startsWith('worker-3 leads')")
    after = browser.execute_script(
        "return performance.getEntriesByType('resource').map((one) => one.startTime - window.sent).filter((s) => s > 0)"
    )
    assert min(after) > 3500


def test_hand_over_with_the_keyboard_and_without_script(signed_in):
    browser, address, nodes = signed_in
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(address)
        browser.find_element("link text", "scheduler").send_keys("\ue007")
        browser.find_element("xpath", "//button[contains(., 'Hand over to worker-3')]").send_keys("\ue007")
        until(lambda: "<b>worker-3</b> leads" in browser.page_source, "the new leader on the page")
        assert nodes[2].election("scheduler").is_leader
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_kill_of_the_leader_appears_without_a_click(browser, postgres_url, tmp_path):
    with Cluster(postgres_url, tmp_path, ttl=5) as cluster:
        cluster.start(2)
        leader, token = cluster.wait_for_leader()
        with ui(postgres_url) as address:
            browser.get(address)
            wait_for(browser, f"return document.querySelector('main').innerText.includes('{leader.name}')")
            leader.kill()
            after, _ = cluster.wait_for_leader(token)
            wait_for(browser, f"return document.querySelector('main').innerText.includes('{after.name}')")


def test_page_goes_grey_when_the_database_or_the_server_is_gone(browser, postgres_server, postgres_url):
    with three(postgres_url), ui(postgres_url) as address:
        browser.get(address)
        assert not browser.execute_script("return document.body.classList.contains('stale')")
        postgres_server.stop()
        try:
            wait_for(browser, "return document.body.classList.contains('stale')")
            assert "may no longer be true" in browser.find_element("css selector", ".banner").text
        finally:
            postgres_server.start()
        wait_for(browser, "return !document.body.classList.contains('stale')")
    wait_for(browser, "return document.body.classList.contains('lost') && !document.querySelector('#lost').hidden")


def test_names_run_no_script_and_nothing_comes_from_elsewhere(browser, sqlite_url):
    with tenure.Node(sqlite_url, name=NASTY, namespace=NASTY, metadata={"x": NASTY}) as node:
        node.election(NASTY).wait(20)
        with ui(sqlite_url, namespace=NASTY) as address:
            browser.get_log("browser")
            for page in ("", "members", "waits", "doctor", "actions", "role?" + urlencode({"name": NASTY})):
                browser.get(address + page)
                assert browser.execute_script("return window.attacked === undefined")
                loaded = browser.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)")
                assert loaded
                assert all(name.startswith(address) for name in loaded)
            assert NASTY in browser.find_element("css selector", "h1").text
            assert [entry for entry in browser.get_log("browser") if "Content Security" in entry["message"]] == []
