"""Reads an fp32 ONNX file: its graph as it is, and its weights in initializers, Constant nodes and subgraphs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx import ModelProto

from bf16kit.converter.graph.dimensions import is_named, mark_guessed, rename
from bf16kit.converter.graph.initializers import dims
from bf16kit.converter.graph.names import values_of
from bf16kit.converter.options import Options
from bf16kit.converter.process import onnx_trial
from bf16kit.converter.process.quiet import first_line, quiet, reason
from bf16kit.converter.read.detect import Kind
from bf16kit.converter.read.sources import Advance, check_fp32, input_specs, output_specs
from bf16kit.converter.rewrite.lowering import check_opset
from bf16kit.converter.source import Checkpoint, Source, digest_files
from bf16kit.messages.errors import Bf16kitError, ConversionError, SourceError, UsageError
from bf16kit.numerics.tensors import BY_ONNX, TensorSpec
from bf16kit.runtime.ort.onnxgraph import all_tensors

_UNREAD = ("doc_string", "metadata_props")  # fields that are dropped, in any encoding


def read(options: Options, _kind: Kind, advance: Advance) -> Source:
    """Return the file as a source; :class:`ConversionError` if it holds no fp32 weights."""
    from bf16kit.converter.read import oracles
    from bf16kit.converter.rewrite.explicit import floating_tensors

    model, files = read_graph(options.source)
    oracle = oracles.of_onnx(options.source, model)
    inputs, outputs = resolve_edges(model, options.inputs)
    tensors = floating_tensors(model)
    check_fp32(options.source, tensors)
    checkpoint = Checkpoint("onnx", digest_files(files, advance), tensors)
    return Source(checkpoint, model, inputs, outputs, tools=("onnxscript",), oracle=oracle)


def read_graph(path: Path) -> tuple[ir.Model, list[Path]]:
    """Return the model, its external data memory-mapped, and the files it consists of.

    Raises :class:`SourceError` when it is damaged, or when external data is missing or outside the model's directory,
    and :class:`ConversionError` when an input or output is no tensor that bf16kit serves, a constant is sparse, its
    opset is too new, or ONNX Runtime cannot open it (:mod:`bf16kit.converter.process.onnx_trial`).
    """
    try:
        with quiet():
            model, files = _load(path)
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
    # These raise better errors than ONNX's checker and ONNX Runtime, for a missing type or shape, and for an opset.
    input_specs(model), output_specs(model)
    check_opset(model)
    onnx_trial.check(path)
    return model, files


def _load(path: Path) -> tuple[ir.Model, list[Path]]:
    """Return the model as onnx_ir reads it, and its files."""
    proto = onnx.load(path, load_external_data=False)
    for text in _undecodable(proto):  # neither onnx_ir nor ONNX's checker reports it
        raise SourceError(f"{path}: damaged: the name {text[:40]!r} is not UTF-8")
    for edge in (*proto.graph.input, *proto.graph.output):
        kind = edge.type.WhichOneof("value")
        if kind not in ("tensor_type", None):  # every scikit-learn classifier ends with a map by default
            raise ConversionError(
                f"{path}: {edge.name!r} is of type {kind.removesuffix('_type')}, and bf16kit serves tensors only; a"
                " classifier of scikit-learn is exported without ZipMap (skl2onnx: options={'zipmap': False})"
            )
    constants = [node.output[0] for node in proto.graph.node for a in node.attribute if a.HasField("sparse_tensor")]
    for name in (*constants, *(tensor.values.name for tensor in proto.graph.sparse_initializer)):
        raise ConversionError(f"{path}: constant {name!r} is sparse; make it dense")
    files = _external_files(path, proto)
    return ir.from_proto(proto), [path, *files]


def _external_files(path: Path, proto: ModelProto) -> list[Path]:
    """Return the files that hold the data of tensors, at any depth, and state them in ``proto`` by their whole paths.

    Otherwise onnx_ir would look for the data of a function's tensors in the working directory.
    """
    from onnx.external_data_helper import ExternalDataInfo

    files: dict[Path, None] = {}
    for tensor in all_tensors(proto):
        if tensor.data_location != tensor.EXTERNAL:
            continue
        try:
            info: Any = ExternalDataInfo(tensor)
            location = path.parent.absolute() / info.location
            inside = location.resolve().is_relative_to(path.parent.resolve())
            present = location.stat().st_size if location.is_file() else -1
            location.stat()  # raises for names that are too long, files used as directories, and cyclic links
        except FileNotFoundError:
            present = -1
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            raise SourceError(f"{path}: the data of {tensor.name!r} cannot be read: {first_line(error)}") from None
        if not inside:
            raise SourceError(f"{path}: {tensor.name!r} is in {info.location!r}, outside the model's directory")
        if present < 0:
            raise SourceError(f"{path}: its external data {location.name} is missing")
        known = BY_ONNX.get(tensor.data_type)
        nbytes = 0 if known is None else known.numpy.itemsize * math.prod(tensor.dims)
        needed = (info.offset or 0) + max(info.length or 0, nbytes)
        if present < needed:
            raise SourceError(f"{location}: truncated: {present} bytes, {path.name} needs {needed}")
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = str(location)
        files[location] = None
    return list(files)


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


def _correct_initializer_types(model: ir.Model) -> None:
    """Set each initializer's type and shape to those of its tensor, because a separate declaration may differ.

    Files of IR version 3 declare weights as inputs, possibly with free dimensions. ONNX Runtime ignores the declaration
    of an initializer that is also an output.
    """
    graphs = (*model.graphs(), *(graph for function in model.functions.values() for graph in function.subgraphs()))
    for value in (value for graph in graphs for value in graph.initializers.values()):
        if value.const_value is not None:
            value.type = ir.TensorType(value.const_value.dtype)
            value.shape = ir.Shape(dims(value.const_value))


def _keep_names_of_inputs(model: ir.Model) -> None:
    """Drop the names of free dimensions that no input has, and those that distinguish nothing.

    Names inside the graph are another program's guesses. Fusions need them, because inference does not follow an
    input's dimension through a Slice or an Expand, and are checked on several sizes. ONNX Runtime would trust them, and
    give values with equal names the same memory, or fail: it is shown none (:mod:`bf16kit.converter.graph.dimensions`).
    """
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


def resolve_edges(
    model: ir.Model, given: Sequence[TensorSpec]
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the graph's inputs, with the dimension names of ``--input``, and its outputs.

    Raises :class:`UsageError` when a given name or dtype differs from the graph's.
    """
    inputs = resolve_inputs(input_specs(model), given)
    name_inputs(model, inputs)
    outputs = output_specs(model)
    for value in model.graph.outputs:
        if value.shape is not None:
            value.shape = ir.Shape([dim if _is_size(dim) else None for dim in value.shape])
    return inputs, outputs


def resolve_inputs(own: Sequence[TensorSpec], given: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return a model's ``own`` inputs, with the dimension names and sizes of ``--input``; errors as `resolve_edges`."""
    names = [spec.name for spec in own]
    for unknown in (spec.name for spec in given if spec.name not in names):
        raise UsageError(f"--input {unknown}: the model's inputs are {', '.join(names)}")
    return tuple(_chosen(spec, given) for spec in own)


def name_inputs(model: ir.Model, inputs: Sequence[TensorSpec]) -> None:
    """Set the dimensions of the graph's inputs to those of ``inputs``, which are in the same order; also inside it."""
    names: dict[str, set[int | str]] = defaultdict(set)
    for value, spec in zip(model.graph.inputs, inputs, strict=True):
        for old, new in zip(value.shape or (), spec.shape, strict=False):
            if not isinstance(old, int) and old.value is not None:
                names[old.value].add(new)
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
