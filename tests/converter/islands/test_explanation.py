"""``bf16-convert explain`` on the command line: the layer at which drift arises, and what would mend it."""

import json
from collections.abc import Sequence
from html import unescape
from pathlib import Path

import failing
import numpy as np
import onnx
import pytest
from architectures import Cnn, seeded
from converting import ONNX_ONLY, Cli
from onnx import ModelProto, numpy_helper
from safetensors.torch import save_file

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.islands.explanation import search_artifact
from bf16kit.converter.islands.layertrace import open_reference
from bf16kit.converter.process.progress import Progress
from bf16kit.drift.budget import Budget
from bf16kit.drift.measurements import DiagnosisEntry

PUBLISHED_ANYHOW = (*ONNX_ONLY, "--allow-over-budget", "--no-search")


def explained(cli: Cli, model: ModelProto, target: Path, profile: str, *flags: str) -> dict[str, object]:
    """Convert ``model`` with ``flags``, and return what explain says of ``profile``."""
    onnx.save(model, target.parents[2] / "model.onnx")
    cli("checkpoint", target.parents[2] / "model.onnx", "--out", target, *(flags or PUBLISHED_ANYHOW)).published()
    return dict(json.loads(cli("explain", target, "--profile", profile, "--json").published().out)["profiles"][0])


def drift(path: Path, profile: str) -> float:
    return Artifact.open(path).manifest.drift[profile].outputs["y"]["relative_l2"]["mean"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "profile", "guilty", "kept"),
    [
        (failing.cancellation().proto, "cpu", "difference", {"w1", "w2"}),
        (failing.cancellation().proto, "cuda", "difference", {"left", "right", "difference"}),
        (failing.raised_and_lowered(), "cuda", "lower", {"raise", "lower"}),
        (failing.inner_overflow(), "cuda", "explode", {"explode", "shrink"}),
        (failing.sharp_softmax(), "cuda", "softmax", {"query", "sharpen", "softmax"}),
    ],
)
def test_the_node_at_fault_is_named_and_the_suggested_pattern_brings_drift_within_budget(
    cli: Cli, target: Path, model: ModelProto, profile: str, guilty: str, kept: set[str]
) -> None:
    """Converting again with the suggested ``--keep-fp32`` pattern reduces drift to the predicted value."""
    found = explained(cli, model, target, profile)
    assert isinstance(found["leaves"], dict)
    assert isinstance(found["remedy"], dict)
    assert found["leaves"]["name"] == guilty
    assert set(found["remedy"]["nodes"]) == kept
    assert found["tried"] is True

    mended, suggested = target.with_name("2"), ("--keep-fp32", found["remedy"]["keep_fp32"])
    source = target.parents[2] / "model.onnx"
    cli("checkpoint", source, "--out", mended, *PUBLISHED_ANYHOW, *suggested).published()
    foretold = 10 ** (-found["remedy"]["after_db"] / 20)
    assert drift(mended, profile) <= 1.5e-2 < drift(target, profile)
    assert drift(mended, profile) == pytest.approx(foretold, rel=0.5), "the samples differ: golden ones, and all"


@pytest.mark.parametrize("profile", ["cpu", "cpu-bf16", "cuda"])
def test_a_sound_model_has_the_predicted_sqnr_in_every_layer(cli: Cli, small: Artifact, profile: str) -> None:
    """The cpu profiles fuse a wide product, its bias and its activation, so both graphs have the last result alone."""
    said = json.loads(cli("explain", small.path, "--profile", profile, "--json").published().out)
    assert said["samples"] == "the golden samples"
    (found,) = said["profiles"]
    layers = found["layers"]
    fused = [("relu0", "Relu", 1), ("matmul1", "MatMul", 2), ("add1", "Add", 2)]
    single = [("matmul0", "MatMul", 1), ("add0", "Add", 1), *fused]
    assert [(each["name"], each["op"], each["depth"]) for each in layers] == (single if profile == "cuda" else fused)
    assert layers[0].keys() == {"name", "op", "weight", "depth", "sqnr_db", "expected_db"}
    assert max(abs(each["sqnr_db"] - each["expected_db"]) for each in layers) < 3
    assert (found["ails"], found["leaves"], found["remedy"], found["tried"]) == (False, None, None, False)


def test_the_text_says_of_a_sound_artifact_that_no_remedy_is_needed(cli: Cli, small: Artifact) -> None:
    said = cli("explain", small.path, "--samples", "feeders:three").published().out
    assert "layers on feeders:three" in said
    assert said.count("Every output has the SQNR predicted for rounding to bf16") == 3
    assert said.endswith("No remedy is needed.\n")


@pytest.mark.long
def test_a_node_without_its_first_output_is_named_too(cli: Cli, target: Path) -> None:
    """The last state of a chaotic recurrence: noise doubles with each step."""
    model = graphs.parsed(
        "(float[20, batch, 16] x) => (float[1, batch, 32] y) { [rnn] , y = RNN <hidden_size = 32> (x, w, r) }",
        w=graphs.values(1, 32, 16),
        r=graphs.values(1, 32, 32, seed=1, scale=0.5),
    )
    found = explained(cli, model, target, "cpu")
    assert isinstance(found["layers"], list)
    assert isinstance(found["leaves"], dict)
    assert ([each["name"] for each in found["layers"]], found["leaves"]["name"]) == (["rnn"], "rnn")


@pytest.mark.long
def test_a_profile_that_is_over_another_bound_than_relative_l2_is_explained_too(cli: Cli, target: Path) -> None:
    """On a level of 1,000 bf16 rounds away what the outputs differ by, and each layer has its predicted SQNR."""
    model = graphs.mlp()
    (level,) = (each for each in model.graph.initializer if each.name == "b1")
    level.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(level) + np.float32(1000), "b1"))
    found = explained(cli, model, target, "cuda")
    assert isinstance(found["remedy"], dict)
    assert (found["ails"], found["leaves"], found["remedy"]["nodes"]) == (True, None, ["add1"])


@pytest.mark.long
def test_an_output_that_no_node_computes_does_not_ail(cli: Cli, target: Path) -> None:
    model = graphs.mlp()
    model.graph.output.extend([graphs.edge("x", ["batch", 16]), graphs.edge("w0", [16, 32])])
    assert explained(cli, model, target, "cpu")["ails"] is False


@pytest.mark.long
def test_a_weight_that_several_layers_share_names_none_of_them(cli: Cli, target: Path) -> None:
    """Exporters store equal tensors, such as the scales of new normalisations, once, under the name of the first."""
    model = graphs.mlp((16, 16, 16))
    model.graph.node[-1].input[1] = "b0"
    del model.graph.initializer[3]
    layers = explained(cli, model, target, "cuda")["layers"]
    assert isinstance(layers, list)
    found = {layer["name"]: layer["weight"] for layer in layers}
    assert (found["matmul0"], found["matmul1"], found["add0"], found["add1"]) == ("w0", "w1", "", "")


@pytest.mark.long
def test_islands_that_exist_already_stay(cli: Cli, target: Path) -> None:
    """With those that the conversion found and the user asked for, the budget is met: nothing more is suggested."""
    flags = (*ONNX_ONLY, "--keep-fp32", "^first$")
    assert explained(cli, failing.cancellation().proto, target, "cuda", *flags)["remedy"] is None
    assert any(entry.code == "budget" for entry in Artifact.open(target).manifest.plan.nodes["cuda"])


@pytest.mark.long
def test_a_search_folds_batchnorm_where_the_conversion_did(cli: Cli, tmp_path: Path, target: Path) -> None:
    """Weights that are bf16 in the source stay unchanged. A search that folded BatchNorm would round them, at 56 dB."""
    source = tmp_path / "model.safetensors"
    state = seeded(Cnn()).state_dict().items()
    save_file({name: t.bfloat16() if t.is_floating_point() else t for name, t in state}, source)
    model = ("--model", "architectures:Cnn", "--input", "x:float32:batch,3,16,16")
    cli("checkpoint", source, "--out", target, *model, *ONNX_ONLY).published()
    artifact = Artifact.open(target)
    with open_reference(artifact) as graph:
        result = search_artifact(graph, artifact, "cpu", [artifact.golden().inputs], Budget(), Progress())
    assert result.entry is not None
    assert result.entry.after < 1e-3


def _published(cli: Cli, model: ModelProto, target: Path, *flags: str) -> DiagnosisEntry:
    """Convert ``model`` with the report, and return the diagnosis of its profile cpu, which names a layer."""
    source = target.parents[2] / "model.onnx"
    onnx.save(model, source)
    cli("checkpoint", source, "--out", target, *flags).published()
    measured = Artifact.open(target).measurements()
    assert measured is not None
    layers = measured.profiles["cpu"].layers
    assert layers is not None
    assert layers.diagnosis is not None
    assert layers.diagnosis.leaves is not None
    return layers.diagnosis


@pytest.mark.long
def test_the_report_of_a_model_published_over_budget_has_what_explain_says(cli: Cli, target: Path) -> None:
    found = _published(cli, failing.cancellation().proto, target, "--allow-over-budget")
    assert found.leaves is not None
    assert found.remedy is not None
    assert (found.leaves.name, found.remedy.keep_fp32, found.tried) == ("difference", "^(w1|w2)$", True)
    page = unescape((target / "report.html").read_text("utf-8"))
    said = cli("explain", target, "--profile", "cpu").published().out
    for text in (
        "SQNR falls below its prediction at difference (Sub)",
        "Keeping w1 and w2 in fp32 would raise output y from",
        "--keep-fp32 '^(w1|w2)$'",
    ):
        assert text in said
        assert text in page
    inspected = " ".join(cli("inspect", target).published().out.split())
    assert "layers cpu: SQNR falls below its prediction at difference (Sub)" in inspected


@pytest.mark.long
@pytest.mark.parametrize("flags", [("--no-search",), ("--search-minutes", "1e-9")])
def test_no_remedy_is_searched_if_the_search_is_off_or_has_no_time(
    cli: Cli, target: Path, flags: Sequence[str]
) -> None:
    found = _published(cli, failing.cancellation().proto, target, "--allow-over-budget", *flags)
    assert (found.remedy, found.tried) == (None, False)
    page = (target / "report.html").read_text("utf-8")
    assert "No remedy was looked for; bf16-convert explain looks for one." in page


@pytest.mark.long
def test_a_model_within_budget_is_diagnosed_without_a_search(cli: Cli, target: Path) -> None:
    """The runs of the conversion already show the layer that falls below its prediction."""
    found = _published(cli, failing.sharp_softmax(), target, "--profile", "cpu")
    assert found.leaves is not None
    assert (found.leaves.name, found.remedy, found.tried) == ("softmax", None, False)
    assert "No remedy is needed, because the budget is met" in (target / "report.html").read_text("utf-8")
    said = cli("explain", target).published().out
    assert said.rstrip().endswith("No remedy is needed, because the budget is met on these samples.")
    cli("explain", target, "--profile", "cuda").refused(2, "no ONNX profile 'cuda'", "it has cpu")


@pytest.mark.long
def test_no_remedy_is_searched_for_cpu_bf16(cli: Cli, target: Path) -> None:
    flags = (*PUBLISHED_ANYHOW, "--profile", "cpu-bf16")
    assert explained(cli, failing.cancellation().proto, target, "cpu-bf16", *flags)["tried"] is False
    said = cli("explain", target).published().out
    assert said.rstrip().endswith("No remedy was looked for on profile cpu-bf16.")


@pytest.mark.long
def test_an_artifact_without_a_reference_cannot_be_explained(cli: Cli, target: Path, onnx_file: Path) -> None:
    cli("checkpoint", onnx_file, "--out", target, "--no-residual", *ONNX_ONLY).published()
    cli("explain", target).refused(2, "--no-residual and keeps no fp32 reference", "convert the checkpoint again")


@pytest.mark.long
def test_layers_of_an_optional_profile_are_measured_only_if_it_is_requested(
    cli: Cli, small: Artifact, onnx_file: Path, target: Path
) -> None:
    by_default = small.measurements()
    assert by_default is not None
    assert by_default.profiles["cpu-bf16"].layers is None
    for profile in ("cpu", "cuda"):
        layers = by_default.profiles[profile].layers
        assert layers is not None
        assert layers.measured == len(layers.rows) > 1
        assert all(row.sqnr_db > 45 for row in layers.rows)
    cli("checkpoint", onnx_file, "--out", target, "--profile", "cpu-bf16", *ONNX_ONLY).published()
    asked = Artifact.open(target).measurements()
    assert asked is not None
    assert asked.profiles["cpu-bf16"].layers is not None
