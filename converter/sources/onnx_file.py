"""An fp32 ONNX file: its weights, in initializers, Constant nodes and bodies, and its graph as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bf16kit.errors import SourceError, UsageError
from bf16kit.tensors import TensorSpec
from converter.process.quiet import quiet, reason
from converter.sources.edges import input_specs

if TYPE_CHECKING:
    import onnx_ir as ir


def read_graph(path: Path) -> tuple[ir.Model, list[Path]]:
    """The model, its external data memory-mapped, and the files it is made of.

    Raises :class:`SourceError` when it is damaged, or when external data is missing or outside the model's directory.
    """
    import onnx_ir as ir

    try:
        with quiet():
            model = ir.load(path)
            model.graph.sort()
    except Exception as error:  # protobuf and onnx_ir raise errors of many kinds on damaged files
        raise SourceError(f"{path}: truncated or damaged: not an ONNX model ({reason(error)})") from error
    if not list(model.graph.outputs):
        raise SourceError(f"{path}: truncated or damaged: its graph has no outputs")
    # Up to IR version 3 weights had to be listed among the inputs; nobody feeds them.
    for value in [value for value in model.graph.inputs if value.name in model.graph.initializers]:
        model.graph.inputs.remove(value)
    return model, [path, *_external_files(path, model)]


def _external_files(path: Path, model: ir.Model) -> list[Path]:
    import onnx_ir as ir

    files: dict[Path, int] = {}
    for tensor in _tensors(model):
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        location = path.parent / tensor.location
        if not location.resolve().is_relative_to(path.parent.resolve()):
            raise SourceError(f"{path}: {tensor.name!r} is in {tensor.location!r}, outside the model's directory")
        end = (tensor.offset or 0) + (tensor.length or tensor.nbytes)
        files[location] = max(end, files.get(location, 0))
    for location, end in files.items():
        _check_size(path, location, end)
    return list(files)


def _tensors(model: ir.Model) -> Iterator[ir.TensorProtocol | None]:
    """Every tensor the file holds: initializers and attributes, of the graph, its bodies and its functions."""
    import onnx_ir as ir

    for graph in (*model.graphs(), *(graph for function in model.functions.values() for graph in function.subgraphs())):
        yield from (value.const_value for value in graph.initializers.values())
    nodes = [*model.graph.all_nodes(), *(node for f in model.functions.values() for node in f.all_nodes())]
    for attribute in (attribute for node in nodes for attribute in node.attributes.values()):
        if attribute.type == ir.AttributeType.TENSOR:
            yield attribute.as_tensor()
        elif attribute.type == ir.AttributeType.TENSORS:
            yield from attribute.as_tensors()


def _check_size(path: Path, location: Path, end: int) -> None:
    if not location.is_file():
        raise SourceError(f"{path}: its external data {location.name} is missing")
    if location.stat().st_size < end:
        raise SourceError(f"{location}: truncated: {location.stat().st_size} bytes, {path.name} needs {end}")


def apply_inputs(model: ir.Model, given: Sequence[TensorSpec]) -> None:
    """Give the graph's inputs the dimension names of ``--input``; names and dtypes must be the graph's own."""
    import onnx_ir as ir

    specs = {spec.name: spec for spec in input_specs(model)}
    for spec in given:
        if spec.name not in specs:
            raise UsageError(f"--input {spec.name}: the model's inputs are {', '.join(specs)}")
        own = specs[spec.name]
        if spec.dtype != own.dtype or not _fits(spec, own):
            raise UsageError(f"--input {spec.name}: the model's own input is {own.dtype}{list(own.shape)}")
    for value in model.graph.inputs:
        chosen = next((spec for spec in given if spec.name == value.name), specs[value.name or ""])
        value.shape = ir.Shape(chosen.shape)


def _fits(spec: TensorSpec, own: TensorSpec) -> bool:
    """Free dimensions may be renamed or fixed; fixed ones stay as they are."""
    if len(spec.shape) != len(own.shape):
        return False
    return all(a == b or isinstance(b, str) for a, b in zip(spec.shape, own.shape, strict=True))
