"""A graph reads the files of its own artifact and no others."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import helper

import graphs
from bf16kit.errors import ArtifactError, RuntimeFailure
from bf16kit.runtime.externaldata import check_locations, initializers


def saved(model: onnx.ModelProto, location: str, path: Path) -> Path:
    """``model`` at ``path``, its first tensor declared as kept in ``location``."""
    graphs.refer(model.graph.initializer[0], location)
    path.write_bytes(model.SerializeToString())
    return path


def test_initializers_are_named_by_the_file_they_are_in(tmp_path: Path) -> None:
    path = saved(graphs.mlp(), "weights.fp32", tmp_path / "m.onnx")
    names = [tensor.name for tensor in graphs.mlp().graph.initializer]
    assert initializers(path, "weights.fp32") == names[:1]
    assert initializers(path, "weights.bf16") == []


def test_a_file_of_the_artifact_is_allowed(tmp_path: Path) -> None:
    path = saved(graphs.mlp(), "weights.fp32", tmp_path / "m.onnx")
    check_locations(path, {"weights.fp32"})
    with pytest.raises(ArtifactError, match=r"weights\.fp32"):
        check_locations(path, {"weights.bf16"})


@pytest.mark.parametrize("location", ["/etc/hostname", "../1/weights.fp32", "sub/weights.fp32", ""])
def test_any_other_file_is_refused_by_name(tmp_path: Path, location: str) -> None:
    path = saved(graphs.mlp(), location, tmp_path / "m.onnx")
    with pytest.raises(ArtifactError) as refused:
        check_locations(path, {"weights.fp32"})
    assert repr(location) in str(refused.value)


def test_the_initializers_of_a_branch_are_looked_at(tmp_path: Path) -> None:
    model = graphs.if_branches()
    branch = next(a.g for a in model.graph.node[0].attribute if a.name == "else_branch")
    graphs.refer(branch.initializer[0], "/etc/hostname")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="/etc/hostname"):
        check_locations(tmp_path / "m.onnx", set())


def test_the_constants_of_a_loop_body_are_looked_at(tmp_path: Path) -> None:
    model = graphs.loop()
    body = next(a.g for a in model.graph.node[0].attribute if a.name == "body")
    graphs.refer(body.node[0].attribute[0].t, "/etc/hostname")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="/etc/hostname"):
        check_locations(tmp_path / "m.onnx", set())


def test_the_constants_of_a_function_are_looked_at(tmp_path: Path) -> None:
    """ONNX Runtime inlines functions, and reads what their constants name."""
    model = graphs.constant_nodes()
    graphs.refer(model.graph.node[0].attribute[0].t, "/etc/hostname")
    opset = helper.make_opsetid("", graphs.OPSET)
    model.functions.append(helper.make_function("f", "Weight", [], ["weight"], [model.graph.node[0]], [opset]))
    model.graph.node[0].CopyFrom(helper.make_node("Weight", [], ["weight"], domain="f"))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="/etc/hostname"):
        check_locations(tmp_path / "m.onnx", set())


def test_sparse_initializers_are_looked_at(tmp_path: Path) -> None:
    model = graphs.mlp()
    sparse = model.graph.sparse_initializer.add(dims=[16, 32])
    sparse.values.CopyFrom(model.graph.initializer[0])
    graphs.refer(sparse.values, "/etc/hostname")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="/etc/hostname"):
        check_locations(tmp_path / "m.onnx", set())


def test_a_second_location_hides_behind_no_first(tmp_path: Path) -> None:
    model = graphs.mlp()
    graphs.refer(model.graph.initializer[0], "weights.fp32")
    model.graph.initializer[0].external_data.add(key="location", value="/etc/hostname")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="/etc/hostname"):
        check_locations(tmp_path / "m.onnx", {"weights.fp32"})


def test_what_is_not_onnx_is_said(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_text("hello")
    with pytest.raises(RuntimeFailure, match=r"m\.onnx is not an ONNX file"):
        check_locations(tmp_path / "m.onnx", set())
