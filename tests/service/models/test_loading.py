"""Opening and loading an artifact: what is checked, which profile serves, and the fp32 reference that can."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_artifact, write_endless, write_mlp
from keptweights import KeptWeights
from onnx import helper
from safetensors.numpy import save_file

from bf16kit.artifact.manifest import DriftEntry, Manifest, Source, SpecEntry
from bf16kit.artifact.reading import Digests
from bf16kit.drift.metrics import Budget, DriftSummary, SampleDrift
from bf16kit.messages.errors import ArtifactDamaged, ArtifactError, BudgetExceeded, ConfigError, RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import available_cpus
from bf16kit.runtime.memory.weightstore import PRIVATE_STORE
from bf16kit.service.models import loading
from bf16kit.service.models.loading import LoadedModel, load_fp32, profile_order
from bf16kit.service.models.opened import OpenedArtifact, baseline, open_artifact
from bf16kit.service.models.serving import Serving


def write_flat(path: Path) -> None:
    """Write an artifact fp32[4] → fp32[4], which has no batch axis."""
    write_artifact(
        path,
        lambda weight: [helper.make_node("MatMul", ["x", weight("a")], ["y"])],
        {"a": np.eye(4, dtype=np.float32)},
        [TensorSpec("x", "float32", (4,))],
        [TensorSpec("y", "float32", (4,))],
        {"x": np.ones(4, np.float32)},
        batch_axis=None,
    )


def write_sum(path: Path) -> None:
    """Write an artifact fp32[batch,4] → fp32[], whose output has no batch axis."""
    write_artifact(
        path,
        lambda weight: [
            helper.make_node("MatMul", ["x", weight("a")], ["h"]),
            helper.make_node("ReduceSum", ["h"], ["y"], keepdims=0),
        ],
        {"a": np.eye(4, dtype=np.float32)},
        [TensorSpec("x", "float32", ("batch", 4))],
        [TensorSpec("y", "float32", ())],
        {"x": np.ones((2, 4), np.float32)},
    )


def opened(path: Path, **serving: object) -> OpenedArtifact:
    return open_artifact(path, Serving.model_validate(serving))


@pytest.mark.parametrize("write", [write_flat, write_sum])
def test_a_model_is_batched_only_along_an_axis_of_all_its_inputs_and_outputs(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    """Splitting the outputs of others would give one client another client's rows."""
    write(tmp_path / "m" / "1")
    found = opened(tmp_path / "m" / "1")
    assert (found.batch_axis, found.max_batch_size) == (None, 0)
    assert "within budget" in whole_gate(tmp_path / "m" / "1").golden


@pytest.mark.parametrize(
    ("name", "serving", "words"),
    [
        ("mlp", {"max_dims": {"seq": 4}}, r"max_dims for 'seq', which is not .*: the free dimensions are batch"),
        ("flat", {"max_dims": {"seq": 4}}, "its inputs have no free dimension"),
        ("mlp", {"labels": {"x": ("a", "b")}}, "has labels for unknown 'x'; the model has y"),
        ("flat", {"max_batch_size": 4}, "declares no batch axis"),
        ("flat", {"warmup": (2,)}, "warmup asks for 2 rows"),
    ],
)
def test_settings_that_do_not_fit_the_artifact_are_an_error(
    tmp_path: Path, name: str, serving: dict[str, object], words: str
) -> None:
    write_flat(tmp_path / "flat" / "1")
    write_mlp(tmp_path / "mlp" / "1")
    opened(tmp_path / "mlp" / "1", max_dims={"batch": 4}, labels={"y": ("a", "b")})
    with pytest.raises(ConfigError, match=words):
        whole_gate(tmp_path / name / "1", **serving)


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


def test_an_artifact_that_is_changed_while_it_is_loaded_is_rejected(tmp_path: Path) -> None:
    """The loaded model might be neither the old one nor the new one."""
    path = tampered(tmp_path / "mlp" / "1")

    def meanwhile(step: str, seconds: float) -> None:
        if step.startswith("running"):
            with (path / "residual.bin").open("r+b") as file:
                file.write(b"\xff\xff")

    with pytest.raises(ArtifactDamaged, match=r"residual\.bin: its sha256 is"):
        loading.load(path, Serving(), device="cpu", threads=1, on_step=meanwhile)


def whole_gate(path: Path, **serving: object) -> LoadedModel:
    return loading.load(path, Serving.model_validate(serving), device="cpu", threads=1)


def test_a_graph_that_never_ends_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would keep every other model from being loaded."""
    monkeypatch.setattr(loading, "FIRST_RUN_SECONDS", 0.2)
    write_endless(tmp_path / "endless" / "1")
    with pytest.raises(RuntimeFailure, match=r"cpu\.onnx, run for the first time: .* was not done after 0\.2 s"):
        whole_gate(tmp_path / "endless" / "1")


@pytest.mark.parametrize(
    ("instances", "server", "threads"),
    [(1, None, None), (1, 4, 4), (2, 4, 2), (3, 4, 1), (8, 4, 1), (2, None, max(1, available_cpus() // 2))],
)
def test_instances_share_the_threads_of_the_server_or_the_processors(
    instances: int, server: int | None, threads: int | None
) -> None:
    """Two instances of all threads each would wait for each other at every operator."""
    assert loading.threads_of_a_run(instances, server) == threads


@pytest.mark.parametrize("shape", [("batch",), ("batch", 16, "more")])
def test_an_output_of_another_rank_than_declared_keeps_a_model_from_serving(
    tmp_path: Path, shape: tuple[int | str, ...]
) -> None:
    declared = SpecEntry(name="y", dtype="float32", shape=list(shape))
    path = tampered(tmp_path / "mlp" / "1", outputs=[declared], golden=None)
    with pytest.raises(ArtifactError, match=r"output 'y' is declared as .*, and the model gives float32\[1, 16\]"):
        whole_gate(path)


# --- the fp32 reference that can answer ------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_the_reference_matches_the_golden_samples_and_takes_its_weights_from_the_store(
    tmp_path: Path, shared: bool
) -> None:
    mlp = opened(write_mlp(tmp_path / "mlp" / "1").path)
    store = KeptWeights()
    runtime = load_fp32("m", mlp, Serving(), threads=1, weights=store if shared else PRIVATE_STORE)
    golden = mlp.artifact.golden()
    np.testing.assert_allclose(runtime.run(golden.inputs)["y"], golden.outputs["y"], rtol=1e-5, atol=1e-6)
    assert runtime.info.precision == "fp32"
    assert len(store.arrays) == shared


def test_the_reference_is_warmed_up_and_checked_before_it_serves(tmp_path: Path) -> None:
    mlp = opened(write_mlp(tmp_path / "mlp" / "1").path)
    with pytest.raises(ConfigError, match="warmup asks for 2 rows"):
        load_fp32("m", replace(mlp, batch_axis=None), Serving(warmup=(2,)), threads=1, weights=PRIVATE_STORE)
    spoilt = write_mlp(tmp_path / "mlp" / "2", spoil=1.0).path
    with pytest.raises(BudgetExceeded):
        load_fp32("m", opened(spoilt), Serving(), threads=1, weights=PRIVATE_STORE)
    # Replaced in place: the served weights were copied when they were loaded, and these are another model's.
    with (mlp.artifact.path / "weights.bf16").open("r+b") as file:
        file.write(b"\xff\xff")
    with pytest.raises(ArtifactError):
        load_fp32("m", mlp, Serving(), threads=1, weights=PRIVATE_STORE)


# --- which profile auto serves, by the budget in force and the processor ---------------------------------------------

BOTH = ("cpu", "cpu-bf16")


def manifest(relative_l2: float | None) -> Manifest:
    drift = {} if relative_l2 is None else {"y": {"relative_l2": {"mean": relative_l2}}}
    entry = DriftEntry(samples=16, source="random", outputs=drift)
    source = Source(format="onnx", sha256="", bytes=0, tensors=0)
    return Manifest(model="m", inputs=[], outputs=[], profiles={}, drift={"cpu-bf16": entry}, source=source)


STRICT = Budget().override({"relative_l2": 5e-3})
OVER = "its drift is over budget: output 'y': relative_l2 is {}, the budget allows at most {}"


@pytest.mark.parametrize(
    ("profiles", "drift", "budget", "native", "order", "why"),
    [
        (BOTH, 6e-3, Budget(), True, ("cpu-bf16", "cpu"), "cpu-bf16 is within budget, and this processor multiplies"),
        (BOTH, 6e-3, Budget(), False, ("cpu",), "cpu-bf16 was skipped, bf16 would be emulated here"),
        (BOTH, None, Budget(), True, ("cpu",), "cpu-bf16 was skipped, its drift was never measured"),
        (BOTH, 0.5, Budget(), True, ("cpu",), f"cpu-bf16 was skipped, {OVER.format(0.5, 0.015)}"),
        (BOTH, 6e-3, STRICT, True, ("cpu",), f"cpu-bf16 was skipped, {OVER.format(0.006, 0.005)}"),
        (BOTH, math.nan, Budget(), True, ("cpu",), "cpu-bf16 was skipped, its drift is over budget"),
        (("cpu-bf16",), None, Budget(), False, ("cpu-bf16",), ""),
    ],
)
def test_the_profile_with_fewer_bits_serves_where_it_is_within_the_budget_in_force_and_native(
    profiles: tuple[str, ...], drift: float | None, budget: Budget, native: bool, order: tuple[str, ...], why: str
) -> None:
    """``serving.yaml`` may set a stricter budget than the artifact's. A single profile needs no reason."""
    found, reason = profile_order(manifest(drift), profiles, budget, native=native)
    assert found == order
    assert reason.startswith(f"auto: {why}" if why else "")
    assert bool(reason) == bool(why)
