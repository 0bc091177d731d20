"""What operators watch: the page that Prometheus reads, the alerts and the dashboard on it, and the traces."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import anyio
import httpx
import prometheus_client
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

import tenure
from tenure.engine.recorder import TRANSITIONS
from tenure.integrations import otel
from tenure.integrations.prometheus import TenureCollector, observe
from tests.conftest import missing
from tests.integrations.cluster import ROOT, Process
from tests.integrations.web import free_port, gunicorn
from tests.support.store_by_hand import QUICK, Nodes, fork, until

PAGE = (ROOT / "docs" / "how-to" / "observe.md").read_text()
ALERTS = ROOT / "ops" / "alerts.yml"
DASHBOARD = ROOT / "ops" / "grafana.json"
PATIENCE_S = 60
ADDED_BY_PROMETHEUS = {"instance", "le"}


class Samples:
    """A page as the parser of Prometheus's own format reads it."""

    def __init__(self, text):
        self.families = list(text_string_to_metric_families(text))
        self.samples = [sample for family in self.families for sample in family.samples]

    def value(self, name, **labels):
        """The value of the one sample of that name that has these labels; None if there is none."""
        found = [
            sample.value for sample in self.samples if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert len(found) < 2, (name, labels)
        return found[0] if found else None

    @property
    def labels(self):
        """Which labels the samples of each name have."""
        return {sample.name: set(sample.labels) for sample in self.samples if sample.name.startswith("tenure_")}


def scrape(port):
    """The page behind a port; None if no server answers."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10, trust_env=False)
    except httpx.TransportError:
        return None
    assert answer.status_code == 200
    return Samples(answer.text)


def shown(*nodes):
    registry = prometheus_client.CollectorRegistry()
    observe(*nodes, registry=registry)
    return Samples(prometheus_client.generate_latest(registry).decode())


async def work():
    await anyio.sleep_forever()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a leader with services of both kinds, and with a schedule."""
    node = tenure.Node(f"sqlite:///{tmp_path_factory.mktemp('page')}/tenure.db", name="a", **QUICK)
    schedule = tenure.Schedule()
    schedule.every("1 s", name="tick")(lambda _: None)
    node.leader_only("r", work)
    node.leader_only("r", schedule)
    node.everywhere(work)
    with node:
        until(lambda: [service.state for service in node.services()] == ["running"] * 3, "services up")
        until(lambda: any(job.succeeded_ago is not None for job in node.stats().jobs), "a run")
        return shown(node)


# --- the page -----------------------------------------------------------------------------------------------


def test_leadership_moves_from_one_page_to_the_other(postgres_url, tmp_path):
    """Two processes, each with a page behind a real HTTP server: a hand-over, then kill -9 of the new leader."""
    with contextlib.ExitStack() as stack:
        ports, processes = {}, {}
        for name in ("a", "b"):
            ports[name] = free_port()
            command = [sys.executable, "-m", "tests.integrations.observed_app", str(ports[name])]
            environment = {"TENURE_URL": postgres_url, "TENURE_NAME": name, "TENURE_TTL": "10"}
            processes[name] = Process(name, command, environment, tmp_path)
            stack.callback(processes[name].close)
            until(lambda name=name: scrape(ports[name]), f"the page of {name}", PATIENCE_S)

        def reads(name, **expected):
            """The page of a replica, if everything on it is as expected."""
            page = scrape(ports[name])
            labels = {"node": name, "namespace": "default", "role": "r"}
            values = {key: page.value(f"tenure_{key}", **labels) for key in expected}
            return page if values == expected else None

        until(lambda: reads("a", is_leader=1, service_up=1) or reads("b", is_leader=1, service_up=1), "a leader", 60)
        leader, other = ("a", "b") if reads("a", is_leader=1) else ("b", "a")
        before = until(lambda: reads(leader, is_leader=1, token=1, service_up=1, seconds_since_leader_seen=0))
        assert before.value("tenure_transitions_total", reason="elected") == 1
        assert before.value("tenure_trust_remaining_seconds", node=leader) > 0
        assert before.value("tenure_ttl_seconds", node=leader) == 10
        assert reads(other, is_leader=0, token=0, service_up=0)
        until(lambda: scrape(ports[other]).value("tenure_seconds_since_leader_seen") < 3, "the leader seen", PATIENCE_S)

        os.kill(processes[leader].process.pid, signal.SIGUSR1)
        until(lambda: reads(other, is_leader=1, token=2, service_up=1), "the other page", PATIENCE_S)
        after = until(lambda: reads(leader, is_leader=0, token=0, service_up=0), "the first page", PATIENCE_S)
        assert after.value("tenure_transitions_total", reason="resigned") == 1
        # No value while the node stands aside: its term was short.
        until(lambda: (scrape(ports[leader]).value("tenure_seconds_since_leader_seen") or 0) > 0, "seen from aside")

        processes[other].process.kill()
        until(lambda: reads(leader, is_leader=1, token=3, service_up=1), "the first page again", PATIENCE_S)
        assert scrape(ports[other]) is None
        last = scrape(ports[leader])
        assert last.value("tenure_transitions_total", reason="elected") == 2
        assert last.value("tenure_renewal_seconds_count") > before.value("tenure_renewal_seconds_count")


def test_the_page_has_what_the_document_names_and_nothing_else(page):
    rows = re.findall(r"^\| `(tenure_\w+)` \| ([\w, ]+) \|", PAGE, flags=re.MULTILINE)
    documented = {name: {label.strip() for label in labels.split(",")} for name, labels in rows}
    shown_labels = dict(page.labels)
    for name, labels in list(shown_labels.items()):
        base = re.sub(r"_(bucket|count|sum)$", "", name)
        if base != name:
            del shown_labels[name]
            shown_labels[base] = labels - {"le"}
    assert shown_labels == documented


def test_every_kind_of_transition_is_there_from_the_start_and_documented(page):
    """At zero: a counter that appears at one has no increase that Prometheus could see."""
    reasons = {sample.labels["reason"] for sample in page.samples if sample.name == "tenure_transitions_total"}
    assert reasons == set(TRANSITIONS)
    table = PAGE.partition("| `reason` | what happened |")[2].partition("\n- ")[0]
    assert (
        set(re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines() if "|" in row))) == reasons
    )


def test_types_of_the_metrics_are_what_prometheus_expects(page):
    types = {family.name: family.type for family in page.families if family.name.startswith("tenure_")}
    counters = {name for name, kind in types.items() if kind == "counter"}
    assert counters == {"tenure_transitions", "tenure_renewals_failed", "tenure_service_failures", "tenure_runs"}
    assert types["tenure_renewal_seconds"] == "histogram"
    assert set(types.values()) == {"counter", "gauge", "histogram"}
    bounds = [(float(sample.labels["le"]), sample.value) for sample in page.samples if sample.name.endswith("_bucket")]
    assert bounds == sorted(bounds)
    assert bounds[-1] == (float("inf"), page.value("tenure_renewal_seconds_count"))
    assert page.value("tenure_build_info", version=tenure.__version__) == 1


def test_runs_of_a_schedule_are_counted(page):
    assert page.value("tenure_runs_total", job="tick", outcome="done") >= 1
    assert page.value("tenure_runs_total", job="tick", outcome="lost") == 0
    assert 0 <= page.value("tenure_seconds_since_success", job="tick") < 60
    assert 0 <= page.value("tenure_job_overdue_seconds", job="tick") < 60


def test_services_everywhere_have_no_role(page):
    assert page.value("tenure_service_up", service="work", role="r") == 1
    assert page.value("tenure_service_up", service="work", role="") == 1


def test_a_node_shows_only_what_is_known(sqlite_url):
    """Before the start there is no role; of a role that it withdrew from there is no leader that it could have seen."""
    node = tenure.Node(sqlite_url, name="a", **QUICK)
    before = shown(node)
    assert before.value("tenure_trust_remaining_seconds", node="a") == 0
    assert before.value("tenure_seconds_since_renewal") is None
    assert "tenure_is_leader" not in before.labels
    with node:
        election = node.election("r")
        election.wait(20)
        assert shown(node).value("tenure_seconds_since_leader_seen", role="r") == 0
        election.withdraw()
        gone = shown(node)
    assert gone.value("tenure_seconds_since_leader_seen", role="r") is None
    assert gone.value("tenure_is_leader", role="r") == 0
    assert gone.value("tenure_transitions_total", role="r", reason="elected") == 1


def test_nodes_of_one_process_share_a_page(sqlite_url):
    async def main():
        async with tenure.AsyncNode(sqlite_url, name="b", **QUICK) as other:
            with Nodes(sqlite_url, **QUICK) as nodes:
                node = nodes("a")
                node.election("r").wait(20)
                other.election("r")
                page = shown(node, other)
        assert page.value("tenure_is_leader", node="a", role="r") == 1
        assert page.value("tenure_is_leader", node="b", role="r") == 0

    anyio.run(main)


def test_what_could_not_be_told_apart_is_refused(sqlite_url):
    node, twin = (tenure.Node(sqlite_url, name="a") for _ in range(2))
    with pytest.raises(tenure.ConfigError, match="need different names"):
        TenureCollector(node, twin)
    with pytest.raises(tenure.ConfigError, match="no node"):
        TenureCollector()
    registry = prometheus_client.CollectorRegistry()
    first = observe(node, registry=registry)
    with pytest.raises(tenure.ConfigError, match="shows nodes already"):
        observe(twin, registry=registry)
    with pytest.raises(tenure.ConfigError, match="'x' is not a node"):
        observe("x", registry=registry)
    registry.unregister(first)
    observe(twin, registry=registry)


def test_a_forked_child_does_not_show_the_numbers_of_its_parent(sqlite_url):
    with Nodes(sqlite_url, **QUICK) as nodes:
        node = nodes("a")
        node.election("r").wait(20)
        pid = fork()
        if pid == 0:
            os._exit(0 if set(shown(node).labels) == {"tenure_build_info"} else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize(
    ("module", "framework", "extra"),
    [
        ("prometheus", "prometheus_client", "prometheus"),
        ("otel", "opentelemetry", "otel"),
        ("apscheduler", "apscheduler", "apscheduler"),
    ],
)
def test_a_missing_extra_says_how_to_install_it(module, framework, extra):
    program = f"import sys; sys.modules['{framework}'] = None; import tenure.integrations.{module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"ConfigError: {framework} is not installed: pip install 'tenure[{extra}]'" in done.stderr


def test_workers_of_gunicorn_have_a_page_each_as_the_document_says(postgres_url, tmp_path):
    """And after a reload the new workers have theirs."""
    (config,) = re.findall(r"^```py\n(# gunicorn.conf.py\n.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    base = free_ports(6)
    config = config.replace("9400", str(base)).replace("workers = 4", "workers = 2")
    (tmp_path / "gunicorn.conf.py").write_text(config)
    (tmp_path / "app.py").write_text(APPLICATION)
    options = ("--config", str(tmp_path / "gunicorn.conf.py"), "--pythonpath", str(tmp_path), "--graceful-timeout", "5")
    environment = {"TENURE_URL": postgres_url, "TENURE_TTL": "10"}
    master = Process("gunicorn", gunicorn("app:app", free_port(), *options), environment, tmp_path)

    def nodes():
        """Who shows itself on the ports of the workers, and whether it leads."""
        pages = [page for page in map(scrape, range(base, base + 6)) if page]
        leads = [sample for page in pages for sample in page.samples if sample.name == "tenure_is_leader"]
        return {sample.labels["node"]: sample.value for sample in leads}

    try:
        until(lambda: sorted(nodes().values()) == [0, 1], "two pages, one leader", PATIENCE_S)
        before = set(nodes())
        os.kill(master.process.pid, signal.SIGHUP)
        until(lambda: before.isdisjoint(nodes()) and sorted(nodes().values()) == [0, 1], "two new ones", PATIENCE_S)
    except BaseException:
        print(master.output())
        raise
    finally:
        master.process.terminate()
        master.wait(20)
        master.close()


def free_ports(number):
    """The first of some consecutive free ports."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError, OverflowError), contextlib.ExitStack() as stack:
            for port in range(first, first + number):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


APPLICATION = """
import tenure

node = tenure.Node()


@node.leader_only("r")
def work(term):
    term.wait_lost()


def app(environment, start_response):
    start_response("200 OK", [])
    return [b""]
"""


# --- alerts and dashboard -----------------------------------------------------------------------------------


def expressions():
    """What the dashboard asks of Prometheus, with Grafana's variables filled in."""
    board = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [annotation["expr"] for annotation in board["annotations"]["list"]]
    filled = {"$__rate_interval": "5m", "$namespace": ".*", "$role": ".*"}
    for expression in asked:
        for variable, value in filled.items():
            expression = expression.replace(variable, value)  # noqa: PLW2901
        assert "$" not in expression
        yield expression


@pytest.mark.parametrize("path", [ALERTS, DASHBOARD], ids=lambda path: path.name)
def test_alerts_and_dashboard_stand_on_names_and_labels_that_are_shown(page, path):
    text = path.read_text() if path is ALERTS else "\n".join([*expressions(), path.read_text()])
    names = set(re.findall(r"\btenure_\w+", text))
    assert names <= set(page.labels), names - set(page.labels)
    labels = set().union(*page.labels.values())
    used = {word.strip() for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", text) for word in group.split(",")} | set(
        re.findall(r"\$labels\.(\w+)", text)
    )
    used |= set(re.findall(r"[{,] ?(\w+)(?:=~|!~|!=|=)\\?\"", text))
    assert {"namespace", "role", "node"} <= used
    assert used <= labels | ADDED_BY_PROMETHEUS, used - labels


def test_the_dashboard_shows_every_metric_and_the_document_every_alert(page):
    asked = " ".join(expressions())
    for name in page.labels.keys() - {"tenure_build_info", "tenure_renewal_seconds_sum"}:
        assert re.search(rf"\b{name}\b", asked), name
    alerts = re.findall(r"^ +- alert: (\w+)$", ALERTS.read_text(), flags=re.MULTILINE)
    assert len(alerts) == 13
    table = PAGE.partition("| alert | what to do |")[2].partition("\n## ")[0]
    assert sorted(
        re.findall(r"`(Tenure\w+)`", "".join(row.split("|")[1] for row in table.splitlines() if "|" in row))
    ) == (sorted(alerts))


def test_panels_of_the_dashboard_have_a_place_each():
    board = json.loads(DASHBOARD.read_text())
    taken = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["description"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.fixture
def promtool():
    program = shutil.which("promtool")
    if program is None:
        missing("no promtool found: install prometheus")
    return lambda *arguments: subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_promtool_finds_the_rules_in_order(promtool):
    done = promtool("check", "rules", ALERTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "13 rules found" in done.stdout


def test_each_alert_fires_when_it_should_and_none_while_all_is_well(promtool):
    done = promtool("test", "rules", Path(__file__).with_name("alerts_test.yml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_understands_what_the_dashboard_asks(promtool, tmp_path):
    rules = [{"record": f"tenure:{number}", "expr": expression} for number, expression in enumerate(expressions())]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML, too
    done = promtool("check", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


# --- OpenTelemetry ------------------------------------------------------------------------------------------


@pytest.fixture
def tracing():
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider, exporter.get_finished_spans
    provider.shutdown()


def test_a_term_is_a_trace_that_begins_before_the_term_ends(sqlite_url, tracing):
    provider, spans = tracing
    node = tenure.Node(sqlite_url, name="a", namespace="n", **QUICK)
    otel.observe(node, tracer_provider=provider)
    with node:
        with node.lead("r"):
            (elected,) = until(spans, "the election exported while the term goes on")
            assert elected.name == "tenure.elected"
        until(lambda: len(spans()) == 2, "the term exported")
    term = spans()[1]
    names = {"tenure.role": "r", "tenure.token": 1, "tenure.node": "a", "tenure.namespace": "n"}
    assert dict(elected.attributes) == names
    assert term.name == "tenure.term"
    assert dict(term.attributes) == {**names, "tenure.reason": "resigned"}
    assert elected.parent is None
    assert term.parent.span_id == elected.context.span_id
    assert term.context.trace_id == elected.context.trace_id
    assert elected.start_time == elected.end_time == term.start_time < term.end_time
    assert term.status.status_code is trace.StatusCode.UNSET
    assert term.instrumentation_scope.name == "tenure"


def test_doubts_and_losses_are_in_the_trace(postgres_server, postgres_url, tracing):
    provider, spans = tracing
    node = tenure.Node(postgres_url, name="a", ttl=30, renew_every=0.3)
    otel.observe(node, tracer_provider=provider)
    with node:
        election = node.election("r")
        term = election.wait(20)
        postgres_server.restart()
        until(lambda: term.valid, "the same term goes on")
        sql = "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
        postgres_server.execute(f"{sql} and pid <> pg_backend_pid()", dbname=postgres_url.rpartition("/")[2])
        assert term.wait_lost(20)
        election.wait(20)
    first, second = (span for span in spans() if span.name == "tenure.term")
    assert [event.name for event in first.events][:2] == ["suspended", "resumed"]
    assert first.attributes["tenure.reason"] == "the connection was cut"
    assert (first.status.status_code, first.status.description) == (trace.StatusCode.ERROR, "the connection was cut")
    assert (second.attributes["tenure.reason"], second.attributes["tenure.token"]) == ("left", 2)
    assert second.status.status_code is trace.StatusCode.UNSET
    assert first.context.trace_id != second.context.trace_id


def test_terms_of_an_async_node_are_not_part_of_a_request(sqlite_url, tracing):
    provider, spans = tracing

    async def main():
        node = tenure.AsyncNode(sqlite_url, name="a", **QUICK)
        otel.observe(node, tracer_provider=provider)
        with provider.get_tracer("application").start_as_current_span("request"):
            async with node, node.lead("r"):
                pass

    anyio.run(main)
    spans_by_name = {span.name: span for span in spans()}
    assert set(spans_by_name) == {"tenure.elected", "tenure.term", "request"}
    assert spans_by_name["tenure.elected"].parent is None
    assert spans_by_name["tenure.term"].attributes["tenure.reason"] == "resigned"


def test_a_leader_that_is_killed_has_told_that_it_led(sqlite_url):
    program = textwrap.dedent("""
        import os, tenure
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
        from tenure.integrations.otel import observe

        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter()))
        trace.set_tracer_provider(provider)  # the application's own, which is what is used by default
        node = tenure.Node()
        observe(node)
        with node, node.lead("r"):
            input()
    """)
    environment = {**os.environ, "TENURE_URL": sqlite_url, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    guard = threading.Timer(PATIENCE_S, process.kill)
    guard.start()
    try:
        told = ""
        while "\n}\n" not in told:
            line = process.stdout.readline()
            assert line, "nothing was told"
            told += line
        process.kill()
        rest = process.stdout.read()
    finally:
        guard.cancel()
        process.kill()
        process.stdin.close()
        process.stdout.close()
        process.wait()
    assert json.loads(told)["name"] == "tenure.elected"
    assert "tenure.term" not in rest
