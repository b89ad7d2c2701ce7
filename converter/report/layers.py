"""SQNR along the graph: how much of the reference's signal each layer keeps, and where it falls below prediction."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from bf16kit.drift.measurements import MARGIN_DB, MOST_DB, DiagnosisEntry, LayerEntry, Layers, Measurements
from bf16kit.messages.wording import listed

_NAMED = 12  # nodes and weights of a remedy that a sentence names


@dataclass(frozen=True, slots=True)
class LayerSeries:
    """The layers of one profile, sorted by depth; ``measured`` is their number before rows were left out.

    ``first_off`` is the first layer whose SQNR is :data:`MARGIN_DB` below the predicted one; None if there is none.
    ``diagnosis`` is what the layers say about the outputs; None in older artifacts. ``summary`` says it in sentences,
    and ``option`` is what to convert with to mend the worst output; "" if none is needed or known.
    """

    profile: str
    measured: int
    rows: tuple[LayerEntry, ...]
    first_off: LayerEntry | None
    diagnosis: DiagnosisEntry | None
    summary: str
    option: str

    @property
    def leaves(self) -> LayerEntry | None:
        """The layer where the noise of an output below its predicted SQNR comes from, or None."""
        return None if self.diagnosis is None else self.diagnosis.leaves

    def worst(self) -> list[LayerEntry]:
        """Return the rows, those farthest below their predicted SQNR first."""
        return sorted(self.rows, key=shortfall, reverse=True)


def shortfall(row: LayerEntry) -> float:
    """Return how many dB ``row`` is below its predicted SQNR; −inf for an exact layer."""
    return -math.inf if row.sqnr_db >= MOST_DB else row.expected_db - row.sqnr_db


def layer_name(row: LayerEntry) -> str:
    """Return the user's name for the layer: its weight if it has one, because exporters make up names of nodes."""
    return row.weight or row.name


def layer_series(measured: Measurements, failing: Collection[str] = ()) -> Iterator[LayerSeries]:
    """Yield the layers of each profile for which they were measured; ``failing`` are the profiles over budget."""
    for profile, entry in sorted(measured.profiles.items()):
        if entry.layers is not None and entry.layers.rows:
            yield series(profile, entry.layers, within=profile not in failing)


def series(profile: str, layers: Layers, *, within: bool = True, remarks: str = "") -> LayerSeries:
    """Sort the layers of one profile by depth, and say what they mean.

    ``within`` says whether the profile is within the budget. ``remarks`` are sentences on the remedy, or on why there
    is none.
    """
    rows, found = tuple(sorted(layers.rows, key=lambda row: row.depth)), layers.diagnosis
    first = next((row for row in rows if shortfall(row) > MARGIN_DB), None)
    said = "" if found is None else " ".join(_sentences(found, first, within, remarks))
    option = f"--keep-fp32 {shlex.quote(found.remedy.keep_fp32)}" if found and found.remedy else ""
    return LayerSeries(profile, layers.measured, rows, first, found, said, option)


def _sentences(found: DiagnosisEntry, first: LayerEntry | None, within: bool, remarks: str) -> Iterator[str]:
    if not found.ails:
        yield "Every output has the SQNR predicted for rounding to bf16, so its drift comes from all layers alike."
        if first is not None:
            name = layer_name(first)
            yield f"The first layer below its predicted SQNR is {name}; later layers average its error away."
        yield "No remedy is needed."
        return
    if found.leaves is None:
        yield (
            "An output is over budget, though no layer is below its predicted SQNR: the rounding errors of all layers"
            " add up."
        )
    else:
        yield (
            f"SQNR falls below its prediction at {found.leaves.name} ({found.leaves.op}):"
            f" {found.leaves.sqnr_db:.1f} dB, predicted {found.leaves.expected_db:.1f} dB."
        )
    if remarks:
        yield remarks
    if (remedy := found.remedy) is not None:
        names = listed(remedy.nodes) if len(remedy.nodes) <= _NAMED else f"{len(remedy.nodes)} nodes and weights"
        yield (
            f"Keeping {names} in fp32 would raise output {remedy.output} from {remedy.before_db:.1f} to"
            f" {remedy.after_db:.1f} dB (tested on the CPU):"
        )
    elif not remarks and found.tried:
        yield "Keeping nodes and weights in fp32 does not mend it; look at its inputs or its weights."
    elif not remarks and within:
        yield "No remedy is needed, because the budget is met."
    elif not remarks:
        yield "No remedy was looked for; bf16-convert explain looks for one."
