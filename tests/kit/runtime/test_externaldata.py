"""A graph may read the files of its own artifact and no others."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import graphs
from bf16kit.messages.errors import ArtifactError, RuntimeFailure
from bf16kit.runtime.ort.externaldata import check_locations, initializers


def saved(model: onnx.ModelProto, location: str, path: Path) -> Path:
    """Write ``model`` to ``path``, with its first tensor declared as stored in ``location``. Return ``path``."""
    graphs.refer(model.graph.initializer[0], location)
    path.write_bytes(model.SerializeToString())
    return path


def test_initializers_are_listed_by_the_file_they_are_in(tmp_path: Path) -> None:
    stored: dict[int, str] = {TensorProto.BFLOAT16: "weights.bf16", TensorProto.FLOAT: "weights.fp32"}
    path = graphs.save_external(graphs.narrow(graphs.mlp()), tmp_path / "cpu.onnx", stored)
    assert initializers(path, "weights.bf16") == ["w0", "w1"]
    assert initializers(path, "weights.fp32") == ["b0", "b1"]
    assert initializers(path, "residual.rebuilt") == []


def test_a_file_of_the_artifact_is_allowed(tmp_path: Path) -> None:
    path = saved(graphs.mlp(), "weights.fp32", tmp_path / "m.onnx")
    check_locations(path, {"weights.fp32"})
    with pytest.raises(ArtifactError, match=r"weights\.fp32"):
        check_locations(path, {"weights.bf16"})


@pytest.mark.parametrize("location", ["/etc/hostname", "../1/weights.fp32", "sub/weights.fp32", ""])
def test_any_other_file_is_rejected_and_named(tmp_path: Path, location: str) -> None:
    path = saved(graphs.mlp(), location, tmp_path / "m.onnx")
    with pytest.raises(ArtifactError) as refused:
        check_locations(path, {"weights.fp32"})
    assert repr(location) in str(refused.value)


def test_the_initializers_of_a_branch_are_checked(tmp_path: Path) -> None:
    model = graphs.if_branches()
    branch = next(a.g for a in model.graph.node[0].attribute if a.name == "else_branch")
    graphs.refer(branch.initializer[0], "/etc/hostname")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="/etc/hostname"):
        check_locations(tmp_path / "m.onnx", set())


def test_the_constants_of_a_loop_body_are_checked(tmp_path: Path) -> None:
    model = graphs.loop()
    body = next(a.g for a in model.graph.node[0].attribute if a.name == "body")
    graphs.refer(body.node[0].attribute[0].t, "/etc/hostname")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="/etc/hostname"):
        check_locations(tmp_path / "m.onnx", set())


def test_the_constants_of_a_function_are_checked(tmp_path: Path) -> None:
    """ONNX Runtime inlines functions, and reads the files that their constants name."""
    model = graphs.constant_nodes()
    graphs.refer(model.graph.node[0].attribute[0].t, "/etc/hostname")
    opset = helper.make_opsetid("", graphs.OPSET)
    model.functions.append(helper.make_function("f", "Weight", [], ["weight"], [model.graph.node[0]], [opset]))
    model.graph.node[0].CopyFrom(helper.make_node("Weight", [], ["weight"], domain="f"))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="/etc/hostname"):
        check_locations(tmp_path / "m.onnx", set())


def test_sparse_initializers_are_checked(tmp_path: Path) -> None:
    model = graphs.mlp()
    sparse = model.graph.sparse_initializer.add(dims=[16, 32])
    sparse.values.CopyFrom(model.graph.initializer[0])
    graphs.refer(sparse.values, "/etc/hostname")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="/etc/hostname"):
        check_locations(tmp_path / "m.onnx", set())


def test_a_second_location_is_checked_too(tmp_path: Path) -> None:
    model = graphs.mlp()
    graphs.refer(model.graph.initializer[0], "weights.fp32")
    model.graph.initializer[0].external_data.add(key="location", value="/etc/hostname")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="/etc/hostname"):
        check_locations(tmp_path / "m.onnx", {"weights.fp32"})


def placed(path: Path, *, size: int, offset: int | str = 0, length: int | str | None = None) -> Path:
    """Write an MLP whose fp32 weight [16, 32] is ``length`` bytes at ``offset`` of a file of ``size`` bytes."""
    model = graphs.mlp()
    tensor = model.graph.initializer[0]
    graphs.refer(tensor, "weights.fp32")
    del tensor.external_data[1:]
    tensor.external_data.add(key="offset", value=str(offset))
    if length is not None:
        tensor.external_data.add(key="length", value=str(length))
    (path / "weights.fp32").write_bytes(bytes(size))
    (path / "m.onnx").write_bytes(model.SerializeToString())
    return path / "m.onnx"


@pytest.mark.parametrize("length", [2048, None])
def test_a_tensor_that_ends_with_its_file_is_allowed(length: int | None, tmp_path: Path) -> None:
    check_locations(placed(tmp_path, size=64 + 2048, offset=64, length=length), {"weights.fp32"})


@pytest.mark.parametrize("length", [2048, None])
def test_a_tensor_beyond_the_end_of_its_file_is_rejected(length: int | None, tmp_path: Path) -> None:
    """The file was truncated, or the graph is for other weights. Without a length, the shape determines it."""
    path = placed(tmp_path, size=64 + 2047, offset=64, length=length)
    with pytest.raises(ArtifactError, match=r"tensor 'w0' in 'weights\.fp32' ends at byte 2112, beyond the 2111 bytes"):
        check_locations(path, {"weights.fp32"})


@pytest.mark.parametrize("length", [0, 1, 2047, 2049])
def test_a_length_that_does_not_match_the_shape_is_rejected(length: int, tmp_path: Path) -> None:
    path = placed(tmp_path, size=4096, length=length)
    words = rf"tensor 'w0' .* has {length} bytes, but its shape \[16, 32\] and dtype need 2048"
    with pytest.raises(ArtifactError, match=words):
        check_locations(path, {"weights.fp32"})


@pytest.mark.parametrize("dims", [[-1], [-16, -32], [0, -1]], ids=str)
def test_a_negative_dimension_is_rejected(dims: list[int], tmp_path: Path) -> None:
    path = placed(tmp_path, size=4096)
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].dims[:] = dims
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match=r"tensor 'w0' .* no dimension may be negative"):
        check_locations(path, {"weights.fp32"})


@pytest.mark.parametrize("offset", [1, 32, 65])
def test_a_tensor_that_is_not_aligned_to_a_cache_line_is_rejected(offset: int, tmp_path: Path) -> None:
    path = placed(tmp_path, size=4096, offset=offset, length=2048)
    with pytest.raises(ArtifactError, match=rf"tensor 'w0' .* starts at byte {offset}, which is not a multiple of 64"):
        check_locations(path, {"weights.fp32"})


@pytest.mark.parametrize("junk", ["-64", "0x40", "64 ", "", "６４", "1" * 5000])
def test_an_offset_or_length_that_is_not_a_number_of_bytes_is_rejected(junk: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"tensor 'w0' .* has the offset '.*', which is not a number of bytes"):
        check_locations(placed(tmp_path, size=4096, offset=junk), {"weights.fp32"})
    with pytest.raises(ArtifactError, match=r"tensor 'w0' .* has the length '.*', which is not a number of bytes"):
        check_locations(placed(tmp_path, size=4096, length=junk), {"weights.fp32"})


def test_a_second_offset_is_rejected(tmp_path: Path) -> None:
    path = placed(tmp_path, size=4096)
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data.add(key="offset", value="1")
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="has 2 values of offset, expected one"):
        check_locations(path, {"weights.fp32"})


def test_a_file_that_is_not_onnx_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_text("hello")
    for read in (lambda path: check_locations(path, set()), lambda path: initializers(path, "residual.rebuilt")):
        with pytest.raises(RuntimeFailure, match=r"m\.onnx is not an ONNX file"):
            read(tmp_path / "m.onnx")
