"""Models are loaded, replaced and unloaded while requests are in flight, and all are closed by one deadline."""

import gc
import shutil
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from beginning import leased
from controlled import Controlled, HeldLoads, write_model
from openfiles import no_more_threads
from sessions import recorded_sessions
from waiting import stays, until

from bf16kit.messages.errors import Unavailable
from bf16kit.service.contract import infer
from bf16kit.service.drift.fallbackcontroller import PrecisionOrder
from bf16kit.service.models import loads as loading_threads
from bf16kit.service.models.plan import desired_model_of
from bf16kit.service.models.reconciler import CHANGES_AT_ONCE
from bf16kit.service.request import Request
from bf16kit.service.telemetry.metrics import Metrics

QUIET = "shadow: {rate: 0}\nversion_policy: all\n"
ONE = Request({"x": np.zeros((1, 16), np.float32)}, rows=1)


@pytest.fixture
def loads() -> Iterator[HeldLoads]:
    """Yield the recorded loads of models, which a test can hold."""
    held = HeldLoads()
    yield held
    held.go.set()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def repository(tmp_path: Path, metrics: Metrics, loads: HeldLoads) -> Iterator[Controlled]:
    """Yield a repository that is empty and started."""
    repository = Controlled(tmp_path, metrics, device="cpu", threads=1, unload_seconds=30.0, load=loads)
    repository.start()
    yield repository
    repository.close()


def put(root: Path, name: str = "m", version: int = 1, *, serving: str = QUIET, **made: Any) -> None:
    write_model(root, name, version, serving=serving, **made)


def states(repository: Controlled) -> dict[tuple[str, int], str]:
    return {(slot.name, slot.version): slot.state for slot in repository.models()}


def is_ready(repository: Controlled) -> bool:
    return repository.ready


def rows_run(metrics: Metrics) -> float | None:
    lines = metrics.expose()[0].decode().splitlines()
    found = [line for line in lines if line.startswith('bf16kit_rows_total{model="m",version="1"}')]
    return float(found[0].rsplit(" ", 1)[1]) if found else None


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_slow_load_holds_up_no_other_model_and_few_run_at_once(
    tmp_path: Path, repository: Controlled, loads: HeldLoads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading_threads, "PATIENCE_SECONDS", 0.0)
    names = [f"m{number}" for number in range(CHANGES_AT_ONCE + 2)]
    for name in names:
        put(tmp_path, name)
    loads.go.clear()
    futures = [repository.load(name) for name in names]
    until(lambda: len(loads.begun) == CHANGES_AT_ONCE)
    stays(lambda: len(loads.begun) == CHANGES_AT_ONCE, 0.3, "as many loads")
    assert sorted(loads.begun) == [f"{name}/1" for name in names[:CHANGES_AT_ONCE]]
    loads.go.set()
    for future in futures:
        future.result(60)
    assert set(states(repository).values()) == {"ready"}


@pytest.mark.long
def test_a_bug_while_loading_does_not_stop_later_loads(
    tmp_path: Path, repository: Controlled, loads: HeldLoads, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path)
    real, loads.load = loads.load, lambda *given, **more: 1 / 0
    with pytest.raises(Unavailable):
        repository.load("m").result(60)
    assert repository.find("m", "").reason == "an unexpected error, see the server's log"
    loads.load = real
    repository.load("m").result(60)
    assert is_ready(repository)


@pytest.mark.long
@pytest.mark.parametrize("replacing", [False, True])
def test_a_load_whose_threads_cannot_be_started_frees_what_it_loaded(
    tmp_path: Path, repository: Controlled, metrics: Metrics, monkeypatch: pytest.MonkeyPatch, replacing: bool
) -> None:
    put(tmp_path)
    if replacing:
        repository.load("m").result(60)
        put(tmp_path)
    in_memory = recorded_sessions(monkeypatch)
    with no_more_threads("m-1-executor-1"):  # the second of two
        assert isinstance(repository.load("m").exception(60), Unavailable)
    assert in_memory() == 0
    assert [thread.name for thread in threading.enumerate()].count("m-1-executor-0") == replacing
    if not replacing:
        repository.load("m").result(60)
    infer(repository.get("m", ""), ONE)
    assert rows_run(metrics) == 1, "in the series that are exposed"


# --- replacing --------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("needed", [True, False])
def test_a_server_is_not_ready_until_all_models_it_starts_with_are_ready(
    tmp_path: Path, metrics: Metrics, needed: bool
) -> None:
    repository = Controlled(tmp_path, metrics, device="cpu", threads=1, ready_when_empty=not needed)
    assert is_ready(repository) == (not needed)
    put(tmp_path, "bad", spoil=0.5)
    put(tmp_path, "good")
    repository.scan()
    repository.start()
    until(lambda: "loading" not in states(repository).values())
    assert not is_ready(repository)
    shutil.rmtree(tmp_path / "bad")
    repository.scan()
    until(lambda: states(repository) == {("good", 1): "ready"})
    assert is_ready(repository)
    repository.unload("good").result(60)
    assert is_ready(repository) == (not needed)
    assert repository.close()


# --- unloading --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_series_are_those_of_the_generation_that_answers(
    tmp_path: Path, repository: Controlled, metrics: Metrics
) -> None:
    """Though the earlier one still has requests: it was replaced, or unloaded and loaded again."""
    put(tmp_path)
    repository.load("m").result(60)
    with leased(repository.acquire, "m", "") as old:
        put(tmp_path)
        replaced = repository.load("m")
        until(lambda: repository.get("m", "") is not old)
        infer(old, ONE)
        assert rows_run(metrics) == 0
    replaced.result(60)
    with leased(repository.acquire, "m", ""):
        unloaded = repository.unload("m")
        until(lambda: not repository.models())
        loaded = repository.load("m")
    unloaded.result(60)
    loaded.result(60)
    infer(repository.get("m", ""), ONE)
    assert rows_run(metrics) == 1


@pytest.mark.long
def test_an_order_of_a_precision_holds_for_the_generation_for_which_it_was_given(
    tmp_path: Path, repository: Controlled
) -> None:
    put(tmp_path)
    (plan,) = desired_model_of(tmp_path / "m").plans
    order = PrecisionOrder("m", 1, plan.digest, "fp32", "drift")
    for serving in (QUIET, f"{QUIET}max_queue_size: 2\n") * 2:
        (tmp_path / "m" / "serving.yaml").write_text(serving, "utf-8")
        repository.load("m").result(60)
        assert infer(repository.get("m", "1"), ONE).reported_precision == "bf16", "also the same plan, loaded again"
        if serving == QUIET:
            repository.order(order).result(60)
            assert infer(repository.get("m", "1"), ONE).reported_precision == "fp32"
    assert isinstance(repository.order(order).exception(60), Unavailable)


@pytest.mark.long
def test_an_unload_stops_waiting_for_a_request_after_its_limit_and_logs_it(
    tmp_path: Path, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path)
    repository = Controlled(tmp_path, metrics, device="cpu", threads=1, unload_seconds=0.01)
    repository.start()
    repository.load("m").result(60)
    with leased(repository.acquire, "m", "") as model:
        repository.unload("m").result(60)
        with pytest.raises(Unavailable):
            infer(model, ONE)
    assert "unloaded before these had ended: requests" in caplog.text
    assert repository.close()


# --- closing ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_closing_waits_for_a_model_being_loaded_until_the_deadline_and_logs_it(
    tmp_path: Path, repository: Controlled, loads: HeldLoads, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, "a")
    put(tmp_path, "b")
    loads.go.clear()
    a, b = repository.load("a"), repository.load("b")
    until(lambda: loads.begun)
    assert not repository.close(0.1)
    assert "a model is still being loaded or unloaded; stopping without waiting for it" in caplog.text
    assert isinstance(b.exception(60), Unavailable)
    loads.go.set()
    assert isinstance(a.exception(60), Unavailable)
    assert repository.close()
    assert set(states(repository).values()) <= {"unavailable"}
    assert b'model="' not in metrics.expose()[0]
    assert isinstance(repository.load("a").exception(60), Unavailable)


def test_a_reason_has_at_most_1000_characters(tmp_path: Path, repository: Controlled) -> None:
    put(tmp_path, serving=f"{'x' * 70_000}: 1\n")
    assert isinstance(repository.load("m").exception(60), Unavailable)
    assert len(repository.find("m", "").reason) <= 1000


# --- garbage ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_model_is_excluded_from_garbage_collection_until_it_is_unloaded(
    tmp_path: Path, repository: Controlled
) -> None:
    """A garbage collection of all objects stops every request for tens of milliseconds."""
    put(tmp_path)
    gc.unfreeze()
    repository.load("m").result(60)
    assert gc.get_freeze_count() > 10_000
    model = repository.get("m", "")
    model.itself = model  # type: ignore[attr-defined]  # a cycle, as any closure makes one
    unloaded = weakref.ref(model)
    del model
    repository.unload("m").result(60)
    until(lambda: unloaded() is None)
