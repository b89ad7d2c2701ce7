"""Reads an fp32 ONNX file: its graph as it is, and its weights in initializers, Constant nodes and subgraphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bf16kit.messages.errors import Bf16kitError, ConversionError, SourceError, UsageError
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.ort.externaldata import all_tensors
from converter.graph.dimensions import is_named, mark_guessed, rename
from converter.graph.initializers import dims
from converter.graph.names import values_of
from converter.options import Options
from converter.process import onnx_trial
from converter.process.quiet import first_line, quiet, reason
from converter.read.detect import Kind
from converter.read.signature import input_specs, output_specs
from converter.read.sources import Advance
from converter.source import Checkpoint, Source, digest_files

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnx import GraphProto, ModelProto

_UNREAD = ("doc_string", "metadata_props")  # fields that are dropped, in any encoding
_SHOWN = 40  # bytes of a damaged name


def read(options: Options, _kind: Kind, advance: Advance) -> Source:
    """Return the file as a source; :class:`ConversionError` if it holds no fp32 weights."""
    from converter.read import oracles
    from converter.rewrite.explicit import floating_tensors

    if options.model is not None:
        raise UsageError("--model: an ONNX file brings its own architecture")
    model, files = read_graph(options.source)
    oracle = oracles.of_onnx(options.source, model)
    inputs, outputs = resolve_edges(model, options.inputs)
    tensors = floating_tensors(model)
    if not any(tensor.dtype.name == "float32" for tensor in tensors.values()):
        raise ConversionError(f"{options.source}: holds no fp32 weights, so there is nothing to convert")
    checkpoint = Checkpoint("onnx", digest_files(files, advance), tensors)
    return Source(checkpoint, model, inputs, outputs, tools=("onnxscript",), oracle=oracle)


def read_graph(path: Path) -> tuple[ir.Model, list[Path]]:
    """Return the model, its external data memory-mapped, and the files it consists of.

    Raises :class:`SourceError` when it is damaged, or when external data is missing or outside the model's directory,
    and :class:`ConversionError` when an input or output is no tensor that bf16kit serves, a constant is sparse, or
    ONNX Runtime cannot open it (:mod:`converter.process.onnx_trial`).
    """
    try:
        with quiet():
            model = _load(path)
            model.graph.sort()
    except Bf16kitError:
        raise
    except Exception as error:  # protobuf and onnx_ir raise errors of many kinds on damaged files
        raise SourceError(f"{path}: truncated or damaged: not an ONNX model ({reason(error)})") from error
    if not list(model.graph.outputs):
        raise SourceError(f"{path}: truncated or damaged: its graph has no outputs")
    # Up to IR version 3 weights had to be listed among the inputs, but callers do not feed them.
    for value in [value for value in model.graph.inputs if value.name in model.graph.initializers]:
        model.graph.inputs.remove(value)
    _correct_initializer_types(model)
    _keep_names_of_inputs(model)
    files = [path, *_external_files(path, model)]
    input_specs(model), output_specs(model)  # raises a better error than ONNX's checker for a missing type or shape
    onnx_trial.check(path)
    return model, files


def _load(path: Path) -> ir.Model:
    """Return the model as onnx_ir reads it, its external data beside it."""
    import onnx
    import onnx_ir as ir

    proto = onnx.load(path, load_external_data=False)
    for text in _undecodable(proto):  # neither onnx_ir nor ONNX's checker reports it
        raise SourceError(f"{path}: damaged: the name {text[:_SHOWN]!r} is not UTF-8")
    _check_supported(path, proto.graph)
    _check_places(path, proto)
    model = ir.from_proto(proto)
    for tensor in _tensors(model):
        if isinstance(tensor, ir.ExternalTensor):
            tensor.base_dir = path.parent
    return model


def _check_places(path: Path, proto: ModelProto) -> None:
    """Raise :class:`SourceError` for external data at a place that is no number of bytes: onnx_ir fails on it."""
    for tensor in all_tensors(proto):
        for entry in tensor.external_data:
            if entry.key in ("offset", "length") and not (entry.value.isascii() and entry.value.isdecimal()):
                raise SourceError(
                    f"{path}: damaged: tensor {tensor.name!r} has the {entry.key} {entry.value[:_SHOWN]!r}"
                )


def _undecodable(message: Any) -> Iterator[bytes]:
    """Yield the names in ``message``, at any depth, that are not UTF-8: protobuf returns them as bytes."""
    if message.DESCRIPTOR.name == "TensorProto":  # listing its fields would copy its data
        texts = (message.name, *(text for entry in message.external_data for text in (entry.key, entry.value)))
        yield from (text for text in texts if isinstance(text, bytes))
        return
    for field, value in message.ListFields():
        if field.name in _UNREAD:
            continue
        for each in value if field.is_repeated else (value,):
            if field.message_type is not None:
                yield from _undecodable(each)
            elif field.type == field.TYPE_STRING and isinstance(each, bytes):
                yield each


def _check_supported(path: Path, graph: GraphProto) -> None:
    """Raise :class:`ConversionError` for what a sound file may have and onnx_ir does not read: maps, sparse tensors."""
    producers = {name: node.op_type for node in graph.node for name in node.output}
    for edge in (*graph.input, *graph.output):
        kind = edge.type.WhichOneof("value")
        if kind == "map_type" or (kind == "sequence_type" and edge.type.sequence_type.elem_type.HasField("map_type")):
            what = "a map" if kind == "map_type" else "a sequence of maps"
            # every scikit-learn classifier ends with one by default
            remedy = "; export it without ZipMap (skl2onnx: options={'zipmap': False})"
            raise ConversionError(
                f"{path}: {edge.name!r} is {what}, and bf16kit serves tensors only"
                f"{remedy if producers.get(edge.name) == 'ZipMap' else ''}"
            )
    constants = [node.output[0] for node in graph.node for a in node.attribute if a.HasField("sparse_tensor")]
    for name in (*constants, *(tensor.values.name for tensor in graph.sparse_initializer)):
        raise ConversionError(f"{path}: constant {name!r} is sparse; make it dense")


def _correct_initializer_types(model: ir.Model) -> None:
    """Set each initializer's type and shape to those of its tensor, because a separate declaration may differ.

    Files of IR version 3 declare weights as inputs, possibly with free dimensions. ONNX Runtime ignores the declaration
    of an initializer that is also an output.
    """
    import onnx_ir as ir

    for value in (value for graph in _graphs(model) for value in graph.initializers.values()):
        if value.const_value is not None:
            value.type = ir.TensorType(value.const_value.dtype)
            value.shape = ir.Shape(dims(value.const_value))


def _keep_names_of_inputs(model: ir.Model) -> None:
    """Drop the names of free dimensions that no input has, and those that distinguish nothing.

    Names inside the graph are another program's guesses. Fusions need them, because inference does not follow an
    input's dimension through a Slice or an Expand, and are checked on several sizes. ONNX Runtime would trust them, and
    give values with equal names the same memory, or fail: it is shown none (:mod:`converter.graph.dimensions`).
    """
    import onnx_ir as ir

    edges = {*model.graph.inputs, *model.graph.outputs}
    named = {str(dim) for value in model.graph.inputs for dim in value.shape or () if _is_meaningful(dim)}
    for value in (value for graph in model.graphs() for value in values_of(graph)):
        if value.shape is not None and not value.is_initializer():
            kept = [_is_size(d) or (_is_meaningful(d) and (value in edges or str(d) in named)) for d in value.shape]
            value.shape = ir.Shape([dim if keep else None for dim, keep in zip(value.shape, kept, strict=True)])
    mark_guessed(model)


def _is_size(dim: int | ir.SymbolicDim) -> bool:
    return isinstance(dim, int) and dim >= 0  # some exporters write −1 for a free dimension


def _is_meaningful(dim: int | ir.SymbolicDim) -> bool:
    return not isinstance(dim, int) and is_named(dim.value)


def _external_files(path: Path, model: ir.Model) -> list[Path]:
    import onnx_ir as ir

    files: dict[Path, int] = {}
    for tensor in _tensors(model):
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        location = path.parent / tensor.location
        try:
            inside = location.resolve().is_relative_to(path.parent.resolve())
            location.stat()  # raises for names that are too long, files used as directories, and cyclic links
        except FileNotFoundError:
            pass
        except (OSError, RuntimeError, ValueError) as error:
            raise SourceError(f"{path}: the data of {tensor.name!r} cannot be read: {first_line(error)}") from None
        if not inside:
            raise SourceError(f"{path}: {tensor.name!r} is in {tensor.location!r}, outside the model's directory")
        end = (tensor.offset or 0) + (tensor.length or tensor.nbytes)
        files[location] = max(end, files.get(location, 0))
    for location, end in files.items():
        if not location.is_file():
            raise SourceError(f"{path}: its external data {location.name} is missing")
        if location.stat().st_size < end:
            raise SourceError(f"{location}: truncated: {location.stat().st_size} bytes, {path.name} needs {end}")
    return list(files)


def _tensors(model: ir.Model) -> Iterator[ir.TensorProtocol | None]:
    """Yield every tensor of the file: initializers and attributes of the graph, its subgraphs and its functions."""
    import onnx_ir as ir

    for graph in _graphs(model):
        yield from (value.const_value for value in graph.initializers.values())
    nodes = [*model.graph.all_nodes(), *(node for f in model.functions.values() for node in f.all_nodes())]
    for attribute in (attribute for node in nodes for attribute in node.attributes.values()):
        if attribute.type == ir.AttributeType.TENSOR:
            yield attribute.as_tensor()
        elif attribute.type == ir.AttributeType.TENSORS:
            yield from attribute.as_tensors()


def _graphs(model: ir.Model) -> Iterator[ir.Graph]:
    """Yield the main graph and every subgraph, including those of functions."""
    yield from model.graphs()
    for function in model.functions.values():
        yield from function.subgraphs()


def resolve_edges(
    model: ir.Model, given: Sequence[TensorSpec]
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the graph's inputs, with the dimension names of ``--input``, and its outputs.

    Raises :class:`UsageError` when a given name or dtype differs from the graph's.
    """
    import onnx_ir as ir

    inputs = resolve_inputs(input_specs(model), given)
    name_inputs(model, inputs)
    outputs = output_specs(model)
    for value in model.graph.outputs:
        if value.shape is not None:
            value.shape = ir.Shape([dim if _is_size(dim) else None for dim in value.shape])
    return inputs, outputs


def resolve_inputs(own: Sequence[TensorSpec], given: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return a model's ``own`` inputs, with the dimension names and sizes of ``--input``; errors as `resolve_edges`."""
    inputs = tuple(_chosen(spec, given) for spec in own)
    unknown = sorted({spec.name for spec in given} - {spec.name for spec in inputs})
    if unknown:
        raise UsageError(f"--input {unknown[0]}: the model's inputs are {', '.join(spec.name for spec in inputs)}")
    return inputs


def name_inputs(model: ir.Model, inputs: Sequence[TensorSpec]) -> None:
    """Set the dimensions of the graph's inputs to those of ``inputs``, which are in the same order; also inside it."""
    import onnx_ir as ir

    names: dict[str, set[int | str]] = {}
    for value, spec in zip(model.graph.inputs, inputs, strict=True):
        for old, new in zip(value.shape or (), spec.shape, strict=False):
            if not isinstance(old, int) and old.value is not None:
                names.setdefault(old.value, set()).add(new)
    rename(model, {old: next(iter(new)) if len(new) == 1 else None for old, new in names.items()})
    for value, spec in zip(model.graph.inputs, inputs, strict=True):
        value.shape = ir.Shape(spec.shape)


def _chosen(own: TensorSpec, given: Sequence[TensorSpec]) -> TensorSpec:
    """Return the given spec for ``own``, or ``own`` if there is none."""
    chosen = next((spec for spec in given if spec.name == own.name), own)
    # It may only name or fix free dimensions: fixed ones must stay.
    fits = len(chosen.shape) == len(own.shape) and all(
        a == b or isinstance(b, str) for a, b in zip(chosen.shape, own.shape, strict=True)
    )
    if chosen.dtype != own.dtype or not fits:
        raise UsageError(f"--input {own.name}: the model's own input is {own.dtype}{list(own.shape)}")
    return chosen
