"""Checks ``saved_model.pb`` before TensorFlow loads it: its signatures, and what TensorFlow would run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bf16kit.messages.errors import ConversionError, SourceError, UsageError
from bf16kit.messages.text import listed, printable
from bf16kit.messages.wording import quoted
from converter.graph.names import FreshNames
from converter.read.tensorflow.messages import message
from converter.read.tensorflow.operators import COMPUTING, RESTORING, refusal
from converter.read.tensorflow.reach import reachable_nodes

DEFAULT = "serving_default"
FILE = "saved_model.pb"
_LARGEST = (1 << 31) - 1  # bytes of a protocol buffer
_MOST_NAMED = 5
_MOST_LISTED, _SHOWN = 20, 100  # signatures in a message, and characters of a name
_STRING, _BFLOAT16, _REF = 7, 14, 100
_OWN = "__saved_model_"  # prefix of signatures that TensorFlow adds for its own use


@dataclass(frozen=True, slots=True)
class ServedSignature:
    """One signature of a SavedModel: its tensors by the names that clients use, and the graph for TensorFlow.

    ``graph`` is a MetaGraphDef without what is not needed: collections, assets and Python's objects.
    """

    signature: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    graph: bytes
    notes: tuple[str, ...] = ()


def choose(directory: Path, signature: str | None) -> ServedSignature:
    """Return the signature that ``--signature`` names, or the default one, after checking its operators.

    Raises :class:`SourceError` for a damaged file, :class:`UsageError` naming the signatures if the requested one does
    not exist, and :class:`ConversionError` for strings and operators that cannot be converted.
    """
    path = directory / FILE
    graph = _serving_graph(path, _parsed(path))
    signatures = _by_key(path, "signature", graph.signatures)
    name = _name(path, [name for name in signatures if not name.startswith(_OWN)], signature)
    inputs = _tensors(path, name, "input", signatures[name].inputs)
    outputs = _tensors(path, name, "output", signatures[name].outputs)
    if not outputs:
        raise ConversionError(f"{path}: signature {quoted(name)} has no outputs")
    _check_computing(path, name, graph.graph, outputs.values())
    if graph.saver.restore_op:
        _check_restoring(path, graph)
    for field in ("collections", "assets", "objects"):
        graph.ClearField(field)
    new_names = _distinct_names(inputs, outputs)
    notes = tuple(
        f"output {quoted(old)} was renamed to {quoted(name)}, because an input has the same name"
        for old, name in new_names.items()
        if old != name
    )
    return ServedSignature(
        name, inputs, {new_names[old]: tensor for old, tensor in outputs.items()}, graph.SerializeToString(), notes
    )


def _distinct_names(inputs: Mapping[str, str], outputs: Mapping[str, str]) -> dict[str, str]:
    """Return a name for each output: its own, unless an input has it, which TensorFlow allows but ONNX does not."""
    fresh = FreshNames((*inputs, *outputs))
    return {name: fresh.make(f"{name}_output") if name in inputs else name for name in outputs}


def _parsed(path: Path) -> Any:
    from google.protobuf.message import DecodeError

    if not path.resolve().is_relative_to(path.parent.resolve()):
        raise SourceError(f"{path}: is a link out of the model's directory; put the file itself there")
    try:
        if path.stat().st_size > _LARGEST:
            raise SourceError(f"{path}: is {path.stat().st_size} bytes; the limit for a protocol buffer is {_LARGEST}")
        content = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from None
    model = message("SavedModel")()
    try:
        model.ParseFromString(content)
    except DecodeError:
        raise SourceError(f"{path}: truncated or damaged: not a TensorFlow SavedModel") from None
    if not model.meta_graphs:
        raise SourceError(f"{path}: truncated or damaged: holds no graph")
    return model


def _serving_graph(path: Path, model: Any) -> Any:
    """Return the graph for serving, or the only one."""
    graphs = [graph for graph in model.meta_graphs if list(graph.info.tags) == ["serve"]]
    graphs = graphs or list(model.meta_graphs)
    if len(graphs) > 1:
        tags = _shown("; ".join(", ".join(graph.info.tags) or "no tag" for graph in graphs[:_MOST_NAMED]))
        raise ConversionError(
            f"{path}: holds {len(graphs)} graphs, expected exactly one with the single tag 'serve' ({tags}); save"
            " only the graph to convert"
        )
    return graphs[0]


def _by_key(path: Path, what: str, entries: Sequence[Any]) -> dict[str, Any]:
    found = {entry.key: entry.value for entry in entries}
    if len(found) < len(entries):
        raise SourceError(f"{path}: truncated or damaged: two {what}s have the same name")
    return dict(sorted(found.items()))


def _name(path: Path, names: Sequence[str], requested: str | None) -> str:
    if not names:
        raise ConversionError(
            f"{path}: has no signature, so its inputs and outputs are unknown; save it again with"
            " tf.saved_model.save(module, directory, signatures=module.FUNCTION.get_concrete_function(…)), or, from"
            " Keras, with model.export(directory)"
        )
    if requested is None and DEFAULT not in names:
        if len(names) == 1:
            return names[0]
        raise UsageError(f"{path}: has no signature {DEFAULT!r}; choose one with --signature: {_listed(names)}")
    name = DEFAULT if requested is None else requested
    if name not in names:
        raise UsageError(f"--signature {name}: {path} has {_listed(names)}")
    return name


def _tensors(path: Path, signature: str, what: str, entries: Sequence[Any]) -> dict[str, str]:
    found = _by_key(path, what, entries)
    for name, info in found.items():
        where = f"{path}: {what} {quoted(name)} of signature {quoted(signature)}"
        if info.composite or info.sparse:
            raise ConversionError(f"{where} is sparse or ragged, and bf16kit serves tensors only")
        if info.dtype % _REF == _STRING:
            raise ConversionError(
                f"{where} holds strings, which are not supported here; export a model that takes and gives numbers"
            )
        if info.dtype % _REF == _BFLOAT16:
            raise ConversionError(f"{where} is bfloat16; {_AS_FP32}")
        if info.shape.unknown_rank:
            raise ConversionError(
                f"{where} has no known rank; save the model with tf.TensorSpec(shape, dtype) for every input"
            )
        if not info.name:
            raise SourceError(f"{path}: truncated or damaged: {what} {quoted(name)} is not a tensor")
    return {name: info.name for name, info in found.items()}


_AS_FP32 = (
    "tf2onnx would write fp16 in its place. Export the model in float32 (Keras: the dtype policy 'float32'): bf16 is"
    " what the conversion makes of it"
)


def _check_computing(path: Path, signature: str, graph: Any, outputs: Iterable[str]) -> None:
    allowed, rejected = COMPUTING | _functions(graph), dict[str, str]()
    for node, function in reachable_nodes(graph, outputs):
        if node.op not in allowed:
            of = f" of function {quoted(function)}" if function else ""
            rejected.setdefault(node.op, f"node {quoted(node.name)}{of}")
        if _BFLOAT16 in _types(node):
            raise ConversionError(
                f"{path}: node {quoted(node.name)} ({_shown(node.op)}) computes in bfloat16; {_AS_FP32}"
            )
    if not rejected:
        return
    lines = []
    for op, where in sorted(rejected.items())[:_MOST_NAMED]:
        reason, remedy = refusal(op)
        lines.append(f"\n  {_shown(op)}: {reason} ({where}); {remedy}")
    more = f"\n  and {len(rejected) - _MOST_NAMED} others" if len(rejected) > _MOST_NAMED else ""
    raise ConversionError(
        f"{path}: signature {quoted(signature)} needs operators that are not converted:{''.join(lines)}{more}"
    )


def _check_restoring(path: Path, graph: Any) -> None:
    allowed = RESTORING | _functions(graph.graph)
    for node, function in reachable_nodes(graph.graph, [graph.saver.restore_op]):
        if node.op not in allowed:
            where = f" in function {quoted(function)}" if function else ""
            raise ConversionError(
                f"{path}: restoring its variables would run the operator {_shown(node.op)} (node"
                f" {quoted(node.name)}{where}), which no SavedModel needs for that; save the model again"
                " with TensorFlow's own tf.saved_model.save"
            )


def _functions(graph: Any) -> set[str]:
    """Return the names of the graph's functions; TensorFlow rejects a function with an operator's name."""
    return {function.signature.name for function in graph.library.function}


def _types(node: Any) -> set[int]:
    """Return every dtype that an attribute of ``node`` names; a reference counts as the type it refers to."""
    return {dtype % _REF for entry in node.attr for dtype in (entry.value.type, *entry.value.list.type) if dtype > 0}


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - _MOST_LISTED} others"] if len(names) > _MOST_LISTED else []
    return listed([*map(_shown, names[:_MOST_LISTED]), *more])


def _shown(text: str) -> str:
    """Return a name from a file for a message without quotes: cut, control characters escaped."""
    return printable(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…", keep="")
