"""Which requests are measured, and how their rows are copied."""

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from samplings import FAULTS, Clock, arrivals, burst_weight, unbiased, until_over

from bf16kit.service.drift.contract import ShadowPolicy
from bf16kit.service.drift.sampler import BURST_S, FLOOR, Sampler, TokenBucket, copies, size_of

DEFAULTS = ShadowPolicy()


# --- which requests ---------------------------------------------------------------------------------------------------


def simulated(
    rate: float, seconds: float, policy: ShadowPolicy = DEFAULTS, busy: Callable[[float], float] = lambda now: 1.0
) -> list[tuple[float, float]]:
    """Return when each request of simulated traffic came, and its probability."""
    clock = Clock()
    sampler = Sampler(policy, clock)
    return [(clock.now, sampler.probability()) for _ in arrivals(clock, {16: rate}, seconds, 3, busy=busy)]


@pytest.mark.parametrize(
    ("rate", "policy", "expected"),
    [
        (220.0, DEFAULTS, 0.8),  # 0.8 of the limit
        (30.0, DEFAULTS, FLOOR),  # of which the rate would measure 0.3
        (220.0, ShadowPolicy(rate=0.1, max_per_second=100), 22.0),
        (2.0, DEFAULTS, FLOOR),
        (2.0, ShadowPolicy(max_per_second=0.1), 0.08),  # the limit wins over the floor
    ],
)
def test_the_rate_of_samples_is_that_of_the_policy(rate: float, policy: ShadowPolicy, expected: float) -> None:
    found = simulated(rate, 300, policy)
    assert sum(probability for _, probability in found) / 300 == pytest.approx(expected, rel=0.15)


def test_an_idle_model_is_measured_whole_and_a_quiet_one_nearly() -> None:
    assert np.mean([probability for _, probability in simulated(0.1, 6000)]) > 0.99
    assert np.mean([probability for _, probability in simulated(0.4, 6000)]) > 0.9


@pytest.mark.long
def test_the_intervals_of_what_is_measured_cover_the_truth() -> None:
    """The errors of the means are standard normal, and the intervals are too high or too low as seldom as they say."""
    runs = 100
    found = [unbiased({16: 20.0, 64: 2.0, 500: 0.22}, 200.0, seed) for seed in range(runs)]
    errors = [error for error, *_ in found]
    assert abs(np.mean(errors)) < 0.1 + 3 / math.sqrt(runs)  # drift is skewed, so the mean is low more often than high
    assert np.std(errors) < 1.2
    assert sum(interval.low > 1 for _, interval, *_ in found) <= 0.06 * runs
    assert sum(interval.high < 1 for _, interval, *_ in found) <= 0.1 * runs
    assert np.mean([effective for *_, effective, _, _ in found]) > 0.85


@pytest.mark.long
def test_a_fault_of_one_kind_in_a_hundred_is_found() -> None:
    """With 20 requests a second its first hundred measured requests are some minutes of traffic."""
    found = [until_over(FAULTS["a kind of 1 % destroyed"], seed, most=3600) for seed in range(5)]
    assert np.median(found) < 900
    assert max(found) < 3600


@pytest.mark.long
@pytest.mark.parametrize(("requests", "seconds"), [(20, 0.1), (100, 0.1), (100, 5.0), (200, 20.0), (5000, 5.0)])
def test_a_burst_into_an_idle_model_keeps_its_weight(requests: int, seconds: float) -> None:
    """If the samples of its beginning used up the tokens, those of large weight that follow would be dropped."""
    shares = [burst_weight(requests, seconds, seed) for seed in range(8 if requests > 1000 else 40)]
    error = float(np.std(shares)) / math.sqrt(len(shares))
    assert abs(float(np.mean(shares)) - 1) < 3 * error + 0.05


def test_a_thousandfold_burst_gives_no_more_samples_than_the_limit_allows_and_passes_by() -> None:
    found = simulated(1.1, 120, busy=lambda now: 1000 if 60 < now < 65 else 30)
    assert sum(probability for at, probability in found if 60 < at < 65) < BURST_S
    after = [probability for at, probability in found if at > 100]
    assert sum(after) / 20 == pytest.approx(FLOOR, rel=0.3)


def test_the_bucket_starts_full_and_refills_at_its_rate() -> None:
    clock = Clock()
    bucket = TokenBucket(2.0, clock)
    burst = 2 * BURST_S
    assert sum(bucket.try_acquire() for _ in range(200)) == burst
    clock.now = 0.5
    assert [bucket.try_acquire() for _ in range(2)] == [True, False]
    clock.now = 1000.0
    assert sum(bucket.try_acquire() for _ in range(200)) == burst


# --- copies -----------------------------------------------------------------------------------------------------------


def test_copies_of_some_rows_are_contiguous_and_share_no_memory() -> None:
    array = np.arange(12).reshape(3, 4).astype(ml_dtypes.bfloat16)
    found = copies({"x": array}, [0, 3], 1)["x"]
    np.testing.assert_array_equal(found, array[:, [0, 3]])
    whole = copies({"x": array.T})["x"]
    for each in (found, whole):
        assert each.flags.c_contiguous
        assert each.dtype == array.dtype
        assert not np.shares_memory(each, array)


def test_the_size_is_that_of_the_copies_and_texts_count_by_their_characters() -> None:
    texts = np.array(["a" * 1000, "b"], np.object_)
    assert size_of({"x": texts, "y": np.zeros(3, np.float32)}) == 2 * 8 + 1001 + 12
    assert size_of({"x": texts, "y": np.zeros((2, 3), np.float32)}, [1], 0) == 8 + 1 + 12
