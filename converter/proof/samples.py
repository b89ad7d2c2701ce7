"""Calibration samples: the inputs on which a conversion is run and its drift measured."""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bf16kit.errors import InvalidRequest, RuntimeFailure, SamplesError
from bf16kit.tensors import TensorSpec, check_feeds, describe
from converter.graph.dimensions import loosened, reconciled
from converter.model import Array, Feeds
from converter.process.imports import import_callable, is_import_spec
from converter.process.quiet import first_line

SUFFIXES = (".npz", ".safetensors")
LIMIT = 1000  # feeds; what a function yields beyond it is not asked for, so that an endless generator ends


@dataclass(frozen=True, slots=True)
class Samples:
    """Feeds that fit the model's inputs, and in a few words where they came from.

    ``inputs`` are the model's as the feeds show them, where those contradict what it says of itself; else empty.
    """

    feeds: tuple[Feeds, ...]
    origin: str
    inputs: tuple[TensorSpec, ...] = ()


def load(given: str, inputs: Sequence[TensorSpec], runs: Callable[[Sequence[Feeds]], object] | None = None) -> Samples:
    """The samples that ``--samples`` names: a file is one feed, a directory many, a function yields them.

    ``runs`` is the source answering feeds, where the names of dimensions are a stranger's. Samples that contradict
    those names are let through when the source runs on them: then it is the names that are wrong, and
    ``Samples.inputs`` says what is left of them. Raises :class:`SamplesError` when the samples cannot be read, there
    are none, or one does not fit ``inputs``.
    """
    try:
        return _load(given, inputs)
    except SamplesError as contradiction:
        if runs is None or not _names_repeat(inputs):
            raise
        try:
            loose = _load(given, loosened(inputs))
            runs(loose.feeds)
        except (SamplesError, RuntimeFailure):
            raise contradiction from None
    shapes = [{name: array.shape for name, array in feed.items()} for feed in loose.feeds]
    return replace(loose, inputs=reconciled(inputs, shapes))


def how_to_give(inputs: Sequence[TensorSpec]) -> str:
    """How a user gives samples for ``inputs``, in words that can be pasted."""
    keys = ", ".join(f"{spec.name}=…" if spec.name.isidentifier() else f"**{{{spec.name!r}: …}}" for spec in inputs)
    described = ", ".join(f"{spec.name} {spec.dtype}{describe(spec.shape)}" for spec in inputs)
    return (
        f"--samples FILE, made by numpy.savez('sample.npz', {keys}), or a directory of such files; the model takes"
        f" {described}, where dimensions of one name are one size"
    )


def _names_repeat(inputs: Sequence[TensorSpec]) -> bool:
    named = [dim for spec in inputs for dim in spec.shape if isinstance(dim, str)]
    return len(set(named)) < len(named)


def _load(given: str, inputs: Sequence[TensorSpec]) -> Samples:
    path = Path(given)
    if path.is_dir():
        return _from_directory(path, inputs)
    if path.exists():
        return Samples((_checked(path, _read_file(path), inputs),), f"the file {path.name}")
    if is_import_spec(given):
        return _from_function(given, inputs)
    raise SamplesError(f"--samples {given}: no such file or directory, nor a function as pkg.mod:name")


def _from_directory(path: Path, inputs: Sequence[TensorSpec]) -> Samples:
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise SamplesError(f"--samples {path}: holds no {' or '.join(SUFFIXES)} file")
    feeds = tuple(_checked(file, _read_file(file), inputs) for file in files)
    return Samples(feeds, f"the directory {path.resolve().name}")


def _from_function(given: str, inputs: Sequence[TensorSpec]) -> Samples:
    function = import_callable("--samples", given)
    try:
        yielded = list(itertools.islice(iter(function()), LIMIT))
    except Exception as error:  # the user's function may raise anything
        raise SamplesError(f"--samples {given}: the function failed: {first_line(error)}") from error
    if not yielded:
        raise SamplesError(f"--samples {given}: the function yielded nothing")
    feeds = tuple(_checked(f"{given}, sample {i}", _arrays(given, i, y), inputs) for i, y in enumerate(yielded))
    return Samples(feeds, given)


def _arrays(given: str, index: int, yielded: Any) -> Feeds:
    if not isinstance(yielded, Mapping):
        raise SamplesError(
            f"--samples {given}: sample {index} is {type(yielded).__name__}, expected a dict of an array per input"
        )
    return {str(name): _array(f"{given}: sample {index}", name, value) for name, value in yielded.items()}


def _array(where: str, name: object, value: Any) -> Array:
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged lists; tensors that require a gradient
        raise SamplesError(f"--samples {where}: input {str(name)!r} is no array: {first_line(error)}") from None


def _read_file(path: Path) -> Feeds:
    if path.suffix not in SUFFIXES:
        raise SamplesError(f"--samples {path}: expected a {' or '.join(SUFFIXES)} file with an array per input")
    try:
        if path.suffix == ".npz":
            return _read_npz(path)
        from safetensors.numpy import load_file

        return dict(load_file(path))
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise SamplesError(f"--samples {path}: cannot be read: {first_line(error)}") from None
    except Exception as error:  # the safetensors library's own error derives from Exception alone
        if type(error).__name__ != "SafetensorError":
            raise
        raise SamplesError(f"--samples {path}: cannot be read: {first_line(error)}") from None


def _read_npz(path: Path) -> Feeds:
    with path.open("rb") as file:  # opened here: numpy leaves a damaged archive open
        loaded = np.load(file, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise ValueError("one array, not an archive of an array per input")
        with loaded:
            return {name: loaded[name] for name in loaded.files}


def _checked(where: object, feeds: Feeds, inputs: Sequence[TensorSpec]) -> Feeds:
    try:
        check_feeds(inputs, feeds)
    except InvalidRequest as error:
        raise SamplesError(f"--samples {where}: {error}") from None
    if any(array.size == 0 for array in feeds.values()):
        shapes = ", ".join(f"{name}{describe(array.shape)}" for name, array in feeds.items())
        raise SamplesError(f"--samples {where}: a sample without elements measures nothing ({shapes})")
    return {spec.name: np.asarray(feeds[spec.name], order="C") for spec in inputs}
