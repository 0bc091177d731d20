"""The thread that calls the application's callbacks."""

from __future__ import annotations

import logging
import threading

import pytest

from tenure.engine.callbacks import CallbackThread


def test_callback_waits_until_the_system_can_start_a_thread(monkeypatch):
    called = []
    thread = CallbackThread("test")

    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            thread.call(lambda: called.append(1))
    thread.call(lambda: called.append(2))
    thread.close(timeout=10)
    assert called == [1, 2]


@pytest.mark.parametrize("error", [SystemExit(1), RuntimeError("a callback that fails")])
def test_callbacks_go_on_after_one_that_ends_its_thread_or_cannot_be_logged(error):
    called = []
    thread = CallbackThread("test")
    logger = logging.getLogger("tenure.callbacks")

    def fails(_):
        raise RuntimeError("a filter that fails")

    def callback():
        called.append(1)
        raise error

    logger.addFilter(fails)
    try:
        thread.call(callback)
        thread.call(lambda: called.append(2))
        thread.close(timeout=10)
    finally:
        logger.removeFilter(fails)
    assert called == [1, 2]
