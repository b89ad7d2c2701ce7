"""``measurements.json``: everything a conversion measured, in rows; the manifest has the figures that are judged.

Per profile: the drift of each sample, the SQNR of each layer and the result of the search for fp32 islands. Per tensor:
the range events of rounding. Per input: the range of its samples. Canonical JSON like the manifest's
(:mod:`bf16kit.artifact.entries` says how a float that is not finite is written), and bounded: beyond the maxima
below no rows are written, and ``measured`` says how many there were.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, ValidationError

from bf16kit.artifact.entries import STRICT, Number, Size
from bf16kit.artifact.recoveryentries import RecoveryEntry
from bf16kit.drift.inputranges import InputRange
from bf16kit.drift.metrics import SampleDrift
from bf16kit.messages.document import parse_json
from bf16kit.messages.errors import ArtifactError
from bf16kit.messages.wording import quoted
from bf16kit.numerics.rounding import OVERFLOW, SMALLEST_NORMAL, Census

VERSION = 1
MOST_SAMPLES = 10_000  # rows of samples over all profiles and outputs
MOST_LAYERS = 10_000  # of all profiles
MOST_TENSORS = 10_000
MOST_SLICES = 5  # of an output in a profile
MOST_DB = 200.0  # an SQNR of ±this stands for exact and for infinitely far
# How far below its prediction, in dB, an SQNR must lie to be at fault. MiniLM stays within 1.5; cancellation of one
# bit costs 6 (docs/decisions has the numbers of more models).
MARGIN_DB = 6.0
MAX_BYTES = 64 << 20  # of the file; with the maxima above it stays below a tenth of this, unless names are very long

T = TypeVar("T")
Distance = Annotated[Number, Field(ge=0)]
Magnitude = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Entry(BaseModel):
    model_config = STRICT


class SampleColumns(_Entry):
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
        logits = any(row.top1_rows for row in rows)
        return cls(
            measured=len(drifts),
            relative_l2=[row.relative_l2 for row in rows],
            cosine_distance=[row.cosine_distance for row in rows],
            max_abs=[row.max_abs for row in rows],
            nonfinite=[row.nonfinite for row in rows],
            top1_matches=[row.top1_matches for row in rows] if logits else [],
            top1_rows=[row.top1_rows for row in rows] if logits else [],
        )


class LayerEntry(_Entry):
    """The SQNR of one node's result after rounding, over all samples that were run.

    ``name`` is the node's in the source's graph, ``weight`` that of the first weight it reads ("" for none). ``depth``
    counts the matrix products on the longest path to it. ``sqnr_db`` is 10·log10(Σr² / Σ(c−r)²), r the fp32 reference's
    values and c the profile's; ``expected_db`` is the prediction: the value if there were only rounding noise. Both are
    within ±:data:`MOST_DB`.
    """

    name: str
    op: str
    weight: str = ""
    depth: Size
    sqnr_db: Number
    expected_db: Number


class RemedyEntry(_Entry):
    """Nodes and weights that, kept in fp32 in a trial, raised ``output``'s SQNR from ``before_db`` to ``after_db``.

    ``keep_fp32`` is the regular expression that matches them.
    """

    keep_fp32: str
    nodes: list[str]
    output: str
    before_db: Number
    after_db: Number


class DiagnosisEntry(_Entry):
    """The diagnosis of a profile's outputs from its layers.

    ``ails``: an output is :data:`MARGIN_DB` below its predicted SQNR, or over the budget. ``leaves`` is the layer
    at which its noise fell below it, None if it never did. ``tried`` says whether a remedy was searched for; ``remedy``
    is the one that helped, None if none did.
    """

    ails: bool
    leaves: LayerEntry | None = None
    remedy: RemedyEntry | None = None
    tried: bool = False


class Layers(_Entry):
    """Layers in graph order, at most :data:`MOST_LAYERS` of those ``measured``, evenly spaced, and their diagnosis."""

    measured: Size
    rows: list[LayerEntry]
    diagnosis: DiagnosisEntry | None = None


class CensusEntry(_Entry):
    """Range events of rounding one tensor, counted in elements: see :class:`bf16kit.numerics.rounding.Census`."""

    count: Size
    nan: Size
    inf: Size
    overflow: Size
    subnormal: Size
    flushed_to_zero: Size
    max_abs: Magnitude
    min_abs_nonzero: Magnitude

    @property
    def headroom(self) -> float:
        """Binades between the tensor's values and the nearer end of bf16's normal range; negative beyond an end."""
        above = math.log2(OVERFLOW / self.max_abs) if self.max_abs else math.inf
        below = math.log2(self.min_abs_nonzero / SMALLEST_NORMAL) if self.min_abs_nonzero else math.inf
        return min(above, below)

    @property
    def severity(self) -> tuple[float, ...]:
        """Sort key from worst to best: shares that become non-finite, zero and subnormal, then the room."""
        count = max(1, self.count)
        lost = (self.nan + self.inf + self.overflow, self.flushed_to_zero, self.subnormal)
        return (*(-elements / count for elements in lost), self.headroom)


class Ranges(_Entry):
    """The census of the bf16 tensors by name: the worst, at most :data:`MOST_TENSORS` of those ``measured``."""

    measured: Size
    tensors: dict[str, CensusEntry]


class IslandEntry(_Entry):
    """A node that the search keeps in fp32. ``worth`` is drift ÷ budget when only this island is put back to bf16."""

    name: str
    op: str
    remedy: str
    worth: Number


class SearchEntry(_Entry):
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


class SliceEntry(_Entry):
    """A slice of an output: its error ÷ its own variation, its axis, and its first index there."""

    error: Distance
    axis: Size
    index: Size


class ProfileMeasurements(_Entry):
    """The measurements of one profile; ``outputs`` and ``slices``, the worst :data:`MOST_SLICES`, are by output."""

    outputs: dict[str, SampleColumns] = {}
    slices: dict[str, list[SliceEntry]] = {}  # empty if an older bf16kit measured
    layers: Layers | None = None
    search: SearchEntry | None = None


class Measurements(_Entry):
    """The contents of ``measurements.json``."""

    profiles: dict[str, ProfileMeasurements] = {}
    ranges: Ranges = Ranges(measured=0, tensors={})
    inputs: dict[str, InputRange] = {}  # by name; empty if an older bf16kit measured
    recovery: RecoveryEntry | None = None  # only for an artifact whose weights were trained for bf16
    version: int = VERSION

    def dumps(self) -> bytes:
        """Return the canonical bytes of the file."""
        fields = self.model_dump(mode="json")
        if not self.inputs:  # older versions do not know this key
            del fields["inputs"]
        if self.recovery is None:
            del fields["recovery"]
        for profile in fields["profiles"].values():
            if not profile["slices"]:
                del profile["slices"]
        return (json.dumps(fields, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()

    def within_size_limit(self) -> Measurements:
        """Return measurements that fit :data:`MAX_BYTES`.

        When very long names make the file too large, layers, search and tensors are left out.
        """
        if len(self.dumps()) <= MAX_BYTES:
            return self
        profiles = {
            name: entry.model_copy(update={"layers": None, "search": None}) for name, entry in self.profiles.items()
        }
        ranges = Ranges(measured=self.ranges.measured, tensors={})
        return Measurements(profiles=profiles, ranges=ranges, inputs=self.inputs, recovery=self.recovery)

    @classmethod
    def loads(cls, data: bytes, where: str | Path) -> Measurements:
        """Parse the measurements in ``data``; ``where`` names their origin in messages.

        Raises ArtifactError if they are not valid.
        """
        if len(data) > MAX_BYTES:
            raise ArtifactError(f"{where}: larger than {MAX_BYTES >> 20} MiB, not measurements")
        fields = parse_json(data, ArtifactError, where)
        try:
            version = fields.get("version") if isinstance(fields, dict) else None
            if version == VERSION:
                return cls.model_validate_json(data, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            location = ".".join(str(part) for part in first["loc"])
            raise ArtifactError(f"{where}: {location}: {first['msg'].removeprefix('Value error, ')}") from None
        raise ArtifactError(f"{where}: measurements of version {quoted(version)}, this bf16kit reads {VERSION}")


def sample_columns(
    drifts: Mapping[str, Mapping[str, Sequence[SampleDrift]]],
) -> dict[str, dict[str, SampleColumns]]:
    """Return columns by profile and output, each with an equal share of :data:`MOST_SAMPLES` rows."""
    most = MOST_SAMPLES // max(1, sum(len(outputs) for outputs in drifts.values()))
    return {
        profile: {output: SampleColumns.of(rows, most) for output, rows in outputs.items()}
        for profile, outputs in drifts.items()
    }


def ranges(census: Mapping[str, Census]) -> Ranges:
    """Return the census of the tensors with the worst range events, by name."""
    entries = {name: CensusEntry.model_validate(asdict(counts)) for name, counts in census.items()}
    worst = sorted(entries.items(), key=lambda item: (item[1].severity, item[0]))[:MOST_TENSORS]
    return Ranges(measured=len(entries), tensors=dict(worst))


def downsample(rows: Sequence[T], most: int) -> Sequence[T]:
    """Return at most ``most`` of ``rows``, evenly spaced, including the first."""
    kept = min(len(rows), most)
    return [rows[i * len(rows) // kept] for i in range(kept)]
