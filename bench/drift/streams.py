"""Many streams of log drift side by side, each with a change detector: :class:`service.drift.detector.Detector`, as
arrays. A test compares the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.drift.detector import ALLOWANCE, CLIP, REQUESTS, Expected, threshold

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int, int], Floats]  # log drift about its centre, [steps, streams]


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of traffic: how a row's log drift lies about what was measured, from ``rows`` rows.

    ``shift`` is what live drift is of the measured.
    """

    name: str
    spread: float
    draw: Draw
    rows: int = 200
    shift: float = 1.0


class Streams:
    """``expected`` has one entry a stream."""

    def __init__(self, expected: Sequence[Expected]) -> None:
        self.centre = np.array([each.centre for each in expected])
        self._root = np.array([each.root for each in expected])
        self._threshold = threshold(1)
        self.sum = np.zeros(len(expected))

    def add(self, log_drift: Floats) -> NDArray[np.bool_]:
        """One request of each stream; which of them are at the threshold."""
        step = self._root * (np.clip(log_drift - self.centre, -CLIP, CLIP) - ALLOWANCE)
        self.sum = np.clip(self.sum + np.minimum(step, self._threshold / REQUESTS), 0.0, self._threshold)
        return np.asarray(self.sum >= self._threshold * (1 - 1e-9))


def start_streams(case: Case, streams: int, rng: np.random.Generator) -> Streams:
    """Streams whose detectors know ``case.rows`` rows of drift each, measured about 1."""
    measured = np.exp(case.spread * case.draw(rng, case.rows, streams))
    found = [Expected.of([float(value) * 4e-3 for value in rows]) for rows in measured.T]
    return Streams([each for each in found if each is not None])


def traffic(
    case: Case, steps: int, streams: Streams, rng: np.random.Generator, factor: float = 1.0
) -> Iterator[Floats]:
    """Live log drift, a step at a time; ``factor``: how many times what it was it has become."""
    count = len(streams.sum)
    shift = np.log(4e-3 * case.shift * factor)
    for start in range(0, steps, 4096):
        yield from case.spread * case.draw(rng, min(4096, steps - start), count) + shift


def false_alarms(case: Case, samples: int, streams: int, rng: np.random.Generator) -> int:
    """Alarms in so many healthy samples, of all streams together; each begins anew after one."""
    running, alarms = start_streams(case, streams, rng), 0
    for log_drift in traffic(case, samples // streams, running, rng):
        over = running.add(log_drift)
        alarms += int(over.sum())
        running.sum[over] = 0.0
    return alarms


def delays(case: Case, factor: float, streams: int, rng: np.random.Generator, most: int = 2000) -> Floats:
    """Samples until the alarm of each stream after drift has become ``factor`` times what it was; infinite: none."""
    running = start_streams(case, streams, rng)
    for log_drift in traffic(case, 300, running, rng):
        running.add(log_drift)
    found = np.full(len(running.sum), np.inf)
    for count, log_drift in enumerate(traffic(case, most, running, rng, factor), 1):
        over = running.add(log_drift)
        found[over & np.isinf(found)] = count
        if np.isfinite(found).all():
            break
    return found
