"""The base of conversion steps, and the step that infers a dtype and, if possible, a shape for every value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from bf16kit.converter.graph.initializers import dims
from bf16kit.converter.graph.names import values_of
from bf16kit.converter.process.quiet import quiet
from bf16kit.messages.errors import ConversionError
from bf16kit.messages.wording import brief

# Changes a graph in place, or raises ConversionError if that cannot be; messages have the function's name.
Step = Callable[[ir.Model], None]


def run(steps: Sequence[Step], model: ir.Model) -> ir.Model:
    """Run ``steps`` in order on ``model``, in place, and return it.

    Raises :class:`ConversionError` that names the step that failed, the steps before it, and the cause, so that a bug
    report tells where the graph became invalid.
    """
    for done, step in enumerate(steps):
        try:
            step(model)
        except Exception as error:
            cause = brief(error if isinstance(error, ConversionError) else f"{type(error).__name__}: {error}")
            after = f" (after {', '.join(map(_name, steps[:done]))})" if done else ""
            raise ConversionError(f"step '{_name(step)}'{after}: {cause}") from error
    return model


def _name(step: Step) -> str:
    """Return ``infer types`` for :func:`infer_types`, also if some of its arguments are bound by a partial."""
    return str(getattr(step, "func", step).__name__.replace("_", " "))


# Operators whose result is no tensor.
_SEQUENCES = frozenset(
    {"Optional", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceMap"}
) | {"SplitToSequence"}


# Operators that ONNX's inference does not know, whose first output has the floating type of all their data. For those
# in _SAME_SHAPE, it also has the first input's shape.
_FOREIGN = ("com.microsoft", "ai.onnx.ml")
_SAME_SHAPE = frozenset(
    {"BiasAdd", "BiasGelu", "BiasSoftmax", "FastGelu", "Gelu", "GroupNorm", "Normalizer", "QuickGelu"}
    | {"RotaryEmbedding", "Scaler", "SkipGroupNorm", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
)
_SAME_TYPE = _SAME_SHAPE | {
    *("Attention", "FusedConv", "FusedGemm", "FusedMatMul", "GroupQueryAttention", "MultiHeadAttention", "NhwcConv")
}
_ROUNDS = 4  # ONNX's types reach an operator of another domain, whose output's type lets ONNX infer the next nodes


def infer_types(model: ir.Model) -> None:
    """Run ONNX's shape inference over the model, without serialising weights.

    Operators of com.microsoft and ai.onnx.ml that keep the type of their inputs are inferred here. The plan treats what
    stays unknown (outputs of other domains, sequences) as "not fp32" and leaves it alone.
    """
    for value in model.graph.initializers.values():
        if value.const_value is not None:
            value.type = value.type or ir.TensorType(value.const_value.dtype)
            value.shape = value.shape or ir.Shape(dims(value.const_value))
    untyped = [value for graph in model.graphs() for value in values_of(graph) if value.type is None]
    infer = ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)
    with quiet():  # where it cannot infer, it logs a traceback and leaves the model unchanged
        infer(model)
        for _ in range(_ROUNDS):
            if not _infer_foreign(model):
                break
            infer(model)
    _forget_sequences(model, untyped)


def _infer_foreign(model: ir.Model) -> bool:
    """Infer the output types of known operators of other domains; return whether anything was inferred."""
    inferred = False
    for node in model.graph.all_nodes():
        if node.domain not in _FOREIGN or node.op_type not in _SAME_TYPE:
            continue
        output, data = node.outputs[0], node.inputs[0]
        types = (value.dtype for value in node.inputs if value is not None and value.dtype is not None)
        dtype = next((dtype for dtype in types if dtype.is_floating_point()), None)
        if output.dtype is None and dtype is not None:
            output.type, inferred = ir.TensorType(dtype), True
        if node.op_type in _SAME_SHAPE and output.shape is None and data is not None and data.shape is not None:
            output.shape, inferred = data.shape, True
    return inferred


def untyped(model: ir.Model) -> list[ir.Node]:
    """Return the nodes with a used output whose type is unknown; nodes that return sequences are left out."""
    return [
        node
        for node in model.graph.all_nodes()
        if node.op_type not in _SEQUENCES and any(o.name and o.type is None and o.uses() for o in node.outputs)
    ]


def _forget_sequences(model: ir.Model, untyped: list[ir.Value]) -> None:
    """Remove the inferred type of sequences: onnx_ir 1.1 gives each value without a type the type of a tensor."""
    loops = [node for node in model.graph.all_nodes() if node.op_type == "Loop"]
    carried = {inside: value for loop in loops for inside, value in zip(_body(loop).inputs, loop.inputs, strict=False)}
    found: set[ir.Value] = set()
    while more := {value for value in untyped if value not in found and _is_sequence(value, found, carried)}:
        found |= more  # a node that passes a sequence on, into or out of a subgraph, returns one too
    for value in found:
        value.type, value.shape = None, None


def _body(loop: ir.Node) -> ir.Graph:
    return loop.attributes["body"].as_graph()


def _is_sequence(value: ir.Value, found: set[ir.Value], carried: Mapping[ir.Value, ir.Value | None]) -> bool:
    node, index = value.producer(), value.index()
    if node is None or index is None:
        passed_on = [carried.get(value)]  # what a Loop's body starts with
    elif node.op_type in _SEQUENCES:
        return True
    elif node.op_type == "Identity":
        passed_on = list(node.inputs[:1])
    else:
        place = index + 1 if node.op_type == "Loop" else index  # the outputs of a Loop's body start with its condition
        bodies = [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]
        passed_on = [body.outputs[place] for body in bodies if place < len(body.outputs)]
    return any(
        value in found or (value is not None and isinstance(value.type, ir.SequenceType | ir.OptionalType))
        for value in passed_on
    )


def is_float_tensor(value: ir.Value) -> bool:
    """Whether ``value`` is a named fp32 tensor; a sequence of them has the same ``dtype``."""
    return bool(value.name) and isinstance(value.type, ir.TensorType) and value.dtype == ir.DataType.FLOAT
