from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from service.config.loops import Stop


@pytest.fixture
def stop() -> Iterator[Stop]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stop = Stop()
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)
    stop.close()


def test_a_wait_ends_when_another_thread_sets_the_stop_which_stays_set_however_often_it_is_set(stop: Stop) -> None:
    assert not stop.wait(0.01)
    threading.Thread(target=stop.set).start()
    assert stop.wait(20)
    for _ in range(100_000):  # more than a pipe holds
        stop.set()
    assert stop.wait()


def test_a_signal_received_by_another_thread_sets_the_stop(stop: Stop) -> None:
    """Such a signal does not interrupt the main thread's wait, and Python runs no handler before that thread wakes."""
    release = threading.Event()
    receiver = threading.Thread(target=release.wait, args=(60,))
    receiver.start()
    assert receiver.ident is not None
    try:
        stop.on_signals()
        threading.Timer(0.2, signal.pthread_kill, (receiver.ident, signal.SIGTERM)).start()
        assert stop.wait(20)
    finally:
        release.set()
        receiver.join()


def test_a_second_signal_would_kill_the_process(stop: Stop) -> None:
    stop.on_signals()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.wait(20)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
