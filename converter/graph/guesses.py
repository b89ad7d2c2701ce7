"""Names of free dimensions inside a graph that another program guessed: for finding fusions, never for ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx_ir as ir

from converter.graph.names import values_of

GUESSED = "bf16kit.guessed"  # a model's metadata, in memory only


def mark_guessed(model: ir.Model) -> None:
    """Note that names of dimensions inside ``model``, and its clones, may be wrong."""
    model.metadata_props[GUESSED] = "yes"  # `meta` is not cloned


def rename(model: ir.Model, names: Mapping[str, int | str | None]) -> None:
    """Replace the names of free dimensions in ``names`` by other names, sizes, or nothing, everywhere in ``model``."""
    for value in (value for graph in model.graphs() for value in values_of(graph)):
        if value.shape is not None and not value.is_initializer():
            value.shape = ir.Shape(
                [dim if isinstance(dim, int) else names.get(dim.value or "", dim) for dim in value.shape]
            )


def drop_guesses(model: onnx.ModelProto) -> None:
    """Remove the note, and the names of free dimensions of all values inside ``model``; edges keep theirs."""
    notes = [entry for entry in model.metadata_props if entry.key == GUESSED]
    for note in notes:
        model.metadata_props.remove(note)
    if notes:
        _drop_names(model.graph)


def _drop_names(graph: onnx.GraphProto) -> None:
    for value in graph.value_info:
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                dim.ClearField("dim_param")
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        for body in (attribute.g, *attribute.graphs):
            _drop_names(body)
