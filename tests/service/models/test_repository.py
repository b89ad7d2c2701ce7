"""The repository with real artifacts: scans, loads, golden samples, look-ups and draining."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from artifacts import write_mlp, write_product
from controlled import Controlled
from loopback import LoopbackModel
from waiting import until

from bf16kit.artifact.manifest import sealed
from bf16kit.messages.errors import InvalidRequest, NotFound, Unavailable
from bf16kit.runtime.ort import kernel
from bf16kit.service.contract import State, infer
from bf16kit.service.models.generation import Generation
from bf16kit.service.models.repository import find_slot, not_ready, parse_version
from bf16kit.service.models.slot import Slot
from bf16kit.service.request import Observation, Request
from bf16kit.service.telemetry.metrics import Metrics

Open = Callable[..., Controlled]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def scan(tmp_path: Path, metrics: Metrics) -> Iterator[Open]:
    """Yield a function that scans the repository at ``tmp_path`` and returns it; it is closed after the test."""
    opened: list[Controlled] = []

    def build() -> Controlled:
        repository = Controlled(tmp_path, metrics, device="cpu", threads=1)
        repository.scan()
        opened.append(repository)
        return repository

    yield build
    for repository in opened:
        repository.close()


def answering(slot: Slot) -> Generation:
    """Return the generation in ``slot``, which must be ready."""
    assert (slot.state, slot.reason) == ("ready", "")
    assert slot.model is not None
    return slot.model


@pytest.fixture
def load(scan: Open) -> Open:
    """Return a function that does the same and waits until every model is loaded or rejected."""

    def build() -> Controlled:
        repository = scan()
        repository.start()
        until(lambda: all(model.state != "loading" for model in repository.models()), what="loading")
        return repository

    return build


def only(repository: Controlled) -> Slot:
    (slot,) = repository.models()
    return slot


def serving(root: Path, text: str) -> None:
    (root / "mlp" / "serving.yaml").write_text(text, "utf-8")


# --- from directory to ready ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_model_is_ready_after_its_golden_samples_were_within_budget(
    tmp_path: Path, load: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    artifact = write_mlp(tmp_path / "mlp" / "1")
    serving(tmp_path, "max_batch_size: 4\nwarmup: [1, 2]\nmax_queue_delay_ms: 1.5\ninstances: 2")
    model = answering(only(load()))
    assert (model.batch_axis, model.max_batch_size) == (0, 4)
    assert (model.max_queue_delay_s, model.instances) == (0.0015, 2)
    assert (model.info.backend, model.info.device, model.info.profile) == ("onnxruntime", "cpu", "cpu")
    assert model.info.accumulation == "fp32"
    golden = artifact.golden()
    reply = infer(model, Request(golden.inputs, rows=4))
    np.testing.assert_allclose(reply.outputs["y"], golden.outputs["y"], atol=0.05)
    with pytest.raises(InvalidRequest):
        infer(model, Request({"x": np.zeros((5, 16), np.float32)}, rows=5))
    until(lambda: "golden samples within budget" in caplog.text)
    assert "accumulation fp32" in caplog.text


@pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
def test_a_model_on_the_cpu_kernel_reports_its_kernel_path(
    tmp_path: Path, load: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernel.VARIABLE, "portable")
    caplog.set_level(logging.INFO)
    write_product(tmp_path / "product" / "1")
    model = answering(only(load()))
    assert (model.info.kernel, model.info.note) == ("portable", "")
    until(lambda: "accumulation fp32, kernel portable;" in caplog.text)
    # Threads of earlier tests may log as well, e.g. about token files that are gone.
    assert [each for each in caplog.records if each.levelno >= logging.WARNING and ".models." in each.name] == []


@pytest.mark.long
def test_without_the_cpu_kernel_models_serve_and_one_warning_gives_cost_and_remedy(
    tmp_path: Path, load: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "LIBRARY", tmp_path / "_bf16kernel.so")
    for name in ("a", "b", "c"):
        write_product(tmp_path / name / "1")
    write_mlp(tmp_path / "mlp" / "1")  # needs no kernel
    repository = load()
    models = [answering(slot) for slot in repository.models()]
    repository.close()  # waits for the thread, which may not have logged everything yet
    assert [model.info.kernel for model in models] == [""] * 4
    assert ["was not built" in model.info.note for model in models] == [True, True, True, False]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "no CPU kernel, because it was not built" in warning
    assert "twice the memory" in warning
    assert "install a C++17 compiler" in warning


def test_the_error_text_of_a_runtime_is_logged_and_not_shown_to_clients(
    tmp_path: Path, load: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """ONNX Runtime cannot load the artifact's graph, although its digests are correct."""
    directory = tmp_path / "mlp" / "1"
    write_mlp(directory)
    graph = onnx.load(directory / "cpu.onnx", load_external_data=False)
    graph.graph.node[-1].op_type = "SecretOperator"
    graph.graph.node[-1].domain = "secret.domain"
    content = graph.SerializeToString()
    (directory / "cpu.onnx").write_bytes(content)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"]["cpu.onnx"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (directory / "manifest.json").write_bytes(sealed(manifest))
    model = only(load())
    assert (model.state, "secret" in model.reason.lower()) == ("unavailable", False)
    assert "the server's log says why" in model.reason
    assert "SecretOperator" in caplog.text


def test_golden_samples_over_budget_keep_a_model_not_ready_with_the_reason_in_the_log(
    tmp_path: Path, load: Open, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    write_mlp(tmp_path / "mlp" / "1", spoil=0.5)
    repository = load()
    assert only(repository).state == "unavailable"
    assert "golden samples are over the drift budget: output 'y': relative_l2 is" in only(repository).reason
    assert "the budget allows at most 0.015" in caplog.text
    assert not repository.ready
    assert not repository.is_ready("mlp", "")
    assert b'bf16kit_model_ready{model="mlp",version="1"} 0.0' in metrics.expose()[0]
    with pytest.raises(NotFound, match="no version of model 'mlp' is ready"):
        repository.get("mlp", "")
    serving(tmp_path, "budget: {relative_l2: 5, cosine_distance: null}")  # the owner accepts it
    assert only(load()).state == "ready"
    assert b'bf16kit_model_ready{model="mlp",version="1"} 1.0' in metrics.expose()[0]


# --- the registry --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "version"), [("", None), ("7", 7), ("0" * 30 + "1", 1), ("0", 0), ("9" * 18, 10**18 - 1), ("9" * 5000, 0)]
)
def test_a_version_is_a_number_that_a_directory_may_have(text: str, version: int | None) -> None:
    assert parse_version(text) == version
    for wrong in (f"{text}.0", f"-{text}", f"{text}²"):
        with pytest.raises(InvalidRequest, match=r"failed to get model version .* is not an integer"):  # Triton's words
            parse_version(wrong)


def test_the_newest_ready_version_is_found_and_the_error_of_another_depends_on_its_state() -> None:
    """Unavailable means that the client should try again; NotFound means that it should not."""
    states: dict[int, State] = {2: "ready", 9: "ready", 10: "loading", 11: "unavailable"}
    slots = {"m": {version: LoopbackModel("m", version=version, state=state) for version, state in states.items()}}
    assert [find_slot(slots, "m", version).version for version in ("", "2", "11")] == [9, 2, 11]
    assert [type(not_ready(slots["m"][version], "")) for version in (10, 11)] == [Unavailable, NotFound]
    with pytest.raises(NotFound):
        find_slot(slots, "", "")


def test_a_request_that_reaches_no_generation_is_counted(tmp_path: Path, load: Open, metrics: Metrics) -> None:
    write_mlp(tmp_path / "mlp" / "1")
    repository = load()
    for version in ("7", "9" * 5000):
        with pytest.raises(NotFound, match=f"model 'mlp' has no version {version[:30]}[9…]*; it has 1"):
            repository.find("mlp", version)
    repository.find("mlp", "1").observe(Observation("mlp", "1", "", "NOT_FOUND", 0.1))
    told = list[bool]()
    repository.subscribe(lambda: told.append(repository.ready or repository.is_ready("mlp", "")))
    repository.drain()
    assert told == [False]
    assert repository.find("mlp", "").state == "ready", "it still shows its models"
    for look_up in (repository.acquire, repository.get):  # the latter is no request
        with pytest.raises(Unavailable) as refused:
            look_up("mlp", "")
        assert refused.value.reason == "draining"
    text = metrics.expose()[0].decode()
    assert 'bf16kit_requests_total{code="NOT_FOUND",model="mlp",version="1"} 1.0' in text
    assert 'bf16kit_queue_duration_seconds_count{model="mlp",version="1"} 0.0' in text
    assert 'bf16kit_rejected_total{model="mlp",reason="draining",version="1"} 1.0' in text


def test_directories_that_are_not_models_are_skipped_and_a_bad_name_is_logged(
    tmp_path: Path, scan: Open, caplog: pytest.LogCaptureFixture
) -> None:
    write_mlp(tmp_path / "mlp" / "1")
    for name in ("no versions", ".hidden/1", "spaced name/1", "mlp/.2.tmp-1-x", "mlp/01", "mlp/x"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file.txt").write_text("")
    assert [(m.name, m.version) for m in scan().models()] == [("mlp", 1)]
    assert "spaced name is skipped" in caplog.text
    assert "hidden" not in caplog.text
