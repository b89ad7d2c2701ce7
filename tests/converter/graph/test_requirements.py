"""The oldest ONNX Runtime that a profile needs, and that older ones are rejected."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from converting import Cli
from onnx import TensorProto, helper

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.loading import load
from bf16kit.runtime.ort import session
from bf16kit.runtime.ort.quietort import ort
from converter.graph import requirements
from converter.graph.cuda_support import releases
from converter.graph.requirements import required
from converter.process import versions

OLDEST = "1.24.1"  # of the releases with a kernel table


def _install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.setattr(versions, "onnxruntime", lambda: version)


def _graph(path: Path, opset: int, ir_version: int = 10) -> Path:
    proto = graphs.mlp((4, 4))
    proto.opset_import[0].version, proto.ir_version = opset, ir_version
    onnx.save(proto, path)
    return path


@pytest.mark.parametrize(
    ("opset", "ir_version", "least"),
    [(13, 8, "1.24"), (25, 13, "1.24"), (26, 13, "1.25"), (22, 14, "1.40.0"), (27, 13, "1.40.0")],
)
def test_it_is_the_oldest_release_that_loads_the_graphs_or_the_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opset: int, ir_version: int, least: str
) -> None:
    _install(monkeypatch, "1.40.0")
    older, graph = _graph(tmp_path / "a.onnx", 13, 8), _graph(tmp_path / "b.onnx", opset, ir_version)
    assert required("cpu", [older, graph]) == {"onnxruntime": least}
    assert required("cpu", [graph, older]) == {"onnxruntime": least}


def test_cuda_needs_the_first_release_with_its_kernels_or_an_older_one_that_ran_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everywhere = _graph(tmp_path / "a.onnx", 22)
    assert required("cuda", [everywhere]) == {"onnxruntime": OLDEST}
    late = tmp_path / "b.onnx"
    nodes = [helper.make_node("Sin", ["x"], ["y"], name="sin")]
    x, y = (graphs.edge(name, [4], TensorProto.BFLOAT16) for name in "xy")
    onnx.save(graphs.model(nodes, [x], [y]), late)
    assert required("cuda", [everywhere, late]) == {"onnxruntime": "1.27.0"}
    _install(monkeypatch, "1.26.0")
    assert required("cuda", [late]) == {"onnxruntime": "1.27.0"}
    assert required("cuda", [late], on_device=True) == {"onnxruntime": "1.26.0"}
    _install(monkeypatch, "1.40.0.dev20270101")
    assert required("cuda", [late], on_device=True) == {"onnxruntime": "1.27.0"}
    _install(monkeypatch, None)
    assert required("cuda", [late]) == {"onnxruntime": "1.27.0"}


def test_a_release_that_lost_a_kernel_excludes_all_releases_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No release has lost one yet. The manifest can only state "this release or later"."""
    monkeypatch.setattr(
        requirements, "missing_kernels", lambda _, table: ["lost"] if table.onnxruntime == "1.26.0" else []
    )
    assert required("cuda", [_graph(tmp_path / "a.onnx", 22)]) == {"onnxruntime": "1.27.0"}


def test_if_no_release_has_a_kernel_the_newest_is_required(tmp_path: Path) -> None:
    nodes = [helper.make_node("MaxPool", ["x"], ["y"], name="pool", kernel_shape=[2, 2])]
    narrow = TensorProto.BFLOAT16
    onnx.save(
        graphs.model(nodes, [graphs.edge("x", [1, 1, 4, 4], narrow)], [graphs.edge("y", [1, 1, 3, 3], narrow)]),
        tmp_path / "a.onnx",
    )
    assert required("cuda", [tmp_path / "a.onnx"]) == {"onnxruntime": releases()[-1]}


def test_manifest_report_and_inspect_state_the_required_release(mlp: Artifact, cli: Cli) -> None:
    needed = {name: entry.requires for name, entry in mlp.manifest.profiles.items()}
    on_cpu = {"onnxruntime": "1.24"}
    assert needed == {"cpu": on_cpu, "cpu-bf16": on_cpu, "cuda": {"onnxruntime": OLDEST}, "torchscript": {}}
    assert "onnxruntime 1.24 or later" in mlp.file("report.html").read_text("utf-8")
    assert "runs with   onnxruntime 1.24 or later (cpu)" in cli("inspect", mlp.path).published().out


def test_an_older_release_is_rejected_before_it_loads_anything(
    small: Artifact, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(small, "cpu").close()
    monkeypatch.setattr(ort, "__version__", "1.23.2")
    monkeypatch.setattr(session, "open_session", None)
    with pytest.raises(RuntimeFailure, match=r"profile cpu needs ONNX Runtime 1\.24 or later, but 1\.23\.2 is"):
        load(small, "cpu")
    cli("verify", small.path, "--profile", "cpu").refused(3, "profile cpu needs ONNX Runtime 1.24 or later", "upgrade")
