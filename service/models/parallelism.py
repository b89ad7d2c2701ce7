"""``instances: auto``: chooses between one batch on all threads, and several at once on a few threads each.

The choice with more rows per second wins. It is measured when a model is loaded, for a fraction of a second. A parallel
model has a second session for the batches side by side; both sessions read the same copy of the weights.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bf16kit.messages.errors import Bf16kitError
from bf16kit.messages.wording import brief
from bf16kit.runtime import Runtime
from service.contract import Array

_log = logging.getLogger(__name__)
SECONDS = 0.4  # limit on the measurement of one model, without first runs and the last round
ROUNDS = 31  # of a measurement at most
ROWS = 8  # of a measured batch: about what a few dozen clients cause
MAX_INSTANCES = 8  # instances at most: with more of them single batches would be slow
#: The least gain in throughput for which several instances are used, since they take memory of their own.
LEAST_GAIN = 1.05

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How many batches run at once, the runtime for batches side by side (None: there is none), and why."""

    instances: int = 1
    narrow: Runtime | None = None
    reason: str = ""

    def close(self) -> None:
        """Free the second session of a model that is not going to be served."""
        if self.narrow is not None:
            self.narrow.close()


def choose_parallelism(
    wide: Runtime, load: Callable[[int], Runtime], feeds: Mapping[str, Array], threads: int, *, clock: Clock
) -> Parallelism:
    """Decide whether ``wide``, which runs on ``threads`` threads, gets a second session on fewer; ``load`` loads it."""
    instances = min(threads, MAX_INSTANCES)
    if wide.info.backend != "onnxruntime" or wide.info.device != "cpu" or instances == 1:
        return Parallelism(reason="auto: 1 instance; more need ONNX Runtime on a CPU with 2 threads or more")
    try:
        narrow = load(threads // instances)
    except Bf16kitError as error:
        _log.warning("instances is auto, and a second session failed: %s", brief(error))
        return Parallelism(reason="auto: 1 instance, a second session failed (the log says why)")
    try:
        gain, rounds = _gain(wide, narrow, feeds, instances, clock)
    except BaseException:
        narrow.close()
        raise
    measured = f"{instances} at once do {gain:.2f} times the rows of one with all threads (medians of {rounds})"
    if gain < LEAST_GAIN:
        narrow.close()
        return Parallelism(reason=f"auto: 1 instance, {measured}")
    return Parallelism(instances, narrow, f"auto: {instances} instances, {measured}")


def _gain(
    wide: Runtime, narrow: Runtime, feeds: Mapping[str, Array], instances: int, clock: Clock
) -> tuple[float, int]:
    """Return the throughput of ``instances`` runs of ``narrow`` at once relative to ``wide``, and the rounds."""
    with ThreadPoolExecutor(instances, "spreading") as pool:

        def at_once() -> None:
            for future in [pool.submit(narrow.run, feeds) for _ in range(instances)]:
                future.result()

        runs: Mapping[str, Callable[[], object]] = {"wide": lambda: wide.run(feeds), "narrow": at_once}
        for run in runs.values():
            run()  # the first run of each is slower
        taken, rounds = medians(runs, seconds=SECONDS, clock=clock)
    return instances * taken["wide"] / taken["narrow"], rounds


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
