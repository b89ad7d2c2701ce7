"""Tells whether the run time of an ONNX graph depends on the sizes of its inputs alone, and not on their values."""

from __future__ import annotations

from pathlib import Path

from bf16kit.runtime.kernel import DOMAIN, all_nodes, constant_values, parse_graph

# Standard operators whose cost is in proportion to the elements that they read and write, and whose output has a shape
# that values cannot make larger. Not Expand, Tile, Range or NonZero, and nothing with a graph inside: Loop, If, Scan.
_OPERATORS = """
Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization Cast Ceil Celu Clip Concat
Constant Cos Cosh Div Dropout Elu Equal Erf Exp Flatten Floor Gather Gelu GlobalAveragePool GlobalMaxPool Greater
GreaterOrEqual GroupNormalization HardSigmoid HardSwish Identity InstanceNormalization IsInf IsNaN
LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax LpNormalization Max MaxPool Mean Min Mish Mod Mul Neg
Not Or PRelu Pow RMSNormalization Reciprocal ReduceL1 ReduceL2 ReduceLogSumExp ReduceMax ReduceMean ReduceMin
ReduceProd ReduceSum ReduceSumSquare Relu Reshape Round Selu Shape Sigmoid Sign Sin Sinh Size Slice Softmax Softplus
Softsign Split Sqrt Squeeze Sub Sum Tan Tanh ThresholdedRelu Transpose Unsqueeze Where Xor
"""
_BY_SIZE = frozenset(_OPERATORS.split())
# The cost of a product of two inputs grows faster than their size, so one of the two must be constant.
_PRODUCTS = frozenset(["Conv", "Gemm", "MatMul"])


def depends_on_size_alone(model: Path | bytes) -> bool:
    """Return whether values cannot change how long the ONNX graph ``model`` runs. When in doubt: False."""
    graph = parse_graph(model).graph
    constant = constant_values(graph)
    return bool(graph.node) and all(
        (node.domain == DOMAIN and "Attention" not in node.op_type)
        or (not node.domain and node.op_type in _BY_SIZE)
        or (not node.domain and node.op_type in _PRODUCTS and not constant.isdisjoint(node.input[:2]))
        for node in all_nodes(graph.node)
    )
