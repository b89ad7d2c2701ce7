"""Sides raced for real, in processes of their own, on a product small enough for a test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bench.core.verdict import FEWEST_PROCESSES
from bench.kernel.hosts import Subject
from bench.kernel.sides import ONNX_RUNTIME, PEERS, side
from bench.kernel.turns import FULL, Effort, Piece, Timed, copies, race

SPINLESS = side("ONNX Runtime fp32, spinning off")


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    """x [rows, 8] by w [8, 4] is y."""
    file = tmp_path / "graph" / "model.onnx"
    file.parent.mkdir()
    edges = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", c]) for n, c in (("x", 8), ("y", 4))]
    weight = numpy_helper.from_array(np.ones((8, 4), np.float32), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", edges[:1], edges[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), file)
    return Subject("small", tmp_path / "artifact", file, file)


def feeds() -> dict[str, np.ndarray]:
    return {"x": np.ones((2, 8), np.float32)}


def test_every_process_has_every_turn_of_every_side(subject: Subject, tmp_path: Path) -> None:
    pieces = [Piece("two rows", feeds(), caches=("warm", "cold"))]
    effort = Effort(processes=2, rounds=3, seconds=0.0, runs=2)
    openvino = side("OpenVINO fp32")
    timed = race((ONNX_RUNTIME, SPINLESS, openvino), subject, pieces, effort, tmp_path / "root")
    assert list(timed.samples) == ["two rows, warm", "two rows, cold"]
    for sides in timed.samples.values():
        for name in (ONNX_RUNTIME.name, SPINLESS.name):
            assert [[len(turn) for turn in process] for process in sides[name]] == [[2, 2, 2], [2, 2, 2]]
    assert timed.errors["two rows"][SPINLESS.name] == 0.0
    if openvino.name in timed.absent:  # where it is not installed, it says so
        assert "OpenVINO is not installed" in timed.absent[openvino.name]
    assert not (tmp_path / "root" / "copies").exists()


def test_no_two_sides_read_the_same_weights(subject: Subject, tmp_path: Path) -> None:
    openvino = side("OpenVINO fp32, latency")
    with copies((ONNX_RUNTIME, SPINLESS, openvino), subject, tmp_path / "copies") as found:
        read = [found[ONNX_RUNTIME.name].graph, found[SPINLESS.name].graph, found[openvino.name].stored]
        assert len({file.stat().st_ino for file in (*read, subject.graph)}) == 4


def test_a_side_without_times_in_some_process_is_left_out() -> None:
    timed = Timed(samples={"work": {"a": [[[1.0]], [[1.0]]], "b": [[[1.0]]]}})
    timed.drop_incomplete()
    assert list(timed.samples["work"]) == ["a"]


def test_the_full_effort_has_the_processes_that_a_verdict_needs() -> None:
    assert FULL.processes >= FEWEST_PROCESSES
    assert FULL.shape(seconds=5.0) == (3, 1)
    assert FULL.shape(seconds=0.1) == (3, 3)
    assert FULL.shape(seconds=0.001) == (12, 3)


def test_every_peer_takes_part_at_its_defaults_and_otherwise() -> None:
    names = [peer.name for peer in PEERS]
    for library in ("ONNX Runtime fp32", "OpenVINO fp32", "OpenVINO bf16", "torch fp32", "torch bf16"):
        assert library in names
        assert any(name.startswith(f"{library}, ") for name in names)
    assert ONNX_RUNTIME.options == {}
    assert side("OpenVINO bf16").options == {}
