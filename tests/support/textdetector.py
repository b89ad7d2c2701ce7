"""A model of the shape of an OCR detector: a small backbone, a feature pyramid, and a head that gives a map of text."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

import graphs

SIZE = 64  # height and width of the input

Array = NDArray[np.float32]


def text_detector(logit: float = 0.0, seed: int = 0) -> ModelProto:
    """x [batch, 3, 64, 64] → y [batch, 1, 64, 64], in (0, 1).

    Depthwise convolutions with squeeze-and-excitation and hard swish, three scales that are resized, added and
    concatenated, two transposed convolutions, a sigmoid. ``logit`` is added before the sigmoid.
    """
    return _Builder(seed).detector(logit)


def pictures(count: int = 4) -> list[dict[str, Array]]:
    """Return noise as inputs, one picture each."""
    random = np.random.default_rng(7)
    return [{"x": random.standard_normal((1, 3, SIZE, SIZE)).astype(np.float32)} for _ in range(count)]


class _Builder:
    """Adds layers to a graph; each method takes names of values and returns that of its result."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._nodes: list[NodeProto] = []
        self._weights: list[TensorProto] = []

    def detector(self, logit: float) -> ModelProto:
        stem = self._hard_swish(self._norm(self._conv("x", 3, 16, 3, stride=2), 16))
        levels = [self._stage(stem, 16, 24)]
        levels.append(self._stage(levels[0], 24, 32))
        levels.append(self._stage(levels[1], 32, 48))
        lateral = [self._conv(x, n, 24, 1) for x, n in zip(levels, (24, 32, 48), strict=True)]
        middle = self._node("Add", lateral[1], self._resized(lateral[2], 2))
        large = self._node("Add", lateral[0], self._resized(middle, 2))
        parts = [self._conv(x, 24, 8, 3) for x in (large, middle, lateral[2])]
        scales = [parts[0], self._resized(parts[1], 2), self._resized(parts[2], 4)]
        head = self._relu(self._norm(self._conv(self._node("Concat", *scales, axis=1), 24, 24, 3), 24))
        head = self._relu(self._norm(self._upsampled(head, 24, 24), 24))
        logits = self._node("Add", self._upsampled(head, 24, 1), self._constant(np.float32(logit)))
        self._nodes.append(helper.make_node("Sigmoid", [logits], ["y"], name="map"))
        inputs = [graphs.edge("x", ["batch", 3, SIZE, SIZE])]
        return graphs.model(self._nodes, inputs, [graphs.edge("y", ["batch", 1, SIZE, SIZE])], self._weights)

    def _stage(self, x: str, channels: int, wider: int) -> str:
        x = self._hard_swish(self._norm(self._conv(x, channels, channels, 3, stride=2, group=channels), channels))
        squeezed = self._relu(self._conv(self._node("GlobalAveragePool", x), channels, 16, 1))
        x = self._node("Mul", x, self._node("HardSigmoid", self._conv(squeezed, 16, channels, 1)))
        return self._hard_swish(self._norm(self._conv(x, channels, wider, 1), wider))

    def _conv(self, x: str, channels: int, made: int, kernel: int, stride: int = 1, group: int = 1) -> str:
        weight = self._weight(made, channels // group, kernel, kernel, fan_in=channels // group * kernel**2)
        pads = [kernel // 2] * 4
        return self._node("Conv", x, weight, kernel_shape=[kernel] * 2, pads=pads, strides=[stride] * 2, group=group)

    def _upsampled(self, x: str, channels: int, made: int) -> str:
        weight, bias = self._weight(channels, made, 2, 2, fan_in=channels), self._weight(made)
        return self._node("ConvTranspose", x, weight, bias, kernel_shape=[2, 2], strides=[2, 2])

    def _norm(self, x: str, channels: int) -> str:
        scale, bias, mean = (self._weight(channels) for _ in range(3))
        variance = self._constant(self._random.uniform(0.5, 1.5, channels).astype(np.float32))
        return self._node("BatchNormalization", x, scale, bias, mean, variance)

    def _hard_swish(self, x: str) -> str:
        bounds = [self._constant(np.float32(bound)) for bound in (0, 6)]
        gate = self._node("Clip", self._node("Add", x, self._constant(np.float32(3))), *bounds)
        return self._node("Div", self._node("Mul", x, gate), self._constant(np.float32(6)))

    def _relu(self, x: str) -> str:
        return self._node("Relu", x)

    def _resized(self, x: str, times: int) -> str:
        scales = self._constant(np.array([1, 1, times, times], np.float32))
        return self._node(
            "Resize", x, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
        )

    def _weight(self, *shape: int, fan_in: int = 1) -> str:
        values = self._random.standard_normal(shape) / np.sqrt(fan_in)
        return self._constant(values.astype(np.float32))

    def _constant(self, values: Array | np.float32) -> str:
        name = f"w{len(self._weights)}"
        self._weights.append(graphs.initializer(name, np.asarray(values)))
        return name

    def _node(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op.lower()}{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, inputs, [f"{name}/out"], name=name, **attributes))
        return f"{name}/out"
