"""Which ONNX Runtime's kernels the cuda profile is planned for, and that others are noted."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
from converting import ONNX_ONLY, Cli

from bf16kit.artifact import Artifact
from converter.graph.cuda_support import KernelTable, stand_in
from converter.process import versions

NEWEST = "1.31.1"


def _install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.setattr(versions, "onnxruntime", lambda: version)


def _tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    real = resources.files("converter.graph.data").joinpath(f"cuda_kernels_{NEWEST}.json").read_text("utf-8")
    for name in names:
        (tmp_path / f"cuda_kernels_{name}.json").write_text(real.replace(NEWEST, name), "utf-8")
    monkeypatch.setattr(resources, "files", lambda _package: tmp_path)


def test_the_table_of_the_installed_version_is_used_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tables(tmp_path, monkeypatch, NEWEST, "1.24.0", "1.9.0")
    for installed, chosen in (("1.24.0", "1.24.0"), ("1.25.0", NEWEST), (None, NEWEST)):
        _install(monkeypatch, installed)
        assert KernelTable.load().onnxruntime == chosen


def test_another_versions_table_is_said_in_a_note(
    cli: Cli, onnx_file: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stand_in() is None
    _install(monkeypatch, "1.26.0")
    out = cli("checkpoint", onnx_file, "--out", target, *ONNX_ONLY).published().out
    assert f"was read for ONNX Runtime {NEWEST}, and 1.26.0 is installed" in out
    profiles = Artifact.open(target).manifest.profiles
    assert profiles["cuda"].requires == {"onnxruntime": NEWEST}
    assert profiles["cpu"].requires == {"onnxruntime": "1.24"}
