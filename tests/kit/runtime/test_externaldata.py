"""A graph may read the files of its own artifact and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import artifacts
import onnx
import pytest
from onnx import helper

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import Manifest
from bf16kit.messages.errors import ArtifactError, RuntimeFailure
from bf16kit.runtime.loading import load
from bf16kit.runtime.ort.externaldata import check_locations


def saved(model: onnx.ModelProto, location: str, path: Path) -> Path:
    """Write ``model`` to ``path``, with its first tensor declared as stored in ``location``. Return ``path``."""
    graphs.refer(model.graph.initializer[0], location)
    path.write_bytes(model.SerializeToString())
    return path


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


def test_a_second_location_is_checked_too(tmp_path: Path) -> None:
    model = graphs.mlp()
    graphs.refer(model.graph.initializer[0], "weights.fp32")
    model.graph.initializer[0].external_data.add(key="location", value="/etc/hostname")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="/etc/hostname"):
        check_locations(tmp_path / "m.onnx", {"weights.fp32"})


@pytest.mark.parametrize(
    "wrong", [{"offset": "64"}, {"length": "2047"}, {"offset": "-64"}, {"offset": "0x40"}], ids=str
)
def test_a_tensor_that_is_not_within_its_file_is_refused(wrong: dict[str, str], tmp_path: Path) -> None:
    """ONNX Runtime refuses what it maps, and bf16kit what it copies: no crash, and no other bytes."""
    path = artifacts.write_product(tmp_path / "product" / "1", width=32).path
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


@pytest.mark.parametrize("side", [1 << 20, 1 << 40])
def test_a_shape_larger_than_its_file_is_refused_before_memory_is_taken(side: int, tmp_path: Path) -> None:
    path = artifacts.write_product(tmp_path / "product" / "1", width=32).path
    model = onnx.load(path / "cpu.onnx", load_external_data=False)
    model.graph.initializer[0].dims[:] = [side, side]
    (path / "cpu.onnx").write_bytes(model.SerializeToString())
    copied = Artifact(path, Manifest.loads((path / "manifest.json").read_bytes(), path), copies=True)
    with pytest.raises(ArtifactError, match=rf"tensor 'w' of shape \[{side}, {side}\] is no part of 'weights.bf16'"):
        load(copied, "cpu", threads=1, scratch=tmp_path)


def test_a_file_that_is_not_onnx_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_text("hello")
    with pytest.raises(RuntimeFailure, match=r"m\.onnx is not an ONNX file"):
        check_locations(tmp_path / "m.onnx", set())
