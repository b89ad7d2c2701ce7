"""Simulated traffic on a clock of its own, and which of its requests live drift measures at the defaults.

docs/decisions/0055 has longer runs.
"""

import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bf16kit.drift.metrics import Budget, SampleDrift
from bf16kit.numerics.tensors import Array
from bf16kit.service.drift.contract import ShadowPolicy
from bf16kit.service.drift.estimates import Estimate, estimates
from bf16kit.service.drift.recent import RecentRows
from bf16kit.service.drift.sampler import OnOutcome, Outcome, Sample, SampleForwarder
from bf16kit.service.request import Reply, Request

HEALTHY = 3.7e-3  # relative_l2, a quarter of the budget
BOUNDS = Budget.from_dict({"relative_l2": 0.015, "relative_l2.p99": 0.1, "cosine_distance": 5e-4})
DEFAULTS = ShadowPolicy()
RARE = 500  # the length of the rare kind of requests
_OF_KIND = {16: 1.0, 64: 2.0, RARE: 4.0}  # times the drift of a common request
_OFTEN = {16: 18.0, 64: 1.8, RARE: 0.2}  # the rare kind is one request in a hundred


class Clock:
    """Says what it was set to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Arrival:
    """A request that is answered when the clock has come to it; ``drift`` is of each of its rows."""

    request: Request
    reply: Reply
    length: int
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
    """Yield requests of each length, ``rates`` per second of each times ``busy`` at the moment, moving the clock.

    Drift is 1 per element of length, half as much again for one request in twenty, and grows with the row's place.
    """
    chance = random.Random(seed)
    lengths, weights = list(rates), list(rates.values())
    while clock.now < seconds:
        clock.now += chance.expovariate(sum(weights) * busy(clock.now))
        length, count = chance.choices(lengths, weights)[0], rows(chance)
        often = 1.5 if chance.gauss(0, 0.3) > 0.5 else 1.0
        drift = [length * often * (1 + row / 10) for row in range(count)]
        feed = np.broadcast_to(np.float32(0), (count, length))
        yield Arrival(
            Request({"x": feed}, count), Reply({"y": np.array(drift).reshape(count, 1)}, "bf16"), length, drift
        )


# --- what is measured of it -------------------------------------------------------------------------------------------

Wrong = Callable[[Arrival, random.Random], float]  # relative_l2 of a request once the fault has begun
FAULTS: Mapping[str, Wrong] = {
    "a kind of 1 % destroyed": lambda each, chance: 1.4 if each.length == RARE else _healthy(chance),
    "1 % of all requests destroyed": lambda each, chance: 1.4 if chance.random() < 0.01 else _healthy(chance),
    "5 % of all requests destroyed": lambda each, chance: 1.4 if chance.random() < 0.05 else _healthy(chance),
}
_HEALTHY_S, _MOST_S = 300.0, 7200.0


def _healthy(chance: random.Random, spread: float = 0.1) -> float:
    return HEALTHY * math.exp(spread * chance.gauss(0, 1))


class Always(random.Random):
    """Chooses every request."""

    def random(self) -> float:
        return 0.0


class Forwarding:
    """Receives the samples of a forwarder, reports ``outcome`` for each if it is not None, and counts the outcomes.

    A test can hold the runs on bf16 (y = 2 x), or make them fail.
    """

    def __init__(
        self,
        policy: ShadowPolicy = DEFAULTS,
        *,
        axis: int | None = 0,
        outcome: Outcome | None = None,
        chance: random.Random | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self.samples: list[Sample] = []
        self.callbacks: list[OnOutcome] = []
        self.counted = Counter[str]()
        self.finished = 0
        self.go, self.at_work = threading.Event(), threading.Event()
        self.go.set()
        self.fails: Exception | None = None
        self.outcome = outcome
        self.forwarder = SampleForwarder(
            self, policy, lambda outcome, samples: self.counted.update({outcome: samples}),
            name="m", batch_axis=axis, profile="cpu-bf16", precision="bf16", run_bf16=self._run,
            chance=chance or Always(), clock=self.clock,
        )  # fmt: skip

    def _run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> tuple[dict[str, Array], str]:
        self.at_work.set()
        assert self.go.wait(30)
        if self.fails is not None:
            raise self.fails
        return dict.fromkeys(outputs, feeds["x"] * 2), "bf16"

    def send(self, sample: Sample, on_outcome: OnOutcome) -> None:
        self.samples.append(sample)
        self.callbacks.append(on_outcome)
        if self.outcome is not None:
            on_outcome(self.outcome)

    def finish(self) -> None:
        self.finished += 1

    def offer(self, request: Request, reply: Reply | None = None) -> Sample | None:
        """Offer a request; return its sample if it was forwarded at once."""
        before = len(self.samples)
        self.forwarder.offer(request, reply or Reply({}, "bf16"))
        return self.samples[-1] if len(self.samples) > before else None


def add(recent: RecentRows, relative_l2: float, sample: Sample) -> None:
    """Add a request of one row."""
    drift = SampleDrift(relative_l2, min(relative_l2**2 / 2, 1.0), relative_l2, 60.0, 0, 0, 0)
    recent.add([drift], 1 / sample.probability)


def unbiased(rates: Mapping[int, float], seconds: float, seed: int) -> tuple[float, Estimate, float, int, float]:
    """Return the error of the weighted mean in standard errors, its interval ÷ the truth, the share of effective
    samples, how many there are, and the share of dropped ones. Drift follows from the length."""
    clock, recent, chance = Clock(), RecentRows(), random.Random(seed)
    samples = Forwarding(outcome="measured", chance=random.Random(1000 + seed), clock=clock)
    everything, drifts, weights = [], [], []
    for each in arrivals(clock, rates, seconds, seed):
        often = each.drift[0] / each.length
        everything.append(_healthy(chance, 0.3) * _OF_KIND[each.length] * often)
        if (sample := samples.offer(each.request, each.reply)) is not None:
            add(recent, everything[-1], sample)
            drifts.append(everything[-1])
            weights.append(1 / sample.probability)
    y, w, truth = np.array(drifts), np.array(weights), float(np.mean(everything))
    mean = float((w * y).sum() / w.sum())
    error = float(np.sqrt((w**2 * (y - mean) ** 2).sum()) / w.sum())
    (found,) = estimates(recent.window(), Budget.from_dict({"relative_l2": truth}))
    dropped = samples.counted["dropped"]
    effective = float(w.sum() ** 2 / (w**2).sum())
    return (mean - truth) / error, found, effective / len(y), len(y), dropped / (dropped + len(y))


def until_over(wrong: Wrong, seed: int, rates: Mapping[int, float] = _OFTEN, most: float = _MOST_S) -> float:
    """Return the seconds from the beginning of a fault until a breach is established; infinite if it is not."""
    clock, recent, chance = Clock(), RecentRows(), random.Random(seed)
    samples = Forwarding(outcome="measured", chance=random.Random(1000 + seed), clock=clock)
    for each in arrivals(clock, rates, _HEALTHY_S + most, seed):
        faulty = clock.now > _HEALTHY_S
        drift = wrong(each, chance) if faulty else _healthy(chance)
        if (sample := samples.offer(each.request, each.reply)) is not None:
            add(recent, drift, sample)
            if faulty and any(found.lowest > 1 for found in estimates(recent.window(), BOUNDS)):
                return clock.now - _HEALTHY_S
    return math.inf


def burst_weight(requests: int, seconds: float, seed: int) -> float:
    """Return the weights of a burst's samples ÷ its requests, of ten bursts into a model that is idle otherwise."""
    clock, chance, weight = Clock(), random.Random(seed), 0.0
    samples = Forwarding(outcome="measured", chance=random.Random(seed), clock=clock)
    request, reply = Request({"x": np.zeros((1, 16), np.float32)}), Reply({"y": np.ones((1, 1))}, "bf16")
    for start in range(0, 600, 60):
        idle = [(start + at + chance.random(), False) for at in range(0, 35, 5)]
        burst = [(start + 39 + seconds * chance.random(), True) for _ in range(requests)]
        for clock.now, bursting in (*idle, *sorted(burst)):
            sample = samples.offer(request, reply)
            weight += 1 / sample.probability if bursting and sample is not None else 0.0
    return weight / (10 * requests)
