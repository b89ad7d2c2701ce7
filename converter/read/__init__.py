"""Reads a source: recognises its format by content, makes it runnable, and keeps its tensors as they were stored."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path

from bf16kit.converter.options import Options
from bf16kit.converter.read.detect import Kind, recognise
from bf16kit.converter.read.sources import Advance
from bf16kit.converter.source import Source
from bf16kit.messages.errors import SourceError, UsageError

Reader = Callable[[Options, Kind, Advance], Source]

_BY_NAME = (Kind.SAFETENSORS, Kind.SHARDED, Kind.TORCH_ZIP, Kind.PICKLE, Kind.LIGHTNING)
_OF_JAX, _OF_TENSORFLOW = (Kind.ORBAX, Kind.FLAX), (Kind.SAVED_MODEL, Kind.KERAS)
_MAPPED = (*_BY_NAME[:-1], *_OF_JAX)
# The module for each format; it is imported when needed, and its `read` makes the Source.
READERS: Mapping[Kind, str] = {
    Kind.ONNX: "onnx_file",
    Kind.HUGGING_FACE: "huggingface",
    Kind.EXPORTED: "exportedprogram",
    Kind.TORCHSCRIPT: "scripted",
    Kind.MODULE: "inmemory",
    **dict.fromkeys(_BY_NAME, "bareweights"),
    **dict.fromkeys(_OF_JAX, "jax"),
    **dict.fromkeys(_OF_TENSORFLOW, "tensorflow"),
}

# The weight files of a source that is a directory.
_WEIGHTS = ("*.safetensors", "*.bin", "saved_model.pb", "variables/variables.*")


def read(options: Options, advance: Advance) -> Source:
    """Read the source of a conversion. ``advance`` is called with the number of bytes read.

    Raises :class:`SourceError` when it cannot be read or does not fit its model, :class:`UsageError` when an option it
    needs is missing, :class:`ConversionError` when no graph can be made of it.
    """
    kind = recognise(options.source) if options.module is None else Kind.MODULE
    _check_options(options, kind)
    reader: Reader = importlib.import_module(f"bf16kit.converter.read.{READERS[kind]}").read
    source = reader(options, kind, advance)
    if "__metadata__" in source.checkpoint.tensors:
        raise SourceError(
            f"{options.source}: has a tensor named '__metadata__', which safetensors reserves; rename the tensor"
        )
    return source


def _check_options(options: Options, kind: Kind) -> None:
    """Raise :class:`UsageError` for an option that does not apply to sources of ``kind``."""
    if options.model is not None and kind not in (*_BY_NAME, *_OF_JAX):
        raise UsageError(f"--model: {kind.value} brings its own architecture")
    step = "--step" if options.step is not None else "--item"
    for flag, given, kinds, purpose in (
        ("--with-past", options.with_past or None, (Kind.HUGGING_FACE,), "Hugging Face directories"),
        ("--signature", options.signature, _OF_TENSORFLOW, "TensorFlow models"),
        ("--weights", options.weights, _BY_NAME, "checkpoints that fill a model by its names"),
        (step, options.item if options.step is None else options.step, (Kind.ORBAX,), "Orbax checkpoints"),
        ("--map", options.map, _MAPPED, "weights without a graph"),
    ):
        if given is not None and kind not in kinds:
            raise UsageError(f"{flag}: is for {purpose}, and {options.source} is {kind.value}")
    if options.export == "hf" and kind is not Kind.HUGGING_FACE:
        raise UsageError(
            f"--format hf: copies the config and tokenizer of a Hugging Face directory, and {options.source} is"
            f" {kind.value}; --format safetensors writes the weights alone"
        )


def nbytes(path: Path) -> int | None:
    """Return the size of the files at ``path``, for a progress bar.

    The result is None if there are none, which `read` reports better.
    """
    if path.is_file():
        return path.stat().st_size
    weights = [file for pattern in _WEIGHTS for file in path.glob(pattern)]
    return sum(file.stat().st_size for file in weights) or None
