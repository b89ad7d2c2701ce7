"""Running a graph during a conversion: where its weights are stored meanwhile."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from lowered import specs

import graphs
from bf16kit.runtime.memory import scratch
from converter.verify.running import open_fp32_graph


@pytest.mark.parametrize(("in_memory", "expected"), [("", "stage"), ("stage", "system")])
def test_weights_are_mapped_from_a_directory_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: str, expected: str
) -> None:
    for name in ("stage", "system"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "system"))
    monkeypatch.setattr(scratch, "_file_system", lambda path: "tmpfs" if path.name == in_memory else "ext4")
    used: list[Path] = []
    make = tempfile.mkdtemp

    def recorded(suffix: str | None, prefix: str | None, dir: Path) -> str:
        used.append(dir)
        return make(suffix, prefix, dir)

    monkeypatch.setattr(tempfile, "mkdtemp", recorded)
    model = ir.from_proto(graphs.mlp())
    runtime = open_fp32_graph(model, specs(model.graph.inputs), specs(model.graph.outputs), tmp_path / "stage")
    runtime.run({"x": np.zeros((1, 16), np.float32)})
    runtime.close()
    assert used == [tmp_path / expected]
    assert not any((tmp_path / expected).iterdir())
