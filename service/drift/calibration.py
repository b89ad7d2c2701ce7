"""What an artifact's conversion measured, which live samples are compared with: drift, and the ranges of inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bf16kit.artifact.entries import drawn_at_random
from bf16kit.artifact.manifest import Manifest
from bf16kit.drift.measurements import InputRange, Measurements
from bf16kit.drift.metrics import has_slices
from bf16kit.drift.slices import Scales
from service.contract import Array


@dataclass(frozen=True, slots=True)
class Calibration:
    """``rows``: the drift of each measured sample, by profile and output: max_abs for ``scalars`` (outputs of one
    number per row), else relative_l2. ``ranges``: the input ranges, by input name.

    Both are empty if the samples were random: live inputs do not resemble random ones. ``missing_reason`` explains why
    something is missing. ``scales``: how much each slice of an output varied over the samples, by output; empty for
    artifacts before schema version 7. ``infinite``: outputs whose reference is not finite in the golden samples, as of
    a model that masks.
    """

    rows: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    ranges: Mapping[str, InputRange] = field(default_factory=dict)
    missing_reason: str = "its artifact keeps no measurements"
    scales: Mapping[str, Scales] = field(default_factory=dict)
    infinite: frozenset[str] = frozenset()
    scalars: frozenset[str] = frozenset()

    @classmethod
    def of(cls, manifest: Manifest, measurements: Measurements | None) -> Calibration:
        """Return the calibration of an artifact.

        ``measurements`` is None for an artifact older than measurements are.
        """
        if measurements is None:
            return cls()
        usable = {profile for profile, entry in manifest.drift.items() if not drawn_at_random(entry.source)}
        measured = [each for entry in manifest.drift.values() for each in entry.outputs.items()]
        scalars = frozenset(output for output, stats in measured if "relative_l2" not in stats)
        if not usable:
            return cls(missing_reason="it was measured on random inputs", scalars=scalars)
        rows = {
            profile: {
                output: columns.max_abs if output in scalars else columns.relative_l2
                for output, columns in entry.outputs.items()
            }
            for profile, entry in measurements.profiles.items()
            if profile in usable
        }
        return cls(rows, measurements.inputs, "too few samples were measured", scalars=scalars)


def all_finite(output: Array) -> bool:
    """Return whether no element is infinite or NaN; strings and integers are always finite."""
    if not has_slices(output):
        return True
    with np.errstate(invalid="ignore"):  # casting a NaN of a narrow type raises the flag
        return bool(np.isfinite(output.astype(np.float64, copy=False)).all())


def rows_out_of_range(
    ranges: Mapping[str, InputRange], feeds: Mapping[str, Array], rows: int, batch_axis: int | None
) -> dict[str, NDArray[np.bool_]]:
    """Return, for each input that has a range, a mask [rows] of the rows that hold a value outside it."""

    def mask(array: Array, known: InputRange) -> NDArray[np.bool_]:
        out = known.outside(array)
        if batch_axis is None or batch_axis >= array.ndim or array.shape[batch_axis] != rows:
            return np.full(rows, bool(out.any()))
        return np.asarray(out.any(axis=tuple(i for i in range(array.ndim) if i != batch_axis)))

    return {name: mask(feeds[name], known) for name, known in ranges.items() if name in feeds}
