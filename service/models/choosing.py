"""Which profile of a model answers: the one that ``serving.yaml`` names or, for ``auto``, the fastest that may.

Speed is measured where and when the model is loaded, on the golden samples, in turn and for a fraction of a second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from bf16kit.drift import Budget, DriftSummary
from bf16kit.manifest import Manifest

SECONDS = 0.3  # that measuring one model may take, but for the last round
ROUNDS = 31
#: How many times as long another profile must take: less is no difference between two starts, and it is less accurate.
WORTH = 1.1

Clock = Callable[[], float]


def passed_over(manifest: Manifest, profile: str, budget: Budget, *, native: bool) -> str:
    """Why ``auto`` does not try ``profile``, which is not the first choice; "" when it does.

    ``budget`` is what the server holds the model to, which may be less than the artifact was made for. ``native``:
    the processor has the instructions that the profile is for.
    """
    entry = manifest.drift.get(profile)
    if entry is None or not entry.outputs:
        return "its drift was never measured"
    summaries = {output: DriftSummary(entry.samples, stats) for output, stats in entry.outputs.items()}
    breaches = [str(each) for output, found in sorted(summaries.items()) for each in budget.breaches(output, found)]
    if breaches:
        return f"its drift is over budget: {'; '.join(breaches)}"
    return "" if native else "this processor emulates it"


def medians(
    runs: Mapping[str, Callable[[], object]], *, seconds: float = SECONDS, clock: Clock = time.perf_counter
) -> tuple[dict[str, float], int]:
    """The median seconds of each of ``runs``, which take turns, and the number of rounds: at least one.

    Every other round goes the other way round, so that none always follows the same one.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, rounds, start = list(runs), 0, clock()
    while True:
        began = clock()
        for name in order:
            before = clock()
            runs[name]()
            times[name].append(clock() - before)
        order.reverse()
        rounds += 1
        now = clock()
        if rounds == ROUNDS or now - start + (now - began) > seconds:  # another round would take as long as this one
            return {name: statistics.median(found) for name, found in times.items()}, rounds


def fastest(taken: Mapping[str, float], rounds: int) -> tuple[str, str]:
    """The profile to serve of those whose median seconds are in ``taken``, the most accurate first, and why."""
    first = next(iter(taken))
    best = min(taken, key=lambda name: taken[name])
    if best != first and taken[first] < WORTH * taken[best]:
        best = first
    others = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in taken.items() if name != best)
    words = f"auto: {_ms(taken[best])} a run, {others} (medians of {rounds} on the golden samples)"
    if best == first and min(taken.values()) < taken[first]:
        words += "; less than a tenth faster counts as no faster"
    return best, words


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
