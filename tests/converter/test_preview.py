"""``bf16-convert checkpoint --dry-run``: what a conversion would write, without it."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from converting import Cli, tree

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.disk import disk_size
from bf16kit.converter.report.figures import Figures

_DOCUMENTED = Path(__file__).parents[2] / "docs" / "json.md"
_KEYS = {
    *("version", "published", "error", "dry_run", "name", "profiles", "optional", "plan", "on_cpu", "notes", "time"),
    *("total_bytes", "checkpoint_bytes", "parts"),
}


@pytest.mark.long
def test_the_plan_is_the_conversions_own_the_size_is_near_and_nothing_is_written(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    onnx.save(graphs.mlp((256, 1024, 256)), tmp_path / "m.onnx")
    arguments = ("checkpoint", tmp_path / "m.onnx", "--out", target)
    seen = cli(*arguments, "--dry-run").published().out
    told = json.loads(cli(*arguments, "--dry-run", "--json").published().out)
    assert tree(tmp_path) == ["m.onnx"]
    assert told.keys() == _KEYS
    assert [key for key in _KEYS if f"`{key}`" not in _DOCUMENTED.read_text()] == []
    cli(*arguments).published()
    artifact = Artifact.open(target)
    found, disk = Figures(artifact.manifest, artifact.manifest.files), disk_size(artifact)
    assert set(told["profiles"]) == artifact.manifest.profiles.keys()
    assert [(each["of"], each["code"], each["count"]) for each in told["plan"]] == [
        (each.of, each.code, each.count) for each in found.plan
    ]
    assert told["parts"]["weights"] == pytest.approx(disk.weights, rel=1e-3), "alignment"
    assert told["parts"]["residual"] == pytest.approx(disk.residual, rel=1e-3)
    assert told["total_bytes"] == pytest.approx(disk.total, rel=0.1)
    assert f"on a CPU    {found.on_cpu}" in seen
    assert seen.startswith("m/1: dry run, nothing was written; about ")
    cli(*arguments, "--dry-run").refused(2, "already exists")


def test_a_dry_run_refuses_samples_that_the_conversion_would_refuse(cli: Cli, tmp_path: Path, target: Path) -> None:
    onnx.save(graphs.mlp(), tmp_path / "m.onnx")
    arguments = ("checkpoint", tmp_path / "m.onnx", "--out", target, "--dry-run", "--samples")
    cli(*arguments, tmp_path / "none.npz").refused(2, "none.npz")
    np.savez(tmp_path / "other.npz", y=np.zeros((1, 2), np.float32))
    cli(*arguments, tmp_path / "other.npz").refused(2, "other.npz")


def test_a_dry_run_is_for_one_checkpoint(cli: Cli, tmp_path: Path, mlp_file: Path) -> None:
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "a.pt").write_bytes(mlp_file.read_bytes())
    arguments = ("checkpoint", tmp_path / "many", "--out", tmp_path / "repository")
    cli(*arguments, "--dry-run").refused(2, "--json and --dry-run are for one checkpoint")
    assert not (tmp_path / "repository").exists()
