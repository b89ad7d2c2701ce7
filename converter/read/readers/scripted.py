"""Reads a TorchScript file as a source: its graph is followed operator by operator, and the file is its own oracle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bf16kit.messages.errors import ConversionError, UsageError
from bf16kit.numerics.tensors import TensorSpec
from converter.options import Options
from converter.read.detect import Kind
from converter.read.readers.common import Advance, exported_source, inputs_of, source_without_graph
from converter.read.trust import check_trusted
from converter.source import Checkpoint, Source, TorchModel, digest_files

if TYPE_CHECKING:
    import torch

# Operators that read a tensor's values and branch on them.
_DECIDING = ("prim::If", "prim::Loop", "aten::Bool", "aten::Float", "aten::Int", "aten::item", "prim::tolist")


def read(options: Options, kind: Kind, advance: Advance) -> Source:
    """Return the file as a source, without a graph if that cannot be followed.

    Raises :class:`ConversionError` if it holds no fp32 weights, or does not run.
    """
    from converter.read import oracles, precisions, script_file
    from converter.read.torch.interpreted import input_names
    from converter.read.torch.onnx_export import adapt

    if options.model is not None:
        raise UsageError("--model: a TorchScript file brings its own architecture")
    check_trusted(options, kind.value)
    script = script_file.load(options.source)
    found = script_file.tensors(script)
    tensors = script_file.arrays(options.source, found)
    if not any(tensor.dtype.name == "float32" for tensor in tensors.values()):
        raise ConversionError(f"{options.source}: holds no fp32 weights, so there is nothing to convert")
    precisions.check_range(options.source, tensors)
    checkpoint = Checkpoint("torchscript", digest_files([options.source], advance), tensors)
    inputs = _in_order(inputs_of(options), list(input_names(script)))
    itself = replace(adapt(script, inputs, call=_positional), script=script)
    source = _translated(itself, found, checkpoint)
    oracle = replace(oracles.of_module(itself), how="the TorchScript file itself, on the CPU")
    notes = precisions.notes(tensors, residual=options.residual)
    rowwise = source.graph is not None or not script_file.decides_by_numbers(script)
    return replace(source, oracle=oracle, notes=notes, rowwise=rowwise)


def _translated(original: TorchModel, found: Mapping[str, torch.Tensor], checkpoint: Checkpoint) -> Source:
    """Return ``original`` as a source, with a graph if its operators can be followed into one."""
    from converter.read.torch.interpreted import Interpreted
    from converter.read.torch.onnx_export import adapt

    script = original.script
    translated = Interpreted(script, found)
    try:
        model = adapt(translated, original.inputs, call=_positional)
    except ConversionError as error:
        return source_without_graph(checkpoint, original, None, reason=_failure_reason(translated.stopped, str(error)))
    if model.outputs != original.outputs:
        given, computed = ", ".join(original.outputs), ", ".join(model.outputs)
        reason = f"the file gives {given}, but its translated operators give {computed}"
        return source_without_graph(checkpoint, original, None, reason=reason)
    source = exported_source(checkpoint, replace(model, script=script), None)
    return (
        replace(source, no_graph_reason=_failure_reason(translated.stopped, source.no_graph_reason))
        if source.no_graph_reason
        else source
    )


def _failure_reason(operator: str, reason: str) -> str:
    """Return the reason why ONNX failed, with the name of the file's operator if that is known."""
    if operator in _DECIDING:
        return (
            f"{operator} depends on values in a tensor (a branch, a loop, a size), which cannot be translated to ONNX"
        )
    return f"{operator}: {reason}" if operator and operator not in reason else reason


def _positional(module: torch.nn.Module, feeds: Mapping[str, torch.Tensor]) -> Any:
    return module(*feeds.values())


def _in_order(inputs: tuple[TensorSpec, ...], names: list[str]) -> tuple[TensorSpec, ...]:
    """Return ``inputs`` in the order of the module's arguments if the names match; else as given."""
    if len(inputs) > len(names):
        raise UsageError(f"--input: given {len(inputs)} times, but the module takes {len(names)}: {', '.join(names)}")
    by_name = {spec.name: spec for spec in inputs}
    return (
        tuple(by_name[name] for name in names[: len(inputs)]) if by_name.keys() == set(names[: len(inputs)]) else inputs
    )
