"""In which order the hosts of a URL are dialled, and which connection is used."""

from __future__ import annotations

import threading

import pytest

from tenure.core import timing
from tenure.databases import hosts
from tenure.errors import ConfigError, StoreUnavailable


class Line:
    """A connection."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


class Exchange:
    """Hosts a, b and c. Each answers by what a test gives for it: a connection, a reason, or an error; or is silent."""

    def __init__(self, limit_s: float = 20) -> None:
        self.hosts = hosts.Hosts([{"host": name} for name in "abc"], "abc", limit_s)
        self.answers: dict[str, object] = dict.fromkeys("abc", "refused")
        self.dialled: list[str] = []
        self.woken = threading.Event()

    def dial(self) -> object:
        self.dialled.clear()
        return self.hosts.dial(self._dial)

    def _dial(self, host: hosts.Host) -> object:
        self.dialled.append(host["host"])
        answer = self.answers[host["host"]]
        if isinstance(answer, threading.Event):
            answer.wait(20)
            return self.answers["late"]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def exchange():
    exchange = Exchange()
    yield exchange
    exchange.woken.set()


def test_host_that_answered_last_comes_first_and_the_others_as_the_url_lists_them(exchange):
    exchange.answers["b"] = line = Line()
    assert exchange.dial() is line
    assert exchange.dialled == ["a", "b"]
    assert exchange.dial() is line
    assert exchange.dialled == ["b"]
    exchange.answers |= {"b": "refused", "c": line}
    assert exchange.dial() is line
    assert exchange.dialled == ["b", "a", "c"]
    assert not line.closed.is_set()


def test_silent_hosts_are_not_waited_for_and_close_what_they_give_later(exchange):
    late, line = Line(), Line()
    exchange.answers |= {"a": exchange.woken, "b": exchange.woken, "c": line, "late": late}
    assert exchange.dial() is line  # although the limit is longer than this test may take
    assert exchange.dialled == ["a", "b", "c"]
    exchange.woken.set()
    assert late.closed.wait(20)
    assert not line.closed.is_set()


def test_reasons_of_all_hosts_are_told_and_a_silent_one_has_its_limit():
    exchange = Exchange(limit_s=0.5)
    exchange.answers |= {"a": exchange.woken, "b": StoreUnavailable("cannot use it")}
    assert exchange.dial() == "a: no answer within 0.5 s; b: cannot use it; c: refused"
    exchange.woken.set()


def test_error_of_the_configuration_is_raised_if_no_host_is_accepted(exchange):
    exchange.answers["a"] = ConfigError("grant it")
    with pytest.raises(ConfigError, match="grant it"):
        exchange.dial()
    exchange.answers["b"] = line = Line()
    assert exchange.dial() is line, "the error of another host says nothing about this one"


def test_wait_for_silent_hosts_can_be_ended(exchange):
    exchange.answers |= dict.fromkeys("abc", exchange.woken)
    outcomes = []

    def dial() -> None:
        try:
            exchange.dial()
        except StoreUnavailable as error:
            outcomes.append(str(error))

    thread = threading.Thread(target=dial)
    thread.start()
    while len(exchange.dialled) < 3:
        threading.Event().wait(0.01)
    exchange.hosts.abort()
    thread.join(10)  # the limit is longer
    assert outcomes == ["the connection is not needed any more"]


@pytest.mark.parametrize("ttl", [1, 2, 3, 4, 5, 8, 10, 60, 3600])
def test_host_has_as_long_as_a_renewal_and_leaves_time_for_the_next_one(ttl):
    limit_s = hosts.time_limit_s(ttl)
    assert hosts.HEAD_START_S <= limit_s <= min(2, timing.renewal_interval(ttl))
    assert 3 * limit_s < timing.trust(ttl), "three rounds of attempts fit into the trust"
