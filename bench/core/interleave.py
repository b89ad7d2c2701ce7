"""Timing several programs that do the same work, run by run in turns, so that what else the machine does hits all."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from types import TracebackType

import numpy as np

Run = Callable[[], object]

# Threads of torch (OpenMP) and OpenVINO (TBB) wait busily for more work when a run has ended: they are given the time
# to fall asleep, or they would take a core from whoever runs next.
PAUSE_S = 0.005
# A side this much slower than the fastest takes part in fewer rounds.
_SLOW = 3.0
_AT_MOST = 400
_FEWEST = 10


@dataclass(slots=True)
class Timings:
    """Seconds of each run of one side."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: ``rounds`` at least, more until ``seconds`` have passed, for a median that stands still."""

    rounds: int
    seconds: float


def interleaved(
    runs: Mapping[str, Run],
    effort: Effort,
    *,
    always: Collection[str],
    linger: Collection[str] = (),
) -> dict[str, Timings]:
    """Time ``runs`` by rounds. In each, every side runs once, in an order drawn anew, none twice running.

    Sides in ``always`` take part in every round; others, when they are much slower, only in some, but in 10 at least.
    After sides in ``linger`` there is a pause. Everything runs twice first, which does not count; the second of these
    tells how slow it is.
    """
    found = {name: Timings() for name in runs}
    for run in runs.values():
        run()
    first = {name: _timed(run, pause=name in linger) for name, run in runs.items()}
    every = {
        name: 1 if name in always else _every(seconds, min(first.values()), effort) for name, seconds in first.items()
    }
    generator = np.random.default_rng(0)
    last = ""
    started = time.perf_counter()
    with _NoCollector():
        for done in range(max(effort.rounds, _AT_MOST)):
            if done >= effort.rounds and time.perf_counter() - started > effort.seconds:
                break
            order = _order([name for name in runs if done % every[name] == 0], last, generator)
            for name in order:
                found[name].seconds.append(_timed(runs[name], pause=name in linger))
            last = order[-1]
    return found


def _timed(run: Run, *, pause: bool) -> float:
    started = time.perf_counter()
    run()
    elapsed = time.perf_counter() - started
    if pause:
        time.sleep(PAUSE_S)
    return elapsed


def _every(seconds: float, fastest: float, effort: Effort) -> int:
    """In every how many rounds a side of ``seconds`` takes part."""
    wanted = math.ceil(seconds / fastest / _SLOW)
    return max(1, min(wanted, effort.rounds // _FEWEST))


def _order(names: list[str], last: str, generator: np.random.Generator) -> list[str]:
    """``names`` shuffled, not beginning with ``last``: a side that follows itself finds its weights in the cache."""
    names = [names[index] for index in generator.permutation(len(names))]
    if names[0] == last and len(names) > 1:
        names.append(names.pop(0))
    return names


class _NoCollector(AbstractContextManager[None]):
    """Python's collector, which costs milliseconds when it comes, waits until the measurement is over."""

    def __enter__(self) -> None:
        gc.collect()
        gc.disable()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.enable()
