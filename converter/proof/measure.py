"""Runs a model on samples, and measures how far one runtime's outputs are from another's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np

from bf16kit import drift
from bf16kit.drift import DriftSummary, SampleDrift
from bf16kit.errors import RuntimeFailure, SamplesError
from bf16kit.runtime import Runtime
from bf16kit.tensors import TensorSpec
from converter.model import Array, Feeds
from converter.proof.samples import Samples
from converter.proof.spool import Spool

# Allowed relative_l2 between two samples run together and run apart: fp32 arithmetic in another order, and no more.
_TOLERANCE = 1e-4

Drifts = dict[str, list[SampleDrift]]  # by output, a row per sample


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


def drifts(
    reference: Sequence[Feeds], candidate: Iterable[Feeds], outputs: Sequence[TensorSpec], batch_axis: int | None
) -> list[Drifts]:
    """Return the drift of ``candidate``'s outputs, each released once measured, from ``reference``'s, by sample."""
    found: list[Drifts] = []
    for actual in candidate:  # zip would hold its last pair while the next outputs are computed
        expected = reference[len(found)]
        found.append({s.name: drift.measure(expected[s.name], actual[s.name], s, batch_axis) for s in outputs})
        del expected, actual
    if len(found) != len(reference):
        raise ValueError(f"{len(found)} answers to {len(reference)} samples")
    return found


def joined(found: Sequence[Drifts]) -> Drifts:
    """Join the drifts of all samples into one."""
    return {output: [row for one in found for row in one[output]] for output in found[0]}


def summarise(found: Sequence[Drifts]) -> dict[str, DriftSummary]:
    """Summarise drift over all samples, by output."""
    return {output: DriftSummary.of(rows) for output, rows in joined(found).items()}


def batch_axis(
    runtime: Runtime, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], feeds: Sequence[Feeds]
) -> int | None:
    """Return 0 if the first axis is a batch axis, else None.

    Every input and output must have a free first dimension, with one name for all inputs. Two samples run together must
    give the same outputs as run apart. Also None if ``feeds`` hold no two samples of the same shape.
    """
    first = {spec.shape[0] if spec.shape else None for spec in inputs}
    if len(first) != 1 or not isinstance(next(iter(first)), str):
        return None
    if any(not spec.shape or isinstance(spec.shape[0], int) for spec in outputs):
        return None
    pair = _pair(feeds)
    if pair is None:
        return None
    try:
        apart = [runtime.run({name: array[i : i + 1] for name, array in pair.items()}) for i in (0, 1)]
        together = runtime.run(pair)
    except RuntimeFailure:
        return None  # a dimension that is declared free but is not
    return 0 if all(_same(together, apart, spec) for spec in outputs) else None


def _pair(feeds: Sequence[Feeds]) -> Feeds | None:
    """Return two different samples in one feed: two rows of one feed, or one row each of two of the same shape."""
    for feed in feeds:
        if all(len(array) > 1 for array in feed.values()):
            return {name: np.ascontiguousarray(array[:2]) for name, array in feed.items()}
    for a, b in combinations(feeds[:100], 2):
        if all(a[name].shape[1:] == b[name].shape[1:] for name in a):
            return {name: np.concatenate([a[name][:1], b[name][:1]]) for name in a}
    return None


def _same(together: Feeds, apart: Sequence[Feeds], spec: TensorSpec) -> bool:
    if any(len(row[spec.name]) != 1 for row in apart):
        return False
    expected = np.concatenate([row[spec.name] for row in apart])
    found = drift.measure(expected, together[spec.name], spec, 0)
    return all(sample.relative_l2 <= _TOLERANCE and not sample.nonfinite for sample in found)


def with_batch_dimension(outputs: Sequence[TensorSpec], name: str) -> tuple[TensorSpec, ...]:
    """Return ``outputs`` with their first dimension called ``name``, once it was proved to be the batch."""
    return tuple(replace(spec, shape=(name, *spec.shape[1:])) for spec in outputs)


def as_dict(summaries: Mapping[str, DriftSummary]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the summaries as the manifest stores them."""
    return {output: summary.as_dict() for output, summary in summaries.items()}
