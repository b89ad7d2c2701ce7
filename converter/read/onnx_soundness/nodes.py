"""Checks that a node fits its operator: number of inputs and outputs, required attributes, attribute types."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnx import AttributeProto, NodeProto
from onnx.defs import OpSchema

from bf16kit.messages.errors import SourceError
from converter.read.onnx_soundness.tensors import check_tensor
from converter.read.onnx_soundness.walk import quoted

_VALUES = {
    AttributeProto.TENSOR: "t",
    AttributeProto.GRAPH: "g",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor",
}
_ANY = 1000  # ONNX writes 2³¹ − 1 for "any number"
_SINGLE = OpSchema.FormalParameterOption.Single


def check_node(path: Path, node: NodeProto, schema: OpSchema | None) -> None:
    """Raise :class:`SourceError` if ``node`` does not fit ``schema``; None means that the operator is not ONNX's."""
    names = [attribute.name for attribute in node.attribute]
    if len(set(names)) < len(names):
        raise SourceError(f"{path}: damaged: node {quoted(node.name)} has two attributes with the same name")
    for attribute in node.attribute:
        _check_attribute(path, node, attribute, schema)
    if schema is None:
        return
    for name, expected in schema.attributes.items():
        if expected.required and name not in names:
            raise SourceError(f"{_what(path, node)} lacks the attribute {name!r} of {quoted(node.op_type)}")
    _check_edges(path, node, "input", schema.inputs, (schema.min_input, schema.max_input))
    _check_edges(path, node, "output", schema.outputs, (schema.min_output, schema.max_output))


def _what(path: Path, node: NodeProto) -> str:
    """Name a node by its name or, because many exporters set none, by its output."""
    name = node.name or next(iter(node.output), "") or next(iter(node.input), "")
    return f"{path}: damaged: node {quoted(name)}"


def _check_attribute(path: Path, node: NodeProto, attribute: AttributeProto, schema: OpSchema | None) -> None:
    if attribute.type == AttributeProto.TENSOR and attribute.HasField("t"):
        check_tensor(path, attribute.t)
    for tensor in attribute.tensors:
        check_tensor(path, tensor)
    what = f"{_what(path, node)}: attribute {quoted(attribute.name)} of {quoted(node.op_type)}"
    field = _VALUES.get(attribute.type)
    if field is not None and not attribute.HasField(field) and not attribute.ref_attr_name:
        raise SourceError(f"{what} is empty")
    expected = None if schema is None else schema.attributes.get(attribute.name)
    if expected is None:
        return
    numbers = (attribute.type, int(expected.type.value))  # type: ignore[attr-defined]  # an enum
    if numbers[0] != numbers[1]:
        actual_type, expected_type = (AttributeProto.AttributeType.Name(number) for number in numbers)
        raise SourceError(f"{what} is {actual_type}, expected {expected_type}")


def _check_edges(
    path: Path, node: NodeProto, kind: str, declared: Sequence[OpSchema.FormalParameter], bounds: tuple[int, int]
) -> None:
    """Check the number of inputs or outputs; an empty name stands for an omitted one."""
    edges: Sequence[str] = getattr(node, kind)
    least, most = bounds
    if not least <= len(edges) <= most:
        expected_count = str(least) if least == most else f"{least} or more" if most > _ANY else f"{least} to {most}"
        text = f"{_what(path, node)} has {len(edges)} {kind}{'s' if len(edges) != 1 else ''}"
        raise SourceError(f"{text}, and {quoted(node.op_type)} needs {expected_count}")
    for name, parameter in zip(edges, declared, strict=False):
        if not name and parameter.option == _SINGLE:
            raise SourceError(f"{_what(path, node)} lacks the {kind} {parameter.name!r} of {quoted(node.op_type)}")
