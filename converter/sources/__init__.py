"""Reading a source: recognised by content, made runnable, its tensors kept as they were stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bf16kit.errors import ConversionError, SourceError, UsageError
from bf16kit.tensors import TensorSpec
from converter.model import Array, Checkpoint, Sampler, Source, digest_files
from converter.options import Options
from converter.sources.detect import Kind, recognise

if TYPE_CHECKING:
    import torch

    from converter.model import TorchModel

Advance = Callable[[int], None]


def read(options: Options, advance: Advance) -> Source:
    """The source of a conversion. ``advance`` is told of the bytes read.

    Raises :class:`SourceError` when it cannot be read or does not fit its model, :class:`UsageError` when an option it
    needs is missing, :class:`~bf16kit.errors.ConversionError` when it cannot be made a graph.
    """
    kind = recognise(options.source)
    if options.with_past and kind is not Kind.HUGGING_FACE:
        raise UsageError(f"--with-past: is for Hugging Face directories, and {options.source} is {kind.value}")
    source = READERS[kind](options, kind, advance)
    if "__metadata__" in source.checkpoint.tensors:
        raise SourceError(f"{options.source}: has a tensor called '__metadata__', which no safetensors file can hold")
    return source


def _read_onnx(options: Options, _kind: Kind, advance: Advance) -> Source:
    from converter.passes.constants import floating_tensors
    from converter.sources import onnx_file, oracles

    if options.model is not None:
        raise UsageError("--model: an ONNX file brings its own architecture")
    model, files = onnx_file.read_graph(options.source)
    oracle = oracles.of_onnx(options.source, model)
    inputs, outputs = onnx_file.settle_edges(model, options.inputs)
    tensors = floating_tensors(model)
    if not any(tensor.dtype.name == "float32" for tensor in tensors.values()):
        raise ConversionError(f"{options.source}: holds no fp32 weights, so there is nothing to convert")
    checkpoint = Checkpoint("onnx", digest_files(files, advance), tensors)
    return Source(checkpoint, model, inputs, outputs, tools=("onnxscript",), oracle=oracle)


def _read_huggingface(options: Options, _kind: Kind, advance: Advance) -> Source:
    from converter.sources import huggingface, precisions

    if options.model is not None:
        raise UsageError("--model: a Hugging Face directory brings its own architecture")
    tensors, files = huggingface.read_tensors(options.source)
    precisions.check_range(options.source, tensors)
    checkpoint = Checkpoint("huggingface", digest_files(files, advance), tensors)
    loaded = huggingface.load(options, tensors)
    source = _exported(checkpoint, loaded.model, loaded.sampler, ("transformers",))
    outputs = tuple(huggingface.output_kind(options, spec) for spec in source.outputs)
    notes = (*loaded.notes, *precisions.notes(tensors, residual=options.residual))
    return replace(source, outputs=outputs, notes=notes)


def _read_weights(options: Options, kind: Kind, advance: Advance) -> Source:
    """Weights without a graph: an architecture is built, or was saved with them."""
    from converter.sources import precisions, statedict
    from converter.sources.torch.onnx_export import adapt, not_served

    tensors, files, module = _tensors(options, kind)
    if not tensors:
        raise SourceError(f"{options.source}: holds no tensors")
    precisions.check_range(options.source, tensors)
    if module is None:
        module = statedict.build(options)
        statedict.fit(module, tensors)
    checkpoint = Checkpoint(_FORMATS[kind], digest_files(files, advance), tensors)
    model = adapt(statedict.in_fp32(module), _inputs_of(options))
    notes = (*not_served(model.outputs, model.left_out), *precisions.notes(tensors, residual=options.residual))
    return replace(_exported(checkpoint, model, None), notes=notes)


_FORMATS: Mapping[Kind, str] = {
    Kind.SAFETENSORS: "safetensors",
    Kind.SHARDED: "safetensors-sharded",
    Kind.TORCH_ZIP: "torch",
    Kind.PICKLE: "torch-pickle",
}
# What makes a recognised source a Source. A kind that gets its reader here leaves `detect`'s list of those to come.
READERS: Mapping[Kind, Callable[[Options, Kind, Advance], Source]] = {
    Kind.ONNX: _read_onnx,
    Kind.HUGGING_FACE: _read_huggingface,
    **dict.fromkeys(_FORMATS, _read_weights),
}


def _tensors(options: Options, kind: Kind) -> tuple[Mapping[str, Array], list[Path], torch.nn.Module | None]:
    from converter.sources import safetensors_file, torch_file

    if kind is Kind.SAFETENSORS:
        return safetensors_file.read_file(options.source), [options.source], None
    if kind is Kind.SHARDED:
        index = options.source
        if index.is_dir():
            index = next(index.glob("*.safetensors.index.json"))
        tensors, files = safetensors_file.read_sharded(index)
        return tensors, files, None
    tensors, module = torch_file.read_file(options.source, kind, trust_pickle=options.trust_pickle)
    return tensors, [options.source], module


def _inputs_of(options: Options) -> tuple[TensorSpec, ...]:
    if not options.inputs:
        raise UsageError(
            f"{options.source}: a checkpoint does not say what its model's inputs are; name each with"
            " --input NAME:DTYPE:DIMS, for example --input x:float32:batch,16"
        )
    return options.inputs


def _exported(
    checkpoint: Checkpoint, model: TorchModel, sampler: Sampler | None, tools: tuple[str, ...] = ()
) -> Source:
    """``model`` exported; its oracle answers until the module is dropped, and asks that exporting left it alone."""
    from converter.sources import oracles
    from converter.sources.edges import output_specs
    from converter.sources.torch.onnx_export import to_onnx

    untouched = oracles.Untouched(model.module)
    graph = to_onnx(model, checkpoint.tensors)
    untouched.check("torch.onnx.export")
    return Source(
        checkpoint,
        graph,
        model.inputs,
        output_specs(graph),
        model,
        sampler,
        ("torch", "onnxscript", *tools),
        oracles.of_module(model),
    )


def nbytes(path: Path) -> int | None:
    """Bytes of the files at ``path``, for a progress bar; None when nothing is there, which `read` explains better."""
    if path.is_file():
        return path.stat().st_size
    weights = [file for pattern in ("*.safetensors", "*.bin") for file in path.glob(pattern)]
    return sum(file.stat().st_size for file in weights) or None
