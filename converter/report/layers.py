"""SQNR down the graph: what each layer's answer has left of the reference's, and where it leaves the expected line."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from bf16kit.measurements import MARGIN_DB, MOST_DB, DiagnosisEntry, LayerEntry, Layers, Measurements
from bf16kit.text import listed


@dataclass(frozen=True, slots=True)
class LayerSeries:
    """The layers of one profile in the order of their depth, of ``measured`` in all.

    ``first_off`` is the first whose SQNR is :data:`MARGIN_DB` below what bf16 alone would leave of it; None when all
    keep to the line. ``diagnosis`` is what they say of the outputs; None in artifacts that are older than that.
    ``within`` says whether the profile keeps to the budget, ``unsought`` why no remedy was looked for where it is not
    that, in a sentence.
    """

    profile: str
    measured: int
    rows: tuple[LayerEntry, ...]
    first_off: LayerEntry | None
    diagnosis: DiagnosisEntry | None = None
    within: bool = True
    unsought: str = ""

    @property
    def leaves(self) -> LayerEntry | None:
        """The layer from which the noise of an output comes that is off the line."""
        return None if self.diagnosis is None else self.diagnosis.leaves

    @property
    def option(self) -> str:
        """What to convert with so that the worst output is mended; "" when nothing has to be, or nothing is known."""
        remedy = None if self.diagnosis is None else self.diagnosis.remedy
        return "" if remedy is None else f"--keep-fp32 {shlex.quote(remedy.keep_fp32)}"

    @property
    def told(self) -> str:
        """What the layers say of the outputs, in sentences; "" when it is not known. :attr:`option` follows."""
        return (
            ""
            if self.diagnosis is None
            else " ".join(_told(self.diagnosis, self.first_off, self.within, self.unsought))
        )

    def worst(self) -> list[LayerEntry]:
        """The rows, those furthest below the expected line first."""
        return sorted(self.rows, key=shortfall, reverse=True)


def shortfall(row: LayerEntry) -> float:
    """How many dB ``row`` is below the line; an exact layer is as far above it as can be."""
    return -math.inf if row.sqnr_db >= MOST_DB else row.expected_db - row.sqnr_db


def called(row: LayerEntry) -> str:
    """What a user calls the layer: its weight where it has one, exporters make up the names of nodes."""
    return row.weight or row.name


def layer_series(measured: Measurements, failing: Collection[str] = ()) -> Iterator[LayerSeries]:
    """The layers of each profile for which they were measured; ``failing`` are over budget."""
    for profile, entry in sorted(measured.profiles.items()):
        if entry.layers is not None and entry.layers.rows:
            yield series(profile, entry.layers, within=profile not in failing)


def series(profile: str, layers: Layers, *, within: bool = True, unsought: str = "") -> LayerSeries:
    """The layers of one profile by depth."""
    rows = tuple(sorted(layers.rows, key=lambda row: row.depth))
    first = next((row for row in rows if shortfall(row) > MARGIN_DB), None)
    return LayerSeries(profile, layers.measured, rows, first, layers.diagnosis, within, unsought)


def _told(found: DiagnosisEntry, first_off: LayerEntry | None, within: bool, unsought: str) -> Iterator[str]:
    if not found.ails:
        yield "Every output is on the expected line: what drift there is comes from rounding everywhere alike."
        if first_off is not None:
            yield f"The first layer below it is {called(first_off)}; what follows averages its error away."
        yield "No remedy is needed."
    elif found.leaves is None:
        yield "An output is over budget and no layer left the line: rounding adds up alike down a graph this deep."
    else:
        yield (
            f"It leaves the expected line at {found.leaves.name} ({found.leaves.op}): {found.leaves.sqnr_db:.1f} dB"
            f" where {found.leaves.expected_db:.1f} are expected."
        )
        yield _mended(found, within, unsought)


def _mended(found: DiagnosisEntry, within: bool, unsought: str) -> str:
    remedy = found.remedy
    if remedy is not None:
        return (
            f"Kept in fp32, {listed(remedy.nodes)} would bring output {remedy.output} from {remedy.before_db:.1f} to"
            f" {remedy.after_db:.1f} dB (tried on the CPU):"
        )
    if found.tried:
        return "No few nodes before it would mend that when kept in fp32: look at its inputs, or its weights."
    if unsought:
        return unsought
    why = "No remedy is needed, because the budget is met" if within else "No remedy was looked for"
    return f"{why}; bf16-convert explain tells one."
