"""Reasons of an end, and states of services, are enums inside and plain strings outside, on every version of Python."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import sqlite3

import pytest

from tenure.events import Deposed, EndReason
from tenure.services.service import ServiceInfo, ServiceState


@pytest.mark.parametrize("word", [*EndReason, *ServiceState])
def test_word_is_shown_as_the_string_that_it_is(word):
    text = word.value
    assert type(text) is str
    assert (str(word), repr(word), f"{word}", f"{word:>30}", "%s" % word) == (  # noqa: UP031
        text,
        repr(text),
        text,
        f"{text:>30}",
        text,
    )
    assert json.dumps({word: word}) == json.dumps({text: text})


@pytest.mark.parametrize("reason", EndReason)
def test_reason_is_equal_to_its_string(reason):
    assert reason == reason.value
    assert {reason.value: 1}[reason] == 1
    assert Deposed("r", 1, reason) == Deposed("r", 1, reason.value)
    assert hash(Deposed("r", 1, reason)) == hash(Deposed("r", 1, reason.value))
    assert repr(Deposed("r", 1, reason)) == f"Deposed(role='r', token=1, reason={reason.value!r})"


def test_state_is_equal_to_its_string():
    infos = [ServiceInfo("s", "r", state, 0, None) for state in (ServiceState.STUCK, "stuck")]
    assert infos[0] == infos[1]
    assert repr(infos[0]) == repr(infos[1])


@pytest.mark.parametrize("word", [*EndReason, *ServiceState])
def test_word_survives_copies(word):
    assert pickle.loads(pickle.dumps(word)) is copy.deepcopy(word) is word


def test_reason_is_a_parameter_like_its_string_for_every_driver():
    psycopg_adapt = pytest.importorskip("psycopg.adapt")
    converters = pytest.importorskip("pymysql.converters")
    dump = psycopg_adapt.Transformer().as_literal
    assert dump(EndReason.CUT) == dump("the connection was cut")
    assert converters.escape_item(EndReason.CUT, "utf8") == "'the connection was cut'"
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        assert connection.execute("select ?", (EndReason.CUT,)).fetchone() == ("the connection was cut",)
