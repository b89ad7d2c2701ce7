"""Inspecting an artifact: what people see of it."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from converting import ONNX_ONLY, Cli
from onnx import helper

import graphs
from bf16kit.artifact import Artifact

HOSTILE = "<script>alert(1)</script>\x1b[31m[bold]"


def test_everything_of_note_is_shown(cli: Cli, mlp: Artifact) -> None:
    out = cli("inspect", mlp.path).published().out
    manifest = mlp.manifest
    for text in (
        manifest.source.sha256,
        "torch, 4 tensors, 7.0 kB",
        "layout      2 of 2 bf16 tensors, 100% of their bytes, in panels of 32 columns",
        "batching    axis 0",
        "[batch,16]",
        "emulated on the CPU, not verified on a device",
        "Precision plan",
        "every digest matches",
        *(entry.sha256 for entry in manifest.files.values()),
        *manifest.profiles,
        *(f"{name} {version}" for name, version in manifest.tools.items()),
    ):
        assert text in out


def test_weights_in_c_order_are_said_to_be(cli: Cli, tmp_path: Path, target: Path) -> None:
    """Only the cpu profile reads panels: without it, there are none."""
    onnx.save(graphs.mlp(), tmp_path / "m.onnx")
    cli("checkpoint", tmp_path / "m.onnx", "--out", target, "--profile", "cuda", *ONNX_ONLY).published()
    assert "layout      C order" in cli("inspect", target).published().out


def test_a_narrow_terminal_cuts_nothing(cli: Cli, mlp: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    out = cli("inspect", mlp.path).published().out
    assert all(entry.sha256 in out for entry in mlp.manifest.files.values())
    assert "…" not in out


def _hostile(path: Path) -> Path:
    """A model whose tensor, node, input and output are called something that a page or terminal would obey."""
    proto = graphs.model(
        [helper.make_node("MatMul", [f"x{HOSTILE}", f"w{HOSTILE}"], [f"y{HOSTILE}"], name=f"n{HOSTILE}")],
        [graphs.edge(f"x{HOSTILE}", ["batch", 16])],
        [graphs.edge(f"y{HOSTILE}", ["batch", 16])],
        [graphs.initializer(f"w{HOSTILE}", graphs.values(16, 16))],
    )
    onnx.save(proto, path)
    return path


def test_names_that_a_terminal_or_a_browser_would_obey_are_shown_as_text(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    done = cli("checkpoint", _hostile(tmp_path / "m.onnx"), "--out", target).published()
    page = (target / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    shown = cli("inspect", target).published().out + cli("verify", target).published().out + done.out
    assert "\x1b" not in shown
    assert "<script>alert(1)</script>\\x1b[31m[bold]" in shown.replace("\n", "")


def test_an_error_about_such_a_name_is_text_too(cli: Cli, tmp_path: Path, target: Path) -> None:
    source = _hostile(tmp_path / "m.onnx")
    done = cli("checkpoint", source, "--out", target, "--budget", "relative_l2=1e-9").refused(1, "\\x1b[31m")
    assert "\x1b" not in done.err
