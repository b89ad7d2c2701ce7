"""A cuda graph has a kernel for every bf16 node, in every release that its manifest allows."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from converting import ONNX_ONLY, Cli
from onnx import TensorProto, helper

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.system.versions import is_older
from converter.graph.cuda_nodes import missing_kernels
from converter.graph.cuda_support import KernelTable, releases
from converter.process import versions

NODES = (
    helper.make_node("Conv", ["x", "k"], ["conv"], name="conv", pads=[1, 1, 1, 1]),
    helper.make_node("Relu", ["conv"], ["relu"], name="relu"),
    helper.make_node("GlobalAveragePool", ["relu"], ["pooled"], name="pooled"),
    helper.make_node("Flatten", ["pooled"], ["flat"], name="flat"),
    helper.make_node("MatMul", ["flat", "w"], ["hidden"], name="hidden"),
    helper.make_node("Sin", ["hidden"], ["waves"], name="waves"),
    helper.make_node("Softmax", ["waves"], ["shares"], name="shares"),
    helper.make_node("Concat", ["shares", "hidden"], ["both"], name="both", axis=1),
    helper.make_node("MatMul", ["both", "v"], ["y"], name="y"),
)
WEIGHTS = (
    graphs.initializer("k", graphs.values(8, 3, 3, 3, seed=1, scale=0.3)),
    graphs.initializer("w", graphs.values(8, 32, seed=2)),
    graphs.initializer("v", graphs.values(64, 8, seed=3, scale=0.1)),
)
LATE = {"ReduceMean": "1.30.0", "Sin": "1.27.0"}  # the first release with a bf16 kernel on CUDA; pooling becomes a mean


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a graph whose operators got bf16 kernels on CUDA in different releases."""
    edges = [graphs.edge("x", ["batch", 3, 8, 8])], [graphs.edge("y", ["batch", 8])]
    onnx.save(graphs.model(list(NODES), *edges, list(WEIGHTS)), tmp_path / "source.onnx")
    return tmp_path / "source.onnx"


def _converted(release: str, source: Path, target: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    monkeypatch.setattr(versions, "onnxruntime", lambda: release)
    cli("checkpoint", source, "--out", target, "--profile", "cuda", *ONNX_ONLY, "--allow-over-budget").published()
    return Artifact.open(target)


def _graph(artifact: Artifact) -> onnx.ModelProto:
    return onnx.load(artifact.file("cuda.onnx"), load_external_data=False)


@pytest.mark.parametrize("release", releases())
def test_a_graph_planned_for_a_release_has_kernels_in_it_and_in_all_later_ones(
    release: str, source: Path, target: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = _converted(release, source, target, cli, monkeypatch)
    graph = _graph(artifact)
    entry = artifact.manifest.profiles["cuda"]
    least = entry.requires["onnxruntime"]
    assert not is_older(release, least)
    having = [each for each in releases() if missing_kernels(graph, KernelTable.load(each)) == []]
    assert having == [each for each in releases() if not is_older(each, least)]
    narrow = {
        value.name for value in graph.graph.value_info if value.type.tensor_type.elem_type == TensorProto.BFLOAT16
    }
    ops = {node.op_type for node in graph.graph.node if narrow & set(node.output)}
    assert ops & LATE.keys() == {op for op, since in LATE.items() if not is_older(release, since)}
    assert ops >= {"Conv", "Relu", "MatMul", "Softmax", "Concat"}


def test_the_manifest_states_the_first_release_with_all_kernels(
    source: Path, target: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = _converted("1.31.1", source, target, cli, monkeypatch)
    assert artifact.manifest.profiles["cuda"].requires == {"onnxruntime": "1.30.0"}
    (missing,) = missing_kernels(_graph(artifact), KernelTable.load("1.29.0"))
    assert "ReduceMean-18 of T bfloat16" in missing


def test_a_node_without_a_kernel_is_found() -> None:
    """The graph is made by hand: no plan puts bf16 where CUDA has no kernel."""
    narrow = TensorProto.BFLOAT16
    nodes = [helper.make_node("MaxPool", ["x"], ["y"], name="pool", kernel_shape=[2, 2])]
    proto = graphs.model(nodes, [graphs.edge("x", [1, 1, 4, 4], narrow)], [graphs.edge("y", [1, 1, 3, 3], narrow)])
    proto.opset_import[0].version = 22
    assert missing_kernels(proto, KernelTable.load()) == ["pool: MaxPool-22 of T bfloat16"]


def test_nodes_without_bf16_need_no_entry_in_the_table() -> None:
    proto = graphs.model(
        [helper.make_node("Elu", ["x"], ["y"], name="elu")], [graphs.edge("x", [4])], [graphs.edge("y", [4])]
    )
    assert missing_kernels(proto, KernelTable.load()) == []
