"""Dimensions in ONNX files of other tools: unknown ones are equal to no other, and a run can prove a name wrong.

Neither the converter nor the server relies on a dimension name that a run contradicts.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from converting import ONNX_ONLY
from numpy.typing import NDArray
from onnx import ModelProto, helper
from serverprocess import Serve

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.cli import run

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
    text = "(float[n,16] x, float[n,16] z) => (float[n,32] y)"
    nodes = "{ [sum] sum = ReduceSum(x, rows) [add] both = Add(z, sum) [matmul] y = MatMul(both, w) }"
    return graphs.parsed(f"{text} {nodes}", w=graphs.values(16, 32), rows=np.array([0]))


def floats(*shape: int) -> Array:
    return RANDOM.standard_normal(shape).astype(np.float32)


def convert(proto: ModelProto, directory: Path, name: str = "m", **samples: Any) -> int:
    """Convert ``proto`` into ``directory/models/name/1``, with one file of samples if there are any."""
    onnx.save(proto, directory / "m.onnx")
    arguments = ["checkpoint", str(directory / "m.onnx"), "--out", str(directory / "models" / name / "1"), *ONNX_ONLY]
    if samples:
        np.savez(directory / f"{name}.npz", **samples)
        arguments += ["--samples", str(directory / f"{name}.npz")]
    return run(arguments)


@pytest.mark.long
def test_a_dimension_name_that_a_run_contradicts_is_replaced_in_what_is_served(tmp_path: Path, serve: Serve) -> None:
    """The outputs of ``doubled`` and ``lists`` have the name of an input's dimension, and another size."""
    assert convert(paddle(), tmp_path, "paddle", x=floats(2, 3, 8, 20)) == 0
    assert convert(doubled(), tmp_path, "doubled") == 0
    assert convert(two_lists(), tmp_path, "lists", x=floats(5, 16), z=floats(3, 16)) == 0
    named = {
        "paddle": ([["x_0", 3, "x_2", "x_3"]], ["x_0", 8, "y_2", "y_3"], 0),
        "doubled": ([["batch", 16]], ["y_0", 16], None),
        "lists": ([["n", 16], ["z_0", 16]], ["y_0", 32], None),
    }
    for name, expected in named.items():
        manifest = Artifact.open(tmp_path / "models" / name / "1").manifest
        found = [entry.shape for entry in manifest.inputs], manifest.outputs[0].shape, manifest.batch_axis
        assert found == expected
    server = serve("--repository", tmp_path / "models", "--device", "cpu").wait_ready()
    for model, shapes, answer in (
        ("paddle", {"x": (1, 3, 9, 30)}, (1, 8, 9, 30)),
        ("paddle", {"x": (4, 3, 30, 9)}, (4, 8, 30, 9)),
        ("doubled", {"x": (3, 16)}, (6, 16)),
        ("lists", {"x": (2, 16), "z": (7, 16)}, (7, 32)),
    ):
        feeds = {name: floats(*shape) for name, shape in shapes.items()}
        assert server.infer(model, feeds)["y"].shape == answer


def test_a_sample_that_contradicts_a_name_and_does_not_run_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proto = two_lists()
    proto.graph.node[0].CopyFrom(helper.make_node("Identity", ["x"], ["sum"], name="sum"))  # now they must be equal
    assert convert(proto, tmp_path, x=floats(5, 16), z=floats(3, 16)) == 2
    said = "input 'z' has shape [3, 16], expected [n,16]: dimension 0 must be 5"
    assert said in capsys.readouterr().err
