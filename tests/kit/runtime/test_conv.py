"""``bf16kit::Conv…`` and ``ConvDepthwise…`` in real sessions: bits that nothing may change, and errors without a crash.

kernels/tests/conv_test.cpp compares random convolutions with float64.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernelpaths import use
from onnx import ModelProto, helper
from products import Array, results

import graphs
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.ort import kernel

pytestmark = pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
C, N = 20, 40
WINDOWS = {"kernel_shape": [3, 2], "strides": [2, 1], "dilations": [1, 1], "pads": [1, 0, 1, 1]}


def conv(op: str = "ConvBf16_panels_tail", elements: int = C * 6 * N, bias: int = N, **attributes: Any) -> ModelProto:
    """Return a convolution of [batch, height, width, 20] by a weight that only the kernel reads."""
    given = WINDOWS | {"channels": C, "n": N} | attributes
    node = helper.make_node(op, ["x", "w", "b"], ["y"], domain="bf16kit")
    node.attribute.extend(helper.make_attribute(name, value) for name, value in given.items() if value is not None)
    weight = graphs.values(elements, seed=1).astype(ml_dtypes.bfloat16)
    stored = [graphs.initializer("w", weight), graphs.initializer("b", graphs.values(bias, seed=2))]
    made = graphs.model([node], [graphs.edge("x")], [graphs.edge("y")], stored)
    made.opset_import.append(helper.make_opsetid("bf16kit", 1))
    return made


def image(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


GROUPS = conv(elements=C * 6 * N // 2, group=2)
DEPTHWISE = conv("ConvDepthwise_silu", elements=C * 6, bias=C, n=C)
HIDDEN = 96
PIXELS = {"kernel_shape": [1, 1], "strides": [1, 1], "dilations": [1, 1], "pads": [0, 0, 0, 0]}


def block(op: str = "ConvBlockBf16_panels_panels_tail_silu", **attributes: Any) -> ModelProto:
    """Return an inverted bottleneck of [batch, height, width, 20] in one node: 20 → 96 → 96 → 40 channels."""
    steps = (C, HIDDEN, PIXELS), (HIDDEN, HIDDEN, WINDOWS), (HIDDEN, N, PIXELS)
    given: dict[str, Any] = {}
    stored = []
    for place, (channels, n, windows) in enumerate(steps, 1):
        given |= {f"{name}{place}": value for name, value in (windows | {"channels": channels, "n": n}).items()}
        k = 6 if windows is WINDOWS else channels
        weight = graphs.values(k * n, seed=place, scale=k**-0.5).astype(ml_dtypes.bfloat16)
        stored += [graphs.initializer(f"w{place}", weight), graphs.initializer(f"b{place}", graphs.values(n, seed=9))]
    node = helper.make_node(op, ["x", "w1", "w2", "w3", "b1", "b2", "b3"], ["y"], domain="bf16kit")
    node.attribute.extend(helper.make_attribute(name, value) for name, value in (given | attributes).items())
    made = graphs.model([node], [graphs.edge("x")], [graphs.edge("y")], stored)
    made.opset_import.append(helper.make_opsetid("bf16kit", 1))
    return made


@pytest.mark.parametrize(
    "made",
    [conv(), conv("Conv_panels_tail_relu6"), GROUPS, DEPTHWISE, block(), block("ConvBlock_panels_panels_tail_relu")],
    ids=["bf16", "fp32", "groups", "depthwise", "block", "fp32 block"],
)
def test_threads_paths_and_neighbours_change_no_bit(made: ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    x = image(3, 40, 50, C)
    (alone,) = results(made, x)
    assert alone.shape == (3, 20, 50, made.graph.initializer[-1].dims[0])
    assert np.array_equal(results(made, x, threads=3)[0], alone)
    assert np.array_equal(results(made, x[1:2])[0], alone[1:2])
    if "Bf16" not in made.graph.node[0].op_type:
        use("avx2", monkeypatch)
        assert np.array_equal(results(made, x)[0], alone)


@pytest.mark.parametrize("shape", [(0, 8, 8, C), (2, 1, 1, C)], ids=str)
def test_empty_and_smallest_images_run(shape: tuple[int, ...]) -> None:
    assert results(conv(), image(*shape))[0].shape == (shape[0], (shape[1] + 1) // 2, shape[2], N)
    assert results(DEPTHWISE, image(*shape))[0].shape == (shape[0], (shape[1] + 1) // 2, shape[2], C)
    assert results(block(), image(*shape))[0].shape == (shape[0], (shape[1] + 1) // 2, shape[2], N)


@pytest.mark.parametrize(
    ("made", "x", "message"),
    [
        (conv(kernel_shape=[3, 3, 3]), (1, 8, 8, C), "kernel_shape has 3 integers; it must have one or two"),
        (conv(kernel_shape=None), (1, 8, 8, C), "kernel_shape has 0 integers"),
        (conv(pads=[1, 1]), (1, 8, 8, C), "pads has 2 integers; it must have 4"),
        (conv(pads=[1] * 900), (1, 8, 8, C), "pads has 900 integers; it must have 4"),
        (conv(pads=[1.0] * 4), (1, 8, 8, C), "pads has 0 integers; it must have 4"),
        (conv(pads=[0, -1, 0, 0]), (1, 8, 8, C), "integer 1 of attribute pads is -1; it must be from 0"),
        (conv(strides=[0, 1]), (1, 8, 8, C), "integer 0 of attribute strides is 0; it must be from 1"),
        (conv(dilations=[1, 2**40]), (1, 8, 8, C), f"attribute dilations is {2**40}; it must be from 1 to {2**31 - 1}"),
        (conv(kernel_shape=[2**31 - 1, 2**31 - 1]), (1, 8, 8, C), "is too large"),
        (conv(elements=C * 6 * N - 1), (1, 8, 8, C), "has 4799 elements"),
        (conv("ConvDepthwise", elements=N * 6), (1, 8, 8, C), "they must be equal"),
        (conv("ConvDepthwise", elements=15 * 6, bias=15, channels=15, n=15), (1, 8, 8, 15), "at least 16"),
        (conv(group=3), (1, 8, 8, C), "attribute group is 3; it must divide channels = 20 and n = 40"),
        (conv(group=0), (1, 8, 8, C), "attribute group is 0"),
        (conv(group=2), (1, 8, 8, C), "has 4800 elements; k = 60 and n = 40 need 2400"),
        (block(group3=2), (1, 8, 8, C), "has 3840 elements; k = 48 and n = 40 need 1920"),
        (conv(bias=N + 1), (1, 8, 8, C), "dimension 0 of the bias is 41; it must be 40"),
        (conv(), (1, 8, 8, C + 1), "20 channels"),
        (conv(), (8, 8, C), "it must have 4"),
        (conv(), (), "it must have 4"),
        (conv(dilations=[9, 1]), (1, 8, 8, C), "10 pixels high with its padding; a window is 19"),
        (conv(), (1, 0, 8, C), "2 pixels high with its padding; a window is 3"),
        (block(pads1=[0, 0, 0, 1]), (1, 8, 8, C), "convolution 1 of a block has windows of several pixels"),
        (block(strides3=[2, 1]), (1, 8, 8, C), "convolution 3 of a block has windows of several pixels"),
        (block(pads2=[0, 0]), (1, 8, 8, C), "pads2 has 2 integers; it must have 4"),
        (block(n1=80, channels2=HIDDEN), (1, 8, 8, C), "has 1920 elements"),
        (
            block(channels3=48, n3=80),
            (1, 8, 8, C),
            "convolution 3 of a block has 48 channels; n of the one before is 96",
        ),
        (block(), (1, 8, 8, C + 1), "20 channels"),
        (block(dilations2=[9, 1]), (1, 8, 8, C), "10 pixels high with its padding; a window is 19"),
    ],
)
def test_what_is_wrong_is_named(made: ModelProto, x: tuple[int, ...], message: str) -> None:
    with pytest.raises(RuntimeFailure, match=message):
        results(made, image(*x))
