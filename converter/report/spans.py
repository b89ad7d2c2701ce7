"""How far the values of each bf16 tensor span, in powers of two, against what bf16 holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bf16kit.measurements import CensusEntry, Ranges

LOWEST, NORMAL, HIGHEST = -133, -126, 128  # exponents: of the smallest subnormal, the smallest normal, and overflow


@dataclass(frozen=True, slots=True)
class Span:
    """One tensor: exponents (log2) of its smallest and largest magnitude, None where all is zero, and what was lost."""

    name: str
    low: float | None
    high: float | None
    census: CensusEntry
    remark: str


def spans(ranges: Ranges) -> tuple[Span, ...]:
    """Every tensor of ``ranges``, the worst first."""
    ordered = sorted(ranges.tensors.items(), key=lambda item: (item[1].severity, item[0]))
    return tuple(Span(name, _log2(e.min_abs_nonzero), _log2(e.max_abs), e, _remark(e)) for name, e in ordered)


def _log2(magnitude: float) -> float | None:
    return math.log2(magnitude) if magnitude > 0 else None


def _remark(entry: CensusEntry) -> str:
    """What bf16 does not hold of a tensor; "" when it holds all."""
    found = (
        (entry.nan, "NaN"),
        (entry.inf, "infinite"),
        (entry.overflow, "overflow"),
        (entry.flushed_to_zero, "flushed to zero"),
        (entry.subnormal, "subnormal"),
    )
    return ", ".join(f"{count:,} {what}" for count, what in found if count)
