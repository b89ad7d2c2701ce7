"""Loads on threads that can be given up: limits, what is left behind, and the end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from waiting import until

from bf16kit.messages.errors import ConfigError, Unavailable
from service.models import loads
from service.models.loads import MOST_LEFT_BEHIND, Loads

FOREVER = 3600.0


class Loaded:
    """What a load returns; it only knows whether it is closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


class Held:
    """A load with two steps, which a test can hold in the first one."""

    def __init__(self, seconds: float) -> None:
        self.loaded = Loaded()
        self.steps: list[str] = []
        self.begun, self.go = threading.Event(), threading.Event()
        self._seconds = seconds

    def __call__(self, on_step: Callable[[str, float], None]) -> Any:
        on_step("opening x.onnx", self._seconds)
        self.begun.set()
        assert self.go.wait(60)
        on_step("running x.onnx", FOREVER)
        self.steps.append("running x.onnx")
        return self.loaded


class Bench:
    """The loads under test, and threads that wait for them."""

    def __init__(self) -> None:
        self.loads = Loads()
        self._held: list[Held] = []
        self._callers = ThreadPoolExecutor(16)

    def begin(self, key: str = "key", seconds: float = FOREVER) -> tuple[Held, Future[Any]]:
        """Begin a held load, and return it with the future of its caller."""
        held = Held(seconds)
        self._held.append(held)
        future = self._callers.submit(self.loads.run, f"model {key!r}", key, held)
        assert held.begun.wait(20)
        return held, future

    def leave_behind(self, key: str) -> Held:
        held, future = self.begin(key, 0.01)
        assert "loading was given up" in str(future.exception(20))
        return held

    def close(self) -> None:
        for held in self._held:
            held.go.set()
        self._callers.shutdown()
        assert self.loads.stop(time.monotonic() + 20)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_a_load_returns_its_model_and_raises_its_error(bench: Bench) -> None:
    held, future = bench.begin()
    held.go.set()
    assert future.result(20) is held.loaded
    assert not held.loaded.closed

    def wrong(on_step: object) -> Any:
        raise ConfigError("wrong")

    with pytest.raises(ConfigError, match="wrong"):
        bench.loads.run("m", "key", wrong)


def test_a_step_over_its_limit_is_named_and_ends_the_load_at_its_next_step(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    held, future = bench.begin(seconds=0.02)
    error = future.exception(20)
    assert isinstance(error, Unavailable)
    assert "loading was given up: opening x.onnx took longer than 0 s" in str(error)
    held.go.set()
    until(lambda: "model 'key': the load that was given up has ended" in caplog.text)
    assert held.steps == []


def test_a_model_that_is_loaded_after_it_was_given_up_is_closed(bench: Bench) -> None:
    begun, go, loaded = threading.Event(), threading.Event(), Loaded()

    def load(on_step: Callable[[str, float], None]) -> Any:
        on_step("opening x.onnx", 0.01)
        begun.set()
        assert go.wait(60)
        return loaded

    with pytest.raises(Unavailable):
        bench.loads.run("m", "key", load)
    go.set()
    until(lambda: loaded.closed)


def test_a_slow_load_is_logged_with_its_model_and_step(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "SLOW_SECONDS", 0.01)
    with caplog.at_level(logging.WARNING):
        held, future = bench.begin()
        until(lambda: "model 'key' has been loading for 0 s: opening x.onnx" in caplog.text)
    held.go.set()
    assert future.result(20) is held.loaded


def test_what_was_given_up_is_not_loaded_again_while_its_thread_runs(bench: Bench) -> None:
    held = bench.leave_behind("key")
    with pytest.raises(Unavailable, match="loading was given up before, and still runs: change the model's files"):
        bench.loads.run("m", "key", held)
    held.go.set()
    until(lambda: not bench.loads._attempts)
    again, future = bench.begin("key")
    again.go.set()
    assert future.result(20) is again.loaded


def test_few_loads_are_left_behind(bench: Bench) -> None:
    held = [bench.leave_behind(str(number)) for number in range(MOST_LEFT_BEHIND)]
    with pytest.raises(
        Unavailable, match=f"{MOST_LEFT_BEHIND} loads that were given up still run .model '0', .*restart"
    ):
        bench.loads.run("m", "another", held[0])
    held[0].go.set()
    until(lambda: len(bench.loads._attempts) < MOST_LEFT_BEHIND)
    another, future = bench.begin("another")
    another.go.set()
    assert future.result(20) is another.loaded


def test_a_superseded_load_gets_a_little_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.loads.supersede("no such")
    quick, future = bench.begin("quick")
    bench.loads.supersede("quick")
    quick.go.set()
    assert future.result(20) is quick.loaded
    monkeypatch.setattr(loads, "PATIENCE_SECONDS", 0.01)
    _, future = bench.begin("slow")
    bench.loads.supersede("slow")
    assert "because the model was changed or unloaded meanwhile" in str(future.exception(20))


def test_a_superseded_load_that_is_wanted_again_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "PATIENCE_SECONDS", 0.05)
    held, future = bench.begin("slow")
    bench.loads.supersede("slow")
    bench.loads.supersede("slow", wanted=True)
    time.sleep(0.1)  # longer than it would have had
    held.go.set()
    assert future.result(20) is held.loaded


def test_a_superseded_load_that_still_runs_is_not_called_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was given up is not tried again by itself."""
    monkeypatch.setattr(loads, "PATIENCE_SECONDS", 0.01)
    _, future = bench.begin("slow")
    bench.loads.supersede("slow")
    assert future.exception(20) is not None
    with pytest.raises(Unavailable, match="is still ending; try again later") as refused:
        bench.loads.run("m", "slow", Held(FOREVER))
    assert loads.GIVEN_UP not in str(refused.value)


def test_a_stop_gives_up_what_is_still_being_loaded_at_its_deadline(bench: Bench) -> None:
    held, future = bench.begin()
    assert not bench.loads.stop(time.monotonic() + 0.01)
    assert "the server is shutting down" in str(future.exception(20))
    held.go.set()
    assert bench.loads.stop(time.monotonic() + 20)


def test_a_thread_that_cannot_be_started_is_unavailable(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(Unavailable, match="can't start new thread"):
            bench.loads.run("m", "key", Held(FOREVER))
    held, future = bench.begin()
    held.go.set()
    assert future.result(20) is held.loaded
