"""Defines operators with several products of the same activations, in ONNX's own operators.

The kernel computes the products at once and wakes its threads once. Such operators exist only for whole panels without
an activation, which is what query, key and value of attention have.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from converter.fuse.functions import FunctionBody, ProductVariant, lists, stem
from converter.fuse.panelnodes import matrix_nodes

MOST = 3  # products in one node


@dataclass(frozen=True, slots=True)
class JoinedVariant:
    """An operator of ``count`` products, 2 to :data:`MOST`, all with a bias or all without; ``rounds`` is as in
    :class:`~converter.fuse.functions.ProductVariant`."""

    count: int
    bias: bool
    rounds: bool = False

    @property
    def op_type(self) -> str:
        """The operator's name, such as ``MatMul3_panels_bias``; kernels/ort/operators.cpp registers them all."""
        return f"{stem(self.count, self.rounds)}_panels{'_bias' if self.bias else ''}"


def _single(bias: bool, rounds: bool) -> str:
    return ProductVariant("panels", ("panels", "matrix"), bias, "none", rounds).op_type


# The operators of single products that may be joined, with whether each has a bias and whether it rounds.
JOINABLE = {_single(bias, rounds): (bias, rounds) for bias, rounds in itertools.product((False, True), (False, True))}


def attributes(k: int, columns: Sequence[int]) -> dict[str, int | list[int]]:
    """Return the attributes of a node with products of [k, n], one n for each of ``columns``: ``k``, ``n1`` and so on.

    Only its function reads the lists, as those of :func:`converter.fuse.functions.lists`.
    """
    found: dict[str, int | list[int]] = {"k": k}
    for position, n in enumerate(columns, 1):
        found[f"n{position}"] = n
        found |= {f"{name}{position}": sizes for name, sizes in lists("panels", k, n).items()}
    return found


def function(joined: JoinedVariant, opset: int) -> ir.Function:
    """Return the function of ``joined`` in the operators of ``opset``, 13 or newer.

    X [..., k], W1, W2 … (k·n1, k·n2 … in whole panels), and the biases B1 [n1], B2 [n2] … if they have one
    → Y1 [..., n1], Y2 [..., n2] …
    """
    positions = range(1, joined.count + 1)
    x = ir.Value(name="X")
    weights = [ir.Value(name=f"W{position}") for position in positions]
    biases = [ir.Value(name=f"B{position}") for position in positions if joined.bias]
    body, outputs, names = FunctionBody(opset), [], ["k"]
    activations = body.rounded(x) if joined.rounds else x
    for position, weight in zip(positions, weights, strict=True):
        attribute_names = {name: f"{name}{position}" for name in ("panels", "matrix")}
        names += [f"n{position}", *attribute_names.values()]
        body.extend(
            matrix_nodes(
                weight, {name: body.integers_attribute(attribute) for name, attribute in attribute_names.items()}
            )
        )
        bias = biases[position - 1] if joined.bias else None
        outputs.append(body.product(activations, body.nodes[-1].outputs[0], bias))
    for position, output in zip(positions, outputs, strict=True):
        output.name = f"Y{position}"
    return body.function(joined.op_type, [x, *weights, *biases], outputs, names)
