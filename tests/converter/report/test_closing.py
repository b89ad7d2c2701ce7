"""What the command line says after a conversion."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from converting import ONNX_ONLY, Cli

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.report.closing import closing
from bf16kit.converter.report.oncpu import on_cpu

_DOCUMENTED = Path(__file__).parents[3] / "docs" / "json.md"
_KEYS = {
    *("version", "published", "error", "path", "model", "model_version", "report", "within", "headline", "worst"),
    *("verdicts", "top1", "islands", "on_cpu", "exports", "notes", "seconds"),
    *("total_bytes", "checkpoint_bytes", "total_ratio"),
}


def test_one_line_tells_drift_size_and_time_and_the_rest_what_to_do(mlp: Artifact) -> None:
    first, *lines = closing(mlp, ["a remark"], 75.2).splitlines()
    line = (
        r"mlp/1: within budget, \w+ at \d+% of its bound \(\S+( emulated)?\); [\d.]+ kB on disk, [\d.]+ × the .*; 75 s"
    )
    assert re.fullmatch(line, first)
    on_disk = sum(file.stat().st_size for file in mlp.path.iterdir())
    assert f"{on_disk / 1000:.1f} kB on disk, {on_disk / mlp.manifest.source.bytes:.3f} ×" in first
    assert "note: a remark" in lines
    assert f"report      {mlp.path / 'report.html'}" in lines
    assert f"next        bf16-serve check --repository {mlp.path.parents[1]} mlp" in lines
    assert len(lines) < 10, "no table"


def test_verbose_adds_every_row_and_why_an_output_has_no_agreement(mlp: Artifact) -> None:
    said = closing(mlp, [], 1.0, verbose=True)
    rows = sum(len(metrics) for entry in mlp.manifest.drift.values() for metrics in entry.outputs.values())
    assert said.partition("Drift, within budget\n")[2].count("\n") >= rows
    assert "top1        output: not judged: its kind is other, not logits" in said
    assert "reference   within " in said


def test_profiles_measured_on_other_samples_are_told_apart_with_the_reason(mlp: Artifact) -> None:
    entry = mlp.manifest.drift["torchscript"]
    fewer = mlp.manifest.drift | {"torchscript": entry.model_copy(update={"samples": entry.samples // 2})}
    said = closing(Artifact(mlp.path, mlp.manifest.amended(drift=fewer)), [], 1.0)
    assert f"samples     cpu, cpu-bf16, cuda: {entry.samples} of {entry.source}\n" in said
    assert f"torchscript: {entry.samples // 2} of {entry.source} (when verified: run in both arithmetics" in said


@pytest.mark.long
def test_over_budget_only_the_rows_that_matter_are_shown(cli: Cli, onnx_file: Path, target: Path) -> None:
    flags = (*ONNX_ONLY, "--profile", "cpu", "--budget", "relative_l2=1e-9", "--no-search", "--allow-over-budget")
    out = cli("checkpoint", onnx_file, "--out", target, *flags).published().out
    assert out.startswith("m/1: OVER BUDGET, relative_l2 at ")
    assert [line.split()[2] for line in out.splitlines() if line.endswith("NO")] == ["relative_l2"]
    assert "cosine_distance" not in out


@pytest.mark.long
def test_json_is_one_object_with_the_documented_keys_whether_it_is_published_or_not(
    cli: Cli, onnx_file: Path, target: Path
) -> None:
    done = cli("checkpoint", onnx_file, "--out", target, "--json").published()
    found, manifest = json.loads(done.out), Artifact.open(target).manifest
    assert found.keys() == _KEYS
    assert [key for key in _KEYS if f"`{key}`" not in _DOCUMENTED.read_text()] == []
    assert found["total_bytes"] == sum(file.stat().st_size for file in target.iterdir())
    assert (found["path"], found["model"], found["model_version"]) == (str(target), "m", 1)
    assert Path(found["report"]).is_file()
    assert {each["profile"] for each in found["verdicts"]} == manifest.drift.keys()
    assert found["worst"]["used"] == max(each["tightest"]["used"] for each in found["verdicts"])
    refused = cli("checkpoint", onnx_file, "--out", target, "--json").refused(2, "already exists")
    failed = json.loads(refused.out)
    assert (failed["published"], failed["version"]) == (False, found["version"])
    assert failed["error"] in refused.err


@pytest.mark.long
def test_convolutions_and_recurrent_layers_are_said_to_be_widened_on_a_cpu(cli: Cli, tmp_path: Path) -> None:
    """Exporters of LSTMs reorder the gates of their weights by Slice and Concat."""
    text = "(float[batch, 3, 8, 8] x) => (float[batch, 32, 6, 6] y) { [conv] y = Conv (x, w) }"
    convolution = graphs.parsed(text, w=graphs.values(32, 3, 3, 3))
    text = """(float[7,2,16] x) => (float[7,1,2,24] y) {
        first = Slice (w, zero, half, one)
        second = Slice (w, half, whole, one)
        gates = Concat <axis = 1> (second, first)
        y = LSTM <hidden_size = 24> (x, gates, r)
    }"""
    ends = {name: np.array([value], np.int64) for name, value in (("zero", 0), ("half", 48), ("whole", 96), ("one", 1))}
    weights = {"w": graphs.values(1, 96, 16), "r": graphs.values(1, 96, 24)}
    recurrent = graphs.parsed(text, **weights, **ends)
    for name, model in (("Conv", convolution), ("LSTM", recurrent)):
        onnx.save(model, tmp_path / f"{name}.onnx")
        target = tmp_path / name / "1"
        out = cli("checkpoint", tmp_path / f"{name}.onnx", "--out", target, *ONNX_ONLY).published().out
        assert "on a CPU    gains little memory and no speed: " in out
        assert f"({name}) are widened to fp32 at load and gain neither" in out
        assert "note: no profile cpu-bf16: it would equal cpu, because no product would round what it reads: " in out


@pytest.mark.long
def test_convolutions_of_the_kernel_are_said_to_gain_in_cpu_bf16_only(cli: Cli, tmp_path: Path) -> None:
    text = "(float[batch, 64, 8, 8] x) => (float[batch, 64, 8, 8] y) { [a] h = Conv <pads = [1, 1, 1, 1]> (x, v)"
    text += " [b] y = Conv <pads = [1, 1, 1, 1]> (h, w) }"
    weights = {name: graphs.values(64, 64, 3, 3, seed=seed) for seed, name in enumerate("vw")}
    onnx.save(graphs.parsed(text, **weights), tmp_path / "m.onnx")
    out = cli("checkpoint", tmp_path / "m.onnx", "--out", tmp_path / "m" / "1", *ONNX_ONLY).published().out
    assert "gains memory and, as a rule, speed, in cpu-bf16 only: weights take 0.50 × fp32's memory, 1.00 × in" in out
    assert "0% are multiplied as bf16 by the CPU kernel and 100% are convolved by it in cpu-bf16 only" in out


def test_a_model_of_products_is_said_to_gain_memory_and_speed(mlp: Artifact) -> None:
    said = "gains memory and, as a rule, speed: weights take 0.70 × fp32's memory; 59% are multiplied as bf16 by the"
    assert str(on_cpu(mlp.manifest)).startswith(said)
