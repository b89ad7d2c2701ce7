"""Runs a model on samples, and measures how far one runtime's outputs are from another's."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.process.progress import Advance, ignore
from bf16kit.converter.source import Feeds
from bf16kit.converter.verify.running import GraphReference, open_export, open_profile, open_traced, signature
from bf16kit.converter.verify.samples import Samples
from bf16kit.converter.write import TRACED
from bf16kit.drift import metrics as drift
from bf16kit.drift.metrics import DriftSummary, OutputDrift, SampleDrift
from bf16kit.drift.slices import Scales, Values, Variation
from bf16kit.messages.errors import SamplesError
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Runtime, RuntimeInfo
from bf16kit.runtime.memory.scratch import on_disk

Drifts = dict[str, OutputDrift]  # of one feed, by output
_SLICE = 0.03  # a slice error of 0.5 counts as much as a relative_l2 of 0.015: these are the default bounds
SliceScales = Mapping[str, Scales]  # by output, for outputs of floats
_MAX_SAMPLES = 8  # samples that a torch module is run on in both arithmetics: this CPU's and the other
_ARITHMETICS = {"bf16": "bf16", "bf16-weights": "fp32, to which a CPU without bf16 instructions widens it"}
_ALIGNMENT = 64  # bytes, of each array in a file of outputs


class Spool(Sequence[Feeds]):
    """Outputs kept on disk: 200 samples of 128 tokens over 50,000 words take 5 GB, too much for memory.

    They are mapped, while they are read, from a temporary file in ``directory``, or where :func:`~scratch.on_disk`
    says. It has no name, so nothing is left of it, however the process ends. Arrays are read-only. Strings cannot be
    mapped and stay in memory.
    """

    def __init__(self, directory: Path | None = None, outputs: Iterable[Feeds] = ()) -> None:
        self._kept: list[tuple[int, dict[str, int], Feeds]] = []  # start, places of arrays, and what they are like
        self._file = tempfile.TemporaryFile(dir=on_disk(directory))  # noqa: SIM115 - open as long as this object
        weakref.finalize(self, self._file.close)
        for each in outputs:
            self.append(each)

    def append(self, outputs: Feeds) -> None:
        """Write ``outputs`` to the end of the file; raise OSError if there is no space."""
        start, places = self._file.seek(0, os.SEEK_END), dict[str, int]()
        for name, array in outputs.items():
            if not array.dtype.hasobject:
                places[name] = self._file.tell() - start
                self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                self._file.write(bytes(-array.nbytes % _ALIGNMENT))
        self._file.write(bytes(_ALIGNMENT))  # so that there is something to map
        self._file.flush()
        like = {name: np.broadcast_to(np.zeros((), outputs[name].dtype), outputs[name].shape) for name in places}
        self._kept.append((start, places, {**outputs, **like}))

    def pop(self) -> Feeds:
        """Return the last outputs, and forget them."""
        found: Feeds = self[-1]
        del self._kept[-1]
        return found

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start, places, found = self._kept[index]
        # Mapped anew each time: a mapping holds a descriptor of the file, and a process may have 1,024.
        raw = np.memmap(self._file, np.uint8, "r", start).view(np.ndarray)
        stored = {}
        for name, place in places.items():
            like = found[name]
            stored[name] = raw[place:][: like.nbytes].view(like.dtype).reshape(like.shape)
        return {**found, **stored}


def spool(run: Callable[[Feeds], Feeds], samples: Samples, directory: Path | None, advance: Advance = ignore) -> Spool:
    """Run the reference with ``run`` on ``samples`` and store its outputs in a temporary file in ``directory``.

    Raises :class:`SamplesError` if an output is NaN, because no distance to NaN can be measured. Infinities are
    allowed: masked logits hold them.
    """
    kept = Spool(directory)
    for outputs in map(run, samples.feeds):
        for name, array in outputs.items():
            count = int(np.isnan(array).sum()) if array.dtype.kind == "f" else 0
            if count:
                raise SamplesError(
                    f"the fp32 reference gives NaN for sample {len(kept)} of {samples.origin} (output {name!r},"
                    f" {count} of {array.size} values), and drift from NaN cannot be measured; pass --samples with"
                    " valid inputs of the model"
                )
        kept.append(outputs)
        advance(1)
    return kept


@dataclass(frozen=True, slots=True)
class Expected:
    """Feeds with the reference's ``outputs`` for them, and what the outputs' slices are judged against.

    The feeds from number ``given`` on were made by perturbing the others. ``golden_rows`` is how many rows golden
    samples may have; None: a feed is kept whole, or none is. ``tiny`` are the scales of slices too small to be judged.
    """

    feeds: Sequence[Feeds]
    outputs: Sequence[Feeds]
    scales: SliceScales
    given: int
    golden_rows: int | None = None
    tiny: SliceScales = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where golden samples are: the number of the feed, and of the part of its rows, if it is cut into parts."""

    feed: int = 0
    part: int = 0


def golden_places(feed: int, one: Drifts) -> list[Place]:
    """Return the places in the feed of this number, whose drift is ``one``."""
    parts = len(next(iter(one.values())).parts)
    return [Place(feed, part) for part in range(max(1, parts))]


def golden_part(found: Mapping[int, Drifts], place: Place) -> Drifts:
    """Return the drift at ``place`` in a profile's drift by feed."""
    return {name: one.parts[place.part] if one.parts else one for name, one in found[place.feed].items()}


def is_made(one: Drifts) -> bool:
    """Whether ``one`` was measured on a feed that was made by perturbing others."""
    return any(output.made for output in one.values())


def slice_scales(
    reference: Sequence[Feeds], outputs: Sequence[TensorSpec], batch_axis: int | None
) -> dict[str, list[Values]]:
    """Return what the slices of each output are judged against: their variation over all samples of ``reference``."""
    return {name: each.scales() for name, each in variations(reference, outputs, batch_axis).items()}


def variations(
    reference: Sequence[Feeds], outputs: Sequence[TensorSpec], batch_axis: int | None
) -> dict[str, Variation]:
    """Return the variation of each output's slices over all samples of ``reference``.

    The samples are taken in a random order (:func:`bf16kit.drift.metrics.add_variation`).
    """
    found: dict[str, Variation] = {}
    for index in np.random.default_rng(0).permutation(len(reference)):
        answers = reference[int(index)]
        for spec in outputs:
            if drift.has_slices(answers[spec.name]):
                variation = found.setdefault(spec.name, Variation(spec, batch_axis))
                drift.add_variation(variation, answers[spec.name], batch_axis)
    return found


def drifts(
    reference: Sequence[Feeds],
    candidate: Iterable[Feeds],
    outputs: Sequence[TensorSpec],
    batch_axis: int | None,
    scales: SliceScales,
    given: int | None = None,
    golden_rows: int | None = None,
) -> list[Drifts]:
    """Return the drift of ``candidate``'s outputs, each released once measured, from ``reference``'s, by feed.

    The outputs from number ``given`` on are for feeds that were made by perturbing others. A given feed of more than
    ``golden_rows`` rows is also measured in parts of so many.
    """
    found: list[Drifts] = []
    for actual in candidate:  # zip would hold its last pair while the next outputs are computed
        expected = reference[len(found)]
        made = given is not None and len(found) >= given
        measured: Drifts = {}
        for spec in outputs:
            ours, theirs, scale = expected[spec.name], actual[spec.name], scales.get(spec.name)
            parts: list[OutputDrift] = []
            if golden_rows is not None and not made and len(ours) > golden_rows:
                for start in range(0, len(ours), golden_rows):
                    part = slice(start, start + golden_rows)
                    parts.append(drift.compare(ours[part], theirs[part], spec, batch_axis, scale))
            one = drift.compare(ours, theirs, spec, batch_axis, scale)
            measured[spec.name] = replace(one, made=made, parts=tuple(parts))
        found.append(measured)
        del expected, actual, ours, theirs
    if len(found) != len(reference):
        raise ValueError(f"{len(found)} answers to {len(reference)} samples")
    return found


def summarise(found: Sequence[Drifts]) -> dict[str, DriftSummary]:
    """Summarise drift over all samples, by output."""
    return {output: DriftSummary.joined([one[output] for one in found]) for output in found[0]}


def error_of(summary: DriftSummary) -> float:
    """Return relative_l2, or the worst slice's error in its unit, if that is larger.

    An output of one number per sample has no relative_l2, and maybe too few samples to judge a slice.
    """
    relative, of_slice = summary.judged("relative_l2"), summary.judged("slice_error")
    if relative is None and of_slice is None:
        return summary.judged("max_abs") or 0.0
    return max(relative or 0.0, _SLICE * (of_slice or 0.0))


@dataclass(frozen=True, slots=True)
class Run:
    """The drift of a profile from the reference, one entry per sample that was run, and how the profile ran.

    Every ``step``-th sample was run, starting with the first. ``note`` tells the user what ``info`` does not say; it is
    "" if there is nothing to add.
    """

    drifts: list[Drifts]
    info: RuntimeInfo
    emulated: bool = False
    note: str = ""
    step: int = 1

    def given(self) -> dict[int, Drifts]:
        """Return the drift of each given sample, by sample number."""
        return {self.step * place: found for place, found in enumerate(self.drifts) if not is_made(found)}

    def rows(self) -> dict[str, list[SampleDrift]]:
        """Return the drift of the given samples of all feeds, by output."""
        given = self.given().values()
        return {output: [row for one in given for row in one[output].rows] for output in self.drifts[0]}

    def largest_error(self) -> float:
        """Return the largest :func:`error_of` any output."""
        return max(map(error_of, summarise(self.drifts).values()))


def run_profile(artifact: Artifact, profile: str, expected: Expected, advance: Advance = ignore) -> Run:
    """Run ``profile`` as a server would, or emulated if there is no device for it, and compare with ``expected``.

    Each output is reduced to its drift at once.
    """
    runtime, emulated = open_profile(artifact, profile)
    return _run(runtime, artifact, expected, advance, emulated=emulated)


def run_export(
    artifact: Artifact,
    export: str,
    expected: Expected,
    source: GraphReference | None = None,
    scratch: Path | None = None,
    advance: Advance = ignore,
) -> Run:
    """Run the reference with the tensors of ``export``; ``source`` replaces a missing reference."""
    runtime, note = open_export(artifact, export, source, scratch)
    return _run(runtime, artifact, expected, advance, note=note)


def run_as_served(artifact: Artifact, profile: str, expected: Expected, advance: Advance = ignore) -> Run:
    """Run as :func:`run_profile` does; a torch module in the worse of the two arithmetics that a server may use.

    One is bf16, the other fp32, to which CPUs without bf16 instructions widen it. Both run on the same
    :data:`_MAX_SAMPLES` feeds at most, so that the result does not depend on this CPU: a run takes ten times as long on
    a CPU without bf16 instructions. A module that has nothing in bf16 runs once, on all.
    """
    if profile not in TRACED:
        return run_profile(artifact, profile, expected, advance)
    step = -(-len(expected.feeds) // _MAX_SAMPLES)
    given = -(-expected.given // step)
    chosen = replace(expected, feeds=expected.feeds[::step], outputs=expected.outputs[::step], given=given)
    own = run_profile(artifact, profile, chosen, advance)
    if own.info.precision == "fp32":
        return run_profile(artifact, profile, expected, advance)
    runtime = open_traced(artifact, profile, native_bf16=own.info.precision != "bf16")
    runs = {run.info.precision: run for run in (own, _run(runtime, artifact, chosen, advance))}
    worse = max(sorted(runs), key=lambda precision: runs[precision].largest_error())
    some = f" on {len(chosen.feeds)} of {len(expected.feeds)} samples" if step > 1 else ""
    note = f"when verified: run in both arithmetics{some}; the drift is that of {_ARITHMETICS[worse]}, the worse"
    return replace(own, drifts=runs[worse].drifts, note=note, step=step)


def _run(
    runtime: Runtime,
    artifact: Artifact,
    expected: Expected,
    advance: Advance,
    *,
    emulated: bool = False,
    note: str = "",
) -> Run:
    """Run ``runtime``, close it, and compare it with ``expected``."""
    outputs, axis = signature(artifact.manifest)[1], artifact.manifest.batch_axis
    with closing(runtime):

        def run(feeds: Feeds) -> Feeds:
            outputs = runtime.run(feeds)
            advance(1)
            return outputs

        found, rows = map(run, expected.feeds), expected.golden_rows
        measured = drifts(expected.outputs, found, outputs, axis, expected.scales, expected.given, rows)
        return Run(measured, runtime.info, emulated, note)
