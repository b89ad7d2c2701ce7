"""Kinds of requests and the probabilities with which each is measured."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from bench.serving.traffic import INPUTS, Clock, arrivals
from bf16kit.tensors import TensorSpec
from service.drift.policy import ShadowPolicy
from service.drift.strata import MOST_SIZES, Strata, allocated, free_dimensions

DEFAULTS = ShadowPolicy()
BUSY = {16: 200.0, 64: 20.0, 500: 1 / 60}  # requests per second by length; the longest comes once a minute


def test_a_free_dimension_is_read_once_and_a_fixed_one_never() -> None:
    inputs = (
        TensorSpec("a", "int64", ("batch", "seq", 3)),
        TensorSpec("b", "int64", ("batch", "seq", "width")),
    )
    assert free_dimensions(inputs) == (("a", 0), ("a", 1), ("b", 2))


def test_half_is_shared_by_rate_and_half_alike_and_none_gets_more_than_comes() -> None:
    assert allocated([9.0, 1.0], 1.0) == pytest.approx([0.7, 0.3])
    assert allocated([9.0, 0.1], 1.0) == pytest.approx([0.9, 0.1])  # what the second cannot use, the first can
    assert allocated([3.0, 1.0], 5.0) == [3.0, 1.0]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_shared_is_all_there_is_and_at_least_half_of_a_plain_sample(seed: int) -> None:
    """So no weight is more than twice a plain sample's, whatever comes."""
    rates = np.random.default_rng(seed).lognormal(0, 3, 40)
    for budget in rates.sum() * np.array([1e-3, 0.1, 0.5, 0.999]):
        parts = np.array(allocated(list(rates), budget))
        assert parts.sum() == pytest.approx(budget)
        assert (parts <= rates * (1 + 1e-9)).all()
        assert (parts >= rates * budget / rates.sum() / 2).all()


def test_the_first_request_is_measured_with_the_rate_and_all_of_them_where_that_is_1() -> None:
    def first(rate: float) -> float:
        return Strata(ShadowPolicy(rate=rate), INPUTS).probability({"x": np.zeros((1, 8))}, 0.0)

    assert first(0.25) == pytest.approx(0.25)
    assert first(1.0) == 1.0


def simulated(seconds: float, seed: int, policy: ShadowPolicy = DEFAULTS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drift, probability and length of every request of traffic."""
    clock = Clock()
    strata = Strata(policy, INPUTS, clock)
    found = [
        (each.drift[0], strata.probability(each.request.feeds, each.request.timings.arrived), each.length)
        for each in arrivals(clock, BUSY, seconds, seed)
        if each.request.timings is not None
    ]
    drift, probability, length = (np.array(column) for column in zip(*found, strict=True))
    return drift, probability, length


def test_weighted_samples_are_unbiased_and_unweighted_ones_are_not() -> None:
    """Horvitz and Thompson's sums over many draws from one population, each kind's own as well, lie within their
    standard errors of what they estimate; the same check tells at once where somebody forgets the weights."""
    drift, probability, length = simulated(120, seed=1)
    draws = 200
    chosen = np.random.default_rng(2).random((draws, drift.size)) < probability
    for part in (drift, np.ones(drift.size), *(drift * (length == each) for each in BUSY)):
        error = math.sqrt((part**2 * (1 - probability) / probability).sum() / draws)
        assert abs((chosen * (part / probability)).sum(1).mean() - part.sum()) <= 4 * error + 1e-9 * part.sum()
    weighted = (chosen @ (drift / probability)) / (chosen @ (1 / probability))
    plain = (chosen @ drift) / chosen.sum(1)
    error = weighted.std() / math.sqrt(draws)
    assert abs(weighted.mean() - drift.mean()) < 4 * error + 0.01 * drift.mean()  # a ratio of sums: almost unbiased
    assert abs(plain.mean() - drift.mean()) > 40 * error


def test_as_much_is_measured_as_the_policy_says() -> None:
    """The expected number of samples: 0.8 a second of the one that is the most, and a share where that is less."""
    for policy, expected in ((DEFAULTS, 0.8), (ShadowPolicy(rate=0.1, max_per_second=100), 22.0)):
        _, probability, _ = simulated(120, 3, policy)
        assert probability.sum() / 120 == pytest.approx(expected, rel=0.1)


def test_both_ends_of_latency_are_seen_as_often_as_its_middle() -> None:
    """A twentieth of the requests each, and a quarter of the samples at least."""
    clock, policy = Clock(), DEFAULTS
    strata = Strata(policy, INPUTS, clock)
    expected = Counter[str]()
    for each in arrivals(clock, {16: 200.0}, 120, 4):
        spread = math.log(each.latency / 16e-3) / 0.3
        kind = "fast" if spread < -1.8 else "slow" if spread > 1.8 else "middle" if abs(spread) < 1.3 else "between"
        expected[kind] += strata.probability(each.request.feeds, clock.now - each.latency)  # type: ignore[assignment]
    samples = sum(expected.values())
    assert expected["fast"] > samples / 10
    assert expected["slow"] > samples / 10  # 3.6 % of the requests each


def test_a_shape_that_comes_once_a_minute_among_220_a_second_is_measured_nearly_each_time() -> None:
    """One sample in 13,000 requests would be drawn of it by a plain sample in three hours."""
    _, probability, length = simulated(400, seed=5)
    rare = probability[length == 500]
    assert rare.size >= 4
    assert rare.mean() > 0.8


def test_a_burst_raises_no_more_samples_than_the_bound_allows() -> None:
    """An idle model, then a thousand requests in each second: within 5 s no more than 5 samples and a few at first."""
    clock = Clock()
    strata = Strata(DEFAULTS, INPUTS, clock)
    expected = 0.0
    for each in arrivals(clock, {16: 1.0, 64: 0.1}, 65, 6, busy=lambda now: 1 if now < 60 else 1000):
        probability = strata.probability(each.request.feeds, clock.now - each.latency)
        expected += probability if clock.now > 60 else 0
    assert expected < 5 * 0.8 + 4


def test_after_a_burst_the_share_is_measured_again_at_once() -> None:
    clock = Clock()
    strata = Strata(DEFAULTS, INPUTS, clock)
    after = [
        strata.probability(each.request.feeds, clock.now - each.latency)
        for each in arrivals(clock, {16: 1.0}, 60, 7, busy=lambda now: 1000 if now < 20 else 20)
        if clock.now > 22
    ]
    assert sum(after) / len(after) == pytest.approx(DEFAULTS.rate, rel=0.2)


def test_where_nothing_has_room_less_is_chosen_until_there_is() -> None:
    clock = Clock()
    strata = Strata(DEFAULTS, INPUTS, clock)

    def a_second(crowded: bool) -> float:
        total = 0.0
        for _ in range(200):
            clock.now += 1 / 200
            total += strata.probability({"x": np.zeros((1, 16), np.float32)}, clock.now - 0.01)
        if crowded:
            strata.crowd()
        return total

    for _ in range(5):
        a_second(crowded=False)
    assert a_second(crowded=False) == pytest.approx(0.8, rel=0.1)
    crowded = [a_second(crowded=True) for _ in range(10)]
    assert crowded[-1] == pytest.approx(0.05, rel=0.2)
    free = [a_second(crowded=False) for _ in range(40)]
    assert free[-1] == pytest.approx(0.8, rel=0.1)


def test_sizes_that_a_client_makes_up_are_bounded_and_forgotten() -> None:
    """Classes beyond the most share one; an hour later there is room for others."""
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
    assert len(strata._sizes) == MOST_SIZES + 1
    for _ in range(3):
        clock.now += 3600
        offer([1] * 6)
    assert len(strata._sizes) < 3
