"""``measurements.json``: everything a conversion measured, in rows; the manifest has the figures that are judged.

JSON with sorted keys on one line, and bounded: beyond the maxima below no rows are written, and ``measured`` says how
many there were.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from bf16kit.artifact.entries import Entry, Number, RecoveryEntry, Size, first_error
from bf16kit.drift.metrics import SampleDrift
from bf16kit.messages.errors import ArtifactError
from bf16kit.messages.wording import parse_json, quoted
from bf16kit.numerics.rounding import Census

VERSION = 1
MOST_SAMPLES = 10_000  # rows of samples over all profiles and outputs
MOST_LAYERS = 10_000  # of all profiles
MOST_TENSORS = 10_000
DIGITS = 7  # as many as fp32 has: all 17, on a line each, would make the file of a small model three times as large
MOST_SLICES = 5  # of an output in a profile
MOST_DB = 200.0  # an SQNR of ±this stands for exact and for infinitely far
# How far below its prediction, in dB, an SQNR must lie to be at fault. MiniLM stays within 1.5; cancellation of one
# bit costs 6 (docs/decisions has the numbers of more models).
MARGIN_DB = 6.0
MAX_BYTES = 64 << 20  # of the file; with the maxima above it stays below a tenth of this

# A few samples do not contain the largest possible value. So a value counts as inside when it exceeds theirs by less
# than half of the range (0 included). An overflow is farther off.
SLACK = 0.5

T = TypeVar("T")
Finite = Annotated[float, Field(allow_inf_nan=False)]
Distance = Annotated[Number, Field(ge=0)]


class InputRange(Entry):
    """The smallest and the largest finite value of one input, 0 without any; ``nonfinite`` if it had other values, too.

    The budget was checked only for inputs in these ranges.
    """

    low: Finite
    high: Finite
    nonfinite: bool = False

    @classmethod
    def of(cls, array: NDArray[Any]) -> Self | None:
        """Return the range of one array; None if it has no range: strings, booleans, or an empty array."""
        if (array.dtype.kind not in "iuf" and array.dtype.name != "bfloat16") or array.size == 0:
            return None
        finite = array if array.dtype.kind in "iu" else array[np.isfinite(array)]
        if not finite.size:
            return cls(low=0.0, high=0.0, nonfinite=True)
        return cls(low=float(finite.min()), high=float(finite.max()), nonfinite=finite.size < array.size)

    def outside(self, array: NDArray[Any]) -> NDArray[np.bool_]:
        """Return a mask of the elements that lie more than :data:`SLACK` of the range, with 0, beyond its ends."""
        low, high = min(self.low, 0.0), max(self.high, 0.0)
        slack = SLACK * (high - low)
        out = (array < low - slack) | (array > high + slack)
        if array.dtype.kind in "iu":
            return np.asarray(out)
        return np.asarray(np.where(np.isfinite(array), out, not self.nonfinite))

    def __str__(self) -> str:
        return f"{self.low:.6g} to {self.high:.6g}{', and not finite' if self.nonfinite else ''}"


class SampleColumns(Entry):
    """The drift of one output, a column per metric and a row per sample.

    Row ``i`` of ``n`` is sample ``i · measured // n``. The ``top1`` columns are empty for an output that is not logits.
    """

    measured: Size
    relative_l2: list[Distance]
    cosine_distance: list[Distance]
    max_abs: list[Distance]
    nonfinite: list[Size]
    top1_matches: list[Size] = []
    top1_rows: list[Size] = []

    @classmethod
    def of(cls, drifts: Sequence[SampleDrift], most: int) -> SampleColumns:
        """Return at most ``most`` of ``drifts``, evenly spaced, as columns."""
        rows = downsample(drifts, most)
        columns = {name: [getattr(row, name) for row in rows] for name in cls.model_fields if name != "measured"}
        if not any(columns["top1_rows"]):
            columns |= {"top1_matches": [], "top1_rows": []}
        return cls(measured=len(drifts), **columns)


class LayerEntry(Entry):
    """The SQNR of one node's result after rounding, over all samples that were run.

    ``name`` is the node's in the source's graph, ``weight`` that of the first weight it reads ("" for none). ``depth``
    counts the matrix products on the longest path to it. ``sqnr_db`` is 10·log10(Σr² / Σ(c−r)²), r the fp32 reference's
    values and c the profile's; ``expected_db`` is that of rounding noise alone. Both are within ±:data:`MOST_DB`.
    """

    name: str
    op: str
    weight: str = ""
    depth: Size
    sqnr_db: Number
    expected_db: Number


class RemedyEntry(Entry):
    """Nodes and weights that, kept in fp32 in a trial, raised ``output``'s SQNR from ``before_db`` to ``after_db``.

    ``keep_fp32`` is the regular expression that matches them.
    """

    keep_fp32: str
    nodes: list[str]
    output: str
    before_db: Number
    after_db: Number


class DiagnosisEntry(Entry):
    """The diagnosis of a profile's outputs from its layers; ``tried`` says whether a ``remedy`` was searched for.

    ``ails``: on the samples that were run, an output is :data:`MARGIN_DB` below its predicted SQNR, or over the budget,
    or the profile is over the budget on those of the conversion.
    ``leaves`` is the layer at which its noise fell below it, None if it never did.
    """

    ails: bool
    leaves: LayerEntry | None = None
    remedy: RemedyEntry | None = None
    tried: bool = False


class Layers(Entry):
    """Layers in graph order, at most :data:`MOST_LAYERS` of those ``measured``, evenly spaced, and their diagnosis."""

    measured: Size
    rows: list[LayerEntry]
    diagnosis: DiagnosisEntry | None = None


class Ranges(Entry):
    """The census of the bf16 tensors by name: the worst, at most :data:`MOST_TENSORS` of those ``measured``."""

    measured: Size
    tensors: dict[str, Census]


class IslandEntry(Entry):
    """A node that the search keeps in fp32. ``worth`` is the search's drift ÷ budget with only this in bf16."""

    name: str
    op: str
    remedy: str
    worth: Number


class SearchEntry(Entry):
    """The result of the search for fp32 islands.

    ``before`` and ``after`` are the largest drift ÷ budget. ``bf16_bytes`` and ``bf16_flops`` are the shares of the
    weights' bytes and of the arithmetic that are in bf16. ``blame`` is empty, but for artifacts of older versions.
    """

    candidates: Size
    before: Number
    after: Number
    islands: list[IslandEntry] = []
    bf16_bytes: Number
    bf16_flops: Number
    blame: str = ""


class SliceEntry(Entry):
    """A slice of an output: its error ÷ its own variation, its axis, and its first index there."""

    error: Distance
    axis: Size
    index: Size


class ProfileMeasurements(Entry):
    """The measurements of one profile; ``outputs`` and ``slices``, the worst :data:`MOST_SLICES`, are by output."""

    omitted = ("slices",)

    outputs: dict[str, SampleColumns] = {}
    slices: dict[str, list[SliceEntry]] = {}  # empty if an older bf16kit measured
    layers: Layers | None = None
    search: SearchEntry | None = None


class Measurements(Entry):
    """The contents of ``measurements.json``."""

    omitted = ("inputs", "recovery")

    profiles: dict[str, ProfileMeasurements] = {}
    ranges: Ranges = Ranges(measured=0, tensors={})
    inputs: dict[str, InputRange] = {}  # by name; empty if an older bf16kit measured
    recovery: RecoveryEntry | None = None  # only for an artifact whose weights were trained for bf16
    version: int = VERSION

    def dumps(self) -> bytes:
        """Return the bytes of the file; what the profiles gave is rounded to :data:`DIGITS` digits."""
        fields = self.model_dump(mode="json")
        fields["profiles"] = _rounded(fields["profiles"])
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return f"{text}\n".encode()

    @classmethod
    def loads(cls, data: bytes, where: str | Path) -> Measurements:
        """Parse the measurements in ``data``; ``where`` names their origin in messages.

        Raises ArtifactError if they are not valid.
        """
        fields = parse_json(data, ArtifactError, where)
        version = fields.get("version") if isinstance(fields, dict) else None
        if version != VERSION:
            raise ArtifactError(f"{where}: measurements of version {quoted(version)}, this bf16kit reads {VERSION}")
        try:
            return cls.model_validate_json(data, strict=True)
        except ValidationError as error:
            raise ArtifactError(f"{where}: {first_error(error)}") from None


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def sample_columns(drifts: Mapping[str, Mapping[str, Sequence[SampleDrift]]]) -> dict[str, dict[str, SampleColumns]]:
    """Return columns by profile and output, each with an equal share of :data:`MOST_SAMPLES` rows."""
    most = MOST_SAMPLES // max(1, sum(map(len, drifts.values())))
    return {p: {o: SampleColumns.of(rows, most) for o, rows in outputs.items()} for p, outputs in drifts.items()}


def ranges(census: Mapping[str, Census]) -> Ranges:
    """Return the census of the tensors with the worst range events, by name."""
    worst = sorted(census.items(), key=lambda item: (item[1].severity, item[0]))[:MOST_TENSORS]
    return Ranges(measured=len(census), tensors=dict(worst))


def downsample(rows: Sequence[T], most: int) -> Sequence[T]:
    """Return at most ``most`` of ``rows``, evenly spaced, including the first."""
    kept = min(len(rows), most)
    return [rows[i * len(rows) // kept] for i in range(kept)]


def input_ranges(feeds: Iterable[Mapping[str, NDArray[Any]]]) -> dict[str, InputRange]:
    """Return the range of each input over all ``feeds``."""
    found: dict[str, InputRange] = {}
    for name, array in (item for feed in feeds for item in feed.items()):
        if (one := InputRange.of(array)) is not None:
            known = found.get(name, one)
            low, high = min(known.low, one.low), max(known.high, one.high)
            found[name] = InputRange(low=low, high=high, nonfinite=known.nonfinite or one.nonfinite)
    return found
