"""A Hugging Face directory: transformers builds the module that config.json names."""

from __future__ import annotations

from dataclasses import replace

from bf16kit.errors import UsageError
from converter.model import Checkpoint, Source, digest_files
from converter.options import Options
from converter.sources.detect import Kind
from converter.sources.readers.common import Advance, exported


def read(options: Options, _kind: Kind, advance: Advance) -> Source:
    """The directory as a source; :class:`UsageError` for a ``--model`` that it does not need."""
    from converter.sources import huggingface, precisions

    if options.model is not None:
        raise UsageError("--model: a Hugging Face directory brings its own architecture")
    tensors, files = huggingface.read_tensors(options.source)
    precisions.check_range(options.source, tensors)
    checkpoint = Checkpoint("huggingface", digest_files(files, advance), tensors)
    loaded = huggingface.load(options, tensors)
    source = exported(checkpoint, loaded.model, loaded.sampler, ("transformers",))
    outputs = tuple(huggingface.output_kind(options, spec) for spec in source.outputs)
    notes = (*loaded.notes, *precisions.notes(tensors, residual=options.residual))
    return replace(source, outputs=outputs, notes=notes)
