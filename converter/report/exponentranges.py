"""The range of each bf16 tensor's values, in powers of two, beside the range of bf16."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bf16kit.drift.measurements import CensusEntry, Ranges

LOWEST, NORMAL, HIGHEST = -133, -126, 128  # exponents: smallest subnormal, smallest normal, overflow


@dataclass(frozen=True, slots=True)
class Span:
    """One tensor: exponents (log2) of its smallest and largest magnitude (None if all are zero), and what bf16 lost."""

    name: str
    low: float | None
    high: float | None
    census: CensusEntry
    remark: str


def spans(ranges: Ranges) -> tuple[Span, ...]:
    """Return every tensor of ``ranges``, the worst first."""
    ordered = sorted(ranges.tensors.items(), key=lambda item: (item[1].severity, item[0]))
    return tuple(Span(name, _log2(e.min_abs_nonzero), _log2(e.max_abs), e, _remark(e)) for name, e in ordered)


def _log2(magnitude: float) -> float | None:
    return math.log2(magnitude) if magnitude > 0 else None


def _remark(entry: CensusEntry) -> str:
    """Describe the values of a tensor that bf16 does not hold exactly; "" if there are none."""
    found = (
        (entry.nan, "NaN"),
        (entry.inf, "infinite"),
        (entry.overflow, "overflow"),
        (entry.flushed_to_zero, "flushed to zero"),
        (entry.subnormal, "subnormal"),
    )
    return ", ".join(f"{count:,} {what}" for count, what in found if count)
