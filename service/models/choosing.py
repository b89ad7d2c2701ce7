"""Chooses the profile that answers: the one that ``serving.yaml`` names or, for ``auto``, the fastest one allowed.

The speed is measured when the model is loaded, on the golden samples. The profiles take turns for a fraction of a
second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from bf16kit.drift import Budget, DriftSummary
from bf16kit.manifest import Manifest

SECONDS = 0.3  # limit on the measurement of one model; the last round may exceed it
ROUNDS = 31
#: The first, most accurate profile wins unless it takes this many times as long: less is noise between two starts.
WORTH = 1.1

Clock = Callable[[], float]


def passed_over(manifest: Manifest, profile: str, budget: Budget, *, native: bool) -> str:
    """Return why ``auto`` does not try ``profile``, which is not the first choice; "" if it does.

    ``budget`` is the drift budget in force, which may be stricter than the artifact's. ``native``: the processor has
    the instructions that the profile needs.
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
    """Return the median run time of each of ``runs`` in seconds, and the number of rounds, at least one.

    The runs take turns. Every other round is in reverse order, so that no run always follows the same one.
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
    """Return the profile to serve, and why.

    ``taken`` has the median run time in seconds by profile, the most accurate profile first.
    """
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
