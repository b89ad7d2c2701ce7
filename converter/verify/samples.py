"""Calibration samples: the inputs on which a conversion runs the model and measures drift."""

from __future__ import annotations

import itertools
import zipfile
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bf16kit.artifact.manifest import Manifest
from bf16kit.converter.graph.dimensions import reconciled, with_distinct_dimensions
from bf16kit.converter.options import import_callable, is_import_spec
from bf16kit.converter.process.quiet import first_line
from bf16kit.converter.source import Feeds
from bf16kit.messages.errors import InvalidRequest, RuntimeFailure, SamplesError
from bf16kit.numerics.tensors import Array, TensorSpec, check_feeds, describe, feed_of

_SUFFIXES = (".npz", ".safetensors")
Argument = str | Sequence[Any]
LIMIT = 1000  # feeds; a function is asked for no more, so that an endless generator ends


@dataclass(frozen=True, slots=True)
class Samples:
    """Feeds that match the model's inputs, and a short description of where they came from.

    ``inputs`` are the model's inputs as the feeds show them, if the feeds contradict the declared ones; else empty.
    ``expected`` holds, for each feed, the outputs that came with it, computed by another program. The last ``made``
    feeds were made by perturbing the others.
    """

    feeds: tuple[Feeds, ...]
    origin: str
    inputs: tuple[TensorSpec, ...] = ()
    expected: tuple[Feeds, ...] = ()
    made: int = 0

    @property
    def described(self) -> str:
        """Where the feeds came from, those that were made included."""
        made = f", and {self.made} made of them by perturbation, because they are too few to judge by"
        return f"{self.origin}{made if self.made else ''}"

    @property
    def given(self) -> tuple[Feeds, ...]:
        """The feeds without those that were made of them."""
        return self.feeds[: len(self.feeds) - self.made]


def load(
    argument: Argument,
    inputs: Sequence[TensorSpec],
    run_source: Callable[[Sequence[Feeds]], object] | None = None,
    *,
    outputs: Collection[str] = (),
) -> Samples:
    """Load the samples that ``--samples`` names: a file is one feed, a directory holds many, a function yields them.

    A sequence holds the feeds themselves. A feed, given so or yielded, is as :func:`~tensors.feed_of` takes it.
    Arrays named like one of ``outputs`` are not inputs: they become ``Samples.expected``.

    ``run_source`` runs the source on feeds; it is given if the names of dimensions may be wrong. Samples that
    contradict those names are accepted if the source runs on them: then the names are wrong, and ``Samples.inputs`` has
    the corrected specs. Raises :class:`SamplesError` if the samples cannot be read, there are none, or one does not
    match ``inputs``.
    """
    try:
        return _load(argument, inputs, outputs)
    except SamplesError as contradiction:
        named = [dim for spec in inputs for dim in spec.shape if isinstance(dim, str)]
        if run_source is None or len(set(named)) == len(named):
            raise
        try:
            relaxed = _load(argument, with_distinct_dimensions(inputs), outputs)
            run_source(relaxed.feeds)
        except (SamplesError, RuntimeFailure):
            raise contradiction from None
    shapes = [{name: array.shape for name, array in feed.items()} for feed in relaxed.feeds]
    return replace(relaxed, inputs=reconciled(inputs, shapes))


def check_named(argument: Argument) -> None:
    """Raise :class:`SamplesError` if ``argument`` is a text that names neither a file, a directory nor a function."""
    if isinstance(argument, str) and not Path(argument).exists() and not is_import_spec(argument):
        raise SamplesError(f"--samples {argument}: no such file or directory, and not a function such as pkg.mod:name")


def examples(argument: Argument, inputs: Sequence[TensorSpec]) -> list[Feeds]:
    """Return the first of the samples that ``--samples`` names with two of its rows, and whole, for torch's exporter.

    It takes a size of 1 for fixed, so a free dimension gets the size 2. Rows may be points: a model may need many.
    """
    feed = _load(argument, inputs, None).feeds[0]
    firsts = {spec.shape[0] if spec.shape else None for spec in inputs}
    has_rows = len(firsts) == 1 and isinstance(next(iter(firsts)), str)

    def shown(spec: TensorSpec, rows: int | None) -> Array:
        array = feed[spec.name][:rows] if has_rows else feed[spec.name]
        for axis, dim in enumerate(spec.shape):
            array = np.repeat(array, 2, axis) if isinstance(dim, str) and array.shape[axis] == 1 else array
        return array

    return [{spec.name: shown(spec, rows) for spec in inputs} for rows in (2, None)]


def of_artifact(argument: Argument, manifest: Manifest) -> Samples:
    """Load the samples that ``--samples`` names for a converted model, without the outputs that came with them."""
    inputs = [entry.spec() for entry in manifest.inputs]
    return load(argument, inputs, outputs=[entry.name for entry in manifest.outputs])


def samples_usage(inputs: Sequence[TensorSpec]) -> str:
    """Say how a user gives samples for ``inputs``, in words to copy."""
    keys = ", ".join(f"{spec.name}=…" if spec.name.isidentifier() else f"**{{{spec.name!r}: …}}" for spec in inputs)
    described = ", ".join(f"{spec.name} {spec.dtype}{describe(spec.shape)}" for spec in inputs)
    return (
        f"--samples FILE, made by numpy.savez('sample.npz', {keys}), or a directory of such files; the model takes"
        f" {described}; dimensions with the same name have the same size"
    )


def _load(argument: Argument, inputs: Sequence[TensorSpec], outputs: Collection[str] | None) -> Samples:
    """Load samples; ``outputs`` that are None are all arrays that are no inputs."""
    read, origin = list[tuple[object, Feeds]](), "the given arrays"  # each feed with the place it was found at
    path = Path(argument if isinstance(argument, str) else "")
    if not isinstance(argument, str):
        read += _feeds_in(argument, "in memory", inputs)
        if not read:
            raise SamplesError("--samples: holds no sample; give at least one")
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
        origin = f"the directory {path.resolve().name}"
        if not files:
            raise SamplesError(f"--samples {path}: holds no {' or '.join(_SUFFIXES)} file")
        read += [(file, _read_file(file)) for file in files]
    elif path.exists():
        read, origin = [(path, _read_file(path))], f"the file {path.name}"
    else:
        check_named(argument)
        read, origin = _call_function(argument, inputs), argument
    names = {name for _, feed in read for name in feed} if outputs is None else outputs
    output_names = frozenset(names) - {spec.name for spec in inputs}
    feeds = tuple(
        _checked(location, {k: v for k, v in feed.items() if k not in output_names}, inputs) for location, feed in read
    )
    expected = tuple({k: v for k, v in feed.items() if k in output_names} for _, feed in read)
    return Samples(feeds, origin, expected=expected if any(expected) else ())


def _call_function(argument: str, inputs: Sequence[TensorSpec]) -> list[tuple[object, Feeds]]:
    function = import_callable("--samples", argument)
    try:
        yielded = list(itertools.islice(iter(function()), LIMIT))
    except Exception as error:  # the user's function may raise anything
        raise SamplesError(f"--samples {argument}: the function failed: {first_line(error)}") from error
    if not yielded:
        raise SamplesError(f"--samples {argument}: the function yielded nothing")
    return _feeds_in(yielded, argument, inputs)


def _feeds_in(given: Sequence[Any], origin: str, inputs: Sequence[TensorSpec]) -> list[tuple[object, Feeds]]:
    found = list[tuple[object, Feeds]]()
    for index, each in enumerate(given):
        location = f"{origin}, sample {index}"
        try:
            found.append((location, feed_of(each, inputs)))
        except InvalidRequest as error:
            raise SamplesError(f"--samples {location}: {error}") from None
    return found


def _read_file(path: Path) -> Feeds:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if path.suffix not in _SUFFIXES:
        raise SamplesError(f"--samples {path}: expected a {' or '.join(_SUFFIXES)} file with an array per input")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        with path.open("rb") as file:  # opened here, because numpy leaves a damaged archive open
            loaded = np.load(file, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise ValueError("one array, expected an archive with an array per input")
            with loaded:
                return dict(loaded)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, SafetensorError) as error:
        raise SamplesError(f"--samples {path}: cannot be read: {first_line(error)}") from None


def _checked(location: object, feeds: Feeds, inputs: Sequence[TensorSpec]) -> Feeds:
    try:
        check_feeds(inputs, feeds)
    except InvalidRequest as error:
        raise SamplesError(f"--samples {location}: {error}") from None
    if any(array.size == 0 for array in feeds.values()):
        shapes = ", ".join(f"{name}{describe(array.shape)}" for name, array in feeds.items())
        raise SamplesError(
            f"--samples {location}: a sample without elements cannot be measured ({shapes}); leave it out"
        )
    return {spec.name: np.asarray(feeds[spec.name], order="C") for spec in inputs}
