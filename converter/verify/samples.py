"""Calibration samples: the inputs on which a conversion runs the model and measures drift."""

from __future__ import annotations

import itertools
import math
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bf16kit.artifact.manifest import Manifest
from bf16kit.drift.budget import Budget
from bf16kit.messages.errors import InvalidRequest, RuntimeFailure, SamplesError
from bf16kit.numerics.tensors import TensorSpec, check_feeds, describe
from converter.graph.dimensions import reconciled, with_distinct_dimensions
from converter.process.imports import import_callable, is_import_spec
from converter.process.quiet import first_line
from converter.source import Array, Feeds, Oracle
from converter.verify.observedshapes import may_have_batch_axis

SUFFIXES = (".npz", ".safetensors")
LIMIT = 1000  # feeds; a function is asked for no more, so that an endless generator ends
SAMPLES = 16  # to know how much a slice of an output varies
_STEP = 0.5  # of the difference of two other samples
_RELATIVE = 0.25  # of each element, where there are no others
_SMALLER = 0.1  # of these steps, where the source rejects the feeds that they give
_REPLACED = 0.25  # share of an integer input's elements


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
        return f"{self.origin}, and {self.made} made of them by perturbation" if self.made else self.origin

    @property
    def given(self) -> tuple[Feeds, ...]:
        """The feeds without those that were made of them."""
        return self.feeds[: len(self.feeds) - self.made]


def load(
    argument: str,
    inputs: Sequence[TensorSpec],
    run_source: Callable[[Sequence[Feeds]], object] | None = None,
    *,
    outputs: Collection[str] = (),
) -> Samples:
    """Load the samples that ``--samples`` names: a file is one feed, a directory holds many, a function yields them.

    Arrays named like one of ``outputs`` are not inputs: they become ``Samples.expected``.

    ``run_source`` runs the source on feeds; it is given if the names of dimensions may be wrong. Samples that
    contradict those names are accepted if the source runs on them: then the names are wrong, and ``Samples.inputs`` has
    the corrected specs. Raises :class:`SamplesError` if the samples cannot be read, there are none, or one does not
    match ``inputs``.
    """
    try:
        return _load(argument, inputs, outputs)
    except SamplesError as contradiction:
        if run_source is None or not _names_repeat(inputs):
            raise
        try:
            relaxed = _load(argument, with_distinct_dimensions(inputs), outputs)
            run_source(relaxed.feeds)
        except (SamplesError, RuntimeFailure):
            raise contradiction from None
    shapes = [{name: array.shape for name, array in feed.items()} for feed in relaxed.feeds]
    return replace(relaxed, inputs=reconciled(inputs, shapes))


def of_artifact(argument: str, manifest: Manifest) -> Samples:
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


def _names_repeat(inputs: Sequence[TensorSpec]) -> bool:
    named = [dim for spec in inputs for dim in spec.shape if isinstance(dim, str)]
    return len(set(named)) < len(named)


def _load(argument: str, inputs: Sequence[TensorSpec], outputs: Collection[str]) -> Samples:
    path = Path(argument)
    if path.is_dir():
        read = [(file, _read_file(file)) for file in _files(path)]
        return _samples_from(read, inputs, outputs, f"the directory {path.resolve().name}")
    if path.exists():
        return _samples_from([(path, _read_file(path))], inputs, outputs, f"the file {path.name}")
    if is_import_spec(argument):
        return _samples_from(_call_function(argument), inputs, outputs, argument)
    raise SamplesError(f"--samples {argument}: no such file or directory, and not a function such as pkg.mod:name")


def _samples_from(
    read: Sequence[tuple[object, Feeds]], inputs: Sequence[TensorSpec], outputs: Collection[str], origin: str
) -> Samples:
    """Build samples from the feeds ``read``, each with the place it was found at."""
    output_names = frozenset(outputs) - {spec.name for spec in inputs}
    feeds = tuple(
        _checked(location, {k: v for k, v in feed.items() if k not in output_names}, inputs) for location, feed in read
    )
    expected = tuple({k: v for k, v in feed.items() if k in output_names} for _, feed in read)
    return Samples(feeds, origin, expected=expected if any(expected) else ())


def _files(path: Path) -> list[Path]:
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise SamplesError(f"--samples {path}: holds no {' or '.join(SUFFIXES)} file")
    return files


def _call_function(argument: str) -> list[tuple[object, Feeds]]:
    function = import_callable("--samples", argument)
    try:
        yielded = list(itertools.islice(iter(function()), LIMIT))
    except Exception as error:  # the user's function may raise anything
        raise SamplesError(f"--samples {argument}: the function failed: {first_line(error)}") from error
    if not yielded:
        raise SamplesError(f"--samples {argument}: the function yielded nothing")
    return [(f"{argument}, sample {i}", _arrays(argument, i, y)) for i, y in enumerate(yielded)]


def _arrays(argument: str, index: int, yielded: Any) -> Feeds:
    if not isinstance(yielded, Mapping):
        raise SamplesError(
            f"--samples {argument}: sample {index} is {type(yielded).__name__}, expected a dict of an array per input"
        )
    return {str(name): _array(f"{argument}: sample {index}", name, value) for name, value in yielded.items()}


def _array(location: str, name: object, value: Any) -> Array:
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged lists; tensors that require a gradient
        raise SamplesError(f"--samples {location}: input {str(name)!r} is not an array: {first_line(error)}") from None


def _read_file(path: Path) -> Feeds:
    if path.suffix not in SUFFIXES:
        raise SamplesError(f"--samples {path}: expected a {' or '.join(SUFFIXES)} file with an array per input")
    try:
        if path.suffix == ".npz":
            return _read_npz(path)
        from safetensors.numpy import load_file

        return dict(load_file(path))
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise SamplesError(f"--samples {path}: cannot be read: {first_line(error)}") from None
    except Exception as error:  # the safetensors library's own error derives from Exception alone
        if type(error).__name__ != "SafetensorError":
            raise
        raise SamplesError(f"--samples {path}: cannot be read: {first_line(error)}") from None


def _read_npz(path: Path) -> Feeds:
    with path.open("rb") as file:  # opened here, because numpy leaves a damaged archive open
        loaded = np.load(file, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise ValueError("one array, expected an archive with an array per input")
        with loaded:
            return {name: loaded[name] for name in loaded.files}


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


def with_enough(
    samples: Samples,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    known: Sequence[Feeds],
    oracle: Oracle,
    budget: Budget,
    seed: int,
) -> Samples:
    """Return ``samples`` with as many perturbed ones as it takes to judge ``outputs`` by ``budget``.

    ``known`` are the source's outputs for the first samples; without them, the samples stay as they are. Perturbed
    feeds for which ``oracle`` gives NaN are left out, and so are all from the first one on which it fails.
    """
    if not known:
        return samples
    rows = [math.prod(known[0][s.name].shape[:-1]) for s in outputs if s.kind == "logits" and known[0][s.name].ndim]
    wanted = [SAMPLES / (_batch(samples.feeds[0]) if may_have_batch_axis(inputs, outputs) else 1)]
    wanted += [budget.rows_to_judge() / max(1, each) for each in rows]
    missing = math.ceil(max(wanted)) - len(samples.feeds)
    if missing <= 0:
        return samples
    random = np.random.default_rng(seed)
    made: list[Feeds] = []
    for share in (1.0, _SMALLER):  # of a step; a smaller one stays nearer to inputs that are known to be valid
        perturbed = [_perturbed(samples.feeds, i, random, share) for i in range(len(made), missing)]
        made += _accepted([feed for feed in perturbed if not _is_one_of(feed, samples.feeds)], oracle)
    return replace(samples, feeds=(*samples.feeds, *made), made=len(made))


def _accepted(feeds: Sequence[Feeds], oracle: Oracle) -> Iterator[Feeds]:
    try:
        for feed, outputs in zip(feeds, oracle.outputs(feeds), strict=False):
            if not any(array.dtype.kind == "f" and np.isnan(array).any() for array in outputs.values()):
                yield feed
    except RuntimeFailure:
        return


def _is_one_of(feed: Feeds, others: Sequence[Feeds]) -> bool:
    """Whether perturbing changed nothing, because all inputs are masks, flags or strings."""
    return any(all(np.array_equal(feed[name], other[name]) for name in feed) for other in others)


def _batch(feed: Mapping[str, Array]) -> int:
    """Return how many samples a feed holds, if its first axis is the batch: the smallest first dimension."""
    return max(1, min((array.shape[0] if array.ndim else 1 for array in feed.values()), default=1))


def _perturbed(feeds: Sequence[Feeds], number: int, random: np.random.Generator, share: float) -> Feeds:
    feed = feeds[number % len(feeds)]
    return {name: _perturb(array, [other[name] for other in feeds], random, share) for name, array in feed.items()}


def _perturb(array: Array, all_samples: Sequence[Array], random: np.random.Generator, share: float) -> Array:
    if array.dtype.kind == "f":
        alike = [other for other in all_samples if other.shape == array.shape]
        one, other = (alike[i] for i in random.integers(0, len(alike), 2))
        if len(alike) > 1 and not np.array_equal(one, other, equal_nan=True):
            return np.asarray(array + share * _STEP * (one - other), array.dtype)
        return np.asarray(array * (1 + share * _RELATIVE * random.standard_normal(array.shape)), array.dtype)
    if array.dtype.kind in "iu" and array.size > 1 and not np.isin(array, (0, 1)).all():
        flat = array.reshape(-1).copy()
        replaced = random.random(flat.size) < _REPLACED
        flat[replaced] = random.choice(array.reshape(-1), int(replaced.sum()))
        return flat.reshape(array.shape)
    return array
