"""Rounding up or down by what lessens a layer's output error, against rounding to nearest: drift on held-out samples.

For a product Y = X·W the error that rounding W to Q brings to Y is (W−Q)ᵀ·H·(W−Q) per column, H = XᵀX over
calibration samples. Row by row of W, each weight becomes one of its two bf16 neighbours, and what that loses is made up
for in the rows still to come, through the Cholesky factor of H⁻¹ (the method known as GPTQ, here with 8 bits of
significand, rows in their order, H damped by 1 % of its mean diagonal). H is of the fp32 model. Convolutions are the
products of their patches, group by group. Everything that is not a product's weight is rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bench.conversion.rounding_subjects import SUBJECTS, Subject, Weights, run
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace
from bf16kit.drift.metrics import compare
from bf16kit.numerics.residual import encode_chunks
from bf16kit.numerics.rounding import to_bf16, to_fp32

DAMPING = 0.01
_WORTH = 1.5  # times less drift, on every model: from here on it would ship
_PATCHES = 20_000  # rows of a convolution's H, at most

Array = NDArray[Any]


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Drift of the cpu profile by either rounding, over samples that were not calibrated on."""
    measurements: list[Measurement] = []
    samples: dict[str, str] = {}
    notes = ["fp32 others: the drift if the calibrated weights were fp32, which no rounding of them can better"]
    for name, prepared in SUBJECTS.items():
        subject = prepared(workspace, quick)
        if subject is None:
            notes.append(f"{name} is left out, for want of the packages that rounding_subjects.py names")
            continue
        measurements += _compare(subject)
        samples[subject.name] = f"{len(subject.calibration)} to calibrate, {len(subject.held_out)} held out"
    return Result("calibrated_rounding", measurements, {"damping": DAMPING, "samples": samples}, notes)


def neighbours(weights: Array) -> tuple[Array, Array]:
    """The nearest bf16 values on either side of each fp32 weight, in fp32; both the weight where bf16 holds it."""
    nearest = to_fp32(to_bf16(weights))
    step = np.where(np.abs(nearest) < np.abs(weights), 1, -1)  # of the magnitude, towards the weight
    bits = nearest.view(np.uint32).astype(np.int64) + step * 0x10000
    other = np.where(nearest == weights, nearest, bits.astype(np.uint32).view(np.float32))
    return np.where(nearest == 0, nearest, np.minimum(nearest, other)), np.where(
        nearest == 0, nearest, np.maximum(nearest, other)
    )


def calibrate(weights: Array, hessian: Array) -> Array:
    """bf16 neighbours of ``weights`` [G, K, N], in fp32, that lessen the error of X·W; ``hessian`` XᵀX is [G, K, K]."""
    low, high = neighbours(weights)
    work, chosen = weights.astype(np.float64), np.empty_like(weights)
    factor = _factor(hessian)
    for row in range(weights.shape[1]):
        target = work[:, row]
        chosen[:, row] = np.where(target - low[:, row] < high[:, row] - target, low[:, row], high[:, row])
        error = (target - chosen[:, row]) / factor[:, row, row, None]
        work[:, row + 1 :] -= factor[:, row, row + 1 :, None] * error[:, None, :]
    return chosen


def _factor(hessian: Array) -> Array:
    """The upper Cholesky factor of the inverse of each damped matrix."""
    h = hessian.astype(np.float64)
    mean = np.maximum(np.einsum("gkk->g", h) / h.shape[1], 1e-12)
    h[:, np.arange(h.shape[1]), np.arange(h.shape[1])] += DAMPING * mean[:, None]
    inverse = np.linalg.inv(h)
    return np.swapaxes(np.linalg.cholesky((inverse + np.swapaxes(inverse, 1, 2)) / 2), 1, 2)


@dataclass(frozen=True, slots=True)
class Product:
    """A product whose weight ``weight`` multiplies the value ``given``."""

    node: ir.Node
    weight: str
    given: str

    def as_matrices(self, weight: Array) -> Array:
        """[G, K, N]."""
        if self.node.op_type == "Conv":
            groups = self._group
            return np.swapaxes(weight.reshape(groups, weight.shape[0] // groups, -1), 1, 2).copy()
        return (weight.T if self._transposed else weight)[None].copy()

    def as_weight(self, matrices: Array, like: Array) -> Array:
        if self.node.op_type == "Conv":
            return np.ascontiguousarray(np.swapaxes(matrices, 1, 2)).reshape(like.shape)
        return np.ascontiguousarray(matrices[0].T if self._transposed else matrices[0])

    def rows(self, value: Array, kernel: Sequence[int]) -> Array:
        """[G, rows, K] of what the weight multiplies."""
        if self.node.op_type != "Conv":
            return value.reshape(1, -1, value.shape[-1])
        patches = _patches(value, kernel, self._ints("strides"), self._ints("pads"))
        count = patches.shape[0] * patches.shape[1]
        return np.moveaxis(patches.reshape(count, self._group, -1), 1, 0)

    @property
    def _group(self) -> int:
        found = self.node.attributes.get("group")
        return 1 if found is None else found.as_int()

    @property
    def _transposed(self) -> bool:
        found = self.node.attributes.get("transB")
        return found is not None and bool(found.as_int())

    def _ints(self, name: str) -> Sequence[int]:
        found = self.node.attributes.get(name)
        return [] if found is None else found.as_ints()


def _patches(value: Array, kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int]) -> Array:
    """[batch, places, C·kh·kw], channels first, of an undilated 2-D convolution."""
    top, left, bottom, right = pads or (0, 0, 0, 0)
    padded = np.pad(value, ((0, 0), (0, 0), (top, bottom), (left, right)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, tuple(kernel), axis=(2, 3))
    windows = windows[:, :, :: (strides or (1, 1))[0], :: (strides or (1, 1))[1]]
    batch, channels, height, width = windows.shape[:4]
    return np.moveaxis(windows, 1, 3).reshape(batch, height * width, channels * kernel[0] * kernel[1])


def products(graph: ir.Graph, narrow: frozenset[str]) -> Iterator[Product]:
    """Products of one weight each that is stored in bf16 and used once."""
    for node in graph:
        if node.op_type not in ("MatMul", "Gemm", "Conv") or node.inputs[0] is None or node.inputs[1] is None:
            continue
        given, weight = node.inputs[0], node.inputs[1]
        dilated = "dilations" in node.attributes and set(node.attributes["dilations"].as_ints()) != {1}
        if weight.name in narrow and len(weight.uses()) == 1 and given.name and not dilated:
            yield Product(node, weight.name, given.name)


def nearest(subject: Subject) -> Weights:
    """Every bf16 weight rounded as a conversion does."""
    return {name: to_fp32(to_bf16(a)) if name in subject.narrow else a for name, a in subject.weights.items()}


def calibrated(subject: Subject) -> tuple[Weights, list[str]]:
    """All weights, and the names of those that were calibrated."""
    found = list(products(subject.graph.graph, subject.narrow))
    sums: dict[str, Array] = {}
    inputs = {value.name for value in subject.graph.graph.inputs}
    input_names = sorted({product.given for product in found} - inputs)
    generator = np.random.default_rng(0)
    for feed, values in zip(
        subject.calibration, run(subject, subject.weights, subject.calibration, input_names), strict=True
    ):
        for product in found:
            value = feed[product.given] if product.given in inputs else values[product.given]
            rows = product.rows(value, subject.weights[product.weight].shape[2:])
            most = max(1, _PATCHES // len(subject.calibration))
            if rows.shape[1] > most:
                rows = rows[:, generator.choice(rows.shape[1], most, replace=False)]
            rows = rows.astype(np.float64)
            sums[product.weight] = sums.get(product.weight, 0) + np.swapaxes(rows, 1, 2) @ rows
    weights = nearest(subject)
    for product in found:
        original = subject.weights[product.weight]
        chosen = calibrate(product.as_matrices(original), sums[product.weight])
        weights[product.weight] = product.as_weight(chosen, original)
    return weights, [product.weight for product in found]


def drift(subject: Subject, weights: Weights) -> float:
    """The mean relative_l2 of the first output over the held-out samples."""
    spec, found = subject.outputs[0], []
    pairs = zip(run(subject, subject.weights, subject.held_out), run(subject, weights, subject.held_out), strict=True)
    for expected, got in pairs:
        found += [d.relative_l2 for d in compare(expected[spec.name], got[spec.name], spec, subject.batch_axis).rows]
    return float(np.mean(found))


def _compare(subject: Subject) -> Iterator[Measurement]:
    plain = nearest(subject)
    better, names = calibrated(subject)
    exact = plain | {name: subject.weights[name] for name in names}
    count = sum(subject.weights[name].size for name in names)
    moved = sum(int(np.count_nonzero(plain[name] != better[name])) for name in names)
    before, after = drift(subject, plain), drift(subject, better)
    yield Measurement(f"{subject.name}: relative_l2, nearest", before)
    yield Measurement(f"{subject.name}: relative_l2, calibrated", after)
    yield Measurement(f"{subject.name}: relative_l2, fp32 others", drift(subject, exact))
    yield Measurement(f"{subject.name}: nearest ÷ calibrated", before / after, "×", at_least=_WORTH)
    yield Measurement(f"{subject.name}: weights rounded the other way", moved / count)
    yield Measurement(f"{subject.name}: residual ÷ fp32, nearest", _residual(subject.weights, plain, names))
    yield Measurement(f"{subject.name}: residual ÷ fp32, calibrated", _residual(subject.weights, better, names))


def _residual(original: Weights, rounded: Weights, names: Sequence[str]) -> float:
    """Bytes of the residual per byte of fp32."""
    encoded = sum(len(piece) for n in names for piece in encode_chunks(original[n], to_bf16(rounded[n])))
    return encoded / sum(original[name].nbytes for name in names)
