"""Which requests are measured, and how their rows are copied."""

from __future__ import annotations

import math
import random
import weakref
from collections import Counter

import ml_dtypes
import numpy as np
import pytest

from bench.serving.traffic import INPUTS, Clock, arrivals
from service.drift.observer import Outcome, OutcomeObserver
from service.drift.policy import ShadowPolicy
from service.drift.sampling import (
    BURST,
    MAX_IN_FLIGHT,
    Chooser,
    Sample,
    SampleForwarder,
    TokenBucket,
    copies,
    random_indices,
    size_of,
)
from service.request import Reply, Request, Timings


class Sender:
    """Keeps the samples that it gets, and reports ``outcome`` for each if it is not None."""

    def __init__(self, outcome: Outcome | None = None) -> None:
        self.samples: list[Sample] = []
        self.forgotten = False
        self._outcome = outcome

    def send(self, sample: Sample, observer: OutcomeObserver) -> None:
        self.samples.append(sample)
        if self._outcome is not None:
            observer.sampled(self._outcome, sample.rows)

    def finish(self) -> None:
        self.forgotten = True


class Heard:
    """An observer that counts samples by outcome."""

    def __init__(self) -> None:
        self.samples: Counter[str] = Counter()

    def sampled(self, outcome: str, samples: int) -> None:
        self.samples[outcome] += samples


def test_weighted_rows_are_not_biased_by_the_choice_of_requests_and_rows() -> None:
    """Requests have 1 to 20 rows, of which at most 4 are taken.

    The weighted mean is within a hundredth, or four standard errors, of the mean of all rows served; the sum of the
    weights is within 5 % of their number. The unweighted mean is far off, because drift grows with each row.
    """
    clock, heard, chance = Clock(), Heard(), random.Random(1)
    policy = ShadowPolicy(rate=0.2, max_per_second=20, max_rows=4)
    chooser = Chooser(policy, heard, 0, chance.random, INPUTS, clock)
    everything, values, weights = [], [], []
    traffic = arrivals(clock, {16: 80.0, 64: 8.0, 500: 0.1}, 150, 2, rows=lambda chance: chance.randrange(1, 21))
    for each in traffic:
        everything += each.drift
        sample = chooser.choose(each.request, each.reply, lambda nbytes: True)
        if sample is not None:
            assert sample.rows == min(4, each.request.rows) == len(sample.feeds["x"])
            values += list(sample.outputs["y"][:, 0])
            weights += [1 / sample.probability] * sample.rows
    y, w = np.array(values), np.array(weights)
    mean = (w * y).sum() / w.sum()
    error = math.sqrt((w**2 * (y - mean) ** 2).sum()) / w.sum() * 2  # rows of one request are alike: four count as one
    truth = float(np.mean(everything))
    assert abs(mean - truth) < max(4 * error, 0.01 * truth)
    assert w.sum() == pytest.approx(len(everything), rel=0.05)
    assert abs(y.mean() - truth) > 8 * error
    assert heard.samples["dropped"] < 0.02 * len(values)


def test_a_rare_shape_is_measured_within_three_minutes_at_the_defaults() -> None:
    """It arrives ten times a minute among 300 requests a second: it is one request in 1,800."""
    for seed in range(5):
        clock, chance = Clock(), random.Random(seed)
        chooser = Chooser(ShadowPolicy(), Heard(), 0, chance.random, INPUTS, clock)
        for each in arrivals(clock, {16: 270.0, 64: 30.0, 500: 1 / 6}, 180, seed + 10):
            sample = chooser.choose(each.request, each.reply, lambda nbytes: True)
            if sample is not None and each.length == 500:
                break
        else:
            raise AssertionError(f"seed {seed}: never seen in three minutes")


@pytest.mark.parametrize(("requests", "seconds"), [(20, 0.1), (100, 0.1), (100, 5.0), (200, 20.0)])
def test_a_burst_into_an_idle_model_keeps_its_weight(requests: int, seconds: float) -> None:
    """The weights of its samples add up to its requests.

    An idle model is measured whole. If that went on for eight requests of the burst, it would use up the tokens, and
    what is chosen next, of large weight, would be dropped: the burst would count a tenth of its requests.
    """
    feeds, reply = {"x": np.zeros((1, 16), np.float32)}, Reply({"y": np.ones((1, 1))}, "bf16")
    shares = []
    for seed in range(40):
        clock, chance, weight = Clock(), random.Random(seed), 0.0
        chooser = Chooser(ShadowPolicy(), Heard(), 0, chance.random, INPUTS, clock)
        for start in range(0, 600, 60):
            idle = [(start + at + chance.random(), False) for at in range(0, 35, 5)]
            burst = [(start + 39 + seconds * chance.random(), True) for _ in range(requests)]
            for clock.now, bursting in (*idle, *sorted(burst)):
                timings = Timings(arrived=clock.now - 0.016 * math.exp(chance.gauss(0, 0.3)))
                sample = chooser.choose(Request(feeds, timings=timings), reply, lambda nbytes: True)
                weight += 1 / sample.probability if bursting and sample is not None else 0.0
        shares.append(weight / (10 * requests))
    error = float(np.std(shares)) / math.sqrt(len(shares))
    assert abs(float(np.mean(shares)) - 1) < 3 * error + 0.05


def test_each_row_is_as_likely_as_any_other() -> None:
    chance = random.Random(3)
    seen = Counter(row for _ in range(6000) for row in random_indices(10, 3, chance.random))
    assert len(seen) == 10
    assert max(abs(count - 1800) for count in seen.values()) < 5 * math.sqrt(1800 * 0.7)


def test_the_chosen_rows_are_distinct_and_sorted() -> None:
    chance = random.Random(4)
    for _ in range(200):
        rows = random_indices(9, 5, chance.random)
        assert rows == sorted(set(rows))
        assert set(rows) <= set(range(9))
    assert random_indices(4, 4, chance.random) == [0, 1, 2, 3]
    assert random_indices(9, 2, lambda: 0.0) == [0, 1]


def test_a_sample_has_the_probability_with_which_its_rows_were_chosen() -> None:
    chooser = Chooser(ShadowPolicy(rate=0.5, min_per_second=0, max_rows=2), Heard(), 0, lambda: 0.0, INPUTS)
    request, reply = Request({"x": np.ones((8, 3), np.float32)}, rows=8), Reply({"y": np.ones((8, 1))}, "fp32")
    sample = chooser.choose(request, reply, lambda nbytes: True)
    assert sample is not None
    assert sample.probability == pytest.approx(0.5 * 2 / 8)
    assert sample.precision == "fp32"
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


@pytest.mark.parametrize(("nbytes", "slower"), [(1000, False), (10, True)])
def test_a_sample_without_room_lowers_the_rate_but_one_that_never_fits_does_not(nbytes: int, slower: bool) -> None:
    heard, crowded = Heard(), list[str]()
    chooser = Chooser(ShadowPolicy(rate=1, max_bytes=100), heard, None, lambda: 0.0)
    chooser._strata.note_dropped_sample = lambda: crowded.append("crowd")  # type: ignore[method-assign]
    request, reply = Request({"x": np.zeros(nbytes, np.uint8)}), Reply({}, "bf16")
    assert chooser.choose(request, reply, lambda nbytes: False) is None
    assert heard.samples == {"dropped": 1}
    assert bool(crowded) == slower


def test_a_sample_that_another_process_drops_lowers_the_rate_too() -> None:
    """The other process reports the drop later, to the observer that it got with the sample."""
    heard, crowded = Heard(), list[str]()

    forwarder = SampleForwarder(Sender("dropped"), ShadowPolicy(rate=1), heard, batch_axis=None, draw=lambda: 0.0)
    forwarder._chooser._strata.note_dropped_sample = lambda: crowded.append("crowd")  # type: ignore[method-assign]
    forwarder.offer(Request({"x": np.zeros(2)}), Reply({}, "bf16"))
    assert heard.samples == {"dropped": 1}
    assert crowded == ["crowd"]


def test_a_sample_names_its_profile_because_the_expected_drift_depends_on_it() -> None:
    sender = Sender()
    forwarder = SampleForwarder(
        sender, ShadowPolicy(rate=1), Heard(), batch_axis=None, profile="cpu-bf16", draw=lambda: 0.0
    )
    forwarder.offer(Request({"x": np.zeros(2)}), Reply({}, "bf16"))
    assert [sample.profile for sample in sender.samples] == ["cpu-bf16"]


def test_samples_without_an_outcome_are_limited_in_number_and_bytes() -> None:
    """The limits are checked before anything of a sample is copied."""
    heard, given = Heard(), list[tuple[Sample, OutcomeObserver]]()

    class Keeping:
        def send(self, sample: Sample, observer: OutcomeObserver) -> None:
            given.append((sample, observer))

        def finish(self) -> None:
            """Nothing to forget."""

    policy = ShadowPolicy(rate=1, max_per_second=10_000, max_bytes=1000)
    forwarder = SampleForwarder(Keeping(), policy, heard, batch_axis=None, draw=lambda: 0.0)
    large, small = (Request({"x": np.zeros(size, np.uint8)}) for size in (600, 1))
    forwarder.offer(large, Reply({}, "bf16"))
    forwarder.offer(large, Reply({}, "bf16"))
    assert (len(given), heard.samples) == (1, {"dropped": 1})
    for _ in range(MAX_IN_FLIGHT):
        forwarder.offer(small, Reply({}, "bf16"))
    assert (len(given), heard.samples) == (MAX_IN_FLIGHT, {"dropped": 2})
    given[0][1].sampled("measured", 1)
    forwarder.offer(small, Reply({}, "bf16"))
    assert (len(given), heard.samples) == (MAX_IN_FLIGHT + 1, {"dropped": 2, "measured": 1})


def test_the_bucket_refills_at_its_rate_and_holds_a_burst() -> None:
    clock = Clock()
    bucket = TokenBucket(2.0, clock)
    assert [bucket.try_acquire() for _ in range(3)] == [True, True, False]
    clock.now = 0.5
    assert [bucket.try_acquire() for _ in range(2)] == [True, False]
    clock.now = 100.0
    assert sum(bucket.try_acquire() for _ in range(20)) == BURST


def test_a_sample_holds_copies_of_its_rows_and_not_the_message_or_the_batch() -> None:
    """A view would keep both alive, and its values would change with their memory."""
    sender = Sender()
    message = np.ones((1000, 2), np.float32)
    batch = message * np.float32(1.01)
    alive = weakref.ref(message), weakref.ref(batch)
    forwarder = SampleForwarder(sender, ShadowPolicy(rate=1, max_rows=2), Heard(), batch_axis=0, draw=lambda: 0.0)
    forwarder.offer(Request({"x": message[:5]}, rows=5), Reply({"y": batch[:5]}, "bf16"))
    message[:], batch[:] = 7, 8
    del message, batch
    assert [array() for array in alive] == [None, None]
    (sample,) = sender.samples
    assert sample.feeds["x"].tolist() == [[1, 1], [1, 1]]
    assert np.allclose(sample.outputs["y"], 1.01)


def test_nothing_is_sampled_after_stop_and_close_gives_the_reference_back() -> None:
    sender = Sender()
    forwarder = SampleForwarder(sender, ShadowPolicy(rate=1), Heard(), batch_axis=0, draw=lambda: 0.0)
    forwarder.stop()
    forwarder.offer(Request({"x": np.zeros((1, 2))}, rows=1), Reply({}, "bf16"))
    assert not sender.samples
    was_forgotten = sender.forgotten
    forwarder.close()
    assert (was_forgotten, sender.forgotten) == (False, True)
