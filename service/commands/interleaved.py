"""Measurements that take turns, so that changes in the machine's speed affect all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ROUNDS = 5


class Turn(NamedTuple):
    """One turn: the seconds of each call, the number of rows of all calls, and the seconds of the turn."""

    latencies: list[float]
    rows: int
    seconds: float


@dataclass(slots=True)
class Cell:
    """One quantity to measure, a cell of a table. ``run`` measures for about the given number of seconds."""

    run: Callable[[float], Turn]
    turns: list[Turn] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Rows per second: the median of the turns."""
        return statistics.median(self._rates)

    @property
    def spread(self) -> tuple[float, float]:
        """Rows per second of the slowest and of the fastest turn."""
        return min(self._rates), max(self._rates)

    def percentile(self, share: float) -> float:
        """Return this percentile of the seconds of all calls. With few calls, the p99 is the slowest one."""
        latencies = sorted(second for turn in self.turns for second in turn.latencies)
        return latencies[min(len(latencies) - 1, int(share * len(latencies)))]

    @property
    def _rates(self) -> list[float]:
        return [turn.rows / turn.seconds for turn in self.turns]


def measure_in_turns(cells: Sequence[Cell], seconds: float, done: Callable[[], object], rounds: int = ROUNDS) -> None:
    """Measure every cell ``rounds`` times, for ``seconds`` in all; every other round is in reverse order."""
    each = seconds / max(1, len(cells) * rounds)
    for turn in range(rounds):
        for cell in cells if turn % 2 == 0 else reversed(cells):
            cell.turns.append(cell.run(each))
            done()


def sequential_calls(call: Callable[[], object], rows: int) -> Callable[[float], Turn]:
    """Return a measurement that calls ``call``, with ``rows`` rows each, one call after the other."""

    def run(seconds: float) -> Turn:
        latencies, start = [], time.perf_counter()
        while True:
            started = time.perf_counter()
            call()
            now = time.perf_counter()
            latencies.append(now - started)
            if now - start >= seconds:
                return Turn(latencies, rows * len(latencies), now - start)

    return run
