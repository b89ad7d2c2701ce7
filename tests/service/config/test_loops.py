"""The stop signal, and work that is repeated until it is stopped, whatever it raises."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
from waiting import until

from bf16kit.service.config.loops import Guard, PeriodicThread, Stop


@pytest.fixture
def stop() -> Iterator[Stop]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_would_kill_the_process(stop: Stop, number: signal.Signals) -> None:
    stop.on_signals()
    os.kill(os.getpid(), number)
    assert stop.wait(20)
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_terminal_that_closes_signals_twice_and_does_not_cut_the_drain_off(stop: Stop) -> None:
    """The shell, bash for one, sends SIGHUP to its jobs; then the system does, when the shell has ended."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
    stop.on_signals()
    os.kill(os.getpid(), signal.SIGHUP)
    assert stop.wait(20)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_under_nohup_the_end_of_the_terminal_stops_nothing(stop: Stop) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop.on_signals()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not stop.wait(0.05)


def test_an_error_is_logged_once_a_minute_with_its_traceback_and_the_next_steps_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now, ran = 0.0, list[str]()
    guard = Guard(lambda: now)

    def fails() -> None:
        raise KeyError(int(now >= 10))

    for second in (*range(20), 79):
        now = second
        guard.run("the first step", fails)
        guard.run("the second step", lambda: ran.append("ran"))
    assert len(ran) == 21
    assert caplog.messages == ["the first step failed; it will run again"] * 3  # at 0, at 10 the other, at 79 again
    assert "raise KeyError(" in caplog.text
    with pytest.raises(SystemExit):  # the end of the program is no error of a step
        guard.run("a step", sys.exit)


def test_the_task_is_repeated_until_the_stop_also_after_errors(caplog: pytest.LogCaptureFixture) -> None:
    ticks: list[str] = []

    def tick() -> None:
        ticks.append(threading.current_thread().name)
        raise ValueError("out of order")

    PeriodicThread("clock", 0.001, tick).stop()  # one that never started can be stopped
    ticking = PeriodicThread("clock", 0.001, tick)
    assert ticks == []
    with caplog.at_level(logging.ERROR):
        ticking.start()
        until(lambda: len(ticks) > 2)
        ticking.stop()
    assert set(ticks) == {"clock"}
    assert "clock" not in {thread.name for thread in threading.enumerate()}
    assert "clock failed; it will run again" in caplog.text
