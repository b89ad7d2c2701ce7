"""``instances: auto`` runs several batches at once if that is faster: on a test's clock, and with real sessions."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_mlp, write_product
from numpy.typing import NDArray

from bf16kit.messages.errors import BudgetExceeded, RuntimeFailure
from bf16kit.runtime import Runtime, RuntimeInfo
from bf16kit.runtime.memory.weightstore import PRIVATE_STORE, CachingWeightStore, Fill
from service.models import loading, parallelism
from service.models.engine import ParallelEngine
from service.models.generation import Generation
from service.models.parallelism import MAX_INSTANCES, ROUNDS, SECONDS, Parallelism, choose_parallelism, medians
from service.models.plan import DesiredModel, Plan
from service.models.policy import AUTO, Serving
from service.request import Request
from service.telemetry.metrics import Metrics

INFO = RuntimeInfo("onnxruntime", "cpu", "cpu", "bf16-weights", "fp32")


class Session:
    """A runtime whose runs call ``take``; ``runs`` counts them."""

    inputs = outputs = ()

    def __init__(self, info: RuntimeInfo = INFO, take: Callable[[], object] = lambda: None) -> None:
        self.info = info
        self.runs = 0
        self.closed = False
        self._take = take

    def run(self, *_: object, **__: object) -> dict[str, object]:
        self.runs += 1
        self._take()
        return {}

    def close(self) -> None:
        self.closed = True


class Clock:
    """A clock that advances only during runs, on whichever thread."""

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds


def spread(
    wide_s: float, narrow_s: float, threads: int = 4, info: RuntimeInfo = INFO
) -> tuple[Parallelism, Session, Clock, list[int]]:
    """Measure sessions whose runs take these seconds. ``narrow_s`` is the sum over all runs that run at once."""
    clock, asked = Clock(), list[int]()
    parts = min(threads, MAX_INSTANCES)
    narrow = Session(take=lambda: clock.pass_by(narrow_s / parts))
    wide = Session(info, lambda: clock.pass_by(wide_s))

    def load(count: int) -> Runtime:
        asked.append(count)
        return narrow  # type: ignore[return-value]  # a fake

    found = choose_parallelism(wide, load, {}, threads, clock=clock)  # type: ignore[arg-type]
    return found, narrow, clock, asked


def test_several_instances_are_used_if_they_process_more_rows() -> None:
    found, narrow, clock, asked = spread(wide_s=0.010, narrow_s=0.030)
    assert (found.instances, asked, narrow.closed) == (4, [1], False)
    assert found.narrow is not None
    assert found.reason.startswith("auto: 4 instances, 4 at once do 1.33 times the rows of one with all threads")
    assert clock.now <= SECONDS + 0.04  # plus the first run of each session


def test_a_small_gain_is_not_worth_a_second_session() -> None:
    found, narrow, _, _ = spread(wide_s=0.010, narrow_s=0.039)
    assert (found.instances, found.narrow, narrow.closed) == (1, None, True)
    assert "1.03 times" in found.reason


def test_many_threads_are_divided_among_a_few_instances() -> None:
    found, _, _, asked = spread(wide_s=0.010, narrow_s=0.010, threads=64)
    assert (found.instances, asked) == (MAX_INSTANCES, [64 // MAX_INSTANCES])


@pytest.mark.parametrize("info", [replace(INFO, device="cuda:0"), replace(INFO, backend="torchscript")])
def test_other_devices_and_torch_get_one_instance(info: RuntimeInfo) -> None:
    found, _, _, asked = spread(0.01, 0.01, info=info)
    assert (found.instances, asked) == (1, [])


def test_one_thread_gets_one_instance() -> None:
    found, _, _, asked = spread(0.01, 0.01, threads=1)
    assert (found.instances, asked) == (1, [])


def test_a_second_session_that_fails_does_not_fail_the_model() -> None:
    def load(threads: int) -> Runtime:
        raise BudgetExceeded(f"over it on {threads}")

    found = choose_parallelism(Session(), load, {}, 2, clock=Clock())  # type: ignore[arg-type]
    assert (found.instances, found.narrow) == (1, None)


def test_a_measurement_that_fails_leaves_no_session_behind() -> None:
    def fail() -> None:
        raise RuntimeError("on purpose")

    narrow = Session(take=fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        choose_parallelism(Session(), lambda _: narrow, {}, 2, clock=Clock())  # type: ignore[arg-type, return-value]
    assert narrow.closed


def test_a_lone_batch_gets_all_threads_and_one_beside_it_gets_few() -> None:
    gate, entered = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        assert gate.wait(20)

    wide, narrow = Session(take=block), Session()
    engine = ParallelEngine(wide, narrow)  # type: ignore[arg-type]
    first = threading.Thread(target=engine.run, args=({}, None))
    first.start()
    assert entered.wait(20)
    engine.run({}, None)
    assert (wide.runs, narrow.runs) == (1, 1)
    gate.set()
    first.join()
    engine.run({}, None)
    assert (wide.runs, narrow.runs) == (2, 1)
    engine.close()
    assert wide.closed
    assert narrow.closed


def test_a_failed_run_no_longer_counts_as_running() -> None:
    def fail() -> None:
        raise RuntimeError("on purpose")

    wide, narrow = Session(take=fail), Session()
    engine = ParallelEngine(wide, narrow)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(RuntimeError):
            engine.run({}, None)
    assert (wide.runs, narrow.runs) == (2, 0)


@pytest.mark.parametrize(("least", "instances"), [(0.0, 2), (math.inf, 1)])
def test_the_measured_gain_decides_the_instances_of_a_real_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: float, instances: int
) -> None:
    """The test sets the least gain for a second session, so that any machine gives both results."""
    monkeypatch.setattr(parallelism, "LEAST_GAIN", least)
    artifact = write_mlp(tmp_path / "mlp" / "1")
    loaded = loading.load(artifact.path, Serving.model_validate({"instances": "auto"}), device="cpu", threads=2)
    assert (loaded.instances, loaded.narrow is None) == (instances, instances == 1)
    assert f"auto: {instances} instance" in loaded.summary
    loaded.close()


def test_both_sessions_give_concurrent_requests_the_same_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallelism, "LEAST_GAIN", 0.0)  # two instances on any machine
    artifact = write_mlp(tmp_path / "mlp" / "1")
    serving = Serving.model_validate({"instances": "auto", "shadow": {"rate": 0}})
    loaded = loading.load(artifact.path, serving, device="cpu", threads=2)
    assert loaded.narrow is not None
    inputs = [np.full((1, 16), i, np.float32) for i in range(16)]
    expected = [loaded.runtime.run({"x": x})["y"] for x in inputs]
    model = Generation("mlp", 1, loaded, serving, lambda: Metrics().add("mlp", 1))
    assert model.instances == 2
    with ThreadPoolExecutor(16) as pool:
        for _ in range(5):
            replies = list(pool.map(lambda x: model.infer(Request({"x": x})).outputs["y"], inputs))
            assert all(np.allclose(got, want, rtol=1e-5) for got, want in zip(replies, expected, strict=True))
    assert model.close(time.monotonic() + 20)
    with pytest.raises(RuntimeFailure):
        loaded.narrow.run({"x": inputs[0]})


def test_both_sessions_read_one_copy_of_the_weights(tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []

    class Counting:
        def get(self, key: str, size: int, fill: Fill) -> NDArray[np.uint8]:
            asked.append((key, size))
            return PRIVATE_STORE.get(key, size, fill)

    artifact = write_product(tmp_path / "product" / "1")
    serving = Serving.model_validate({"instances": "auto"})
    loading.load(artifact.path, serving, device="cpu", threads=2, weights=Counting()).close()
    assert len(asked) == len(set(asked)) == 1


def test_auto_is_read_and_survives_being_sent_to_another_process() -> None:
    serving = Serving.model_validate({"instances": "auto"})
    assert serving.instances == AUTO
    desired = DesiredModel("mlp", (Plan(1, Path("/x"), serving),))
    assert DesiredModel.from_json(desired.to_json()) == desired


def test_sessions_that_are_loaded_together_share_their_copy_of_the_weights() -> None:
    filled = []

    def fill(key: str) -> Fill:
        return lambda memory: filled.append((key, memory.size))

    store = CachingWeightStore(PRIVATE_STORE)
    one, same, other = (store.get(key, 8, fill(key)) for key in ("a", "a", "b"))
    assert one is same
    assert other is not one
    assert filled == [("a", 8), ("b", 8)]


# --- the measurement --------------------------------------------------------------------------------------------------


class TurnClock:
    """A clock that advances only during runs; ``calls`` holds the names of the runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def taking(self, name: str, *seconds: float) -> tuple[str, object]:
        """Return ``name`` and a run that takes each of ``seconds`` in turn, and then always the last."""
        left = list(seconds)

        def run() -> None:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return name, run


def measured(clock: TurnClock, *runs: tuple[str, object], seconds: float = SECONDS) -> tuple[dict[str, float], int]:
    return medians(dict(runs), seconds=seconds, clock=clock)  # type: ignore[arg-type]  # objects that are called


def test_runs_take_turns_and_every_other_round_is_in_reverse_order() -> None:
    clock = TurnClock()
    _, rounds = measured(clock, clock.taking("a", 0.01), clock.taking("b", 0.01), seconds=0.065)
    assert (clock.calls, rounds) == (["a", "b", "b", "a", "a", "b"], 3)


def test_measuring_ends_when_another_round_would_take_too_long() -> None:
    clock = TurnClock()
    found, rounds = measured(clock, clock.taking("a", 0.08), clock.taking("b", 0.04), seconds=0.3)
    assert found == pytest.approx({"a": 0.08, "b": 0.04})
    assert rounds == 2
    assert clock.now <= 0.3


def test_a_run_longer_than_the_time_limit_is_measured_once() -> None:
    clock = TurnClock()
    assert measured(clock, clock.taking("a", 5.0), clock.taking("b", 3.0)) == ({"a": 5.0, "b": 3.0}, 1)


def test_fast_runs_are_measured_a_limited_number_of_times() -> None:
    clock = TurnClock()
    _, rounds = measured(clock, clock.taking("a", 1e-6), clock.taking("b", 1e-6))
    assert rounds == ROUNDS


def test_an_occasional_delay_does_not_change_the_measured_time() -> None:
    clock = TurnClock()
    found, _ = measured(clock, clock.taking("a", 0.01), clock.taking("b", 0.1, 0.005, 0.005))
    assert found["b"] == pytest.approx(0.005)
