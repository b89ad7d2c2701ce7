"""Excuses slices that fp32 does not resolve, and checks the others of the reference against the source itself.

A slice whose variation is at fp32's noise says nothing that bf16 could destroy. How large the noise is shows in the
difference between the source's outputs and the reference's, two fp32 programs. That difference is no excuse by itself,
because a fault in the reference would make it too: the source's own noise, with its weights perturbed, must explain it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from bf16kit.drift import metrics as drift
from bf16kit.drift.slices import SliceSums, Values
from bf16kit.messages.errors import ConversionError
from bf16kit.numerics.tensors import TensorSpec
from converter.source import Array, Feeds
from converter.verify.oracle import MULTIPLE, OracleRun

# A slice is resolved if fp32 programs differ by at most this share of its variation: an eighth of what the default
# budget allows bf16.
_RESOLVED = 2.0**-4
# The difference is seen in few samples, and may be small by chance. Then the noise of the perturbed source counts, up
# to this many times the mean square seen: it is larger than that of two programs.
_MISSED = 16.0
_ULPS = 2.0**-22  # of the output's largest value: two programs may differ by that even where no weight matters


def resolved(
    oracle_run: OracleRun,
    expected: Sequence[Feeds],
    outputs: Sequence[TensorSpec],
    batch_axis: int | None,
    scales: dict[str, list[Values]],
) -> dict[str, list[Values]]:
    """Return ``scales`` with inf for slices that fp32 does not resolve; ``expected`` are the reference's outputs.

    Raises :class:`ConversionError` naming a slice in which the reference differs from the source by more than that.
    """
    found = dict(scales)
    for spec in outputs:
        if spec.name not in scales or not oracle_run.outputs or spec.name not in oracle_run.outputs[0]:
            continue
        pairs = ((own[spec.name], each[spec.name]) for own, each in zip(oracle_run.outputs, expected, strict=False))
        (differences,) = _errors([pairs], spec, batch_axis, scales[spec.name])
        if any((each > _RESOLVED**2).any() for each in differences):
            noise = _noise(oracle_run, spec, batch_axis, scales[spec.name], differences)
            _check(
                spec, differences, noise, [_ULPS**2 * _peak(oracle_run, spec.name) ** 2 / s for s in scales[spec.name]]
            )
            found[spec.name] = [
                np.where(np.maximum(difference, np.minimum(own, _MISSED * difference)) > _RESOLVED**2, np.inf, scale)
                for difference, own, scale in zip(differences, noise, scales[spec.name], strict=True)
            ]
    return found


def _noise(
    oracle_run: OracleRun, spec: TensorSpec, batch_axis: int | None, scales: Sequence[Values], unknown: list[Values]
) -> list[Values]:
    """Return the source's own noise ÷ scale by slice; ``unknown`` for a source that cannot be perturbed."""
    if oracle_run.noise is None:
        return unknown
    runs = _errors(oracle_run.noise.pairs(spec.name), spec, batch_axis, scales)
    return [np.max(axis, axis=0) for axis in zip(*runs, strict=True)] if runs else unknown


def _errors(
    runs: Iterable[Iterable[tuple[Array, Array]]], spec: TensorSpec, batch_axis: int | None, scales: Sequence[Values]
) -> list[list[Values]]:
    """Return each run's mean square error ÷ scale by slice along each axis; 0 where a slice is not judged."""
    found = []
    for pairs in runs:
        sums = SliceSums(spec, batch_axis)
        for one, other in pairs:
            noise = drift.compare(one, other, spec, batch_axis).noise
            if noise is not None:
                sums.merge(noise)
        means = [
            np.pad(mean, (0, max(0, len(s) - len(mean))))[: len(s)]
            for mean, s in zip(sums.means(), scales, strict=True)
        ]
        found.append([mean / scale for mean, scale in zip(means, scales, strict=True)])
    return found


def _peak(oracle_run: OracleRun, name: str) -> float:
    """Return the largest finite magnitude of the source's output, fills left out."""
    arrays = (drift.difference(each[name], each[name])[0] for each in oracle_run.outputs)
    return max((float(np.nanmax(np.abs(r), initial=0.0)) for r in arrays if r.size), default=0.0)


def _check(spec: TensorSpec, differences: Sequence[Values], noise: Sequence[Values], floors: Sequence[Values]) -> None:
    for axis, (difference, own, floor) in enumerate(zip(differences, noise, floors, strict=True)):
        wrong = (difference > _RESOLVED**2) & (difference > np.maximum(MULTIPLE**2 * own, floor))
        if wrong.any():
            index = int(np.where(wrong, difference, 0.0).argmax())
            raise ConversionError(
                f"the fp32 reference does not give the outputs of the source itself, nothing published: output"
                f" {spec.name!r} differs in index {index} along its axis {axis} (not counting the batch's) by"
                f" {np.sqrt(difference[index]):.3g} of the variation there; this model's fp32 noise explains at most"
                f" {np.sqrt(max(MULTIPLE**2 * own[index], floor[index])):.3g}; please report it"
            )
