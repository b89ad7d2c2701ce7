"""Loads on threads that can be given up: limits, what is left behind, and the end."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from openfiles import no_more_threads
from waiting import stays, until

from bf16kit.messages.errors import ConfigError, Unavailable
from bf16kit.service.models import loads
from bf16kit.service.models.loads import GIVEN_UP, MOST_LEFT_BEHIND, Loads


class Held:
    """A load with two steps, which a test can hold in the first one; what it returns knows whether it is closed."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.steps: list[str] = []
        self.begun, self.go = threading.Event(), threading.Event()
        self.closed = False
        self._seconds = seconds

    def __call__(self, on_step: Callable[[str, float], None]) -> Any:
        on_step("opening x.onnx", self._seconds)
        self.begun.set()
        assert self.go.wait(60)
        if self._seconds == math.inf:
            on_step("running x.onnx", math.inf)
            self.steps.append("running x.onnx")
        return self

    def close(self) -> None:
        self.closed = True


class Bench:
    """The loads under test, and threads that wait for them."""

    def __init__(self) -> None:
        self.loads = Loads()
        self._held: list[Held] = []
        self._callers = ThreadPoolExecutor(16)

    def begin(self, seconds: float = math.inf, unwanted: bool = False) -> tuple[Held, Future[Any]]:
        """Begin a held load, and return it with the future of its caller."""
        held = Held(seconds)
        self._held.append(held)
        future = self._callers.submit(self.loads.run, f"model {len(self._held)}", held, lambda: unwanted)
        assert held.begun.wait(20)
        return held, future

    def close(self) -> None:
        for held in self._held:
            held.go.set()
        self._callers.shutdown()
        until(lambda: not self.loads.left_behind())


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_a_load_returns_its_model_and_raises_its_error(bench: Bench) -> None:
    held, future = bench.begin()
    held.go.set()
    assert future.result(20) is held
    assert (held.closed, held.steps) == (False, ["running x.onnx"])

    def wrong(on_step: object) -> Any:
        raise ConfigError("wrong")

    with pytest.raises(ConfigError, match="wrong"):
        bench.loads.run("m", wrong)


def test_a_step_over_its_limit_ends_the_load_and_what_is_still_loaded_is_closed(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    held, future = bench.begin(seconds=0.02)
    error = future.exception(20)
    assert isinstance(error, Unavailable)
    assert str(error).startswith(f"{GIVEN_UP}: opening x.onnx took longer"), "which rules out a second try"
    assert bench.loads.left_behind() == ["model 1"]
    held.go.set()
    until(lambda: held.closed and not bench.loads.left_behind())
    assert "model 1: the load that was given up has ended" in caplog.text


def test_a_slow_load_is_logged_once_with_its_model_and_step(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "SLOW_SECONDS", 0.01)
    held, _ = bench.begin()
    until(lambda: "model 1 has been loading for 0 s: opening x.onnx" in caplog.text)
    stays(lambda: caplog.text.count("opening x.onnx") == 1, 0.5, "one line")  # it is looked at again meanwhile
    held.go.set()


def test_a_load_without_a_thread_is_unavailable(bench: Bench) -> None:
    with no_more_threads(), pytest.raises(Unavailable):
        bench.loads.run("m", Held())


def test_few_loads_are_left_behind(bench: Bench) -> None:
    begun = [bench.begin(0.01) for _ in range(MOST_LEFT_BEHIND)]
    for _, future in begun:
        assert future.exception(20) is not None
    with pytest.raises(Unavailable, match=r"4 loads that were given up still run .*model 1[,)].*restart"):
        bench.loads.run("m", begun[0][0])
    begun[0][0].go.set()
    until(lambda: len(bench.loads.left_behind()) < MOST_LEFT_BEHIND)
    another, future = bench.begin()
    another.go.set()
    assert future.result(20) is another


@pytest.mark.long
def test_a_load_that_is_not_wanted_any_more_gets_a_little_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    held, future = bench.begin(unwanted=True)
    stays(lambda: not future.done(), 0.5, "the load")
    held.go.set()
    assert future.result(20) is held
    monkeypatch.setattr(loads, "PATIENCE_SECONDS", 0.01)
    _, future = bench.begin(unwanted=True)
    assert "because the model was changed or unloaded meanwhile" in str(future.exception(20))
    held, future = bench.begin(unwanted=False)
    stays(lambda: not future.done(), 0.5, "the load")
    held.go.set()
    assert future.result(20) is held


def test_a_stop_gives_up_at_its_deadline_what_is_still_being_loaded(bench: Bench) -> None:
    held, future = bench.begin()
    bench.loads.stop(time.monotonic() + 0.01)
    assert "the server is shutting down" in str(future.exception(20))
    assert not bench.loads.wait(time.monotonic())
    held.go.set()
    assert bench.loads.wait(time.monotonic() + 20)
    assert held.steps == [], "it ends at its next step"
