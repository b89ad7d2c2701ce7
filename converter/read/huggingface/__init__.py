"""Reads a Hugging Face directory as a source; transformers builds the module that config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from bf16kit.converter.options import Options
from bf16kit.converter.read import safetensors_file
from bf16kit.converter.read.detect import Kind
from bf16kit.converter.read.huggingface.inputs import batches, declared, sampler
from bf16kit.converter.read.huggingface.model_directory import INDEX, Directory, companions
from bf16kit.converter.read.huggingface.module import CACHES, Cache, is_causal, leave_out_extras, load_module, sentence
from bf16kit.converter.read.onnx_export import Call, adapt, not_served
from bf16kit.converter.read.sources import Advance, check_names, exported_source, precision_notes
from bf16kit.converter.source import Array, Checkpoint, Feeds, Sampler, Source, TorchModel, digest_files
from bf16kit.messages.errors import ConversionError, UsageError
from bf16kit.numerics.tensors import TensorSpec

_WITHOUT_LIBRARY = (
    "sentence_embedding is left out: sentence-transformers is not installed; pip install 'bf16kit[sentence]'"
)

Loaded = tuple[TorchModel, Sampler | None, list[str]]  # the module with positional inputs, a sampler for it, notes


def read(options: Options, _kind: Kind, advance: Advance) -> Source:
    """Return the directory as a source."""
    directory = Directory.open(options.source)
    tensors, files = directory.tensors()
    precisions = precision_notes(options, tensors)
    export_files, export_notes = companions(directory.path) if options.export == "hf" else ({}, [])
    indices = [file for file in files if file.name == INDEX]
    shards = safetensors_file.shards(indices[0]) if indices else ()
    checkpoint = Checkpoint("huggingface", digest_files(files, advance), tensors, shards)
    model, sampler, notes = load(options, directory, tensors)
    notes += [*precisions, *export_notes]
    library = ("sentence-transformers",) if "sentence_embedding" in model.outputs else ()
    source = exported_source(checkpoint, model, sampler, ("transformers", *library))
    outputs = tuple(_with_kind(directory, spec) for spec in source.outputs)
    return replace(source, outputs=outputs, notes=tuple(notes), export_files=export_files)


def load(options: Options, directory: Directory, tensors: Mapping[str, Array]) -> Loaded:
    """Build the directory's model over the memory of ``tensors``."""
    module, notes = load_module(directory, tensors, options.target.path.parent)
    whole = None if directory.parts is None else sentence(directory, module)
    if directory.parts is not None and whole is None:
        notes.append(_WITHOUT_LIBRARY)
    model, sampler, more = (_with_past if options.with_past else _in_one_pass)(options, directory, module, whole)
    remedy = "--with-past serves the cache" if set(CACHES) & set(model.left_out) and is_causal(module) else ""
    return model, sampler, [*notes, *more, *not_served(model.outputs, model.left_out, remedy)]


def _in_one_pass(options: Options, directory: Directory, module: Any, whole: Any) -> Loaded:
    """Load the model for one forward pass, with every input that it declares or those of ``--input``."""
    if options.inputs:
        check_names(module, options.inputs)
        candidates, notes = [options.inputs], list[str]()
    else:
        inputs, notes = declared(module, directory)
        candidates = batches(inputs)
    call = None if whole is None else lambda whole, feeds: whole(feeds)
    while True:
        candidate = candidates.pop(0)
        sample = sampler(directory, candidate)
        example = None if sample is None else next(iter(sample(0, 1)))
        try:
            return _adapted(module if whole is None else whole, candidate, call, example), sample, notes
        except ConversionError:
            if not candidates:
                raise


def _adapted(module: Any, inputs: tuple[TensorSpec, ...], call: Call | None, example: Feeds | None) -> TorchModel:
    """Return ``module`` with positional inputs, and without the outputs that its config adds; they are only named."""
    try:
        left_out = adapt(module, inputs, call=call, example=example).left_out
    except ConversionError:  # without them it may work
        left_out = ()
    leave_out_extras(module)
    model = adapt(module, inputs, call=call, example=example)
    return replace(model, left_out=tuple(dict.fromkeys((*left_out, *model.left_out))))


def _with_past(options: Options, directory: Directory, module: Any, _whole: Any) -> Loaded:
    if options.inputs:
        raise UsageError("--with-past: the model's own cache says what its inputs are; leave --input out")
    if directory.parts is not None:
        raise UsageError("--with-past: a sentence-transformers directory has no cache; leave the option out")
    cache = Cache(module)
    leave_out_extras(module)
    sample = partial(cache.samples, directory)
    model = adapt(module, cache.inputs, call=cache.call, example=next(iter(sample(0, 1))))
    return replace(model, left_out=cache.left_out), sample, []


def _with_kind(directory: Directory, spec: TensorSpec) -> TensorSpec:
    """Return ``spec`` with the kind that the config implies: a regression head also calls its output logits."""
    regresses = directory.config.get("problem_type") == "regression" or len(directory.config.get("id2label") or {}) == 1
    return replace(spec, kind="regression") if spec.kind == "logits" and regresses else spec
