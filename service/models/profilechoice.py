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
LEAST_SPEEDUP = 1.1

Clock = Callable[[], float]


def skip_reason(manifest: Manifest, profile: str, budget: Budget, *, native: bool) -> str:
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
        round_start = clock()
        for name in order:
            before = clock()
            runs[name]()
            times[name].append(clock() - before)
        order.reverse()
        rounds += 1
        now = clock()
        if (
            rounds == ROUNDS or now - start + (now - round_start) > seconds
        ):  # another round would take as long as this one
            return {name: statistics.median(found) for name, found in times.items()}, rounds


def fastest(run_times: Mapping[str, float], rounds: int) -> tuple[str, str]:
    """Return the profile to serve, and why.

    ``run_times`` has the median run time in seconds by profile, the most accurate profile first.
    """
    first = next(iter(run_times))
    best = min(run_times, key=lambda name: run_times[name])
    if best != first and run_times[first] < LEAST_SPEEDUP * run_times[best]:
        best = first
    others = ", ".join(f"{name} {_milliseconds(seconds)}" for name, seconds in run_times.items() if name != best)
    reason = f"auto: {_milliseconds(run_times[best])} a run, {others} (medians of {rounds} on the golden samples)"
    if best == first and min(run_times.values()) < run_times[first]:
        reason += "; less than a tenth faster counts as no faster"
    return best, reason


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
