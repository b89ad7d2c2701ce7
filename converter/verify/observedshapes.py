"""Corrects a manifest's inputs and outputs by what running the reference has shown, and certifies the batch axis.

A server runs requests of strangers in one batch. So the reference is run on samples alone, and on the same samples in
other orders, sizes and company, including themselves and inputs that are not finite. Each output is compared slice by
slice, at fp32 noise of the slice itself, so that no large value hides a dependence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bf16kit.artifact.manifest import Manifest, SpecEntry
from bf16kit.converter.graph.dimensions import corrected_by, name_dimensions, reconciled
from bf16kit.converter.source import Feeds
from bf16kit.drift import metrics as drift
from bf16kit.drift.slices import FP32_NOISE, Values
from bf16kit.messages.errors import ConversionError, RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec, describe
from bf16kit.runtime import Runtime

_ROWS = 3  # samples that are run together
_EXTREMES = (np.nan, np.inf, 1e30)  # inputs of a companion; a model may reject them, then they cannot do harm
# The largest error of an element of a slice, which sums in another order explain: a share of the slice's variation,
# a share of its magnitude, and, for slices that nearly vanish, a share of the output's usual magnitude.
_OF_VARIATION = 2.0**-11
_OF_USUAL = 2.0**-22


def with_observed_shapes(
    manifest: Manifest, feeds: Sequence[Feeds], found: Sequence[Feeds], axis: int | None
) -> tuple[Manifest, list[str]]:
    """Correct the outputs' dimensions (names, sizes and number) where the ``found`` outputs contradict them.

    Also declares the batch ``axis``, names every output's batch dimension as the inputs name it, and returns a note on
    each corrected output.
    """
    inputs = [entry.spec() for entry in manifest.inputs]
    declared = [entry.spec() for entry in manifest.outputs]
    runs = [
        {name: array.shape for name, array in (feed | outputs).items()}
        for feed, outputs in zip(feeds, found, strict=True)
    ]
    for spec in declared:
        ranks = {len(run[spec.name]): run[spec.name] for run in reversed(runs)}
        if len(ranks) > 1:
            *_, other, one = (describe(shape) for shape in ranks.values())
            raise ConversionError(
                f"output {spec.name!r} is {one} for one sample and {other} for another; export the model with the same"
                " number of dimensions for all samples"
            )
    given = [corrected_by(spec, [run[spec.name] for run in runs]) for spec in declared]
    outputs = reconciled([*inputs, *name_dimensions(given, known=inputs)], runs)[len(inputs) :]
    notes = [
        f"output {was.name!r} is declared as {describe(was.shape)}, but the model gives {describe(others[0])}; the"
        f" artifact declares {describe(now.shape)}"
        for was, now in zip(declared, outputs, strict=True)
        if (others := [run[was.name] for run in runs if corrected_by(was, [run[was.name]]) != was])
    ]
    entries = [SpecEntry.of(spec) for spec in outputs]
    if axis is not None:
        batch = manifest.inputs[0].shape[0]
        entries = [entry.model_copy(update={"shape": [batch, *entry.shape[1:]]}) for entry in entries]
    return manifest.amended(outputs=entries, batch_axis=axis), notes


def batch_axis(
    runtime: Runtime, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], feeds: Sequence[Feeds]
) -> int | None:
    """Return 0 if the first axis is a batch axis, else None.

    Samples must give the same outputs alone as in company. None if shapes rule that out, and if ``feeds`` hold no two
    samples of the same shape.
    """
    if not may_have_batch_axis(inputs, outputs):
        return None
    rows = _rows_of_one_shape(feeds)
    if len(rows) < 2:
        return None
    try:
        apart = [runtime.run(row) for row in rows]
        for order in ((0, 1), (1, 0), (2, 0, 1)):
            if max(order) < len(rows):
                together = runtime.run(_batch([rows[i] for i in order]))
                if not _same([apart[i] for i in order], together, outputs):
                    return None
    except RuntimeFailure:
        return None  # a dimension that is declared free but is not
    return 0 if _undisturbed(runtime, rows[0], rows[1], outputs) else None


def may_have_batch_axis(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bool:
    """Whether every input and output has a free first dimension, with one name for all inputs."""
    free = all(spec.shape and isinstance(spec.shape[0], str) for spec in (*inputs, *outputs))
    return free and len({spec.shape[0] for spec in inputs}) == 1


def _undisturbed(runtime: Runtime, row: Feeds, other: Feeds, outputs: Sequence[TensorSpec]) -> bool:
    """Whether ``row`` has the same outputs beside ``other`` as beside itself, and beside a companion of extreme floats.

    All runs have the same size: alone, the row may be summed in another order.
    """
    companions = [row]
    if any(array.dtype.kind == "f" for array in row.values()):
        with np.errstate(over="ignore"):  # in fp16, the largest is infinite
            companions += [
                {name: np.full_like(a, extreme) if a.dtype.kind == "f" else a for name, a in row.items()}
                for extreme in _EXTREMES
            ]
    usual = {name: array[:1] for name, array in runtime.run(_batch([row, other])).items()}
    for companion in companions:
        try:
            together = runtime.run(_batch([row, companion]))
        except RuntimeFailure:
            continue
        if not _same([usual], {name: array[:1] for name, array in together.items()}, outputs):
            return False
    return True


def _rows_of_one_shape(feeds: Sequence[Feeds]) -> list[Feeds]:
    """Return up to :data:`_ROWS` different samples of the same shape, at least two if there are any."""
    by_shape: dict[tuple[tuple[int, ...], ...], list[Feeds]] = {}
    for feed in feeds:
        for i in range(min(len(array) for array in feed.values())):
            row = {name: array[i : i + 1] for name, array in feed.items()}
            alike = by_shape.setdefault(tuple(array.shape for array in row.values()), [])
            if not any(all(np.array_equal(row[name], other[name]) for name in row) for other in alike):
                alike.append(row)
            if len(alike) == _ROWS:
                return alike
    return max(by_shape.values(), key=len, default=[])


def _batch(rows: Sequence[Feeds]) -> Feeds:
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def _same(apart: Sequence[Feeds], together: Feeds, outputs: Sequence[TensorSpec]) -> bool:
    for spec in outputs:
        rows, found = [row[spec.name] for row in apart], together[spec.name]
        if any(len(row) != 1 or row.shape != rows[0].shape for row in rows):
            return False
        alone = np.concatenate(rows)
        if alone.shape != found.shape or (not drift.has_slices(alone) and not np.array_equal(alone, found)):
            return False
        if drift.has_slices(alone):
            r, error, nonfinite = drift.difference(alone, found)
            usual = float(np.nanmedian(np.abs(r))) if r.size and not np.isnan(r).all() else 0.0
            within = (_within_noise(r, error, axis, usual) for axis in range(1, max(2, r.ndim)))
            if nonfinite.any() or not all(within):
                return False
    return True


def _within_noise(r: Values, error: Values, axis: int, usual: float) -> bool:
    """Whether the error of each slice along ``axis`` of ``[samples, *axes]`` is fp32 noise; NaN is left out."""
    if r.ndim == 1:
        r, error = r[:, None], error[:, None]
    others = tuple(other for other in range(r.ndim) if other != axis)

    def rms(x: Values) -> Values:
        mean: Values = np.nansum(np.square(x), others) / np.maximum(1, np.count_nonzero(~np.isnan(x), others))
        return np.sqrt(mean)

    allowed = _OF_VARIATION * rms(np.diff(r, axis=0)) + 4 * FP32_NOISE * rms(r) + _OF_USUAL * usual
    return bool(np.all(np.max(np.nan_to_num(np.abs(error)), axis=others, initial=0.0) <= allowed))
