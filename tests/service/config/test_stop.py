from __future__ import annotations

import os
import signal
import threading

from service.config.stop import Stop


def test_a_wait_ends_when_another_thread_sets_the_stop() -> None:
    stop = Stop()
    threading.Thread(target=stop.set).start()
    assert stop.wait(20)
    stop.close()


def test_a_stop_stays_set_however_often_it_is_set() -> None:
    stop = Stop()
    for _ in range(100_000):  # more than a pipe holds
        stop.set()
    assert stop.wait()
    assert stop.wait()
    stop.close()


def test_a_wait_for_a_stop_times_out() -> None:
    stop = Stop()
    assert not stop.wait(0.01)
    stop.close()


def test_a_signal_received_by_another_thread_sets_the_stop() -> None:
    """Such a signal does not interrupt the main thread's wait, and Python runs no handler before that thread wakes."""
    stop = Stop()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
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
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.close()


def test_a_signal_sets_the_stop_and_a_second_one_would_kill_the_process() -> None:
    stop = Stop()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        stop.on_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(20)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.close()
