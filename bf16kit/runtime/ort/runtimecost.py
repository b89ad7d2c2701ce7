"""Tells whether the run time of an ONNX graph depends on the sizes of its inputs alone, and not on their values."""

from __future__ import annotations

import re
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING

from bf16kit.runtime.ort.kernel import DOMAIN, all_nodes, constant_values, parse_graph

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

# Standard operators whose cost is in proportion to the elements that they read and write, and whose output has a shape
# that values cannot change. Not Expand, Tile, Range or NonZero, and nothing with a graph inside: Loop, If, Scan.
_OPERATORS = """
Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization Cast Ceil Celu Clip Concat
Constant Cos Cosh Div Dropout Elu Equal Erf Exp Flatten Floor Gather Gelu GlobalAveragePool GlobalMaxPool Greater
GreaterOrEqual GroupNormalization HardSigmoid HardSwish Identity InstanceNormalization IsInf IsNaN
LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax LpNormalization Max MaxPool Mean Min Mish Mod Mul Neg
Not Or PRelu Pow RMSNormalization Reciprocal ReduceL1 ReduceL2 ReduceLogSumExp ReduceMax ReduceMean ReduceMin
ReduceProd ReduceSum ReduceSumSquare Relu Round Selu Shape Sigmoid Sign Sin Sinh Size Softmax Softplus
Softsign Sqrt Sub Sum Tan Tanh ThresholdedRelu Transpose Where Xor
"""
_BY_SIZE = frozenset(_OPERATORS.split())
# The cost of a product of two inputs grows faster than their size, so one of the two must be constant.
_PRODUCTS = frozenset(["Conv", "Gemm", "MatMul"])
_SHAPED_BY_INPUTS = frozenset(["Reshape", "Slice", "Split", "Squeeze", "Unsqueeze"])  # by the second and later ones
_KERNEL = re.compile(
    r"MatMul|Gather|\w*LayerNorm|\w*RmsNorm"
)  # how names of the CPU kernel's operators begin; not attention


def depends_on_size_alone(model: Path | bytes) -> bool:
    """Return whether the bytes of its inputs determine how long the ONNX graph ``model`` runs. When in doubt: False.

    With two free dimensions they would not: 10 × 100 values may take less time than 1,000 × 1.
    """
    graph = parse_graph(model).graph
    constant = constant_values(graph)
    return (
        len(_free_dimensions(graph)) <= 1
        and bool(graph.node)
        and all(_is_by_size(node, constant) for node in all_nodes(graph.node))
    )


def _is_by_size(node: NodeProto, constant: Container[str]) -> bool:
    if node.domain == DOMAIN:
        return _KERNEL.match(node.op_type) is not None
    if node.domain:
        return False
    if node.op_type in _PRODUCTS:
        return any(name in constant for name in node.input[:2])
    if node.op_type in _SHAPED_BY_INPUTS:
        return all(name in constant for name in node.input[1:] if name)
    return node.op_type in _BY_SIZE


def _free_dimensions(graph: GraphProto) -> set[str]:
    """Return the names of the inputs' free dimensions; one without a name counts by its place."""
    initializers = {tensor.name for tensor in graph.initializer}
    return {
        dim.dim_param or f"{edge.name}.{place}"
        for edge in graph.input
        if edge.name not in initializers
        for place, dim in enumerate(edge.type.tensor_type.shape.dim)
        if not dim.HasField("dim_value")
    }
