"""Models are loaded, replaced and unloaded while requests are in flight, and all are closed by one deadline."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifacts import write_mlp
from beginning import leased
from controlled import Controlled
from openfiles import no_more_threads
from sessions import recorded_sessions
from waiting import stays, until

from bf16kit.messages.errors import Unavailable
from bf16kit.service.contract import infer
from bf16kit.service.drift.fallbackcontroller import PrecisionOrder
from bf16kit.service.models import loading
from bf16kit.service.models import loads as loading_threads
from bf16kit.service.models.plan import desired_model_of
from bf16kit.service.models.reconciler import CHANGES_AT_ONCE
from bf16kit.service.request import Request
from bf16kit.service.telemetry.metrics import Metrics

QUIET = "shadow: {rate: 0}\nversion_policy: all\n"
ONE = Request({"x": np.zeros((1, 16), np.float32)}, rows=1)


class Held:
    """Wraps a function: records its calls in ``begun``, and holds them while ``go`` is not set."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real = real
        self.begun: list[str] = []
        self.go = threading.Event()
        self.go.set()

    def __call__(self, subject: Any, *given: Any, **more: Any) -> Any:
        path = getattr(subject, "path", subject)
        self.begun.append(f"{path.parent.name}/{path.name}")
        assert self.go.wait(60)
        return self.real(subject, *given, **more)


@pytest.fixture
def loads() -> Iterator[Held]:
    """Yield the recorded loads of models, which a test can hold."""
    held = Held(loading.load)
    yield held
    held.go.set()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def repository(tmp_path: Path, metrics: Metrics, loads: Held) -> Iterator[Controlled]:
    """Yield a repository that is empty and started."""
    repository = Controlled(tmp_path, metrics, device="cpu", threads=1, unload_seconds=30.0, load=loads)
    repository.start()
    yield repository
    repository.close()


def put(root: Path, name: str = "m", version: int = 1, *, serving: str = QUIET, **made: Any) -> None:
    """Write a new artifact in place of any existing one."""
    shutil.rmtree(root / name / str(version), ignore_errors=True)
    write_mlp(root / name / str(version), **made)
    (root / name / "serving.yaml").write_text(serving, "utf-8")


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
def test_models_are_loaded_one_after_another_by_name_and_version(tmp_path: Path, metrics: Metrics, loads: Held) -> None:
    for name, version in (("b", 1), ("a", 10), ("a", 9), ("c", 1)):
        put(tmp_path, name, version)
    repository = Controlled(tmp_path, metrics, device="cpu", threads=1, load=loads)
    repository.scan()
    repository.start()
    until(lambda: set(states(repository).values()) == {"ready"})
    assert loads.begun == ["a/9", "a/10", "b/1", "c/1"]
    assert repository.close()


@pytest.mark.long
def test_a_slow_load_holds_up_no_other_model_and_few_run_at_once(
    tmp_path: Path, repository: Controlled, loads: Held, monkeypatch: pytest.MonkeyPatch
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
    tmp_path: Path, repository: Controlled, loads: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path)
    real, loads.real = loads.real, lambda *given, **more: 1 / 0
    with pytest.raises(Unavailable):
        repository.load("m").result(60)
    assert repository.find("m", "").reason == "an unexpected error, see the server's log"
    loads.real = real
    repository.load("m").result(60)
    assert is_ready(repository)


@pytest.mark.long
def test_loading_an_unchanged_model_does_nothing_and_a_failed_one_is_tried_again(
    tmp_path: Path, repository: Controlled, loads: Held
) -> None:
    put(tmp_path, "m")
    put(tmp_path, "bad", spoil=0.5)
    repository.load("m").result(60)
    model = repository.get("m", "")
    repository.load("m").result(60)
    assert repository.get("m", "") is model
    for _ in range(2):
        assert isinstance(repository.load("bad").exception(60), Unavailable)
    repository.scan()  # like a poll: it loads only models that have changed
    repository.load("m").result(60)
    assert loads.begun == ["m/1", "bad/1", "bad/1"]


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
def test_a_version_that_a_newer_wish_wants_again_is_not_unloaded_in_between(
    tmp_path: Path, repository: Controlled, loads: Held
) -> None:
    put(tmp_path, version=1)
    repository.load("m").result(60)
    model = repository.get("m", "1")
    put(tmp_path, version=2, serving=QUIET.replace("all", "{latest: 1}"))
    loads.go.clear()
    only_the_second = repository.load("m")
    until(lambda: loads.begun[-1] == "m/2")
    (tmp_path / "m" / "serving.yaml").write_text(QUIET, "utf-8")
    both = repository.load("m")
    loads.go.set()
    only_the_second.result(60)
    both.result(60)
    assert repository.get("m", "1") is model
    assert states(repository) == {("m", 1): "ready", ("m", 2): "ready"}


@pytest.mark.long
def test_a_slow_load_that_a_newer_wish_wants_too_is_not_given_up(
    tmp_path: Path, repository: Controlled, loads: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading_threads, "PATIENCE_SECONDS", 0.05)
    put(tmp_path, version=1)
    loads.go.clear()
    first = repository.load("m")
    until(lambda: loads.begun == ["m/1"])
    put(tmp_path, version=2)
    both = repository.load("m")
    stays(lambda: not first.done(), 0.5, "the load")
    loads.go.set()
    first.result(60)
    both.result(60)
    assert loads.begun == ["m/1", "m/2"]


@pytest.mark.long
def test_models_added_to_a_ready_server_do_not_make_it_unready(
    tmp_path: Path, repository: Controlled, loads: Held
) -> None:
    put(tmp_path)
    assert not is_ready(repository)
    repository.load("m").result(60)
    assert is_ready(repository)
    put(tmp_path, "bad", spoil=0.5)
    put(tmp_path, "slow")
    loads.go.clear()
    bad, slow = repository.load("bad"), repository.load("slow")
    until(lambda: loads.begun[-1] == "bad/1")
    assert (states(repository)["bad", 1], is_ready(repository)) == ("loading", True)
    loads.go.set()
    assert isinstance(bad.exception(60), Unavailable)
    slow.result(60)
    assert (states(repository)["bad", 1], is_ready(repository)) == ("unavailable", True)
    repository.unload("m").result(60)
    repository.unload("slow").result(60)
    assert not is_ready(repository)  # no model serves


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
    for serving in (QUIET, f"{QUIET}max_queue_size: 2\n", QUIET):
        (tmp_path / "m" / "serving.yaml").write_text(serving, "utf-8")
        repository.load("m").result(60)
        assert infer(repository.get("m", "1"), ONE).reported_precision == "bf16", "also the same plan, loaded again"
        if serving == QUIET:
            repository.order(order).result(60)
            assert infer(repository.get("m", "1"), ONE).reported_precision == "fp32"
        else:
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
    tmp_path: Path, repository: Controlled, loads: Held, metrics: Metrics, caplog: pytest.LogCaptureFixture
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


@pytest.mark.long
def test_closing_frees_idle_models_while_another_still_has_requests(tmp_path: Path, repository: Controlled) -> None:
    for name in ("a", "b"):
        put(tmp_path, name)
        repository.load(name).result(60)
    idle = repository.get("b", "")

    def freed() -> bool:
        try:
            infer(idle, ONE)
        except Unavailable:
            return True
        return False

    with ThreadPoolExecutor(1) as closer:
        with leased(repository.acquire, "a", "") as model:
            closing = closer.submit(repository.close, 60.0)
            until(freed)
            infer(model, ONE)
        assert closing.result(60)


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


@pytest.mark.long
def test_a_model_whose_load_hangs_can_be_replaced_and_what_is_loaded_late_is_closed(
    tmp_path: Path, repository: Controlled, loads: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading_threads, "PATIENCE_SECONDS", 0.05)
    put(tmp_path)
    loads.go.clear()
    hanging, go = repository.load("m"), loads.go
    until(lambda: loads.begun == ["m/1"])
    loads.go = threading.Event()  # of the next load
    loads.go.set()
    put(tmp_path)
    replacing = repository.load("m")
    assert "the model was changed or unloaded meanwhile" in str(hanging.exception(60))
    replacing.result(60)
    model = repository.get("m", "")
    go.set()
    until(lambda: "loading" not in {thread.name for thread in threading.enumerate()})
    assert repository.get("m", "") is model
