"""Which bounds can be judged, and what happens to a profile that is over its budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from converting import ONNX_ONLY, Cli, tree

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.drift.metrics import Budget
from bf16kit.numerics.tensors import TensorSpec
from converter.verify.judging import check_budget, with_output_kinds

OUTPUT = TensorSpec("y", "float32", ("batch", 4))
# The cuda profile of the small model drifts more than this, the cpu profile less.
BETWEEN = ("--budget", "relative_l2=3e-3")


@pytest.fixture(scope="session")
def wide_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of two products that are wide enough for the kernel's panels."""
    path = tmp_path_factory.mktemp("wide") / "wide.onnx"
    onnx.save(graphs.mlp((64, 96, 40)), path)
    return path


def test_an_unknown_output_and_a_stated_bound_that_applies_to_none_are_rejected(
    cli: Cli, onnx_file: Path, target: Path
) -> None:
    asked = ("checkpoint", onnx_file, "--out", target)
    cli(*asked, "--output", "z:logits").refused(2, "--output z: the model's outputs are y")
    said = "--budget top1_agreement=1: no output is known to hold logits ('y' is of kind other)", "--output y:logits"
    cli(*asked, "--budget", "top1_agreement=1.0").refused(2, *said)
    assert not target.parent.exists()


def test_an_unjudged_default_bound_is_noted_if_an_output_could_hold_logits() -> None:
    (note,) = check_budget(Budget(), [OUTPUT])
    assert note.startswith("top1_agreement was not judged: no output is known to hold logits ('y' is of kind other)")
    assert note.endswith("--output y:logits")
    (note,) = check_budget(Budget(), [OUTPUT, replace(OUTPUT, name="z")])
    assert "('y' is of kind other, 'z' is of kind other)" in note
    assert note.endswith("--output NAME:logits")
    assert check_budget(Budget(), with_output_kinds([OUTPUT], {"y": "embedding"})) == []
    assert check_budget(Budget.parse(["top1_agreement=none"]), [OUTPUT]) == []
    assert check_budget(Budget.parse(["top1_agreement=1"]), with_output_kinds([OUTPUT], {"y": "logits"})) == []


@pytest.mark.long
def test_a_profile_over_budget_may_be_left_out_and_the_others_published(
    cli: Cli, onnx_file: Path, target: Path
) -> None:
    flags = (*ONNX_ONLY, *BETWEEN, "--no-search", "--drop-failing-profiles")
    done = cli("checkpoint", onnx_file, "--out", target, *flags).published()
    assert "left out, drift over budget: cuda" in done.out
    artifact = Artifact.open(target)
    manifest = artifact.manifest
    assert set(manifest.profiles) == set(manifest.drift) == set(manifest.plan.nodes) == {"cpu", "cpu-bf16"}
    assert "cuda.onnx" not in tree(target)
    cli("verify", target).published()


@pytest.mark.long
def test_an_optional_profile_is_written_if_it_is_within_budget(cli: Cli, wide_file: Path, target: Path) -> None:
    cli("checkpoint", wide_file, "--out", target, *ONNX_ONLY).published()
    manifest = Artifact.open(target).manifest
    assert set(manifest.profiles) == set(manifest.drift) == set(manifest.plan.nodes) == {"cpu", "cpu-bf16", "cuda"}
    drifts = [manifest.drift[p].outputs["y"]["relative_l2"]["mean"] for p in ("cpu", "cpu-bf16", "cuda")]
    assert drifts == sorted(drifts)
    assert (manifest.schema_version, manifest.profiles["cpu-bf16"].verified) == (7, "host")
    shared = [{t.external_data[0].value for t in _initializers(target / f"{p}.onnx")} for p in ("cpu", "cpu-bf16")]
    assert shared[0] == shared[1] == {"weights.bf16"}


def _initializers(path: Path) -> list[onnx.TensorProto]:
    tensors = onnx.load(path, load_external_data=False).graph.initializer
    return [tensor for tensor in tensors if tensor.data_type == onnx.TensorProto.BFLOAT16]


# On the wide model, the drift of cpu is 2.1e-3, of cpu-bf16 3.1e-3, of cuda 4.2e-3.
_CPU_ALONE = ("--budget", "relative_l2=2.5e-3", "--no-search")


@pytest.mark.long
@pytest.mark.parametrize("flag", ["--drop-failing-profiles", "--allow-over-budget"])
def test_an_optional_profile_over_budget_is_left_out_whatever_is_allowed(
    flag: str, cli: Cli, wide_file: Path, target: Path
) -> None:
    done = cli("checkpoint", wide_file, "--out", target, *ONNX_ONLY, *_CPU_ALONE, flag).published()
    assert "note: no profile cpu-bf16, which is faster on some processors: drift over budget" in done.out
    assert "profile cpu-bf16, output 'y': relative_l2 is 0.0030" in done.out
    manifest = Artifact.open(target).manifest
    assert "cpu-bf16" not in {*manifest.profiles, *manifest.drift, *manifest.plan.nodes}
    assert "cpu-bf16.onnx" not in tree(target)
    requested = cli(
        "checkpoint", wide_file, "--out", target, *ONNX_ONLY, *_CPU_ALONE, "--profile", "cpu-bf16", "--force"
    )
    requested.refused(1, "profile cpu-bf16, output 'y': relative_l2 is")


@pytest.mark.long
def test_cpu_bf16_without_a_product_that_rounds_is_left_out_or_rejected_if_requested(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    onnx.save(graphs.embedding(), tmp_path / "m.onnx")
    source = ("checkpoint", tmp_path / "m.onnx", "--out", target, *ONNX_ONLY)
    cli(*source, "--profile", "cpu-bf16").refused(
        2, "--profile cpu-bf16: no matrix product or convolution of this model has a bf16 weight"
    )
    cli(*source).published()
    assert {*Artifact.open(target).manifest.profiles} == {"cpu", "cuda"}


@pytest.mark.long
def test_an_optional_profile_that_does_not_run_is_left_out(
    cli: Cli, wide_file: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(onnxruntime.InferenceSession):  # type: ignore[misc]  # it has no types
        def __init__(self, model: object, *arguments: object, **options: object) -> None:
            if "cpu-bf16.onnx" in str(model):
                raise RuntimeError("no such operator")
            super().__init__(model, *arguments, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Refusing)
    flags = ("checkpoint", wide_file, "--out", target, *ONNX_ONLY)
    cli(*flags, "--profile", "cpu-bf16").refused(3, "no such operator")
    assert "no profile cpu-bf16: the written graph does not run" in cli(*flags).published().out
    assert {*Artifact.open(target).manifest.profiles} == {"cpu", "cuda"}


@pytest.mark.long
def test_if_every_profile_is_over_budget_the_conversion_fails(cli: Cli, onnx_file: Path, target: Path) -> None:
    flags = (*ONNX_ONLY, "--budget", "relative_l2=1e-9", "--no-search", "--drop-failing-profiles")
    cli("checkpoint", onnx_file, "--out", target, *flags).refused(1, "Every profile is over budget", "profile cuda")
    assert not target.parent.exists()


@pytest.mark.long
def test_a_bound_on_a_quantile_is_stored_and_judged(cli: Cli, onnx_file: Path, tmp_path: Path, target: Path) -> None:
    flags = ("checkpoint", onnx_file, "--out", target, *ONNX_ONLY, "--profile", "cpu", "--no-search")
    cli(*flags, "--budget", "relative_l2.worst=1e-9").refused(1, "relative_l2.worst is", "at most 1e-09")
    cli(*flags, "--budget", "relative_l2.p99=1").refused(
        2, "the 99th percentile of 16 samples is not known; give 100 or more, or bound the worst"
    )
    samples = tmp_path / "samples.npz"
    np.savez(samples, x=np.random.default_rng(0).standard_normal((100, 16), np.float32))
    cli(*flags, "--samples", samples, "--budget", "relative_l2.p99=1").published()
    assert Artifact.open(target).manifest.budget["relative_l2.p99"] == 1
    assert "relative_l2.p99" in cli("verify", target).published().out


@pytest.mark.long
@pytest.mark.parametrize("apart", [2.0**-16, 2.0**-22])
def test_a_changed_top_class_is_rejected_though_the_numbers_hardly_change_but_a_tie_in_fp32_is_none(
    cli: Cli, tmp_path: Path, target: Path, apart: float
) -> None:
    """Of eight classes two always lead, which are equal in bf16; there the first of equal classes is chosen."""
    weight = np.zeros((32, 8), np.float32)
    weight[:, 0] = np.abs(graphs.values(32))
    weight[:, 1] = weight[:, 0] * np.float32(1 + apart)
    # Sums that do not cancel are equal but for fp32 noise.
    text = "(float[batch, 32] x) => (float[batch, 8] y) { [abs] m = Abs (x) [product] y = MatMul (m, w) }"
    onnx.save(graphs.parsed(text, w=weight), tmp_path / "m.onnx")
    command = ("checkpoint", tmp_path / "m.onnx", "--out", target, "--output", "y:logits", "--no-search", *ONNX_ONLY)
    if apart == 2.0**-16:
        assert "relative_l2" not in cli(*command).refused(1, "output 'y': top1_agreement is").err
    else:
        cli(*command).published()
        manifest = Artifact.open(target).manifest
        assert [output.kind for output in manifest.outputs] == ["logits"]
        assert manifest.drift["cpu"].outputs["y"]["top1_agreement"]["mean"] == 1.0
