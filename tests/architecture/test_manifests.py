"""The manifests and commands of the page about Kubernetes: they parse, and every path, flag and variable exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

import tenure
from tenure.cli import main
from tenure.integrations.asgi import health

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "kubernetes.md"
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in sorted(ROOT.glob("docs/**/*.md"))
    for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE))
]
REFERENCE = (ROOT / "docs" / "reference.md").read_text()


def find(thing, key):
    """Every value of a key, anywhere in a manifest."""
    if isinstance(thing, dict):
        yield from ([thing[key]] if key in thing else [])
        thing = list(thing.values())
    for part in thing if isinstance(thing, list) else ():
        yield from find(part, key)


def documents(block):
    return [document for document in yaml.safe_load_all(block) if document is not None]


def manifest():
    """The Deployment and the budget of the page."""
    [block] = [block for (block,) in (one.values for one in BLOCKS) if "kind: Deployment" in block]
    return documents(block)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_yaml_block_parses_and_probes_paths_that_exist(block):
    found = documents(block)
    assert found
    paths = {route.path for route in health(tenure.AsyncNode("postgresql://localhost/none"), "r").routes}
    assert {path.removeprefix("/health") for path in find(found, "path")} <= paths
    for name in set(re.findall(r"TENURE_\w+", block)):
        assert f"{name} " in REFERENCE or f"`{name}" in REFERENCE, name


def commands():
    """Every command line of Tenure's on the page, in text and in manifests."""
    text = PAGE.read_text()
    lines = [shlex.split(line) for line in re.findall(r"`(?:kubectl exec \S+ -- )?(tenure \w[^`]*)`", text)]
    listed = [
        command for one in BLOCKS for command in find(documents(one.values[0]), "command") if command[0] == "tenure"
    ]
    assert len(lines) >= 3
    assert listed
    return lines + listed


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_of_the_page_exists_with_its_options(command):
    _, name, *arguments = command
    options = {option for one in main.get_command(None, name).params for option in one.opts}
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    assert {argument for argument in own if argument.startswith("--")} <= options


def test_the_grace_period_is_longer_than_what_has_to_end_in_it():
    [deployment, budget] = manifest()
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    requests = int(container["command"][container["command"].index("--timeout-graceful-shutdown") + 1])
    services = 10  # what a service has to stop, as in on_stuck
    assert pod["terminationGracePeriodSeconds"] >= pause + requests + services
    assert budget["spec"]["minAvailable"] < deployment["spec"]["replicas"]


def test_selectors_and_ports_fit_together():
    [deployment, budget] = manifest()
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == budget["spec"]["selector"]["matchLabels"] == labels
    ports = set(find(deployment, "containerPort"))
    assert set(find(deployment, "port")) == ports
    [command] = [one for one in find(deployment, "command") if one[0] == "uvicorn"]
    assert {int(command[command.index("--port") + 1])} == ports


def test_the_flags_of_the_server_exist():
    uvicorn = pytest.importorskip("uvicorn")
    options = {option for one in uvicorn.main.params for option in one.opts}
    [command] = [one for one in find(manifest(), "command") if one[0] == "uvicorn"]
    assert {word for word in command if word.startswith("--")} <= options
