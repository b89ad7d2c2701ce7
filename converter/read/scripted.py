"""Reads a TorchScript file as a source: its graph is followed operator by operator, and the file is its own oracle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bf16kit.converter.options import Options
from bf16kit.converter.process.quiet import quiet
from bf16kit.converter.read import oracles, sources, torch_file
from bf16kit.converter.read.detect import Kind
from bf16kit.converter.read.interpreted import Interpreted, place
from bf16kit.converter.read.onnx_export import adapt
from bf16kit.converter.source import Checkpoint, Source, TorchModel, digest_files
from bf16kit.messages.errors import ConversionError, RuntimeFailure, SourceError, UsageError
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import scriptgraph
from bf16kit.runtime.torchruntimes import load_module, to_array

# Operators that read a tensor's values, and those that may branch on them.
_ASKING = """
    aten::Bool aten::Float aten::FloatImplicit aten::Int aten::IntImplicit aten::ScalarImplicit aten::equal
    aten::is_nonzero aten::item prim::tolist
""".split()  # noqa: SIM905 - words are read more easily than a list of quoted ones


def read(options: Options, kind: Kind, advance: sources.Advance) -> Source:
    """Return the file as a source, without a graph if that cannot be followed.

    Raises :class:`ConversionError` if it holds no fp32 weights, or does not run.
    """
    sources.check_trusted(options, kind.value)
    script = load(options.source)
    found = tensors(script)
    arrays = torch_file.to_numpy(options.source, found)
    sources.check_fp32(options.source, arrays)
    notes = sources.precision_notes(options, arrays)
    checkpoint = Checkpoint("torchscript", digest_files([options.source], advance), arrays)
    inputs = _in_order(sources.inputs_of(options), [argument.name for argument in script.forward.schema.arguments[1:]])
    itself = adapt(script, inputs, call=lambda module, feeds: module(*feeds.values()), examples=options.examples)
    itself = replace(itself, script=script)
    source = _translated(itself, found, checkpoint)
    oracle = replace(oracles.of_module(itself), how="the TorchScript file itself, on the CPU")
    if source.graph is not None:
        oracle = replace(oracle, roundoff=oracles.roundoff(source.graph))  # of fp16 parts, which stay so
    rowwise = source.graph is not None or not decides_by_numbers(script)
    return replace(source, oracle=oracle, notes=tuple(notes), rowwise=rowwise)


def _translated(original: TorchModel, found: Mapping[str, torch.Tensor], checkpoint: Checkpoint) -> Source:
    """Return ``original`` as a source, with a graph if its operators can be followed into one."""
    translated = Interpreted(original.script, found)

    def failed(reason: str) -> str:
        """Return the reason why ONNX failed, with the name of the file's operator if that is known."""
        operator = translated.failure.operator
        if operator in ("prim::If", "prim::Loop", *_ASKING):
            return f"{operator} depends on values in a tensor (a branch, a loop, a size), which ONNX cannot have"
        return f"{operator}: {reason}" if operator and operator not in reason else reason

    try:
        ran = {spec.name: to_array(tensor) for spec, tensor in zip(original.inputs, original.example, strict=True)}
        model = adapt(translated, original.inputs, example=ran)
    except ConversionError as error:
        return sources.source_without_graph(checkpoint, original, None, reason=failed(str(error)))
    model = replace(model, outputs=original.outputs, script=original.script)  # a named tuple is followed as a tuple
    source = sources.exported_source(checkpoint, model, None)
    return replace(source, no_graph_reason=failed(source.no_graph_reason)) if source.no_graph_reason else source


def _in_order(inputs: tuple[TensorSpec, ...], names: list[str]) -> tuple[TensorSpec, ...]:
    """Return ``inputs`` in the order of the module's arguments if the names match; else as given."""
    if len(inputs) > len(names):
        raise UsageError(f"--input: given {len(inputs)} times, but the module takes {len(names)}: {', '.join(names)}")
    taken, by_name = names[: len(inputs)], {spec.name: spec for spec in inputs}
    return tuple(by_name[name] for name in taken) if by_name.keys() == set(taken) else inputs


def load(path: Path) -> Any:
    """Load the module at ``path`` in evaluation mode on the CPU, its graph inlined; a ``torch.jit.ScriptModule``.

    Loading runs the code in the file. Raises :class:`SourceError` for a file that is damaged or has no ``forward``.
    """
    torch_file.check_bytes(path)
    try:
        with quiet():
            return load_module(path, torch.device("cpu"))
    except RuntimeFailure as error:
        raise SourceError(f"{path}: {error}") from None


def tensors(module: Any) -> dict[str, torch.Tensor]:
    """Return the parameters, buffers, other tensors and constants (of a frozen module) of ``module``, by name.

    A tensor with two names occurs twice, as in a ``state_dict``.
    """
    found = dict(module.state_dict())
    named, places = len(found), {place(tensor) for tensor in found.values()}
    for node in scriptgraph.nodes(module.graph):
        tensor = scriptgraph.tensor_of(module, node)
        if tensor is not None and tensor.ndim and place(tensor) not in places:
            places.add(place(tensor))
            is_constant = node.kind() == "prim::Constant"
            name = f"constants.{len(found) - named}" if is_constant else ".".join(scriptgraph.path_of(node))
            found[name] = tensor
    return found


def decides_by_numbers(module: Any) -> bool:
    """Return whether ``module`` branches on the values of a tensor that is not computed from sizes alone.

    In such a module one row may affect another row's result.
    """
    asking = (node for node in scriptgraph.nodes(module.graph) if node.kind() in _ASKING)
    return not all(_of_sizes(node.inputsAt(0)) for node in asking)


def _of_sizes(value: Any) -> bool:
    """Return whether a tensor is computed only from sizes, as in a trace, and from constants."""
    waiting = {value.debugName(): value}
    seen: set[str] = set()
    while waiting:
        name, value = waiting.popitem()
        seen.add(name)
        kind = value.node().kind()
        if value.type().kind() == "TensorType" and kind not in ("prim::NumToTensor", "prim::Constant"):
            if not kind.startswith("aten::"):
                return False
            waiting |= {each.debugName(): each for each in value.node().inputs() if each.debugName() not in seen}
    return True
