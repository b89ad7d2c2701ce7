"""Which requests live drift measures: simulated traffic, and what choosing costs the thread that answers.

Ten minutes of 220 requests a second of two lengths, and once a minute a third, at the defaults; a round is a seed.
Beside it a plain sample as it was before: each request with the same probability, behind the same bound per second.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np

from bench.core import models
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace
from bench.serving.traffic import INPUTS, Clock, arrivals
from bf16kit.numerics.tensors import Array, TensorSpec
from service.drift.observer import Outcome
from service.drift.policy import ShadowPolicy
from service.drift.sampling import Chooser, Sample, TokenBucket
from service.request import Reply, Request, Timings
from service.shadow.samples import pack

_RATES = {16: 200.0, 64: 20.0, 500: 1 / 60}
_RARE = 500
_FULL, _QUICK = (8, 600.0), (1, 60.0)  # rounds, seconds
_AT_MOST_US = 2.0
_CALLS, _TIMES = 2000, 30


@dataclass(frozen=True, slots=True)
class _Round:
    """``truth`` is the mean drift of all requests. Of the measured ones: what each weighs, its drift, whether it is
    rare; when the first rare one was, in seconds after the first came."""

    truth: float
    weights: Array
    drifts: Array
    waited: float
    dropped: int

    @property
    def samples(self) -> int:
        return self.weights.size

    @property
    def mean(self) -> float:
        return float((self.weights * self.drifts).sum() / self.weights.sum())

    @property
    def error(self) -> float:
        """The standard error of :attr:`mean`."""
        return float(np.sqrt((self.weights**2 * (self.drifts - self.mean) ** 2).sum()) / self.weights.sum())

    @property
    def effective(self) -> float:
        """Kish's effective sample size."""
        return float(self.weights.sum() ** 2 / (self.weights**2).sum())


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Samples, their weights and errors; nanoseconds where a request is not chosen."""
    rounds, seconds = _QUICK if quick else _FULL
    measurements = [*_costs()]
    for name, choosing in (("by strata", _by_strata), ("plain", _plain)):
        found = [_simulated(choosing, seed, seconds) for seed in range(rounds)]
        errors = [(each.mean - each.truth) / each.error for each in found]
        measurements += [
            Measurement(f"{name}: samples per second", median(each.samples for each in found) / seconds, "1/s"),
            Measurement(f"{name}: dropped", 100 * _share(found), "% of the chosen"),
            Measurement(
                f"{name}: effective samples", 100 * median(each.effective / each.samples for each in found), "%"
            ),
            Measurement(f"{name}: until the rare shape is measured", median(each.waited for each in found), "s"),
            Measurement(f"{name}: error of the mean, average", float(np.mean(errors)), "standard errors"),
            Measurement(f"{name}: error of the mean, spread", float(np.std(errors)), "standard errors"),
        ]
    return Result(
        "drift_sampling",
        tuple(measurements),
        settings={
            "rates": {str(length): rate for length, rate in _RATES.items()},
            "rounds": rounds,
            "seconds": seconds,
        },
        notes=(
            "simulated on a clock of its own; medians over rounds",
            "until the rare shape is measured: from when it first comes; all that was simulated, where it never was",
        ),
    )


def _share(found: list[_Round]) -> float:
    dropped = sum(each.dropped for each in found)
    return dropped / (dropped + sum(each.samples for each in found))


# --- simulated --------------------------------------------------------------------------------------------------------


class _Dropped:
    """Counts what is dropped."""

    def __init__(self) -> None:
        self.samples = 0

    def sampled(self, outcome: Outcome, samples: int) -> None:
        self.samples += samples * (outcome == "dropped")


_Choose = Callable[[Request, Reply], float | None]  # the probability of one that is chosen


def _by_strata(clock: Clock, chance: random.Random, dropped: _Dropped) -> _Choose:
    chooser = Chooser(ShadowPolicy(), dropped, 0, chance.random, INPUTS, clock)

    def choose(request: Request, reply: Reply) -> float | None:
        sample = chooser.choose(request, reply, lambda nbytes: True)
        return None if sample is None else sample.probability

    return choose


def _plain(clock: Clock, chance: random.Random, dropped: _Dropped) -> _Choose:
    policy = ShadowPolicy()
    bucket = TokenBucket(policy.max_per_second, clock)

    def choose(request: Request, reply: Reply) -> float | None:
        if chance.random() >= policy.rate:
            return None
        if bucket.try_acquire():
            return policy.rate
        dropped.sampled("dropped", 1)
        return None

    return choose


def _simulated(choosing: Callable[[Clock, random.Random, _Dropped], _Choose], seed: int, seconds: float) -> _Round:
    clock, dropped = Clock(), _Dropped()
    choose = choosing(clock, random.Random(1000 + seed), dropped)  # noqa: S311 - simulated
    everything, drifts, weights = [], [], []
    first_rare_at = first_sampled_at = None
    for each in arrivals(clock, _RATES, seconds, seed):
        everything.append(each.drift[0])
        rare = each.length == _RARE
        first_rare_at = clock.now if rare and first_rare_at is None else first_rare_at
        probability = choose(each.request, each.reply)
        if probability is not None:
            drifts.append(each.drift[0])
            weights.append(1 / probability)
            first_sampled_at = clock.now if rare and first_sampled_at is None else first_sampled_at
    waited = (
        0.0 if first_rare_at is None else (seconds if first_sampled_at is None else first_sampled_at - first_rare_at)
    )
    return _Round(float(np.mean(everything)), np.array(weights), np.array(drifts), waited, dropped.samples)


# --- what it costs ----------------------------------------------------------------------------------------------------


def _costs() -> Iterator[Measurement]:
    """Of the calling thread; the fastest of many blocks."""
    hidden = {"last_hidden_state": np.zeros((1, 16, 384), np.float32), "embedding": np.zeros((1, 384), np.float32)}
    yield from _cost("MLP", models.mlp_feeds(rows=1), {"y": np.zeros((1, 16), np.float32)})
    yield from _cost("MiniLM", models.minilm_feeds(1), hidden)


def _cost(name: str, feeds: dict[str, Array], outputs: dict[str, Array]) -> Iterator[Measurement]:
    inputs = [TensorSpec(key, "float32", ("batch", "seq")) for key in feeds]
    request, reply = Request(feeds, timings=Timings(arrived=time.monotonic())), Reply(outputs, "bf16")

    def offering(policy: ShadowPolicy) -> Callable[[], Sample | None]:
        chooser = Chooser(policy, _Dropped(), 0, random.random, inputs)

        return lambda: chooser.choose(request, reply, lambda nbytes: True)

    everything = offering(ShadowPolicy(rate=1, max_per_second=1e9))
    sample = everything()
    assert sample is not None

    def written() -> None:
        _, file = pack([sample])
        os.close(file)

    yield Measurement(f"{name}: not chosen", _us(offering(ShadowPolicy())), "µs", at_most=_AT_MOST_US)
    yield Measurement(f"{name}: chosen and copied", _us(everything), "µs")
    yield Measurement(f"{name}: written to a file", _us(written), "µs")


def _us(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_TIMES):
        began = time.perf_counter()
        for _ in range(_CALLS):
            call()
        best = min(best, (time.perf_counter() - began) / _CALLS)
    return best * 1e6
