"""Runs a model on samples, and measures how far one runtime's outputs are from another's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bf16kit.artifact.artifact import Artifact
from bf16kit.drift import metrics as drift
from bf16kit.drift.metrics import DriftSummary, OutputDrift, SampleDrift
from bf16kit.drift.slices import Scales, Values, Variation
from bf16kit.messages.errors import SamplesError
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Runtime, RuntimeInfo
from converter.source import Array, Feeds
from converter.verify.running import GraphReference, open_export, open_profile, open_traced, signature
from converter.verify.samples import Samples
from converter.verify.spool import Spool
from converter.write.traced import TRACED

Drifts = dict[str, OutputDrift]  # of one feed, by output
_SLICE = 0.03  # a slice error of 0.5 counts as much as a relative_l2 of 0.015: these are the default bounds
SliceScales = Mapping[str, Scales]  # by output, for outputs of floats
_MAX_SAMPLES = 8  # samples that a torch module is run on in both arithmetics: this CPU's and the other
_ARITHMETICS = {"bf16": "bf16", "bf16-weights": "fp32, to which a CPU without bf16 instructions widens it"}


def run_all(runtime: Runtime, feeds: Sequence[Feeds]) -> Iterator[Feeds]:
    """Yield the outputs of ``runtime`` for each of ``feeds``, one at a time."""
    return (runtime.run(feed) for feed in feeds)


def spool(runtime: Runtime, samples: Samples, directory: Path | None) -> Spool:
    """Run the reference ``runtime`` on ``samples`` and store its outputs in a temporary file in ``directory``.

    Raises :class:`SamplesError` if an output is NaN, because no distance to NaN can be measured. Infinities are
    allowed: masked logits hold them.
    """
    kept = Spool(directory)
    for outputs in run_all(runtime, samples.feeds):
        for name, array in outputs.items():
            _reject_nan(array, f"sample {len(kept)} of {samples.origin}", name)
        kept.append(outputs)
    return kept


def _reject_nan(array: Array, sample: str, output: str) -> None:
    count = int(np.isnan(array).sum()) if array.dtype.kind == "f" else 0
    if count:
        raise SamplesError(
            f"the fp32 reference gives NaN for {sample} (output {output!r}, {count} of {array.size} values), and"
            " drift from NaN cannot be measured; pass --samples with valid inputs of the model"
        )


@dataclass(frozen=True, slots=True)
class Expected:
    """Feeds with the reference's ``outputs`` for them, and what the outputs' slices are judged against.

    The feeds from number ``given`` on were made by perturbing the others.
    """

    feeds: Sequence[Feeds]
    outputs: Sequence[Feeds]
    scales: SliceScales
    given: int

    def every(self, step: int) -> Expected:
        """Return every ``step``-th feed, starting with the first."""
        return Expected(self.feeds[::step], self.outputs[::step], self.scales, -(-self.given // step))


def is_made(one: Drifts) -> bool:
    """Whether ``one`` was measured on a feed that was made by perturbing others."""
    return any(output.made for output in one.values())


def joined(found: Sequence[Drifts]) -> dict[str, list[SampleDrift]]:
    """Join the drifts of the given samples of all feeds, by output."""
    return {output: [row for one in found if not one[output].made for row in one[output].rows] for output in found[0]}


def slice_scales(
    reference: Sequence[Feeds], outputs: Sequence[TensorSpec], batch_axis: int | None
) -> dict[str, list[Values]]:
    """Return what the slices of each output are judged against: their variation over all samples of ``reference``.

    The samples are taken in a random order (:func:`bf16kit.drift.metrics.add_variation`).
    """
    found: dict[str, Variation] = {}
    for index in np.random.default_rng(0).permutation(len(reference)):
        answers = reference[int(index)]
        for spec in outputs:
            if drift.has_slices(answers[spec.name]):
                variation = found.setdefault(spec.name, Variation(spec, batch_axis))
                drift.add_variation(variation, answers[spec.name], batch_axis)
    return {name: variation.scales() for name, variation in found.items()}


def drifts(
    reference: Sequence[Feeds],
    candidate: Iterable[Feeds],
    outputs: Sequence[TensorSpec],
    batch_axis: int | None,
    scales: SliceScales,
    given: int | None = None,
) -> list[Drifts]:
    """Return the drift of ``candidate``'s outputs, each released once measured, from ``reference``'s, by feed.

    The outputs from number ``given`` on are for feeds that were made by perturbing others.
    """
    found: list[Drifts] = []
    for actual in candidate:  # zip would hold its last pair while the next outputs are computed
        expected = reference[len(found)]
        made = given is not None and len(found) >= given
        measured = {
            s.name: drift.compare(expected[s.name], actual[s.name], s, batch_axis, scales.get(s.name)) for s in outputs
        }
        found.append({name: replace(one, made=True) for name, one in measured.items()} if made else measured)
        del expected, actual
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


def as_dict(summaries: Mapping[str, DriftSummary]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the summaries as the manifest stores them."""
    return {output: summary.as_dict() for output, summary in summaries.items()}


@dataclass(frozen=True, slots=True)
class Run:
    """The drift of a profile from the reference, one entry per sample that was run, and how the profile ran.

    Every ``step``-th sample was run, starting with the first. ``note`` tells the user what ``info`` does not say; it is
    "" if there is nothing to add.
    """

    drifts: list[Drifts]
    info: RuntimeInfo
    emulated: bool
    note: str = ""
    step: int = 1

    def by_sample(self) -> dict[int, Drifts]:
        """Return the drift of each given sample that was run, by sample number."""
        numbered = {self.step * place: found for place, found in enumerate(self.drifts)}
        return {n: found for n, found in numbered.items() if not is_made(found)}


def run_as_served(artifact: Artifact, profile: str, expected: Expected) -> Run:
    """Run as :func:`run_profile` does; a torch module in the worse of the two arithmetics that a server may use."""
    if profile in TRACED and (worse := _worse_arithmetic(artifact, profile, expected)) is not None:
        return worse
    return run_profile(artifact, profile, expected)


def run_profile(artifact: Artifact, profile: str, expected: Expected) -> Run:
    """Run ``profile`` as a server would, or emulated if there is no device for it, and compare with ``expected``.

    Each output is reduced to its drift at once.
    """
    manifest = artifact.manifest
    outputs = signature(manifest)[1]
    runtime, emulated = open_profile(artifact, profile)
    try:
        return Run(_drifts(runtime, expected, outputs, manifest.batch_axis), runtime.info, emulated)
    finally:
        runtime.close()


def run_export(
    artifact: Artifact,
    export: str,
    expected: Expected,
    source: GraphReference | None = None,
    scratch: Path | None = None,
) -> Run:
    """Run the reference with the tensors of ``export``; ``source`` replaces a missing reference."""
    runtime, note = open_export(artifact, export, source, scratch)
    try:
        outputs, axis = signature(artifact.manifest)[1], artifact.manifest.batch_axis
        return Run(_drifts(runtime, expected, outputs, axis), runtime.info, False, note)
    finally:
        runtime.close()


def _worse_arithmetic(artifact: Artifact, profile: str, expected: Expected) -> Run | None:
    """Run a torch module in bf16 and in fp32, to which CPUs without bf16 instructions widen it; return the worse run.

    Returns None if the module has nothing in bf16. A server may use either arithmetic. Both run on the same
    :data:`_MAX_SAMPLES` feeds at most, so that the result does not depend on this CPU. A run takes ten times as
    long on a CPU without bf16 instructions.
    """
    outputs, axis = signature(artifact.manifest)[1], artifact.manifest.batch_axis
    step = -(-len(expected.feeds) // _MAX_SAMPLES)
    chosen = expected.every(step)
    own = run_profile(artifact, profile, chosen)
    if own.info.precision == "fp32":
        return None
    runtime = open_traced(artifact, profile, native_bf16=own.info.precision != "bf16")
    try:
        other = _drifts(runtime, chosen, outputs, axis)
        found = {own.info.precision: own.drifts, runtime.info.precision: other}
    finally:
        runtime.close()
    worse = max(sorted(found), key=lambda precision: _largest_error(found[precision]))
    some = f" on {len(chosen.feeds)} of {len(expected.feeds)} samples" if step > 1 else ""
    note = f"when verified: run in both arithmetics{some}; the drift is that of {_ARITHMETICS[worse]}, the worse"
    return Run(found[worse], own.info, own.emulated, note, step)


def _drifts(
    runtime: Runtime, expected: Expected, outputs: Sequence[TensorSpec], batch_axis: int | None
) -> list[Drifts]:
    found = run_all(runtime, expected.feeds)
    return drifts(expected.outputs, found, outputs, batch_axis, expected.scales, expected.given)


def _largest_error(found: Sequence[Drifts]) -> float:
    """Return the largest error of any output."""
    return max(error_of(summary) for summary in summarise(found).values())


def describe_run(info: RuntimeInfo) -> str:
    """Describe what was special about a run that was not emulated; "" if nothing was."""
    return f"on the CPU kernel, path {info.kernel}" if info.kernel else info.note
