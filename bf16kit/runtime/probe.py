"""The accumulation probe: proves on the real device that products of bf16 values are summed in fp32.

It computes dot products of 4,096 integers, each exact in bf16, whose sums are exact in fp32 in any order. Two vectors
are needed. 4,096 ones sum to 4096 in fp32, but to 256 in one bf16 accumulator (256 + 1 rounds to 256). However, 16
lanes, or slices of K, of ones each stay small enough to be exact in bf16. So the second vector starts with large terms
and subtracts them at the end: every lane loses its ones in between, and every partial sum is off.

If the CPU kernel is to round its activations, the probe repeats this with activations that bf16 cannot represent. The
sums must be exactly those of the activations rounded to nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bf16kit.numerics.panels import WIDTH, pack
from bf16kit.runtime import Accumulation
from bf16kit.runtime.device import CPU
from bf16kit.runtime.ort.kernel import DOMAIN

if TYPE_CHECKING:
    from onnx import FunctionProto, NodeProto, OperatorSetIdProto

TERMS = 4096
ROWS = (1, 64)  # matrix-vector and matrix products use different kernels
_COLUMNS = 48  # one whole panel and a narrower one, which the CPU kernel reads differently
_ONE_ACCUMULATOR_SUM = 256  # where a single bf16 accumulator of ones stops growing

# Activations for a product that rounds, each with its rounded value: a tie, and a value above the midpoint.
_ROUNDED = ((1 + 2.0**-8, 1.0), (1 + 3 * 2.0**-9, 1 + 2.0**-7))

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
    """Classify a product that rounds x to bf16, as :func:`classify` does.

    The result is ``unknown``, too, if it rounds differently or not at all.
    """
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
    ``fp32`` multiply fp32 activations by widened bf16 weights, by the CPU kernel in ``library`` or without it by ONNX
    Runtime. Raises :class:`RuntimeFailure` when the device cannot do that.
    """
    from bf16kit.runtime.ort.session import as_runtime_failure, open_session

    rounds = precision == "bf16" and device == CPU
    session = open_session(_graph(precision, rounds), device=device, threads=1, library=library)

    def product(x: NDArray[np.float32]) -> NDArray[Any]:
        with as_runtime_failure(f"the accumulation probe failed on {device}"):
            return np.asarray(session.run(["y"], {"x": x})[0])

    return classify_rounding(product) if rounds else classify(product)


def _graph(precision: str, rounds: bool) -> bytes:
    import ml_dtypes
    from onnx import TensorProto, helper

    stored = weights().astype(ml_dtypes.bfloat16)
    functions = []
    if precision == "bf16-weights" or rounds:
        stored = pack(stored, 1)
        nodes = [_kernel_node(rounds)]
        functions = [_kernel_function(rounds)]
    elif precision == "bf16":
        nodes = [
            helper.make_node("Cast", ["x"], ["narrow"], to=TensorProto.BFLOAT16),
            helper.make_node("MatMul", ["narrow", "w"], ["sums"]),
            helper.make_node("Cast", ["sums"], ["y"], to=TensorProto.FLOAT),
        ]
    else:
        nodes = [
            helper.make_node("Cast", ["w"], ["wide"], to=TensorProto.FLOAT),
            helper.make_node("MatMul", ["x", "wide"], ["y"]),
        ]
    graph = helper.make_graph(
        nodes,
        "accumulation_probe",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", TERMS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", _COLUMNS])],
        [helper.make_tensor("w", TensorProto.BFLOAT16, stored.shape, stored.tobytes(), raw=True)],
    )
    # Opset and IR are pinned: the onnx package's newest may be too new for ONNX Runtime.
    opsets = [_opset(), _opset(DOMAIN)] if functions else [_opset()]
    model = helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=10)
    return bytes(model.SerializeToString())


def _operator(rounds: bool) -> str:
    """Return the kernel's operator; names of rounding operators include the layout."""
    return "MatMulBf16_panels_tail" if rounds else "MatMul"


def _kernel_node(rounds: bool) -> NodeProto:
    from onnx import helper

    name = _operator(rounds)
    return helper.make_node(
        name, ["x", "w"], ["y"], domain=DOMAIN, k=TERMS, n=_COLUMNS, layout="panels", activation="none"
    )


def _kernel_function(rounds: bool) -> FunctionProto:
    """Define :func:`_kernel_node` in standard operators: unpack the panels to [K, N], widen, multiply."""
    from onnx import TensorProto, helper

    panels, tail = divmod(_COLUMNS, WIDTH)
    sizes = {
        "split": [panels * TERMS * WIDTH, TERMS * tail],
        "panels": [panels, TERMS, WIDTH],
        "whole": [TERMS, panels * WIDTH],
        "tail": [TERMS, tail],
    }
    nodes = [helper.make_node("Constant", [], [name], value_ints=value) for name, value in sizes.items()]
    nodes += [
        helper.make_node("Split", ["W", "split"], ["first", "last"]),
        helper.make_node("Reshape", ["first", "panels"], ["by_panel"]),
        helper.make_node("Transpose", ["by_panel"], ["by_row"], perm=[1, 0, 2]),
        helper.make_node("Reshape", ["by_row", "whole"], ["left"]),
        helper.make_node("Reshape", ["last", "tail"], ["right"]),
        helper.make_node("Concat", ["left", "right"], ["matrix"], axis=1),
        helper.make_node("Cast", ["matrix"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["X"], ["narrow"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["narrow"], ["rounded"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["rounded" if rounds else "X", "wide"], ["Y"]),
    ]
    attributes = ["k", "n", "layout", "activation"]
    return helper.make_function(DOMAIN, _operator(rounds), ["X", "W"], ["Y"], nodes, [_opset()], attributes)


def _opset(domain: str = "") -> OperatorSetIdProto:
    from onnx import helper

    return helper.make_opsetid(domain, 1 if domain else 21)
