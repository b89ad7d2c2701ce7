"""What ``bf16-convert inspect`` shows of an artifact."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import destroyed
import numpy as np
import onnx
import pytest
import reported
from converting import ONNX_ONLY, Cli
from onnx import helper

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.disk import disk_size
from bf16kit.artifact.manifest import DriftEntry, Plan, PlanEntry
from bf16kit.converter.report.figures import Figures
from bf16kit.converter.report.page import render
from bf16kit.drift.measurements import Measurements

HOSTILE = "<script>alert(1)</script>\x1b[31m[bold]"


@pytest.mark.long
def test_the_ranges_of_inputs_are_those_of_the_samples_and_are_shown(
    cli: Cli, tmp_path: Path, onnx_file: Path, target: Path
) -> None:
    """The weights are in C order, because only the CPU's profiles read panels."""
    np.savez(tmp_path / "s.npz", x=np.linspace(-3, 7, 64, dtype=np.float32).reshape(4, 16))
    flags = ("--samples", tmp_path / "s.npz", "--profile", "cuda", *ONNX_ONLY)
    cli("checkpoint", onnx_file, "--out", target, *flags).published()
    said = cli("inspect", target).published().out
    assert "-3 to 7" in said
    assert "layout      C order" in said
    found = json.loads(cli("inspect", target, "--json").published().out)["input_ranges"]
    assert found == {"x": {"low": -3.0, "high": 7.0, "nonfinite": False}}
    opened = Artifact.open(target)
    assert "-3 to 7" in render(opened.manifest, opened.manifest.files, [], opened.measurements())


def test_everything_is_shown_on_a_narrow_terminal_with_the_verdict_first(
    cli: Cli, mlp: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    out = cli("inspect", mlp.path).published().out
    manifest = mlp.manifest
    assert "…" not in out
    lines = out.splitlines()
    assert [line.split(":")[0] for line in lines[1:5]] == [
        f"verdict     {profile} is within budget" for profile in ("cpu", "cpu-bf16", "cuda", "torchscript")
    ]
    assert "emulated on the CPU, on" in lines[3]
    assert lines[5].startswith("reference   ")
    for text in (
        manifest.source.sha256,
        "torch, 4 tensors, 7.0 kB",
        f"size        {disk_size(mlp)}",
        "layout      1 of 2 bf16 tensors, ",
        "batching    axis 0",
        "runs with   onnxruntime 1.24 or later (cpu)",
        "[batch,16]",
        "emulated on the CPU, not verified on a device",
        "calibrated on",
        "Precision plan",
        "every digest matches",
        *(entry.sha256 for entry in manifest.files.values()),
        *manifest.profiles,
        *(f"{name} {version}" for name, version in manifest.tools.items()),
    ):
        assert text in out


@pytest.mark.long
def test_the_worst_slices_are_named_by_axis_and_index(cli: Cli, tmp_path: Path, target: Path) -> None:
    case = destroyed.write(tmp_path / "m.onnx", 2, destroyed=True)
    cli("checkpoint", case.path, "--out", target, "--profile", "cpu", "--no-search", "--allow-over-budget").published()
    where = f"index {case.index} of axis {case.axis}"
    assert where in cli("inspect", target).published().out
    found = json.loads(cli("inspect", target, "--json").published().out)["slices"]
    assert found[0]["where"] == where
    assert found[0]["used"] == pytest.approx(found[0]["error"] / 0.5)
    assert [each["error"] for each in found] == sorted((each["error"] for each in found), reverse=True)
    assert len(found) == 5
    assert where in (target / "report.html").read_text("utf-8")


@pytest.mark.long
def test_names_with_markup_or_escape_codes_are_shown_as_text(cli: Cli, tmp_path: Path, target: Path) -> None:
    node = helper.make_node("MatMul", [f"x{HOSTILE}", f"w{HOSTILE}"], [f"y{HOSTILE}"], name=f"n{HOSTILE}")
    edges = [graphs.edge(f"x{HOSTILE}", ["batch", 16])], [graphs.edge(f"y{HOSTILE}", ["batch", 16])]
    onnx.save(graphs.model([node], *edges, [graphs.initializer(f"w{HOSTILE}", graphs.values(16, 16))]), tmp_path / "m")
    done = cli("checkpoint", tmp_path / "m", "--out", target).published()
    page = (target / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    shown = cli("inspect", target).published().out + cli("verify", target).published().out + done.out
    assert "\x1b" not in shown
    assert "<script>alert(1)</script>\\x1b[31m[bold]" in shown.replace("\n", "")
    as_json = cli("inspect", target, "--json").published().out
    assert "\x1b" not in as_json
    assert json.loads(as_json)["inputs"][0]["name"] == f"x{HOSTILE}"
    command = ("checkpoint", tmp_path / "m", "--out", tmp_path / "2", "--no-search", "--budget")
    assert "\x1b" not in cli(*command, "relative_l2=1e-9").refused(1, "\\x1b[31m").err


_ROW = {"profile", "output", "metric", "measured", "judged", "worst", "bound", "used", "within", "emulated"}
_KEYS = {
    *("path", "model", "version", "within", "headline", "verdicts", "drift", "budget", "oracle", "reference"),
    *("source", "sizes", "layout", "batch_axis", "inputs", "outputs", "profiles", "plan", "islands", "searches"),
    *(
        "slices", "on_cpu", "top1", "off_the_line", "diagnoses", "lossy_tensors", "exports", "files", "given",
        "tools", "seed",
    ),
    *("measurements", "input_ranges", "recovery"),
}  # fmt: skip


def test_json_has_the_documented_keys_and_agrees_with_the_manifest(cli: Cli, mlp: Artifact) -> None:
    found = json.loads(cli("inspect", mlp.path, "--json").published().out)
    manifest = mlp.manifest
    assert found.keys() == _KEYS
    documented = (Path(__file__).parents[3] / "docs" / "json.md").read_text()
    assert [key for key in (*_KEYS, *_ROW) if f"`{key}`" not in documented] == []
    on_disk = {file.name: file.stat().st_size for file in mlp.path.iterdir()}
    sizes = found["sizes"]
    assert sizes["total"] == sum(on_disk.values())
    assert sizes["total_ratio"] == sizes["total"] / sizes["checkpoint"]
    assert sizes["copies"] == on_disk["model.torchscript.pt"]
    assert sizes["weights"] == on_disk["weights.bf16"] + on_disk["weights.fp32"]
    assert sizes["residual"] == on_disk["residual.bin"]
    assert found["files"] == {name: entry.model_dump() for name, entry in manifest.files.items()}
    assert found["source"]["sha256"] == manifest.source.sha256
    assert found["profiles"]["cuda"]["verified"] == "emulated"
    assert {row["profile"] for row in found["drift"] if row["emulated"]} == {"cuda"}
    assert {frozenset(row) for row in found["drift"]} == {frozenset(_ROW)}
    assert sum(group["count"] for group in found["plan"]) == len(manifest.plan.tensors) + sum(
        len(nodes) for nodes in manifest.plan.nodes.values()
    )


def test_the_drift_table_shows_the_judged_value_and_whether_it_is_within_budget(mlp: Artifact) -> None:
    """It shows the mean, the worst of max_abs and the total of nonfinite."""
    stats = {
        "relative_l2": {"mean": 0.02, "p50": 0.0, "p99": 0.0, "worst": 0.5},
        "max_abs": {"mean": 0.1, "p50": 0.0, "p99": 0.0, "worst": 3.0},
        "nonfinite": {"total": 2.0},
    }
    drift = {"cpu": DriftEntry(samples=4, source="s", outputs={"output": stats})}
    manifest = mlp.manifest.model_copy(update={"budget": {"relative_l2": 0.02, "nonfinite": 0.0}, "drift": drift})
    assert [(row.metric, row.measured, row.worst, row.bound, row.within) for row in Figures(manifest, {}).drift] == [
        ("relative_l2", 0.02, 0.5, 0.02, True),
        ("max_abs", 3.0, 3.0, None, True),
        ("nonfinite", 2.0, None, 0.0, False),
    ]


def test_islands_are_found_by_their_codes_whatever_their_reasons_say(mlp: Artifact) -> None:
    shape = PlanEntry(name="s", op="Shape", precision="fp32", reason="gives int64", code="no_floats")
    norm = PlanEntry(name="n", op="Softmax", precision="fp32", reason="leaves nothing to narrow", code="normalises")
    cpu = PlanEntry(name="c", op="MatMul", precision="fp32", reason="computes in fp32", code="profile")
    kept = PlanEntry(name="k", op="MatMul", precision="fp32", reason="for the budget", code="budget")
    plan = Plan(tensors=[], nodes={"cuda": [shape, norm, kept], "cpu": [cpu, kept]})
    found = Figures(mlp.manifest.model_copy(update={"plan": plan}), {})
    assert [(each.profile, each.name) for each in found.islands] == [("cpu", "k"), ("cuda", "k"), ("cuda", "n")]
    assert (found.count, found.searched) == (2, 1), "an island of two profiles counts once"


def test_the_worth_of_an_island_is_shown_if_a_search_measured_it() -> None:
    manifest, measured = reported.manifest(), reported.measurements()
    island = Figures(manifest, {}, measured).islands[0]
    assert (island.name, island.worth, island.remedy) == (reported.OFF, 1.58, "its output in fp32")
    kept = reported.SEARCH.islands[0].model_copy(update={"worth": math.nan})
    search = reported.SEARCH.model_copy(update={"islands": [kept]})
    profiles = {"cuda": measured.profiles["cuda"].model_copy(update={"search": search})}
    assert Figures(manifest, {}, Measurements(profiles=profiles)).islands[0].worth is None


def test_inspect_works_on_a_terminal_that_cannot_show_every_character(small: Artifact) -> None:
    command = [str(Path(sys.executable).with_name("bf16-convert")), "inspect", str(small.path)]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert b"0.5" in done.stdout
