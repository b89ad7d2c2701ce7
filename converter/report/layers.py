"""SQNR along the graph: how much of the reference's signal each layer keeps, and where it leaves the expected line."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from bf16kit.drift.measurements import MARGIN_DB, MOST_DB, DiagnosisEntry, LayerEntry, Layers, Measurements
from bf16kit.messages.text import listed


@dataclass(frozen=True, slots=True)
class LayerSeries:
    """The layers of one profile, sorted by depth; ``measured`` is their number before rows were left out.

    ``first_off`` is the first layer whose SQNR is :data:`MARGIN_DB` below the expected line; None if there is none.
    ``diagnosis`` is what the layers say about the outputs; None in older artifacts. ``within`` says whether the profile
    is within the budget. ``no_remedy_reason`` is a sentence on why no remedy was looked for, if the budget is not the
    reason.
    """

    profile: str
    measured: int
    rows: tuple[LayerEntry, ...]
    first_off: LayerEntry | None
    diagnosis: DiagnosisEntry | None = None
    within: bool = True
    no_remedy_reason: str = ""

    @property
    def leaves(self) -> LayerEntry | None:
        """The layer where the noise of an output off the line comes from, or None."""
        return None if self.diagnosis is None else self.diagnosis.leaves

    @property
    def option(self) -> str:
        """The option to convert with to mend the worst output; "" if none is needed or known."""
        remedy = None if self.diagnosis is None else self.diagnosis.remedy
        return "" if remedy is None else f"--keep-fp32 {shlex.quote(remedy.keep_fp32)}"

    @property
    def summary(self) -> str:
        """Sentences on what the layers say about the outputs; "" if unknown. :attr:`option` is meant to follow."""
        return (
            ""
            if self.diagnosis is None
            else " ".join(_diagnosis_sentences(self.diagnosis, self.first_off, self.within, self.no_remedy_reason))
        )

    def worst(self) -> list[LayerEntry]:
        """Return the rows, those farthest below the expected line first."""
        return sorted(self.rows, key=shortfall, reverse=True)


def shortfall(row: LayerEntry) -> float:
    """Return how many dB ``row`` is below the line; −inf for an exact layer."""
    return -math.inf if row.sqnr_db >= MOST_DB else row.expected_db - row.sqnr_db


def layer_name(row: LayerEntry) -> str:
    """Return the user's name for the layer: its weight if it has one, because exporters make up names of nodes."""
    return row.weight or row.name


def layer_series(measured: Measurements, failing: Collection[str] = ()) -> Iterator[LayerSeries]:
    """Yield the layers of each profile for which they were measured; ``failing`` are the profiles over budget."""
    for profile, entry in sorted(measured.profiles.items()):
        if entry.layers is not None and entry.layers.rows:
            yield series(profile, entry.layers, within=profile not in failing)


def series(profile: str, layers: Layers, *, within: bool = True, no_remedy_reason: str = "") -> LayerSeries:
    """Sort the layers of one profile by depth."""
    rows = tuple(sorted(layers.rows, key=lambda row: row.depth))
    first = next((row for row in rows if shortfall(row) > MARGIN_DB), None)
    return LayerSeries(profile, layers.measured, rows, first, layers.diagnosis, within, no_remedy_reason)


def _diagnosis_sentences(
    found: DiagnosisEntry, first_off: LayerEntry | None, within: bool, no_remedy_reason: str
) -> Iterator[str]:
    if not found.ails:
        yield "Every output has the SQNR expected of rounding to bf16, so its drift comes from all layers alike."
        if first_off is not None:
            yield (
                f"The first layer below the expected SQNR is {layer_name(first_off)}; later layers average its"
                " error away."
            )
        yield "No remedy is needed."
    elif found.leaves is None:
        yield (
            "An output is over budget, though no layer is below its expected SQNR: the rounding errors of all layers"
            " add up."
        )
    else:
        yield (
            f"SQNR falls below the expected line at {found.leaves.name} ({found.leaves.op}):"
            f" {found.leaves.sqnr_db:.1f} dB, expected {found.leaves.expected_db:.1f} dB."
        )
        yield _describe_remedy(found, within, no_remedy_reason)


def _describe_remedy(found: DiagnosisEntry, within: bool, no_remedy_reason: str) -> str:
    remedy = found.remedy
    if remedy is not None:
        return (
            f"Keeping {listed(remedy.nodes)} in fp32 would raise output {remedy.output} from {remedy.before_db:.1f}"
            f" to {remedy.after_db:.1f} dB (tested on the CPU):"
        )
    if found.tried:
        return "Keeping a few nodes before it in fp32 does not mend it; look at its inputs or its weights."
    if no_remedy_reason:
        return no_remedy_reason
    reason = "No remedy is needed, because the budget is met" if within else "No remedy was looked for"
    return f"{reason}; bf16-convert explain looks for one."
