"""A cut is silent, in either direction, keeps connections, and heals: shown with a real TCP connection."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.network import SERVER_ADDRESS, Network

pytestmark = pytest.mark.harness

REPOSITORY = Path(__file__).parents[2]
PORT = 7000
SILENCE_S = 1.0
PATIENCE_S = 15.0

# Says what it hears, and sends it back.
ECHO = f"""
import socket
listener = socket.create_server(("{SERVER_ADDRESS}", {PORT}))
print("listening", flush=True)
connection, _ = listener.accept()
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while data := connection.recv(100):
    print("heard", data.decode(), flush=True)
    connection.sendall(data)
print("closed", flush=True)
"""

# Does as it is told: sends a word, or waits so many seconds for what comes.
CALLER = f"""
import socket, sys
connection = socket.create_connection(("{SERVER_ADDRESS}", {PORT}), timeout=5)
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
print("connected", flush=True)
for line in sys.stdin:
    verb, argument = line.split()
    try:
        if verb == "send":
            connection.sendall(argument.encode())
            print("sent", flush=True)
        else:
            connection.settimeout(float(argument))
            print("got", connection.recv(100).decode() or "the end", flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
"""

# What comes of a new connection.
KNOCK = f"""
import socket, sys
try:
    socket.create_connection(("{SERVER_ADDRESS}", int(sys.argv[1])), timeout={SILENCE_S}).close()
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""


class Talk:
    """Two processes, one in each namespace, with a connection between them."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.server = self._start(network.server, ECHO, "listening")
        self.client = self._start(network.client, CALLER, "connected")

    def _start(self, namespace, program, greeting):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        process = self.network.run(namespace, [sys.executable, "-c", program], **pipes)
        assert process.stdout.readline() == greeting + "\n"
        return process

    def send(self, word):
        assert self._ask(f"send {word}") == "sent"

    def receive(self, patience_s):
        return self._ask(f"receive {patience_s}")

    def heard_by_server(self):
        """The server's next line; blocks until there is one."""
        return self.server.stdout.readline().strip()

    def _ask(self, request):
        self.client.stdin.write(request + "\n")
        return self.client.stdout.readline().strip()


@pytest.fixture
def talk(network):
    talk = Talk(network)
    talk.send("hello")
    assert talk.receive(PATIENCE_S) == "got hello"
    assert talk.heard_by_server() == "heard hello"
    return talk


def knock(network, port):
    command = [sys.executable, "-c", KNOCK, str(port)]
    return network.run(network.client, command, stdout=subprocess.PIPE, text=True).communicate()[0].strip()


def signs_of_trouble(network, namespace):
    """Resets and ICMP messages that a namespace has had: what a cut must not cause."""
    process = network.run(namespace, ["cat", "/proc/net/snmp"], stdout=subprocess.PIPE, text=True)
    text, _ = process.communicate()
    rows = [line.split() for line in text.splitlines()]
    tables = {
        names[0]: dict(zip(names[1:], values[1:], strict=True))
        for names, values in zip(rows[::2], rows[1::2], strict=True)
    }
    counted = [("Icmp:", "InMsgs"), ("Icmp:", "OutMsgs"), ("Tcp:", "EstabResets"), ("Tcp:", "OutRsts")]
    return {name: int(tables[table][name]) for table, name in counted}


def test_cut_is_silent_and_the_connection_survives_it(network, talk):
    network.cut()
    talk.send("lost")
    assert talk.receive(SILENCE_S) == "TimeoutError"
    assert knock(network, PORT) == "TimeoutError"  # and not "refused" or "no route"
    for namespace in (network.client, network.server):
        assert set(signs_of_trouble(network, namespace).values()) == {0}
    network.heal()
    assert talk.heard_by_server() == "heard lost"
    assert talk.receive(PATIENCE_S) == "got lost"


def test_cut_from_the_server_loses_only_what_the_server_sends(network, talk):
    network.cut_one_way(from_="server")
    talk.send("question")
    assert talk.heard_by_server() == "heard question"
    assert talk.receive(SILENCE_S) == "TimeoutError"
    network.heal()
    assert talk.receive(PATIENCE_S) == "got question"


def test_cut_from_the_client_loses_only_what_the_client_sends(network, talk):
    network.cut_one_way(from_="client")
    talk.send("question")
    assert talk.receive(SILENCE_S) == "TimeoutError"
    talk.server.kill()  # the server's kernel says goodbye, and that arrives
    assert talk.receive(PATIENCE_S) in ("got the end", "ConnectionResetError")


def test_refusal_arrives_while_the_cable_is_whole(network):
    """The control: were refusals lost anyway, their absence in a cut would show nothing."""
    assert knock(network, PORT) == "ConnectionRefusedError"
    assert signs_of_trouble(network, network.server)["OutRsts"] == 1


def test_namespaces_have_no_way_to_the_host(network):
    shown = network.run(network.client, ["ip", "-j", "route"], stdout=subprocess.PIPE).communicate()[0]
    assert [route["dst"] for route in json.loads(shown)] == ["192.0.2.0/24"]


def test_server_in_a_namespace_is_reached_through_the_cable(network, make_postgres_server):
    server = make_postgres_server(listen=network.server_address, netns=network.server, fsync=False)
    assert server.execute("select 1") == [(1,)]  # from outside, through its socket
    ask = (
        "import psycopg, sys; connection = psycopg.connect(sys.argv[1], connect_timeout=2);"
        "print(*connection.execute('select inet_client_addr()').fetchone())"
    )
    command = [sys.executable, "-c", ask, server.url()]
    reply = network.run(network.client, command, stdout=subprocess.PIPE, text=True).communicate()[0]
    assert reply.strip() == network.client_address
    server.restart("immediate")
    assert server.execute("select 1") == [(1,)]


def namespaces():
    return {path.name for path in Path("/run/netns").iterdir()}


def test_nothing_is_left_when_the_block_ends(network):
    with Network() as other:
        process = other.run(other.client, ["sleep", "60"])
        assert {other.client, other.server} <= namespaces()
    assert process.poll() == -signal.SIGKILL
    assert not {other.client, other.server} & namespaces()
    assert {network.client, network.server} <= namespaces()


def test_nothing_is_left_when_the_process_is_killed(network):
    program = (
        "import time; from tests.support.network import Network\n"
        "network = Network(); print(network.client, network.server, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as child:
        names = set(child.stdout.readline().split())
        assert names <= namespaces()
        child.kill()
    deadline = time.monotonic() + 10
    while names & namespaces():
        assert time.monotonic() < deadline, "the guard did not clean up"
        time.sleep(0.02)
