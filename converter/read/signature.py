"""A graph's inputs and outputs as :class:`~bf16kit.numerics.tensors.TensorSpec`: names, dtypes, dimensions, kinds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from bf16kit.messages.errors import ConversionError, SourceError
from bf16kit.messages.wording import quoted
from bf16kit.numerics.tensors import BY_ONNX, Kind, TensorSpec, describe
from converter.graph.dimensions import UNKNOWN, name_dimensions

if TYPE_CHECKING:
    import onnx_ir as ir

_LARGEST = 2**47  # elements of one tensor: more than any machine can map


def input_specs(model: ir.Model) -> tuple[TensorSpec, ...]:
    """Return the graph's inputs; unnamed free dimensions are named after input and axis.

    Raises :class:`ConversionError` for sequences, optionals, unknown ranks, dtypes that bf16kit does not serve, and
    sizes that do not fit any memory.
    """
    return name_dimensions([_spec(value, "other") for value in model.graph.inputs])


def output_specs(model: ir.Model) -> tuple[TensorSpec, ...]:
    """Return the graph's outputs as :func:`input_specs` does, each with the kind that its name suggests."""
    return name_dimensions(
        [_spec(value, kind_of(value.name or "")) for value in model.graph.outputs], input_specs(model)
    )


def kind_of(name: str) -> Kind:
    """Return an output's kind, guessed from its name."""
    lowered = name.lower()
    if "logits" in lowered or "scores" in lowered:
        return "logits"
    if "embed" in lowered or "hidden_state" in lowered or "pooler" in lowered:
        return "embedding"
    return "other"


def _spec(value: ir.Value, kind: Kind) -> TensorSpec:
    name = value.name or ""
    if value.type is None:
        raise SourceError(f"truncated or damaged: {quoted(name)} has no type")
    if value.dtype is None or int(value.dtype) not in BY_ONNX:
        raise ConversionError(f"{quoted(name)} is {value.type}, and bf16kit serves tensors of plain dtypes only")
    if value.shape is None:
        raise ConversionError(f"{quoted(name)} has no known rank; run ONNX shape inference on the model first")
    shape = tuple(_dim(name, axis, dim) for axis, dim in enumerate(value.shape))
    if math.prod(dim for dim in shape if isinstance(dim, int)) > _LARGEST:
        raise ConversionError(f"{quoted(name)} is declared as {describe(shape)}, which does not fit in any memory")
    return TensorSpec(name, BY_ONNX[int(value.dtype)].name, shape, kind)


def _dim(name: str, axis: int, dim: Any) -> int | str:
    if dim == 0:
        raise ConversionError(
            f"{quoted(name)} has size 0 in dimension {axis}; export the model with a named dimension there"
        )
    if isinstance(dim, int):
        return dim if dim > 0 else UNKNOWN  # some exporters write −1 for a free dimension
    return UNKNOWN if dim.value is None else str(dim.value)
