"""Real races of sides, in separate processes, on a product small enough for a test."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bench.core.verdict import FEWEST_PROCESSES
from bench.kernel.hosts import Subject
from bench.kernel.sides import ONNX_RUNTIME, side
from bench.kernel.turns import FULL, Effort, Piece, copies, race

SPINLESS = side("ONNX Runtime fp32, spinning off")


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    """Return a subject whose graph multiplies x [rows, 8] by w [8, 4]."""
    file = tmp_path / "graph" / "model.onnx"
    file.parent.mkdir()
    edges = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", c]) for n, c in (("x", 8), ("y", 4))]
    weight = numpy_helper.from_array(np.ones((8, 4), np.float32), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", edges[:1], edges[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), file)
    return Subject("small", tmp_path / "artifact", file, file)


PIECES = [Piece("two rows", {"x": np.ones((2, 8), np.float32)}, caches=("warm", "cold"))]


@pytest.mark.long
def test_every_process_has_every_turn_of_every_side(subject: Subject, tmp_path: Path) -> None:
    effort = Effort(processes=2, rounds=3, seconds=0.0, runs=2)
    openvino = side("OpenVINO fp32")
    timed = race((ONNX_RUNTIME, SPINLESS, openvino), subject, PIECES, effort, tmp_path / "root")
    assert list(timed.samples) == ["two rows, warm", "two rows, cold"]
    for sides in timed.samples.values():
        for name in (ONNX_RUNTIME.name, SPINLESS.name):
            assert [[len(turn) for turn in process] for process in sides[name]] == [[2, 2, 2], [2, 2, 2]]
    assert timed.errors["two rows"][SPINLESS.name] == 0.0
    if openvino.name in timed.absent:  # OpenVINO is not installed here
        assert "OpenVINO is not installed" in timed.absent[openvino.name]
    assert not (tmp_path / "root" / "copies").exists()
    with copies((ONNX_RUNTIME, SPINLESS), subject, tmp_path / "copies") as found:  # no two sides read the same weights
        read = [found[each.name].graph for each in (ONNX_RUNTIME, SPINLESS)]
        assert len({file.stat().st_ino for file in (*read, subject.graph)}) == 3


def test_the_full_effort_has_the_processes_that_a_verdict_needs() -> None:
    assert FULL.processes >= FEWEST_PROCESSES
    assert (FULL.runs_of(5.0), FULL.runs_of(0.1)) == (1, 3)
    assert [FULL.rounds_of(seconds) for seconds in (60.0, 0.75, 0.001, 0.0)] == [2, 2, 12, 0]
