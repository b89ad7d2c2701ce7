"""Kinds of requests and the probabilities with which each is measured."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from bench.serving.traffic import INPUTS, Clock, arrivals
from bf16kit.numerics.tensors import TensorSpec
from service.drift.policy import ShadowPolicy
from service.drift.sampling import BURST
from service.drift.strata import MAX_SIZES, Strata, allocated, free_dimensions

DEFAULTS = ShadowPolicy()
BUSY = {16: 200.0, 64: 20.0, 500: 1 / 60}  # requests per second by length; the longest comes once a minute


def test_a_free_dimension_is_read_once_and_a_fixed_one_never() -> None:
    inputs = (
        TensorSpec("a", "int64", ("batch", "seq", 3)),
        TensorSpec("b", "int64", ("batch", "seq", "width")),
    )
    assert free_dimensions(inputs) == (("a", 0), ("a", 1), ("b", 2))


def test_half_is_divided_by_rate_and_half_equally_and_no_kind_gets_more_than_its_rate() -> None:
    assert allocated([9.0, 1.0], 1.0) == pytest.approx([0.7, 0.3])
    assert allocated([9.0, 0.1], 1.0) == pytest.approx([0.9, 0.1])  # the first gets what the second cannot use
    assert allocated([3.0, 1.0], 5.0) == [3.0, 1.0]


@pytest.mark.parametrize("seed", range(5))
def test_the_whole_budget_is_divided_and_each_kind_gets_at_least_half_its_plain_share(seed: int) -> None:
    """So no weight is more than twice that of plain sampling, whatever the rates are."""
    rates = np.random.default_rng(seed).lognormal(0, 3, 40)
    for budget in rates.sum() * np.array([1e-3, 0.1, 0.5, 0.999]):
        parts = np.array(allocated(list(rates), budget))
        assert parts.sum() == pytest.approx(budget)
        assert (parts <= rates * (1 + 1e-9)).all()
        assert (parts >= rates * budget / rates.sum() / 2).all()


def test_the_first_request_is_measured_with_the_configured_rate_and_always_below_the_floor() -> None:
    def first(rate: float, floor: float) -> float:
        strata = Strata(ShadowPolicy(rate=rate, min_per_second=floor), INPUTS)
        return strata.probability({"x": np.zeros((1, 8))}, 0.0)

    assert first(0.25, 0.0) == pytest.approx(0.25)
    assert first(1.0, 0.0) == 1.0
    assert first(0.01, DEFAULTS.min_per_second) == 1.0


def simulated(
    seconds: float,
    seed: int,
    policy: ShadowPolicy = DEFAULTS,
    rates: Mapping[int, float] = BUSY,
    busy: Callable[[float], float] = lambda now: 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the drift, the probability and the length of every request of simulated traffic."""
    clock = Clock()
    strata = Strata(policy, INPUTS, clock)
    found = [
        (each.drift[0], strata.probability(each.request.feeds, each.request.timings.arrived), each.length)
        for each in arrivals(clock, rates, seconds, seed, busy=busy)
        if each.request.timings is not None
    ]
    drift, probability, length = (np.array(column) for column in zip(*found, strict=True))
    return drift, probability, length


def unbiased(drift: np.ndarray, probability: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Check that Horvitz and Thompson's sums over many draws from one population are within four standard errors of
    what they estimate, in total and for each kind. Return the draws."""
    draws = 200
    chosen = np.random.default_rng(2).random((draws, drift.size)) < probability
    for part in (drift, np.ones(drift.size), *(drift * (length == each) for each in BUSY)):
        error = math.sqrt((part**2 * (1 - probability) / probability).sum() / draws)
        assert abs((chosen * (part / probability)).sum(1).mean() - part.sum()) <= 4 * error + 1e-9 * part.sum()
    return chosen


def test_weighted_samples_are_unbiased_and_unweighted_ones_are_not() -> None:
    """The same check fails clearly if the weights are left out."""
    drift, probability, length = simulated(120, seed=1)
    chosen = unbiased(drift, probability, length)
    draws = len(chosen)
    weighted = (chosen @ (drift / probability)) / (chosen @ (1 / probability))
    plain = (chosen @ drift) / chosen.sum(1)
    error = weighted.std() / math.sqrt(draws)
    assert abs(weighted.mean() - drift.mean()) < 4 * error + 0.01 * drift.mean()  # a ratio of sums: almost unbiased
    assert abs(plain.mean() - drift.mean()) > 40 * error


def test_the_rate_of_samples_is_that_of_the_policy() -> None:
    """The expected number of samples is 0.8 a second if 1 is the limit, or the share ``rate`` if that is less."""
    for policy, expected in ((DEFAULTS, 0.8), (ShadowPolicy(rate=0.1, max_per_second=100), 22.0)):
        _, probability, _ = simulated(120, 3, policy)
        assert probability.sum() / 120 == pytest.approx(expected, rel=0.1)


def test_a_quiet_model_is_measured_at_the_floor_and_an_idle_one_whole() -> None:
    """At two requests a second for 4.5 minutes, ``rate`` alone would give five samples."""
    drift, probability, length = simulated(270, 9, rates={16: 1.8, 64: 0.2})
    assert probability.sum() == pytest.approx(270 * DEFAULTS.min_per_second, rel=0.15)
    unbiased(drift, probability, length)
    _, idle, _ = simulated(600, 10, rates={16: 0.1})
    assert idle.mean() > 0.95
    _, alone, _ = simulated(270, 9, ShadowPolicy(min_per_second=0), rates={16: 1.8, 64: 0.2})
    assert alone.sum() < 10


def test_the_floor_never_exceeds_the_limit() -> None:
    _, probability, _ = simulated(600, 11, ShadowPolicy(max_per_second=0.1), rates={16: 2.0})
    assert probability.sum() == pytest.approx(600 * 0.08, rel=0.2)


def test_the_fastest_and_slowest_requests_are_measured_more_often_than_their_share() -> None:
    """Each end has 3.6 % of the requests, and gets more than a tenth of the samples."""
    clock, policy = Clock(), DEFAULTS
    strata = Strata(policy, INPUTS, clock)
    expected = Counter[str]()
    for each in arrivals(clock, {16: 200.0}, 120, 4):
        spread = math.log(each.latency / 16e-3) / 0.3
        kind = "fast" if spread < -1.8 else "slow" if spread > 1.8 else "middle" if abs(spread) < 1.3 else "between"
        expected[kind] += strata.probability(each.request.feeds, clock.now - each.latency)  # type: ignore[assignment]
    samples = sum(expected.values())
    assert expected["fast"] > samples / 10
    assert expected["slow"] > samples / 10


def test_a_shape_that_comes_once_a_minute_among_220_a_second_is_measured_nearly_each_time() -> None:
    """It is one request in 13,000: plain sampling would measure it less than once in three hours."""
    _, probability, length = simulated(400, seed=5)
    rare = probability[length == 500]
    assert rare.size >= 4
    assert rare.mean() > 0.8


def test_a_burst_gives_no_more_samples_than_the_limit_allows() -> None:
    """A model is idle, then gets a thousand times the requests: in 5 s as many samples as there are tokens."""
    clock = Clock()
    strata = Strata(DEFAULTS, INPUTS, clock)
    expected = 0.0
    for each in arrivals(clock, {16: 1.0, 64: 0.1}, 65, 6, busy=lambda now: 1 if now < 60 else 1000):
        probability = strata.probability(each.request.feeds, clock.now - each.latency)
        expected += probability if clock.now > 60 else 0
    assert expected < 5 * 0.8 + BURST


def test_after_a_burst_the_share_is_measured_again_at_once() -> None:
    clock = Clock()
    strata = Strata(ShadowPolicy(min_per_second=0), INPUTS, clock)
    after = [
        strata.probability(each.request.feeds, clock.now - each.latency)
        for each in arrivals(clock, {16: 1.0}, 60, 7, busy=lambda now: 1000 if now < 20 else 20)
        if clock.now > 22
    ]
    assert sum(after) / len(after) == pytest.approx(DEFAULTS.rate, rel=0.2)


def test_fewer_requests_are_chosen_while_samples_find_no_room() -> None:
    clock = Clock()
    strata = Strata(DEFAULTS, INPUTS, clock)

    def a_second(crowded: bool) -> float:
        total = 0.0
        for _ in range(200):
            clock.now += 1 / 200
            total += strata.probability({"x": np.zeros((1, 16), np.float32)}, clock.now - 0.01)
        if crowded:
            strata.note_dropped_sample()
        return total

    for _ in range(5):
        a_second(crowded=False)
    assert a_second(crowded=False) == pytest.approx(0.8, rel=0.1)
    crowded = [a_second(crowded=True) for _ in range(10)]
    assert crowded[-1] == pytest.approx(0.05, rel=0.2)
    free = [a_second(crowded=False) for _ in range(40)]
    assert free[-1] == pytest.approx(0.8, rel=0.1)


def test_the_size_classes_that_clients_create_are_limited_and_forgotten() -> None:
    """Sizes beyond the limit share one class; classes that are not used are removed within hours."""
    clock = Clock()
    inputs = tuple(TensorSpec(name, "float32", ("n", name)) for name in "abcdef")
    strata = Strata(DEFAULTS, inputs, clock)
    chance = random.Random(8)

    def offer(sizes: Sequence[int]) -> None:
        feeds = {name: np.zeros((1, size), np.float32) for name, size in zip("abcdef", sizes, strict=True)}
        assert 0 < strata.probability(feeds, clock.now - 1e-3) <= 1

    for _ in range(2000):
        clock.now += 0.01
        offer([2 ** chance.randrange(10) for _ in range(6)])
    assert len(strata._size_classes) == MAX_SIZES + 1
    for _ in range(3):
        clock.now += 3600
        offer([1] * 6)
    assert len(strata._size_classes) < 3
