"""Reads a Hugging Face directory as a source; transformers builds the module that config.json names."""

from __future__ import annotations

from dataclasses import replace

from bf16kit.messages.errors import UsageError
from converter.options import Options
from converter.read.detect import Kind
from converter.read.readers.common import Advance, exported_source
from converter.source import Checkpoint, Source, digest_files

_INDEX = "model.safetensors.index.json"
_LOADED = (
    "the drift of the export was measured in fp32 arithmetic; transformers computes in bf16 unless"
    " dtype=torch.float32 is passed, and rounding vectors and activations then adds to the drift"
)
_SENTENCE = (
    "the export is only the transformer, as AutoModel loads it. Pooling and normalisation of sentence-transformers"
    " are in directories, which an artifact cannot hold"
)


def read(options: Options, _kind: Kind, advance: Advance) -> Source:
    """Return the directory as a source; :class:`UsageError` for a ``--model``, which it does not need."""
    from converter.read import huggingface, precisions, safetensors_file
    from converter.read.huggingface.companions import companions, uncopied_files_note

    if options.model is not None:
        raise UsageError("--model: a Hugging Face directory brings its own architecture")
    tensors, files = huggingface.read_tensors(options.source)
    precisions.check_range(options.source, tensors)
    export_files = companions(options.source) if options.export == "hf" else {}
    indices = [file for file in files if file.name == _INDEX]
    shards = safetensors_file.shards(indices[0]) if indices else ()
    checkpoint = Checkpoint("huggingface", digest_files(files, advance), tensors, shards)
    loaded = huggingface.load(options, tensors)
    source = exported_source(checkpoint, loaded.model, loaded.sampler, ("transformers",))
    outputs = tuple(huggingface.output_kind(options, spec) for spec in source.outputs)
    notes = (*loaded.notes, *precisions.notes(tensors, residual=options.residual))
    if options.export == "hf":
        notes = (
            *notes,
            _LOADED,
            *uncopied_files_note(options.source),
            *([_SENTENCE] if huggingface.is_sentence_transformer(options.source) else []),
        )
    oracle = loaded.oracle or source.oracle
    return replace(source, outputs=outputs, notes=notes, export_files=export_files, oracle=oracle)
