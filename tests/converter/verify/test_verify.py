"""Verifying a published artifact: its drift is measured again, on the runtimes that serve it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from artifacts import write_product
from converting import ONNX_ONLY, Cli

from bf16kit.artifact.artifact import Artifact
from bf16kit.runtime.ort import kernel


def test_every_profile_is_run_on_the_golden_samples(cli: Cli, mlp: Artifact) -> None:
    out = cli("verify", mlp.path).published().out
    assert out.startswith("Drift from the fp32 reference on the golden samples, 2 samples; every digest matches")
    for profile in ("cpu", "cuda, emulated", "torchscript"):
        assert f" {profile} " in out


def test_only_the_chosen_profiles_run_once_each(cli: Cli, small: Artifact) -> None:
    out = cli("verify", small.path, "--profile", "cpu", "--profile", "cpu").published().out
    assert out.count("relative_l2") == 1
    assert "cuda" not in out
    refused = cli("verify", small.path, "--profile", "torchscript")
    refused.refused(2, "has no profile torchscript; it has cpu, cpu-bf16, cuda")


def test_given_samples_are_run_on_the_reference_too(cli: Cli, mlp: Artifact) -> None:
    out = cli("verify", mlp.path, "--samples", "feeders:three", "--profile", "cpu").published().out
    assert ", 6 samples; every digest matches" in out
    assert "golden" not in out
    cli("verify", mlp.path, "--samples", "feeders:doubles").refused(2, "has dtype float64, expected float32")


def _edited(source: Artifact, target: Path, **changed: Any) -> Path:
    shutil.copytree(source.path, target)
    (target / "manifest.json").write_bytes(source.manifest.model_copy(update=changed).dumps())
    return target


@pytest.mark.long
def test_drift_over_budget_exits_with_1_and_shows_the_table_or_json(cli: Cli, mlp: Artifact, tmp_path: Path) -> None:
    strict = _edited(mlp, tmp_path / "1", budget={"relative_l2": 1e-9})
    done = cli("verify", strict).refused(1, "profile cpu, output 'output': relative_l2 is", "the budget allows")
    assert "every digest matches" in done.out
    assert " NO" in done.out
    found = json.loads(cli("verify", strict, "--json").refused(1, "drift over budget").out)
    assert (found["within"], len(found["over"])) == (False, 4)
    assert [row["within"] for row in found["rows"] if row["metric"] == "relative_l2"] == [False] * 4


def test_json_has_each_metric_with_its_bound_and_share_of_the_budget(cli: Cli, mlp: Artifact) -> None:
    found = json.loads(cli("verify", mlp.path, "--profile", "cpu", "--json").published().out)
    assert found.keys() == {"version", "path", "model", "origin", "samples", "rows", "ran", "over", "within"}
    assert (found["version"], found["within"], found["over"], found["samples"]) == (1, True, [], 2)
    rows = {row["metric"]: row for row in found["rows"]}
    kept = mlp.manifest.drift["cpu"].outputs["output"]
    assert rows["relative_l2"]["bound"] == mlp.manifest.budget["relative_l2"]
    assert 0 < rows["relative_l2"]["measured"] <= kept["relative_l2"]["worst"]
    assert rows["relative_l2"]["used"] == rows["relative_l2"]["judged"] / rows["relative_l2"]["bound"]


@pytest.mark.long
def test_a_missing_reference_is_reported_with_the_remedy(cli: Cli, onnx_file: Path, target: Path) -> None:
    cli("checkpoint", onnx_file, "--out", target, "--no-residual", *ONNX_ONLY).published()
    cli("verify", target).published()  # on the golden samples, whose reference outputs are in the artifact
    cli("verify", target, "--samples", "feeders:three").refused(2, "has no fp32 reference", "with the residual")


def test_verify_writes_nothing(cli: Cli, mlp: Artifact) -> None:
    before = {path: path.stat().st_mtime_ns for path in mlp.path.rglob("*")}
    cli("verify", mlp.path).published()
    assert {path: path.stat().st_mtime_ns for path in mlp.path.rglob("*")} == before


def test_without_the_cpu_kernel_the_reason_and_the_remedy_are_reported_once(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = write_product(tmp_path / "product" / "1")
    monkeypatch.setenv(kernel.VARIABLE, "off")
    out = cli("verify", artifact.path).published().out
    assert out.count("no CPU kernel, because it is switched off by BF16KIT_KERNEL_PATH=off; bf16 weights are") == 1
    assert "unset BF16KIT_KERNEL_PATH" in out
