"""SQNR down the graph: what each layer's answer has left of the reference's, and where it leaves the expected line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bf16kit.measurements import MOST_DB, LayerEntry, Layers, Measurements

MARGIN_DB = 6.0  # below the expected line: twice the noise amplitude that bf16 alone brings


@dataclass(frozen=True, slots=True)
class LayerSeries:
    """The layers of one profile in the order of their depth, of ``measured`` in all.

    ``first_off`` is the first whose SQNR is :data:`MARGIN_DB` below what bf16 alone would leave of it; None when all
    keep to the line.
    """

    profile: str
    measured: int
    rows: tuple[LayerEntry, ...]
    first_off: LayerEntry | None

    def worst(self) -> list[LayerEntry]:
        """The rows, those furthest below the expected line first."""
        return sorted(self.rows, key=shortfall, reverse=True)


def shortfall(row: LayerEntry) -> float:
    """How many dB ``row`` is below the line; an exact layer is as far above it as can be."""
    return -math.inf if row.sqnr_db >= MOST_DB else row.expected_db - row.sqnr_db


def called(row: LayerEntry) -> str:
    """What a user calls the layer: its weight where it has one, exporters make up the names of nodes."""
    return row.weight or row.name


def layer_series(measured: Measurements) -> Iterator[LayerSeries]:
    """The layers of each profile for which they were measured."""
    for profile, entry in sorted(measured.profiles.items()):
        if entry.layers is not None and entry.layers.rows:
            yield series(profile, entry.layers)


def series(profile: str, layers: Layers) -> LayerSeries:
    """The layers of one profile by depth."""
    rows = tuple(sorted(layers.rows, key=lambda row: row.depth))
    first = next((row for row in rows if shortfall(row) > MARGIN_DB), None)
    return LayerSeries(profile, layers.measured, rows, first)
