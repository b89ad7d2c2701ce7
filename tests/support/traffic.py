"""Made-up traffic on a clock of its own: requests of several shapes, with latency and drift that follow from them.

For simulations, here and in the tests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from bf16kit.numerics.tensors import Array, TensorSpec
from service.request import Reply, Request, Timings

INPUTS = (TensorSpec("x", "float32", ("batch", "seq")),)


class Clock:
    """Says what it was set to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Arrival:
    """A request that is answered when the clock has come to it; ``drift`` is of each of its rows."""

    request: Request
    reply: Reply
    length: int
    latency: float
    drift: list[float]


def arrivals(
    clock: Clock,
    rates: Mapping[int, float],
    seconds: float,
    seed: int,
    *,
    rows: Callable[[random.Random], int] = lambda chance: 1,
    busy: Callable[[float], float] = lambda now: 1.0,
) -> Iterator[Arrival]:
    """Requests of each length, ``rates`` per second of each times ``busy`` at the moment, moving the clock.

    Latency is log-normal about a millisecond per element of length, drift 1 per element, half as much again where it
    took long and by the row's place.
    """
    chance = random.Random(seed)
    lengths, weights = list(rates), list(rates.values())
    inputs: dict[tuple[int, int], Array] = {}
    while clock.now < seconds:
        clock.now += chance.expovariate(sum(weights) * busy(clock.now))
        length, count = chance.choices(lengths, weights)[0], rows(chance)
        spread = chance.gauss(0, 0.3)
        latency = 1e-3 * length * math.exp(spread)
        drift = [length * (1.5 if spread > 0.5 else 1.0) * (1 + row / 10) for row in range(count)]
        feed = inputs.get((count, length))
        if feed is None:
            feed = inputs[count, length] = np.zeros((count, length), np.float32)
        timings = Timings(0, 0, latency, 0, clock.now - latency, clock.now - latency, count)
        yield Arrival(
            Request({"x": feed}, count, timings=timings),
            Reply({"y": np.array(drift).reshape(count, 1)}, "bf16"),
            length,
            latency,
            drift,
        )
