from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifacts import write_artifact, write_endless, write_mlp, write_product
from onnx import helper
from safetensors.numpy import save_file
from waiting import until

from bf16kit.artifact.manifest import DriftEntry
from bf16kit.artifact.reading import Digests
from bf16kit.drift.metrics import DriftSummary, SampleDrift
from bf16kit.messages.errors import ArtifactDamaged, ArtifactError, BudgetExceeded, ConfigError, RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.loading import load
from service.models import loading
from service.models.firstruns import check_golden, golden_of, warm_up
from service.models.loading import LoadedModel
from service.models.opening import OpenedArtifact, baseline, open_artifact
from service.models.policy import Serving


@pytest.fixture
def without_batch_axis(tmp_path: Path) -> Path:
    """Return the path of an artifact fp32[4] → fp32[4], which has no batch axis."""
    path = tmp_path / "flat" / "1"
    write_artifact(
        path,
        lambda weight: [helper.make_node("MatMul", ["x", weight("a")], ["y"])],
        {"a": np.eye(4, dtype=np.float32)},
        [TensorSpec("x", "float32", (4,))],
        [TensorSpec("y", "float32", (4,))],
        {"x": np.ones(4, np.float32)},
        batch_axis=None,
    )
    return path


def opened(path: Path, **serving: object) -> OpenedArtifact:
    return open_artifact(path, Serving.model_validate(serving))


def test_a_model_without_a_batch_axis_is_not_batched(without_batch_axis: Path) -> None:
    found = opened(without_batch_axis)
    assert (found.batch_axis, found.max_batch_size) == (None, 0)
    runtime = load(found.artifact, "cpu", threads=1)
    warm_up(runtime, found, (1,), golden_of(found.artifact))
    assert "within budget" in check_golden(runtime, found, golden_of(found.artifact))


def test_batching_a_model_without_a_batch_axis_is_an_error(without_batch_axis: Path) -> None:
    with pytest.raises(ConfigError, match="declares no batch axis"):
        opened(without_batch_axis, max_batch_size=4)
    found = opened(without_batch_axis)
    with pytest.raises(ConfigError, match="warmup asks for 2 rows"):
        warm_up(load(found.artifact, "cpu", threads=1), found, (2,), None)


@pytest.mark.parametrize("shape", [("batch",), ("batch", 16, "more")])
def test_an_output_of_another_rank_than_declared_keeps_a_model_from_serving(
    tmp_path: Path, shape: tuple[int | str, ...]
) -> None:
    write_mlp(tmp_path / "mlp" / "1")
    found = opened(tmp_path / "mlp" / "1")
    runtime = load(found.artifact, "cpu", threads=1)
    lied_about = replace(found, outputs=(TensorSpec("y", "float32", shape),))
    with pytest.raises(ArtifactError, match=r"output 'y' is declared as .*, and the model gives float32\[1, 16\]"):
        warm_up(runtime, lied_about, (1,), None)
    with pytest.raises(ArtifactError, match=r"the model gives float32\[4, 16\]"):
        check_golden(runtime, lied_about, golden_of(found.artifact))


def test_max_dims_for_an_unknown_dimension_is_an_error(tmp_path: Path, without_batch_axis: Path) -> None:
    write_mlp(tmp_path / "mlp" / "1")
    opened(tmp_path / "mlp" / "1", max_dims={"batch": 4})
    with pytest.raises(ConfigError, match=r"max_dims for 'seq', which is not .*: the free dimensions are batch"):
        opened(tmp_path / "mlp" / "1", max_dims={"seq": 4})
    with pytest.raises(ConfigError, match="its inputs have no free dimension"):
        opened(without_batch_axis, max_dims={"seq": 4})


def test_labels_and_formats_for_unknown_tensors_are_an_error(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp" / "1")
    opened(tmp_path / "mlp" / "1", labels={"y": ("a", "b")}, formats={"x": "NCHW"})
    with pytest.raises(ConfigError, match="has labels for unknown 'x'; the model has y"):
        opened(tmp_path / "mlp" / "1", labels={"x": ("a", "b")})
    with pytest.raises(ConfigError, match="has formats for unknown 'y'; the model has x"):
        opened(tmp_path / "mlp" / "1", formats={"y": "NCHW"})


def test_a_batch_axis_that_an_output_does_not_share_is_not_used(tmp_path: Path) -> None:
    """Splitting the batch's outputs would give one client another client's rows."""
    write_artifact(
        tmp_path / "sum" / "1",
        lambda weight: [
            helper.make_node("MatMul", ["x", weight("a")], ["h"]),
            helper.make_node("ReduceSum", ["h"], ["y"], keepdims=0),
        ],
        {"a": np.eye(4, dtype=np.float32)},
        [TensorSpec("x", "float32", ("batch", 4))],
        [TensorSpec("y", "float32", ())],
        {"x": np.ones((2, 4), np.float32)},
    )
    assert opened(tmp_path / "sum" / "1").batch_axis is None


def test_warming_up_works_without_golden_samples(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp" / "1")
    found = opened(tmp_path / "mlp" / "1")
    runtime = load(found.artifact, "cpu", threads=1)
    warm_up(runtime, found, (1, 3), None)
    assert "accuracy not checked" in check_golden(runtime, found, None)


def test_the_budget_is_the_manifests_with_the_owners_changes(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp" / "1", spoil=0.5)
    strict = opened(tmp_path / "mlp" / "1")
    assert strict.budget.bound("relative_l2") == 1.5e-2
    runtime = load(strict.artifact, "cpu", threads=1)
    with pytest.raises(BudgetExceeded, match=r"relative_l2 is .*; output 'y': cosine_distance is"):
        check_golden(runtime, strict, golden_of(strict.artifact))
    wide = opened(tmp_path / "mlp" / "1", budget={"relative_l2": 10, "cosine_distance": None})
    assert "within budget" in check_golden(runtime, wide, golden_of(wide.artifact))


def test_the_baseline_holds_the_statistics_that_a_budget_bounds(tmp_path: Path) -> None:
    manifest = write_mlp(tmp_path / "mlp" / "1").manifest
    assert baseline(manifest, "cpu") == {}
    summary = DriftSummary.of([SampleDrift(l2, 1e-6, 0.1 * l2, 50.0, 0, 0, 0) for l2 in (0.001, 0.003)])
    entry = DriftEntry(samples=2, source="test", outputs={"y": summary.as_dict()})
    found = baseline(manifest.model_copy(update={"drift": {"cpu": entry}}), "cpu")["y"]
    assert found["relative_l2"] == pytest.approx(0.002)  # the mean
    assert found["max_abs"] == pytest.approx(0.0003)  # the worst
    assert "top1_agreement" not in found  # not logits


# --- artifacts that are wrong on purpose ------------------------------------------------------------------------------

ROWS = np.ones((2, 16), np.float32)


def tampered(path: Path, golden: dict[str, np.ndarray] | None = None, **manifest: object) -> Path:
    """Write an MLP with these golden samples and manifest fields, and with correct digests. Return its path."""
    artifact = write_mlp(path)
    fields = artifact.manifest.model_copy(update=manifest)
    if golden is not None:
        save_file(golden, path / "golden.safetensors")
        entry = Digests().entry(path / "golden.safetensors")
        fields = fields.model_copy(update={"files": fields.files | {"golden.safetensors": entry}})
    (path / "manifest.json").write_bytes(fields.dumps())
    return path


@pytest.mark.parametrize(
    ("golden", "said"),
    [
        ({"input:x": ROWS[:0], "output:y": ROWS[:0]}, r"input 'x' has shape \[0, 16\], which is less than one sample"),
        ({"input:x": ROWS.astype(np.int32), "output:y": ROWS}, "input 'x' has dtype int32, expected float32"),
        ({"input:x": ROWS[:, :8].copy(), "output:y": ROWS}, r"input 'x' has shape \[2, 8\], expected \[batch,16\]"),
        ({"output:y": ROWS}, "input 'x' is missing"),
        ({"input:x": ROWS, "input:z": ROWS, "output:y": ROWS}, "unknown input 'z'"),
    ],
)
def test_golden_samples_that_do_not_fit_the_inputs_are_rejected_by_name(
    tmp_path: Path, golden: dict[str, np.ndarray], said: str
) -> None:
    with pytest.raises(ArtifactError, match=rf"golden\.safetensors: {said}"):
        whole_gate(tampered(tmp_path / "mlp" / "1", golden))


def test_an_invalid_budget_is_an_error_of_the_manifest(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"manifest\.json: budget: unknown metric 'speed'"):
        opened(tampered(tmp_path / "mlp" / "1", budget={"speed": 1.0}))


def test_an_fp32_fallback_needs_an_artifact_with_a_reference(tmp_path: Path) -> None:
    path = tampered(tmp_path / "mlp" / "1", reference=None)
    for policy in ("off", "alert"):
        opened(path, fallback=policy)
    with pytest.raises(ConfigError, match="fallback is fp32, but the artifact has no fp32 reference; set fallback: al"):
        opened(path, fallback="fp32")
    opened(write_mlp(tmp_path / "mlp" / "2").path, fallback="fp32")


def test_an_artifact_that_is_changed_while_it_is_loaded_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loaded model might be neither the old one nor the new one."""
    path = tampered(tmp_path / "mlp" / "1")

    def warm_up_meanwhile(*given: Any) -> None:
        with (path / "residual.bin").open("r+b") as file:
            file.write(b"\xff\xff")

    monkeypatch.setattr(loading, "warm_up", warm_up_meanwhile)
    with pytest.raises(ArtifactDamaged, match=r"residual\.bin: its sha256 is"):
        whole_gate(path)


def test_weights_are_mapped_where_serving_yaml_says_so(tmp_path: Path) -> None:
    write_product(tmp_path / "product" / "1", width=256)
    kept = whole_gate(tmp_path / "product" / "1")
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    shared = whole_gate(tmp_path / "product" / "1", weights="mapped")
    assert str(tmp_path / "product" / "1" / "weights.bf16") in Path("/proc/self/maps").read_text()
    x = np.ones((1, 256), np.float32)
    np.testing.assert_array_equal(kept.runtime.run({"x": x})["y"], shared.runtime.run({"x": x})["y"])


def whole_gate(path: Path, **serving: object) -> LoadedModel:
    return loading.load(path, Serving.model_validate(serving), device="cpu", threads=1)


def test_a_graph_that_never_ends_is_stopped(tmp_path: Path) -> None:
    """Otherwise it would keep every other model from being loaded."""
    write_endless(tmp_path / "endless" / "1")
    with pytest.raises(RuntimeFailure, match=r"cpu\.onnx, run for the first time: .* was not done after 0\.2 s"):
        whole_gate(tmp_path / "endless" / "1", first_run_seconds=0.2)


def test_threads_in_serving_yaml_override_those_of_the_server(tmp_path: Path) -> None:
    """A session of four threads starts three of its own; the calling thread is the fourth."""
    path = write_mlp(tmp_path / "mlp" / "1").path

    def threads() -> set[str]:
        return {task.name for task in Path("/proc/self/task").iterdir()}

    def starts(count: int, serving: Serving, server: int | None) -> None:
        before = threads()
        loaded = loading.load(path, serving, device="cpu", threads=server)
        # Threads that hash files end by themselves.
        until(lambda: len(threads() - before) == count, 20, f"{count} threads more")
        loaded.runtime.close()

    loading.load(path, Serving(), device="cpu", threads=1).runtime.close()  # libraries start some threads once
    starts(3, Serving(threads=4), 1)
    starts(0, Serving(threads=1), 4)
    starts(3, Serving(), 4)
