"""The accumulation probe: proves on the real device that products of bf16 values are summed in fp32.

It computes dot products of 4,096 integers, each exact in bf16, whose sums are exact in fp32 in any order. Two vectors
are needed. 4,096 ones sum to 4096 in fp32, but to 256 in one bf16 accumulator (256 + 1 rounds to 256). However, 16
lanes, or slices of K, of ones each stay small enough to be exact in bf16. So the second vector starts with large terms
and subtracts them at the end: every lane loses its ones in between, and every partial sum is off.

If the kernel is to round its activations, the probe repeats this with activations that bf16 cannot represent. The sums
must be those of the activations rounded to nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bf16kit.numerics.panels import pack
from bf16kit.runtime import CPU, Accumulation
from bf16kit.runtime.ort.kernel import DOMAIN

TERMS = 4096
ROWS = (1, 64)  # matrix-vector and matrix products use different kernels
_COLUMNS = 48  # one whole panel and a narrower one, which the CPU kernel reads differently
_ONE_ACCUMULATOR_SUM = 256  # where a single bf16 accumulator of ones stops growing

# Activations for a product that rounds, each with its rounded value: a tie, and a value above the midpoint.
_ROUNDED = ((1 + 2.0**-8, 1.0), (1 + 3 * 2.0**-9, 1 + 2.0**-7))

_PRODUCT, _ROUNDING = "MatMul", "MatMulBf16_panels_tail"  # the CPU kernel's operators

Product = Callable[[NDArray[np.float32]], NDArray[Any]]


def weights() -> NDArray[np.float32]:
    """Weights [4096, 48]: ones in even columns; in odd ones 64 times 512, then ones, then 64 times -512."""
    matrix = np.ones((TERMS, _COLUMNS), np.float32)
    matrix[:64, 1::2] = 512
    matrix[-64:, 1::2] = -512
    return matrix


def classify(product: Product) -> Accumulation:
    """Return how ``product`` accumulates; it maps x, fp32 [rows, 4096], to x @ :func:`weights`, [rows, 48].

    ``fp32`` when every sum is exact, ``bf16`` when sums are off as lower precision makes them, ``unknown`` when they
    are not sums at all.
    """
    exact = weights().sum(axis=0)
    found: Accumulation = "fp32"
    for rows in ROWS:
        sums = np.asarray(product(np.ones((rows, TERMS), np.float32)), np.float32)
        if sums.shape != (rows, _COLUMNS) or not np.isfinite(sums).all():
            return "unknown"
        if np.array_equal(sums, np.broadcast_to(exact, sums.shape)):
            continue
        ones = sums[:, ::2]
        if ones.min() < _ONE_ACCUMULATOR_SUM or ones.max() > TERMS:
            return "unknown"
        found = "bf16"
    return found


def classify_rounding(product: Product) -> Accumulation:
    """Classify a product that rounds x to bf16; ``unknown``, too, if it rounds differently or not at all."""
    found = classify(product)
    for given, rounded_value in _ROUNDED if found == "fp32" else ():
        for rows in ROWS:
            sums = np.asarray(product(np.full((rows, TERMS), given, np.float32)), np.float32)
            if not np.array_equal(sums, np.broadcast_to(rounded_value * weights().sum(axis=0), sums.shape)):
                return "unknown"
    return found


def probe_onnx(device: str, precision: str, library: Path | None = None) -> Accumulation:
    """Probe ONNX Runtime on ``device`` with the arithmetic of ``precision`` (see :class:`RuntimeInfo`).

    ``bf16`` multiplies bf16 by bf16; on the CPU it multiplies fp32 rounded to bf16 by bf16. ``bf16-weights`` and
    ``fp32`` multiply fp32 activations by widened bf16 weights. The CPU kernel in ``library`` computes all but ``fp32``;
    without it, ONNX Runtime does. Raises :class:`RuntimeFailure` when the device cannot do that.
    """
    from bf16kit.runtime.ort.session import as_runtime_failure, open_session

    rounds = precision == "bf16" and device == CPU
    graph = _graph(precision, rounds, library is not None)
    session = open_session(graph, device=device, threads=1, library=library, operators=[_PRODUCT, _ROUNDING])

    def product(x: NDArray[np.float32]) -> NDArray[Any]:
        with as_runtime_failure(f"the accumulation probe failed on {device}"):
            return np.asarray(session.run(["y"], {"x": x})[0])

    return classify_rounding(product) if rounds else classify(product)


def _graph(precision: str, rounds: bool, kernel: bool) -> bytes:
    import ml_dtypes
    from onnx import TensorProto, helper, parser

    stored = weights().astype(ml_dtypes.bfloat16)
    if kernel and precision != "fp32":
        stored = pack(stored, 1)
        operator = _ROUNDING if rounds else _PRODUCT
        nodes = f'y = {DOMAIN}.{operator}<k={TERMS}, n={_COLUMNS}, layout="panels", activation="none">(x, w)'
    else:
        given = TensorProto.BFLOAT16 if precision == "bf16" else TensorProto.FLOAT
        multiplied = TensorProto.FLOAT if rounds else given
        nodes = f"""given = Cast<to={given}>(x)
            left = Cast<to={multiplied}>(given)
            right = Cast<to={multiplied}>(w)
            sums = MatMul(left, right)
            y = Cast<to={TensorProto.FLOAT}>(sums)"""
    # Opset and IR are pinned: the onnx package's newest may be too new for ONNX Runtime.
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21, "{DOMAIN}": 1]>
        accumulation_probe (float[rows, {TERMS}] x) => (float[rows, {_COLUMNS}] y) {{{nodes}}}"""
    )
    weight = helper.make_tensor("w", TensorProto.BFLOAT16, stored.shape, stored.tobytes(), raw=True)
    model.graph.initializer.append(weight)
    return bytes(model.SerializeToString())
