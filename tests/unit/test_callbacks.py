"""The thread that calls the application's callbacks."""

from __future__ import annotations

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
