"""Real races of sides, in separate processes, on a product small enough for a test."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bench.core.verdict import FEWEST_PROCESSES
from bench.kernel.hosts import Subject
from bench.kernel.sides import ONNX_RUNTIME, side
from bench.kernel.turns import FULL, Effort, Piece, contenders, copies, race

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


@pytest.mark.long
def test_contenders_get_more_turns_and_processes_in_the_judged_cache_state(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.kernel.turns.contenders", lambda sides, _: frozenset(sides) & {SPINLESS.name})
    effort = Effort(processes=2, rounds=1, seconds=60.0, further=1, first_rounds=2, most_rounds=2, runs=1)
    timed = race((ONNX_RUNTIME, SPINLESS), subject, PIECES, effort, tmp_path / "root")
    turns = {
        label: {name: [len(process) for process in samples] for name, samples in sides.items()}
        for label, sides in timed.samples.items()
    }
    assert turns == {
        "two rows, warm": {ONNX_RUNTIME.name: [2, 1], SPINLESS.name: [4, 3, 3]},
        "two rows, cold": {ONNX_RUNTIME.name: [2, 1], SPINLESS.name: [2, 1]},
    }


def test_which_sides_are_contenders() -> None:
    """Our paths that users get, and for the arithmetic of each goal its limits and the peers close to the best."""
    seconds = {
        "cpu, avx512f": 5.0,
        "cpu, avx2": 1.0,
        "cpu-bf16": 9.0,
        "limit: fp32 arithmetic": 0.1,
        "limit: bf16 arithmetic": 0.1,
        "ONNX Runtime fp32": 2.0,
        "OpenVINO fp32": 2.5,
        "torch fp32": 2.7,
        "torch bf16": 1.0,
        "OpenVINO bf16": 1.4,
    }
    ours = {"cpu, avx512f", "cpu-bf16"}
    fp32 = {"limit: fp32 arithmetic", "ONNX Runtime fp32", "OpenVINO fp32"}
    bf16 = {"limit: bf16 arithmetic", "torch bf16"}
    assert contenders(seconds, ["fp32"]) == ours | fp32
    assert contenders(seconds, ["bf16"]) == ours | bf16
    assert contenders(seconds, ["fp32", "bf16"]) == ours | fp32 | bf16
    assert contenders({"cpu-bf16": 1.0}, ["fp32"]) == {"cpu-bf16"}


def test_the_full_effort_has_the_processes_that_a_verdict_needs() -> None:
    assert FULL.processes >= FEWEST_PROCESSES
    assert (FULL.runs_of(5.0), FULL.runs_of(0.1)) == (1, 3)
    assert [FULL.rounds_of(seconds) for seconds in (60.0, 0.75, 0.001, 0.0)] == [2, 2, 12, 0]
