"""The drift and the input ranges that an artifact's conversion measured, which live drift is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bf16kit.artifact.entries import drawn_at_random
from bf16kit.artifact.manifest import Manifest
from bf16kit.drift.measurements import InputRange, Measurements
from bf16kit.drift.slices import Scales


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
