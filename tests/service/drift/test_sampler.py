"""Which requests are measured, and how their rows are copied."""

from __future__ import annotations

import math
import random
import weakref
from collections import Counter
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from bench.serving.drift_sampling import FAULTS, burst_weight, unbiased, until_over
from bench.serving.traffic import Clock, arrivals
from service.drift.driftpolicy import ShadowPolicy
from service.drift.forwarder import SampleForwarder
from service.drift.sampler import (
    BURST_S,
    FLOOR,
    Outcome,
    OutcomeObserver,
    Sample,
    Sampler,
    TokenBucket,
    copies,
    random_indices,
    size_of,
)
from service.drift.shadow import MAX_BYTES, QUEUE_SIZE
from service.request import Reply, Request

DEFAULTS = ShadowPolicy()


class Rig:
    """Receives the samples of a forwarder, reports ``outcome`` for each if it is not None, and counts the outcomes."""

    def __init__(
        self,
        policy: ShadowPolicy = DEFAULTS,
        *,
        axis: int | None = 0,
        outcome: Outcome | None = None,
        draw: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.samples: list[Sample] = []
        self.observers: list[OutcomeObserver] = []
        self.counted = Counter[str]()
        self.finished = False
        self._outcome = outcome
        clock = clock or Clock()
        self.forwarder = SampleForwarder(
            self, policy, self, batch_axis=axis, profile="cpu-bf16", draw=draw, clock=clock
        )

    def send(self, sample: Sample, observer: OutcomeObserver) -> None:
        self.samples.append(sample)
        self.observers.append(observer)
        if self._outcome is not None:
            observer.sampled(self._outcome, sample.rows)

    def finish(self) -> None:
        self.finished = True

    def sampled(self, outcome: str, samples: int) -> None:
        self.counted[outcome] += samples

    def offer(self, request: Request, reply: Reply | None = None) -> Sample | None:
        """Offer a request; return its sample if it was chosen."""
        before = len(self.samples)
        self.forwarder.offer(request, reply or Reply({}, "bf16"))
        return self.samples[-1] if len(self.samples) > before else None


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


def test_weighted_rows_are_not_biased_by_the_choice_of_requests_and_rows() -> None:
    """Requests have 1 to 20 rows, of which at most 4 are taken; drift grows with each row, and while it is busy.

    The weighted mean is within a hundredth, or four standard errors, of the mean of all rows served; the sum of the
    weights is within 5 % of their number. The unweighted mean is far off.
    """
    clock, chance = Clock(), random.Random(1)
    policy = ShadowPolicy(rate=0.2, max_per_second=20, max_rows=4)
    rig = Rig(policy, outcome="measured", draw=chance.random, clock=clock)
    everything, values, weights = [], [], []

    def busy(now: float) -> float:
        return 4.0 if now % 60 < 30 else 0.2

    for each in arrivals(
        clock, {16: 80.0, 64: 8.0, 500: 0.1}, 300, 2, rows=lambda chance: chance.randrange(1, 21), busy=busy
    ):
        factor = busy(clock.now)
        everything += [factor * drift for drift in each.drift]
        sample = rig.offer(each.request, each.reply)
        if sample is not None:
            assert sample.rows == min(4, each.request.rows) == len(sample.feeds["x"])
            values += list(factor * sample.outputs["y"][:, 0])
            weights += [1 / sample.probability] * sample.rows
    y, w = np.array(values), np.array(weights)
    mean = (w * y).sum() / w.sum()
    error = math.sqrt((w**2 * (y - mean) ** 2).sum()) / w.sum() * 2  # rows of one request are alike: four count as one
    truth = float(np.mean(everything))
    assert abs(mean - truth) < max(4 * error, 0.01 * truth)
    assert w.sum() == pytest.approx(len(everything), rel=0.05)
    assert abs(y.mean() - truth) > 4 * error
    assert rig.counted["dropped"] < 0.02 * len(values)


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


def test_a_fault_of_one_kind_in_a_hundred_is_found() -> None:
    """With 20 requests a second its first hundred measured requests are some minutes of traffic."""
    found = [until_over(FAULTS["a kind of 1 % destroyed"], seed, most=3600) for seed in range(5)]
    assert np.median(found) < 900
    assert max(found) < 3600


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


@pytest.mark.parametrize("late", [False, True])
def test_fewer_requests_are_chosen_while_samples_find_no_room(late: bool) -> None:
    """They find none here, or another process reports it later."""
    clock, chance = Clock(), random.Random(2)
    rig = Rig(ShadowPolicy(rate=1, max_per_second=100), draw=chance.random, clock=clock)
    rig._outcome = "dropped" if late else None
    request = Request({"x": np.zeros((1, 16), np.float32)})

    def chosen(seconds: int) -> int:
        before = len(rig.samples) + rig.counted["dropped"] * (not late)
        for _ in range(1000 * seconds):
            clock.now += 1 / 1000
            rig.offer(request)
        return len(rig.samples) + rig.counted["dropped"] * (not late) - before

    chosen(10)
    assert chosen(20) < 20 * 80 / 8, "a sixteenth is the least, and each second without drops allows a tenth more"
    rig._outcome = "measured"
    for observer in rig.observers:
        observer.sampled("measured", 1)
    chosen(40)
    assert chosen(5) == pytest.approx(5 * 80, rel=0.2)


def test_the_bucket_starts_full_and_refills_at_its_rate() -> None:
    clock = Clock()
    bucket = TokenBucket(2.0, clock)
    burst = 2 * BURST_S
    assert sum(bucket.try_acquire() for _ in range(200)) == burst
    clock.now = 0.5
    assert [bucket.try_acquire() for _ in range(2)] == [True, False]
    clock.now = 1000.0
    assert sum(bucket.try_acquire() for _ in range(200)) == burst


# --- which rows, and their copies -------------------------------------------------------------------------------------


def test_each_row_is_as_likely_as_any_other_and_those_chosen_are_distinct_and_sorted() -> None:
    chance = random.Random(3)
    found = [random_indices(10, 3, chance.random) for _ in range(6000)]
    assert all(rows == sorted(set(rows)) and len(rows) == 3 for rows in found)
    seen = Counter(row for rows in found for row in rows)
    assert set(seen) == set(range(10))
    assert max(abs(count - 1800) for count in seen.values()) < 5 * math.sqrt(1800 * 0.7)
    assert random_indices(4, 4, chance.random) == [0, 1, 2, 3]


def test_a_sample_has_the_probability_of_its_rows_and_what_the_comparison_needs_to_know() -> None:
    rig = Rig(ShadowPolicy(max_rows=2))
    request = Request({"x": np.ones((8, 3), np.float32)}, rows=8, client="c")
    sample = rig.offer(request, Reply({"y": np.ones((8, 1))}, "fp32"))
    assert sample is not None
    assert (sample.probability, sample.rows) == (2 / 8, 2)
    assert (sample.precision, sample.profile, sample.client) == ("fp32", "cpu-bf16", "c")
    assert sample.nbytes == 2 * 3 * 4 + 2 * 8


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


def test_samples_without_an_outcome_are_limited_in_number_and_bytes() -> None:
    """The limits are checked before anything of a sample is copied."""
    rig = Rig(ShadowPolicy(rate=1, max_per_second=10_000), axis=None)
    huge, large = (np.broadcast_to(np.zeros(1, np.uint8), (size,)) for size in (MAX_BYTES + 1, 40 << 20))
    small = Request({"x": np.zeros(1, np.uint8)})
    assert rig.offer(Request({"x": huge})) is None, "it never fits"
    assert rig.offer(Request({"x": large})) is not None
    assert rig.offer(Request({"x": large})) is None
    assert rig.counted == {"dropped": 2}
    for _ in range(QUEUE_SIZE):
        rig.offer(small)
    assert (len(rig.samples), rig.counted) == (QUEUE_SIZE, {"dropped": 3})
    rig.observers[0].sampled("measured", 1)
    assert rig.offer(small) is not None
    assert rig.counted == {"dropped": 3, "measured": 1}


def test_a_sample_holds_copies_of_its_rows_and_not_the_message_or_the_batch() -> None:
    """A view would keep both alive, and its values would change with their memory."""
    rig = Rig(ShadowPolicy(rate=1, max_rows=2))
    message = np.ones((1000, 2), np.float32)
    batch = message * np.float32(1.01)
    alive = weakref.ref(message), weakref.ref(batch)
    sample = rig.offer(Request({"x": message[:5]}, rows=5), Reply({"y": batch[:5]}, "bf16"))
    message[:], batch[:] = 7, 8
    del message, batch
    assert [array() for array in alive] == [None, None]
    assert sample is not None
    assert sample.feeds["x"].tolist() == [[1, 1], [1, 1]]
    assert np.allclose(sample.outputs["y"], 1.01)


def test_nothing_is_sampled_after_stop_and_close_gives_the_reference_back() -> None:
    rig = Rig(ShadowPolicy(rate=1))
    rig.forwarder.stop()
    assert rig.offer(Request({"x": np.zeros((1, 2))}, rows=1)) is None
    assert not rig.finished
    rig.forwarder.close()
    assert rig.finished
