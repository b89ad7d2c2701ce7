"""Dimensions in ONNX files of other tools: unknown ones are equal to no other, and a run can prove a name wrong.

Neither the converter nor the server relies on a dimension name that a run contradicts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from converting import ONNX_ONLY, Outcome
from numpy.typing import NDArray
from onnx import ModelProto, helper
from serverprocess import Serve, ServerProcess

import graphs
from bf16kit.artifact.artifact import Artifact
from converter.cli import run

Array = NDArray[Any]
RANDOM = np.random.default_rng(0)


def paddle() -> ModelProto:
    """Return a small net as PaddlePaddle exports it: each unknown dimension is called ``?``, −1 is the batch."""
    proto = graphs.conv_bn()
    proto.graph.input[0].CopyFrom(graphs.edge("x", [-1, 3, "?", "?"]))
    proto.graph.output[0].CopyFrom(graphs.edge("y", ["?", 8, "?", "?"]))
    proto.graph.value_info.extend([graphs.edge("c", ["?", 8, "?", "?"]), graphs.edge("n", ["?", 8, "?", "?"])])
    return proto


def doubled() -> ModelProto:
    """Return a model that gives two rows for each input row, although both dimensions are called ``batch``."""
    proto = graphs.mlp()
    proto.graph.node[-1].output[0] = "once"
    proto.graph.node.append(helper.make_node("Concat", ["once", "once"], ["y"], axis=0, name="twice"))
    return proto


def two_lists() -> ModelProto:
    """Return a model of x [n, 16] and z [n, 16] that gives the rows of z·w + (sum of rows of x)·w.

    Both lengths are called n, but the model also runs if they differ.
    """
    return graphs.model(
        [
            helper.make_node("ReduceSum", ["x", "rows"], ["sum"], name="sum"),
            helper.make_node("Add", ["z", "sum"], ["both"], name="add"),
            helper.make_node("MatMul", ["both", "w"], ["y"], name="matmul"),
        ],
        [graphs.edge("x", ["n", 16]), graphs.edge("z", ["n", 16])],
        [graphs.edge("y", ["n", 32])],
        [graphs.initializer("w", graphs.values(16, 32)), graphs.initializer("rows", np.array([0]))],
    )


def convert(proto: ModelProto, directory: Path, *arguments: str | Path) -> Artifact:
    """Convert ``proto`` into ``directory/models/m/1`` and return the artifact."""
    onnx.save(proto, directory / "m.onnx")
    target = directory / "models" / "m" / "1"
    assert (
        run([str(each) for each in ("checkpoint", directory / "m.onnx", "--out", target, *ONNX_ONLY, *arguments)]) == 0
    )
    return Artifact.open(target)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path, said: tuple[str, ...]) -> None:
    """Assert that the converter rejects ``arguments`` with exit code 2 and a message that contains ``said``."""
    code, told = run([str(argument) for argument in arguments]), capsys.readouterr()
    Outcome(code, told.out, told.err).refused(2, *said)


def ask(server: ServerProcess, feeds: dict[str, Array]) -> Array:
    """Return the output ``y`` of one request."""
    tensors = [triton.InferInput(name, list(array.shape), "FP32") for name, array in feeds.items()]
    for tensor, array in zip(tensors, feeds.values(), strict=True):
        tensor.set_data_from_numpy(array)
    with triton.InferenceServerClient(server.target) as client:
        answer: Array = client.infer("m", tensors).as_numpy("y")
    return answer


def floats(*shape: int) -> Array:
    return RANDOM.standard_normal(shape).astype(np.float32)


@pytest.mark.long
def test_unknown_dimensions_that_paddlepaddle_gives_one_name_may_differ(tmp_path: Path, serve: Serve) -> None:
    np.savez(tmp_path / "wide.npz", x=floats(2, 3, 8, 20))
    manifest = convert(paddle(), tmp_path, "--samples", tmp_path / "wide.npz").manifest
    assert manifest.inputs[0].shape == ["x_0", 3, "x_2", "x_3"]
    assert manifest.outputs[0].shape == ["x_0", 8, "y_2", "y_3"]
    assert manifest.batch_axis == 0
    server = serve("--repository", str(tmp_path / "models"), "--device", "cpu").wait_ready()
    for shape in [(1, 3, 9, 30), (4, 3, 30, 9)]:
        assert ask(server, {"x": floats(*shape)}).shape == (shape[0], 8, *shape[2:])


@pytest.mark.long
def test_a_dimension_name_that_an_output_reuses_for_another_size_is_replaced(tmp_path: Path, serve: Serve) -> None:
    manifest = convert(doubled(), tmp_path).manifest
    assert manifest.inputs[0].shape == ["batch", 16]
    assert manifest.outputs[0].shape == ["y_0", 16]
    assert manifest.batch_axis is None
    server = serve("--repository", str(tmp_path / "models"), "--device", "cpu").wait_ready()
    assert ask(server, {"x": floats(3, 16)}).shape == (6, 16)


@pytest.mark.long
def test_a_dimension_name_that_samples_contradict_is_replaced_if_the_source_runs(tmp_path: Path, serve: Serve) -> None:
    np.savez(tmp_path / "uneven.npz", x=floats(5, 16), z=floats(3, 16))
    manifest = convert(two_lists(), tmp_path, "--samples", tmp_path / "uneven.npz").manifest
    assert [entry.shape for entry in manifest.inputs] == [["n", 16], ["z_0", 16]]
    assert manifest.outputs[0].shape == ["y_0", 32]  # also called n in the source, but its size differs from that of x
    server = serve("--repository", str(tmp_path / "models"), "--device", "cpu").wait_ready()
    assert ask(server, {"x": floats(2, 16), "z": floats(7, 16)}).shape == (7, 32)


@pytest.mark.parametrize("given", [{"x": (5, 16), "z": (3, 15)}, {"x": (5, 8), "z": (3, 8)}])
def test_samples_of_a_wrong_fixed_size_are_rejected_by_their_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: dict[str, tuple[int, ...]]
) -> None:
    onnx.save(two_lists(), tmp_path / "m.onnx")
    np.savez(tmp_path / "wrong.npz", x=floats(*given["x"]), z=floats(*given["z"]))
    arguments = ("--out", tmp_path / "models" / "m" / "1", "--samples", tmp_path / "wrong.npz")
    refused(capsys, "checkpoint", tmp_path / "m.onnx", *arguments, said=("wrong.npz", "expected [n,16]"))


def test_a_sample_that_contradicts_a_name_and_does_not_run_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proto = two_lists()
    proto.graph.node[0].CopyFrom(helper.make_node("Identity", ["x"], ["sum"], name="sum"))  # now they must be equal
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "uneven.npz", x=floats(5, 16), z=floats(3, 16))
    arguments = ("--out", tmp_path / "models" / "m" / "1", "--samples", tmp_path / "uneven.npz")
    said = "input 'z' has shape [3, 16], expected [n,16] with 3 = 5 in dimension 0"
    refused(capsys, "checkpoint", tmp_path / "m.onnx", *arguments, said=(said,))
