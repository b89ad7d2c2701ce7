"""Chooses the settings that `bench` suggests from its measurements, and says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from service.commands.layouts import WORTHWHILE_GAIN, Layout


class Measurement(NamedTuple):
    """Rows per second, and the p99 latency in seconds, with this number of clients."""

    clients: int
    rate: float
    p99: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with a maximum batch size, and what clients measured with it. ``max_rows`` 0: no batching."""

    layout: Layout
    max_rows: int
    measurements: tuple[Measurement, ...]

    def best(self, target: float | None) -> Measurement | None:
        """Return the measurement with the most rows per second of those within ``target`` seconds of p99, or None."""
        within = [each for each in self.measurements if target is None or each.p99 <= target]
        return max(within, key=lambda each: each.rate, default=None)


@dataclass(frozen=True, slots=True)
class Advice:
    """The suggested settings. ``reason`` is one sentence."""

    layout: Layout
    max_rows: int
    at: Measurement
    reason: str


def advise(candidates: Sequence[Candidate], target: float | None) -> Advice:
    """Return the layout with the fewest instances whose rate, within ``target`` seconds, is within 3 % of the best.

    Fewer instances answer a single client sooner. If no layout meets the target, the one closest to it is returned.
    """
    reached = [(each, best) for each in candidates if (best := each.best(target)) is not None]
    if not reached:
        nearest, at = min(
            ((each, min(each.measurements, key=_p99)) for each in candidates), key=lambda pair: pair[1].p99
        )
        closest = f"{_label(nearest)}, p99 {_ms(at.p99)} at {_clients(at)}"
        reason = f"no layout keeps p99 within {_ms(target or 0)}: the nearest is {closest}"
        return Advice(nearest.layout, nearest.max_rows, at, reason)
    most = max(best.rate for _, best in reached)
    chosen, at = min(
        (pair for pair in reached if pair[1].rate * WORTHWHILE_GAIN >= most), key=lambda pair: pair[0].layout
    )
    bound = "" if target is None else f" within {_ms(target)}"
    reason = f"{_label(chosen)} gave {at.rate:.4g} rows/s{bound} at {_clients(at)}, p99 {_ms(at.p99)}"
    others = [pair for pair in reached if pair[0] is not chosen]
    if others:
        other, least = max(others, key=lambda pair: pair[1].rate)
        reason += f"; the next best, {_label(other)}, {least.rate:.4g} ({least.rate / at.rate - 1:+.0%})"
        if least.rate > at.rate:
            reason += ", less than 3 % more, which is not worth a lone client's latency"
    return Advice(chosen.layout, chosen.max_rows, at, reason)


def _label(each: Candidate) -> str:
    return each.layout.description() + (f" with batches of up to {each.max_rows}" if each.max_rows else "")


def _clients(measurement: Measurement) -> str:
    return f"{measurement.clients} client{'' if measurement.clients == 1 else 's'}"


def _p99(measurement: Measurement) -> float:
    return measurement.p99


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
