"""A TorchScript file: its own graph, followed operator by operator, and its own oracle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bf16kit.errors import ConversionError, UsageError
from bf16kit.tensors import TensorSpec
from converter.model import Checkpoint, Source, digest_files
from converter.options import Options
from converter.sources.detect import Kind
from converter.sources.readers.common import Advance, exported, inputs_of

if TYPE_CHECKING:
    import torch


def read(options: Options, _kind: Kind, advance: Advance) -> Source:
    """The file as a source; :class:`ConversionError` where its graph cannot be followed or holds no fp32 weights."""
    from converter.sources import oracles, precisions, script_file
    from converter.sources.torch.interpreted import Interpreted, input_names
    from converter.sources.torch.onnx_export import adapt

    if options.model is not None:
        raise UsageError("--model: a TorchScript file brings its own architecture")
    script = script_file.load(options.source)
    found = script_file.tensors(script)
    tensors = script_file.arrays(options.source, found)
    if not any(tensor.dtype.name == "float32" for tensor in tensors.values()):
        raise ConversionError(f"{options.source}: holds no fp32 weights, so there is nothing to convert")
    precisions.check_range(options.source, tensors)
    checkpoint = Checkpoint("torchscript", digest_files([options.source], advance), tensors)
    inputs = _in_order(inputs_of(options), list(input_names(script)))
    itself = adapt(script, inputs, call=_positional)
    followed = adapt(Interpreted(script, found), inputs, call=_positional)
    if followed.outputs != itself.outputs:
        raise ConversionError(f"{options.source}: its graph gives {followed.outputs}, itself it gives {itself.outputs}")
    source = exported(checkpoint, replace(followed, script=script), None)
    oracle = replace(oracles.of_module(itself), how="the TorchScript file itself, on the CPU")
    return replace(source, oracle=oracle, notes=precisions.notes(tensors, residual=options.residual))


def _positional(module: torch.nn.Module, feeds: Mapping[str, torch.Tensor]) -> Any:
    return module(*feeds.values())


def _in_order(inputs: tuple[TensorSpec, ...], names: list[str]) -> tuple[TensorSpec, ...]:
    """``inputs`` in the order in which the module takes them, where they are called as its arguments; else as given."""
    if len(inputs) > len(names):
        raise UsageError(f"--input: {len(inputs)} are given, and the module takes {len(names)}: {', '.join(names)}")
    by_name = {spec.name: spec for spec in inputs}
    return (
        tuple(by_name[name] for name in names[: len(inputs)]) if by_name.keys() == set(names[: len(inputs)]) else inputs
    )
