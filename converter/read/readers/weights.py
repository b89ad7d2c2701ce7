"""Reads weights without a graph as a source: ``--model`` builds the architecture, or it was saved with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bf16kit.messages.errors import SourceError, UsageError
from converter.options import Options
from converter.read.detect import Kind
from converter.read.readers import mapped
from converter.read.readers.common import Advance, exported_source, inputs_of
from converter.source import Array, Checkpoint, Source, digest_files

if TYPE_CHECKING:
    import torch

_FORMATS: Mapping[Kind, str] = {
    Kind.SAFETENSORS: "safetensors",
    Kind.SHARDED: "safetensors-sharded",
    Kind.TORCH_ZIP: "torch",
    Kind.PICKLE: "torch-pickle",
}


def read(options: Options, kind: Kind, advance: Advance) -> Source:
    """Return the weights as a source, in the module that ``--model`` builds or that was saved with them."""
    from converter.read import precisions, safetensors_file, statedict
    from converter.read.torch.onnx_export import adapt, not_served

    tensors, files, module = _tensors(options, kind)
    if not tensors:
        raise SourceError(f"{options.source}: holds no tensors")
    precisions.check_range(options.source, tensors)
    notes = precisions.notes(tensors, residual=options.residual)
    fitted = module is None and options.map is None and not mapped.is_graph(options)
    if fitted:
        module = statedict.build(options)
        try:
            statedict.fit(module, tensors)
        except SourceError as error:
            index = safetensors_file.index_of(options.source) if kind is Kind.SAFETENSORS else None
            if index is None:
                raise
            raise SourceError(f"{error}\n  it is one of the shards of {index}; convert that file") from None
    shards = safetensors_file.shards(files[0]) if kind is Kind.SHARDED else ()
    checkpoint = Checkpoint(_FORMATS[kind], digest_files(files, advance), tensors, shards)
    if module is None:
        return mapped.read(options, checkpoint, notes)
    if not fitted and options.map is not None:
        raise UsageError(f"--map: {options.source} brings its own module; leave it out")
    model = adapt(statedict.in_fp32(module), inputs_of(options))
    notes = (*not_served(model.outputs, model.left_out), *notes)
    return replace(exported_source(checkpoint, model, None), notes=notes)


def _tensors(options: Options, kind: Kind) -> tuple[Mapping[str, Array], list[Path], torch.nn.Module | None]:
    from converter.read import safetensors_file, torch_file

    if kind is Kind.SAFETENSORS:
        return safetensors_file.read_file(options.source), [options.source], None
    if kind is Kind.SHARDED:
        index = options.source
        if index.is_dir():
            index = next(index.glob("*.safetensors.index.json"))
        tensors, files = safetensors_file.read_sharded(index)
        return tensors, files, None
    tensors, module = torch_file.read_file(options.source, kind, trust_pickle=options.trust_code)
    return tensors, [options.source], module
