"""Where a profile falls below the expected line, and which remedy helps, on models for which both are known."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import torch
import troubled
from architectures import Cnn, seeded
from converting import ONNX_ONLY, Cli
from onnx import ModelProto
from safetensors.torch import save_file

import graphs
from bf16kit.artifact.artifact import Artifact
from converter.islands.explain import open_reference, trace
from converter.islands.remedy import pattern
from converter.islands.remedytrials import RemedyTrials

PUBLISHED_ANYHOW = (*ONNX_ONLY, "--allow-over-budget", "--no-search")


def explained(cli: Cli, model: ModelProto, target: Path, profile: str) -> dict[str, object]:
    source = target.parents[2] / "model.onnx"
    onnx.save(model, source)
    cli("checkpoint", source, "--out", target, *PUBLISHED_ANYHOW).published()
    said = cli("explain", target, "--profile", profile, "--json").published().out
    (found,) = json.loads(said)["profiles"]
    return dict(found)


def drift(path: Path, profile: str) -> float:
    return Artifact.open(path).manifest.drift[profile].outputs["y"]["relative_l2"]["mean"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "profile", "guilty", "kept"),
    [
        (troubled.cancellation(), "cpu", "difference", {"left", "right"}),
        (troubled.cancellation(), "cuda", "difference", {"left", "right", "difference"}),
        (troubled.offset(), "cuda", "lower", {"raise", "lower"}),
        (troubled.overflow(), "cuda", "explode", {"explode", "shrink"}),
        (troubled.sharp_softmax(), "cpu", "softmax", {"query", "key"}),
        (troubled.sharp_softmax(), "cuda", "softmax", {"query", "key", "scores", "softmax"}),
    ],
)
def test_the_node_at_fault_is_named_and_the_suggested_pattern_reduces_drift(
    cli: Cli, target: Path, model: ModelProto, profile: str, guilty: str, kept: set[str]
) -> None:
    """Converting again with the suggested ``--keep-fp32`` pattern reduces drift to the predicted value."""
    found = explained(cli, model, target, profile)
    assert isinstance(found["leaves"], dict)
    assert isinstance(found["remedy"], dict)
    assert found["leaves"]["name"] == guilty
    assert set(found["remedy"]["nodes"]) == kept

    mended = target.with_name("2")
    source = target.parents[2] / "model.onnx"
    pattern = found["remedy"]["keep_fp32"]
    cli("checkpoint", source, "--out", mended, *PUBLISHED_ANYHOW, "--keep-fp32", pattern).published()
    foretold = 10 ** (-found["remedy"]["after_db"] / 20)
    assert drift(mended, profile) < drift(target, profile) / 2
    assert drift(mended, profile) == pytest.approx(foretold, rel=0.5), "the samples differ: golden ones, and all"


def test_no_node_is_blamed_if_rounding_costs_what_is_expected(cli: Cli, target: Path) -> None:
    found = explained(cli, graphs.mlp((64,) * 9), target, "cuda")
    assert (found["ails"], found["leaves"], found["remedy"]) == (False, None, None)


@pytest.mark.parametrize("given", ["x", "w0"])
def test_an_output_that_no_node_computes_is_not_below_the_line(cli: Cli, target: Path, given: str) -> None:
    model = graphs.mlp()
    model.graph.output.append(graphs.edge(given, ["batch", 16] if given == "x" else [16, 32]))
    assert explained(cli, model, target, "cpu")["ails"] is False


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_a_trial_without_further_islands_equals_the_profile(cli: Cli, target: Path, profile: str) -> None:
    """Islands that a search found, and islands that the user requested, stay in fp32 in every trial."""
    source = target.parents[2] / "model.onnx"
    onnx.save(troubled.cancellation(), source)
    cli("checkpoint", source, "--out", target, *ONNX_ONLY, "--keep-fp32", "^first$").published()
    artifact = Artifact.open(target)
    assert any(entry.code == "budget" for entry in artifact.manifest.plan.nodes["cuda"])
    feeds = [artifact.golden().inputs]
    with open_reference(artifact) as graph:
        traced = trace(graph, artifact, feeds, profile)
        (output,) = traced.graph.outputs
        trials = RemedyTrials(traced, artifact, profile, feeds, output)
        assert trials.sqnr(()) == pytest.approx(traced.sqnr(output), abs=0.5)


def test_a_trial_folds_batchnorm_where_the_conversion_did(cli: Cli, tmp_path: Path, target: Path) -> None:
    """Weights that are bf16 in the source stay unchanged. A trial that folded BatchNorm would round them, at 56 dB."""
    source = tmp_path / "model.safetensors"
    save_file({name: _bf16(tensor) for name, tensor in seeded(Cnn()).state_dict().items()}, source)
    model = ("--model", "architectures:Cnn", "--input", "x:float32:batch,3,16,16")
    cli("checkpoint", source, "--out", target, *model, *ONNX_ONLY).published()
    artifact = Artifact.open(target)
    feeds = [artifact.golden().inputs]
    with open_reference(artifact) as graph:
        traced = trace(graph, artifact, feeds, "cpu")
        (output,) = traced.graph.outputs
        assert RemedyTrials(traced, artifact, "cpu", feeds, output).sqnr(()) > 100


def _bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def test_the_pattern_escapes_special_characters_in_names() -> None:
    assert pattern(("/model/a.1", "b")) == r"^(/model/a\.1|b)$"
    assert pattern(("a+",)) == r"^a\+$"
