"""SQNR along the graph: how much of the reference's signal each layer keeps, and where it falls below prediction."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from bf16kit.drift.measurements import (
    MARGIN_DB,
    MOST_DB,
    DiagnosisEntry,
    LayerEntry,
    Layers,
    Measurements,
    RemedyEntry,
)
from bf16kit.messages.wording import listed

_NAMED = 12  # nodes and weights of a remedy that a sentence names


@dataclass(frozen=True, slots=True)
class LayerSeries:
    """The layers of one profile, sorted by depth; ``measured`` is their number before rows were left out.

    ``first_off`` is the first layer whose SQNR is :data:`MARGIN_DB` below the predicted one; None if there is none.
    ``diagnosis`` is what the layers say about the outputs; None in older artifacts. ``within`` says whether the profile
    is within the budget. ``remarks`` are sentences on the remedy, or on why there is none.
    """

    profile: str
    measured: int
    rows: tuple[LayerEntry, ...]
    first_off: LayerEntry | None
    diagnosis: DiagnosisEntry | None = None
    within: bool = True
    remarks: str = ""

    @property
    def leaves(self) -> LayerEntry | None:
        """The layer where the noise of an output below its predicted SQNR comes from, or None."""
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
            else " ".join(_diagnosis_sentences(self.diagnosis, self.first_off, self.within, self.remarks))
        )

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
    """Sort the layers of one profile by depth."""
    rows = tuple(sorted(layers.rows, key=lambda row: row.depth))
    first = next((row for row in rows if shortfall(row) > MARGIN_DB), None)
    return LayerSeries(profile, layers.measured, rows, first, layers.diagnosis, within, remarks)


def _diagnosis_sentences(
    found: DiagnosisEntry, first_off: LayerEntry | None, within: bool, remarks: str
) -> Iterator[str]:
    if not found.ails:
        yield "Every output has the SQNR predicted for rounding to bf16, so its drift comes from all layers alike."
        if first_off is not None:
            yield (
                f"The first layer below its predicted SQNR is {layer_name(first_off)}; later layers average its error"
                " away."
            )
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
    if found.remedy is None and remarks:
        yield remarks
    elif found.remedy is None and found.tried:
        yield "Keeping nodes and weights in fp32 does not mend it; look at its inputs or its weights."
    elif found.remedy is None:
        yield (
            "No remedy is needed, because the budget is met."
            if within
            else "No remedy was looked for; bf16-convert explain looks for one."
        )
    else:
        yield from filter(None, [remarks, _describe_remedy(found.remedy)])


def _describe_remedy(remedy: RemedyEntry) -> str:
    many = len(remedy.nodes) > _NAMED
    names = f"{len(remedy.nodes)} nodes and weights" if many else listed(remedy.nodes)
    return (
        f"Keeping {names} in fp32 would raise output {remedy.output} from {remedy.before_db:.1f} to"
        f" {remedy.after_db:.1f} dB (tested on the CPU):"
    )
