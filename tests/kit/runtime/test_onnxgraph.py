"""What an ONNX graph tells before a session is opened: its files, weights read in place, and the cost of a run."""

import re
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from artifacts import write_product
from onnx import NodeProto, TensorProto, helper

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import Manifest
from bf16kit.messages.errors import ArtifactError, RuntimeFailure
from bf16kit.runtime.loading import load
from bf16kit.runtime.ort.kernel import DOMAIN
from bf16kit.runtime.ort.onnxgraph import check_locations, read_in_place

# --- files: a graph may read those of its own artifact and no others --------------------------------------------------


def saved(model: onnx.ModelProto, location: str, path: Path) -> Path:
    """Write ``model`` to ``path``, with its first tensor declared as stored in ``location``. Return ``path``."""
    graphs.refer(model.graph.initializer[0], location)
    path.write_bytes(model.SerializeToString())
    return path


def test_a_file_of_the_artifact_is_allowed(tmp_path: Path) -> None:
    model = graphs.mlp()
    path = saved(model, "weights.fp32", tmp_path / "m.onnx")
    check_locations(path, {"weights.fp32"})
    with pytest.raises(ArtifactError, match=r"weights\.fp32"):
        check_locations(path, {"weights.bf16"})
    model.graph.initializer[0].external_data.add(key="location", value="/etc/hostname")  # a second one is checked too
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="/etc/hostname"):
        check_locations(path, {"weights.fp32"})


@pytest.mark.parametrize("location", ["/etc/hostname", "../1/weights.fp32", "sub/weights.fp32", ""])
def test_any_other_file_is_rejected_and_named(tmp_path: Path, location: str) -> None:
    path = saved(graphs.mlp(), location, tmp_path / "m.onnx")
    with pytest.raises(ArtifactError, match=re.escape(repr(location))):
        check_locations(path, {"weights.fp32"})
    path.write_text("hello")
    with pytest.raises(RuntimeFailure, match=r"m\.onnx is not an ONNX file"):
        check_locations(path, set())


def in_a_branch() -> tuple[onnx.ModelProto, onnx.TensorProto]:
    model = graphs.if_branches()
    branch = next(a.g for a in model.graph.node[0].attribute if a.name == "else_branch")
    return model, branch.initializer[0]


def in_a_loop() -> tuple[onnx.ModelProto, onnx.TensorProto]:
    model = graphs.loop()
    body = next(a.g for a in model.graph.node[0].attribute if a.name == "body")
    return model, body.node[0].attribute[0].t


def in_a_function() -> tuple[onnx.ModelProto, onnx.TensorProto]:
    """ONNX Runtime inlines functions, and reads the files that their constants name."""
    model = graphs.constant_nodes()
    opset = helper.make_opsetid("", graphs.OPSET)
    model.functions.append(helper.make_function("f", "Weight", [], ["weight"], [model.graph.node[0]], [opset]))
    model.graph.node[0].CopyFrom(helper.make_node("Weight", [], ["weight"], domain="f"))
    return model, model.functions[0].node[0].attribute[0].t


def sparse() -> tuple[onnx.ModelProto, onnx.TensorProto]:
    model = graphs.mlp()
    added = model.graph.sparse_initializer.add(dims=[16, 32])
    added.values.CopyFrom(model.graph.initializer[0])
    return model, added.values


@pytest.mark.parametrize("where", [in_a_branch, in_a_loop, in_a_function, sparse])
def test_tensors_at_any_place_are_checked(
    where: Callable[[], tuple[onnx.ModelProto, onnx.TensorProto]], tmp_path: Path
) -> None:
    model, tensor = where()
    graphs.refer(tensor, "/etc/hostname")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="/etc/hostname"):
        check_locations(tmp_path / "m.onnx", set())


@pytest.mark.parametrize(
    "wrong", [{"offset": "64"}, {"length": "2047"}, {"offset": "-64"}, {"offset": "0x40"}], ids=str
)
def test_a_tensor_that_is_not_within_its_file_is_refused(wrong: dict[str, str], tmp_path: Path) -> None:
    """ONNX Runtime refuses what it maps, and bf16kit what it copies: no crash, and no other bytes."""
    path = write_product(tmp_path / "product" / "1", width=32).path
    model = onnx.load(path / "cpu.onnx", load_external_data=False)
    places = {entry.key: entry.value for entry in model.graph.initializer[0].external_data} | wrong
    del model.graph.initializer[0].external_data[:]
    for key, value in places.items():
        model.graph.initializer[0].external_data.add(key=key, value=value)
    (path / "cpu.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(RuntimeFailure, match=r"ONNX Runtime cannot load cpu\.onnx"):
        load(Artifact(path, Manifest.loads((path / "manifest.json").read_bytes(), path)), "cpu", threads=1)
    if "length" not in wrong:  # a copy has the length that the shape needs
        copied = Artifact(path, Manifest.loads((path / "manifest.json").read_bytes(), path), copies=True)
        with pytest.raises(ArtifactError, match=r"tensor 'w' .* is no part of 'weights\.bf16', which has 2048"):
            load(copied, "cpu", threads=1, scratch=tmp_path)


@pytest.mark.parametrize("shape", [[1 << 20] * 2, [1 << 40] * 2, [0, 1 << 62], [1] * 65], ids=["20", "40", "0", "65"])
def test_a_shape_that_its_file_or_any_array_cannot_hold_is_refused_before_memory_is_taken(
    shape: list[int], tmp_path: Path
) -> None:
    path = write_product(tmp_path / "product" / "1", width=32).path
    model = onnx.load(path / "cpu.onnx", load_external_data=False)
    model.graph.initializer[0].dims[:] = shape
    (path / "cpu.onnx").write_bytes(model.SerializeToString())
    copied = Artifact(path, Manifest.loads((path / "manifest.json").read_bytes(), path), copies=True)
    with pytest.raises(ArtifactError, match=r"tensor 'w' of shape \[.*\] is no part of 'weights.bf16'"):
        load(copied, "cpu", threads=1, scratch=tmp_path)


# --- weights that are read in place: ONNX Runtime would fold, widen or pack others ------------------------------------


FP32 = np.ones((4, 4), np.float32)
BF16 = FP32.astype(ml_dtypes.bfloat16)
MATMUL = helper.make_node("MatMul", ["x", "w"], ["y"])
GEMM = helper.make_node("Gemm", ["x", "w"], ["y"])
LOOKUP = helper.make_node("Gather", ["w", "ids"], ["y"])
OURS = helper.make_node("MatMul", ["x", "w"], ["y"], domain=DOMAIN)


def in_place(*nodes: NodeProto, w: graphs.Array = FP32, out: bool = False, **options: bool) -> bool:
    """Return whether the weight ``w`` is read in place."""
    outputs = [graphs.edge("w" if out else "y", [4, 4])]
    model = graphs.model(list(nodes), [graphs.edge("x", [4, 4])], outputs, [graphs.initializer("w", w)])
    found = read_in_place(model, **options)
    assert found <= {"w"}
    return found == {"w"}


def test_products_and_lookups_of_fp32_weights_read_in_place_what_is_not_packed() -> None:
    for node in (MATMUL, GEMM, LOOKUP):
        assert in_place(node, products=True)
    assert [in_place(node) for node in (MATMUL, GEMM, LOOKUP)] == [False, False, True]


def test_the_kernel_reads_bf16_weights_in_place_and_a_lookup_always_does() -> None:
    for nodes in ([OURS], [LOOKUP], [OURS, LOOKUP]):
        assert in_place(*nodes, w=BF16, kernel=True)
        assert not in_place(*nodes, w=BF16.astype(np.int8), kernel=True)
    assert [in_place(OURS, w=BF16), in_place(OURS, LOOKUP, w=BF16), in_place(LOOKUP, w=BF16)] == [False, False, True]
    assert not in_place(OURS, kernel=True)  # a bias


OTHERS = {
    "from the left": [helper.make_node("MatMul", ["w", "x"], ["y"])],
    "as indices": [helper.make_node("Gather", ["x", "w"], ["y"])],
    "added": [helper.make_node("Add", ["x", "w"], ["y"])],
    "convolved": [helper.make_node("Conv", ["x", "w"], ["y"])],
    "also turned": [MATMUL, helper.make_node("Transpose", ["w"], ["z"])],
    "also cast": [LOOKUP, helper.make_node("Cast", ["w"], ["z"], to=TensorProto.FLOAT)],
    "of another domain": [helper.make_node("MatMul", ["x", "w"], ["y"], domain="another")],
    "unread": [helper.make_node("Identity", ["x"], ["y"])],
}


@pytest.mark.parametrize("nodes", OTHERS.values(), ids=OTHERS)
def test_weights_that_any_other_node_reads_are_not_read_in_place(nodes: list[NodeProto]) -> None:
    for w in (FP32, BF16):
        assert not in_place(*nodes, w=w, products=True, kernel=True)
    assert not in_place(MATMUL, w=FP32.astype(np.float16), products=True)
    assert not in_place(MATMUL, out=True, products=True)


def test_weights_that_a_subgraph_reads_and_lookups_of_constant_rows_are_not_read_in_place() -> None:
    """In a subgraph, the same name may stand for another tensor."""
    body = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["out"])], "b", [], [graphs.edge("out", [4, 4])])
    yes = helper.make_node("Constant", [], ["yes"], value=helper.make_tensor("", TensorProto.BOOL, [], [True]))
    branch = helper.make_node("If", ["yes"], ["y"], then_branch=body, else_branch=body)
    rows, again = helper.make_node("Constant", [], ["i"], value_ints=[1]), helper.make_node("Identity", ["i"], ["ids"])
    assert not in_place(rows, again, LOOKUP, products=True)
    assert not in_place(yes, branch, products=True)
    assert not in_place(yes, branch, MATMUL, products=True)
