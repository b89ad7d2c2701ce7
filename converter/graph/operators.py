"""Facts on operators: what ONNX's own schemas say about them, and the families that a precision plan distinguishes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import onnx_ir as ir
from onnx import defs

from bf16kit.runtime.ort.kernel import DOMAIN as KERNEL

BF16 = "tensor(bfloat16)"

# The multiply-accumulate operators, which gain most from bf16.
PRODUCTS = frozenset(
    {"MatMul", "Gemm", "Conv", "Attention", "MultiHeadAttention", "GroupQueryAttention", "FusedMatMul"}
)
# Operators that read weights. Overly large values in those are an error, not masks.
WEIGHTED = PRODUCTS | {"ConvTranspose", "Gather", "LSTM", "GRU", "RNN", "ConvInteger", "QLinearConv", "Einsum"}
# Operators over a sequence that the CPU kernel has too, under names that begin with these.
RECURRENT = ("LSTM", "GRU")
# Operators that only move elements, and so are exact in every precision; input 0 is the data.
MOVEMENT = frozenset(
    {"Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze"}
) | {"Concat", "Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "Slice", "Split"}
# Those of them that combine the data of several inputs.
MERGING = frozenset({"Concat", "ScatterElements", "ScatterND"})
# Arithmetic whose result is one of its operands, or one with its sign changed: exact too.
EXACT = MOVEMENT | {"Abs", "Max", "Min", "MaxPool", "GlobalMaxPool", "Neg", "Relu", "Where"}
# Operators that read only a tensor's shape. Not Size: ONNX Runtime's has no kernel for every dtype.
SHAPE_ONLY = frozenset({"Shape"})
# torch.autocast computes these in fp32 too: they are little work, and rounding scale and bias affects all that follows.
NORMALISATIONS = frozenset(
    {"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"}
    | {"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
)
CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})

# Type variables that are not the data's: LayerNormalization's mean and inverse deviation stay fp32.
_STASHED = {"LayerNormalization": {"U"}}


@dataclass(frozen=True, slots=True)
class Bf16Form:
    """The positions of a node's inputs and outputs that may be bf16; all of them must be so together."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def label(node: ir.Node) -> str:
    """Return the name of an operator for users, with its domain if that is not ONNX's."""
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def since_version(node: ir.Node, opset: int) -> int | None:
    """Return the version of the operator in ``opset``: 1 for com.microsoft, None for an unknown operator."""
    if node.domain == "com.microsoft":
        return 1
    schema = _schema(node.domain, node.op_type, opset)
    return None if schema is None else schema.since_version


def bf16_form(node: ir.Node, opset: int) -> Bf16Form | None:
    """Return where ``node`` may have bf16 at ``opset``; None if the operator has no bf16 form or no known schema.

    com.microsoft has no schemas here; its operators take and return one floating type, as long as only one output is
    used. bf16kit's own products read weights in bf16, one per output, at the inputs after the first, its blocks of
    convolutions three, and its recurrences two, or two for each direction; all else is fp32. Its attention and
    normalisations have no bf16 inputs.
    """
    if node.domain == KERNEL:
        weights = len(node.outputs) if node.op_type.startswith(("MatMul", "Gather", "Conv")) else 0
        if node.op_type.startswith("ConvBlock"):
            weights = 3
        if node.op_type.startswith(RECURRENT):
            weights = 4 if "2" in node.op_type else 2
        return Bf16Form(tuple(range(1, weights + 1)), ())
    if node.domain == "com.microsoft":
        used = [i for i, o in enumerate(node.outputs) if o.uses() or o.is_graph_output()]
        return Bf16Form(tuple(range(len(node.inputs))), (0,)) if used in ([], [0]) else None
    return _form(node.domain, node.op_type, opset, len(node.inputs), len(node.outputs))


@cache  # a search plans a model hundreds of times
def _form(domain: str, op: str, opset: int, inputs: int, outputs: int) -> Bf16Form | None:
    schema = _schema(domain, op, opset)
    if schema is None:
        return None
    narrow = {c.type_param_str for c in schema.type_constraints if BF16 in c.allowed_type_strs}
    narrow -= _STASHED.get(op, set())
    made = _positions(schema.outputs, outputs, narrow)
    return Bf16Form(_positions(schema.inputs, inputs, narrow), made) if made else None


def _positions(formal: Sequence[defs.OpSchema.FormalParameter], count: int, narrow: set[str]) -> tuple[int, ...]:
    if not formal:
        return ()
    return tuple(i for i in range(count) if formal[min(i, len(formal) - 1)].type_str in narrow)


def _schema(domain: str, op: str, opset: int) -> defs.OpSchema | None:
    try:
        return defs.get_schema(op, opset, domain)
    except defs.SchemaError:
        return None
