"""A conversion of a model that is over budget: what it publishes and reports, and that it does not search in vain."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from converting import MLP, ONNX_ONLY, Cli
from failing import Failing, cancellation, lstm, offset
from restored import assert_restored

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import Manifest
from bf16kit.converter.report.figures import Figures
from bf16kit.drift.metrics import Budget

_Build = Callable[[], Failing]


def _command(
    built: Failing, tmp_path: Path, target: Path, flags: tuple[str, ...] = ONNX_ONLY
) -> tuple[str | Path, ...]:
    source, samples = tmp_path / "m.onnx", tmp_path / "samples"
    onnx.save(built.proto, source)
    samples.mkdir(exist_ok=True)
    for index, feed in enumerate(built.feeds):
        np.savez(samples / f"{index}.npz", **feed)  # type: ignore[arg-type]  # numpy takes arrays by keyword
    return ("checkpoint", source, "--out", target, "--samples", samples, *flags)


def _islands(manifest: Manifest) -> tuple[frozenset[str], frozenset[str]]:
    found = (manifest.plan.nodes["cuda"], manifest.plan.tensors)
    nodes, tensors = (frozenset(entry.name for entry in entries if entry.code == "budget") for entries in found)
    return nodes, tensors


@pytest.mark.long
@pytest.mark.parametrize("build", [cancellation, lstm])  # test_search.py has the others
def test_a_model_over_budget_is_published_with_the_parts_at_fault_in_fp32(
    build: _Build, cli: Cli, tmp_path: Path, target: Path
) -> None:
    built = build()
    cli(*_command(built, tmp_path, target), "--no-search").refused(1, "drift over budget, nothing published")
    cli(*_command(built, tmp_path, target)).published()
    artifact = Artifact.open(target)
    artifact.verify()
    manifest = artifact.manifest
    assert _islands(manifest) == (built.nodes, built.weights)
    assert manifest.drift.keys() >= {"cpu", "cuda"}  # cpu-bf16 too if the model has a product for it
    for entry in manifest.drift.values():
        assert entry.outputs["y"]["relative_l2"]["mean"] <= Budget().as_dict()["relative_l2"]
    stored = {entry.name: entry.dtype for entry in manifest.tensors}
    assert {name for name in built.weights if stored[name] != "float32"} == set()
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    floats = {name: array for name, array in graphs.weights_of(built.proto).items() if array.dtype == np.float32}
    assert_restored(tmp_path / "fp32.safetensors", floats)


@pytest.mark.long
def test_a_profile_for_which_other_searches_left_no_candidate_is_searched_no_further(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    """Where all inputs are integers, nothing varies in bf16 once every weight is kept for cpu."""
    proto = graphs.parsed(
        "(int64[batch, 4] ids) => (float[batch, 4, 32] y) { row = Gather (table, ids) y = MatMul (row, w) }",
        table=graphs.values(64, 32),
        w=graphs.values(32, 32, seed=1),
    )
    onnx.save(proto, tmp_path / "m.onnx")
    bounds = [part for name in ("relative_l2", "cosine_distance") for part in ("--budget", f"{name}=1e-6")]
    cli("checkpoint", tmp_path / "m.onnx", "--out", target, *bounds, *ONNX_ONLY).published()
    assert {entry.precision for entry in Artifact.open(target).manifest.plan.nodes["cuda"]} == {"fp32"}


@pytest.mark.long
def test_the_terminal_the_plan_and_the_report_name_the_islands_and_their_worth(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    done = cli(*_command(offset(), tmp_path, target, ())).published()
    said = " ".join(done.out.split())
    assert (
        "profile cuda was over budget; keeping 2 nodes and weights in fp32 brought it within: bf16 now holds 99.2%"
        in said
    )
    assert "node softmax (Softmax): relative_l2" in done.out
    count = Figures((opened := Artifact.open(target)).manifest, opened.manifest.files).count
    assert f"islands     {count} nodes and weights stay fp32 among bf16 ones; 2 of them to meet the budget" in done.out
    assert "searching fp32 islands of cuda: where the error comes from" in done.err
    reasons = {entry.name: entry.reason for entry in Artifact.open(target).manifest.plan.nodes["cuda"]}
    assert reasons["softmax"].startswith("kept in fp32 to meet the budget of cuda; the search measured relative_l2 ")
    page = (target / "report.html").read_text("utf-8")
    assert f"<dd>{count}<small>nodes and weights stay fp32 among bf16 ones; 2 of them" in page
    assert page.count("reduced the drift of cuda from") == 1
    assert "in fp32 brought it within" not in page


@pytest.mark.long
def test_what_is_said_of_one_profile_is_true_after_the_search_for_the_next(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    """The profiles share their weights: the search for cuda keeps one in fp32 that cpu alone left in bf16."""
    feeds = [{"x": graphs.values(4, 64, seed=90 + seed)} for seed in range(4)]
    built = Failing(graphs.mlp((64, 128, 32, 64)), feeds, frozenset(), frozenset())
    done = cli(*_command(built, tmp_path, target), "--budget", "relative_l2=0.0017").published()
    artifact = Artifact.open(target)
    assert {entry.name for entry in artifact.manifest.plan.tensors if entry.precision == "bf16"} == set()
    searches = Figures(artifact.manifest, artifact.manifest.files, artifact.measurements()).searches
    assert {each.profile: each.found.bf16_bytes for each in searches} == {"cpu": 0, "cuda": 0}
    assert done.out.count("bf16 now holds 0.0% of the weights' bytes") == 2


@pytest.mark.long
def test_a_profile_that_the_search_cannot_mend_is_rejected_with_the_reason(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    command = _command(offset(), tmp_path, target)
    cli(*command, "--bf16", "softmax").refused(1, "profile cuda, output 'y'", "the search found no islands")
    cli(*command, "--search-minutes", "1e-9").refused(1, "ran out of time", "--search-minutes")
    assert not target.exists()
    done = cli(*command, "--bf16", "softmax", "--drop-failing-profiles").published()
    assert "left out, drift over budget: cuda" in done.out
    assert Artifact.open(target).manifest.profiles.keys() == {"cpu", "cpu-bf16"}


@pytest.mark.long
def test_torchscript_over_budget_does_not_stop_the_search_for_other_profiles(
    cli: Cli, mlp_file: Path, target: Path
) -> None:
    """torch.autocast decides the islands of TorchScript, and no search can change them."""
    command = ("checkpoint", mlp_file, "--out", target, *MLP, "--no-report", "--budget", "relative_l2=1e-4")
    asked = (*command, "--format", "onnx", "--format", "torchscript")
    refused = cli(*asked).refused(1, "profile torchscript", "nothing published", "The search cannot mend TorchScript")
    assert "--format onnx or --drop-failing-profiles" in refused.err
    assert "profile cpu" not in refused.err, "it was mended"
    assert "profile cuda" not in refused.err, "it was mended"
    cli(*command, "--format", "torchscript").refused(1, "profile torchscript", "convert to ONNX instead")
    done = cli(*asked, "--drop-failing-profiles").published()
    assert "left out, drift over budget: torchscript" in done.out
    manifest = Artifact.open(target).manifest
    assert manifest.profiles.keys() == {"cpu", "cuda"}
    assert _islands(manifest)[1]
    cli(*asked, "--force", "--allow-over-budget").published()
    assert "torchscript" in Artifact.open(target).manifest.profiles


@pytest.mark.long
def test_a_model_within_budget_is_never_searched(cli: Cli, onnx_file: Path, target: Path) -> None:
    command = ("checkpoint", onnx_file, "--out", target, *ONNX_ONLY)
    assert "searching" not in cli(*command).published().err
    assert "searching" in cli(*command, "--force", "--budget", "relative_l2=1e-6").err


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--allow-over-budget",)])
def test_trial_graphs_are_stored_beside_the_artifact(
    cli: Cli, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """The system's temporary directory is often in memory, which the models of a search or a remedy would fill."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    cli(*_command(cancellation(), tmp_path, target), *flags).published()
