"""Which requests' samples are forwarded, what a sample holds, and samples that fp32 has served."""

import math
import random
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from openfiles import no_more_threads
from samplings import Forwarding, arrivals
from waiting import until

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.service.drift.contract import ShadowPolicy
from bf16kit.service.drift.sampler import MAX_BYTES, QUEUE_SIZE
from bf16kit.service.request import Reply, Request

ALL = ShadowPolicy(rate=1, max_per_second=10_000, max_rows=2)
X = np.ones((2, 3), np.float32)


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_weighted_rows_are_not_biased_by_the_choice_of_requests_and_rows() -> None:
    """Requests have 1 to 20 rows, of which at most 4 are taken; drift grows with each row, and while it is busy.

    The weighted mean is within a hundredth, or four standard errors, of the mean of all rows served; the sum of the
    weights is within 5 % of their number. The unweighted mean is far off.
    """
    policy = ShadowPolicy(rate=0.2, max_per_second=20, max_rows=4)
    rig = Forwarding(policy, outcome="measured", chance=random.Random(1))
    clock = rig.clock
    everything, values, weights = [], [], []

    def busy(now: float) -> float:
        return 4.0 if now % 60 < 30 else 0.2

    for each in arrivals(
        clock, {16: 80.0, 64: 8.0, 500: 0.1}, 300, 2, rows=lambda chance: chance.randrange(1, 21), busy=busy
    ):
        factor = busy(clock.now)
        everything += [factor * drift for drift in each.drift]
        sample = rig.offer(each.request, Reply(each.reply.outputs, "bf16"))
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


@pytest.mark.parametrize("late", [False, True])
def test_fewer_requests_are_chosen_while_samples_find_no_room(late: bool) -> None:
    """They find none here, or another process reports it later."""
    rig = Forwarding(ShadowPolicy(rate=1, max_per_second=100), chance=random.Random(2))
    rig.outcome = "dropped" if late else None
    request = Request({"x": np.zeros((1, 16), np.float32)})

    def chosen(seconds: int) -> int:
        before = len(rig.samples) + rig.counted["dropped"] * (not late)
        for _ in range(1000 * seconds):
            rig.clock.now += 1 / 1000
            rig.offer(request)
        return len(rig.samples) + rig.counted["dropped"] * (not late) - before

    chosen(10)
    assert chosen(20) < 20 * 80 / 8, "a sixteenth is the least, and each second without drops allows a tenth more"
    rig.outcome = "measured"
    for on_outcome in rig.callbacks:
        on_outcome("measured")
    chosen(40)
    assert chosen(5) == pytest.approx(5 * 80, rel=0.2)


def test_samples_without_an_outcome_are_limited_in_number_and_bytes() -> None:
    """The limits are checked before anything of a sample is copied."""
    rig = Forwarding(ALL, axis=None)
    huge, large = (np.broadcast_to(np.zeros(1, np.uint8), (size,)) for size in (MAX_BYTES + 1, 40 << 20))
    small = Request({"x": np.zeros(1, np.uint8)})
    assert rig.offer(Request({"x": huge})) is None, "it never fits"
    assert rig.offer(Request({"x": large})) is not None
    assert rig.offer(Request({"x": large})) is None
    assert rig.counted == {"dropped": 2}
    for _ in range(QUEUE_SIZE):
        rig.offer(small)
    assert (len(rig.samples), rig.counted) == (QUEUE_SIZE, {"dropped": 3})
    rig.callbacks[0]("measured")
    assert rig.offer(small) is not None
    assert rig.counted == {"dropped": 3, "measured": 1}


# --- what a sample holds ----------------------------------------------------------------------------------------------


def test_a_sample_holds_copies_of_its_rows_and_what_the_comparison_needs_to_know() -> None:
    """A view would keep the message and the batch alive, and its values would change with their memory."""
    rig = Forwarding(ALL)
    message = np.ones((1000, 2), np.float32)
    batch = message * np.float32(1.01)
    alive = weakref.ref(message), weakref.ref(batch)
    sample = rig.offer(Request({"x": message[:8]}, rows=8, client="c"), Reply({"y": batch[:8]}, "bf16"))
    message[:], batch[:] = 7, 8
    del message, batch
    assert [array() for array in alive] == [None, None]
    assert sample is not None
    assert sample.feeds["x"].tolist() == [[1, 1], [1, 1]]
    assert np.allclose(sample.outputs["y"], 1.01)
    assert (sample.probability, sample.rows, sample.nbytes) == (2 / 8, 2, 2 * 2 * 2 * 4)
    assert (sample.precision, sample.profile, sample.client) == ("bf16", "cpu-bf16", "c")


# --- samples that fp32 has served -------------------------------------------------------------------------------------


def serve_by_fp32(rig: Forwarding) -> None:
    """Offer a request of two rows that fp32 served."""
    rig.offer(Request({"x": X}, rows=2), Reply({"y": X * 5}, "fp32"))


@pytest.fixture
def rig() -> Iterator[Forwarding]:
    rig = Forwarding(ALL)
    yield rig
    rig.go.set()
    assert rig.forwarder.close(math.inf)


def test_a_sample_served_by_fp32_is_forwarded_with_the_outputs_of_bf16(rig: Forwarding) -> None:
    serve_by_fp32(rig)
    until(lambda: rig.samples != [], 30, "handed on")
    (sample,) = rig.samples
    np.testing.assert_array_equal(sample.outputs["y"], X * 2)
    assert (sample.precision, sample.probability, sample.rows) == ("bf16", 1.0, 2)
    assert not rig.counted


@pytest.mark.parametrize("error", [RuntimeFailure("no"), ZeroDivisionError()])
def test_a_sample_that_fails_is_counted_and_the_next_is_measured(rig: Forwarding, error: Exception) -> None:
    rig.fails = error
    serve_by_fp32(rig)
    until(lambda: rig.counted == {"failed": 2}, 30, "counted")
    rig.fails = None
    serve_by_fp32(rig)
    until(lambda: len(rig.samples) == 1, 30, "measured")


def test_samples_that_wait_when_the_forwarder_is_stopped_are_dropped_and_counted(rig: Forwarding) -> None:
    rig.go.clear()
    serve_by_fp32(rig)
    assert rig.at_work.wait(30)
    for _ in range(3):
        serve_by_fp32(rig)
    rig.forwarder.stop()
    assert rig.offer(Request({"x": X}, rows=2)) is None, "nothing is sampled any more"
    assert rig.finished == 0
    assert not rig.forwarder.close(time.monotonic())
    rig.go.set()
    assert rig.forwarder.close(math.inf)
    assert rig.finished > 0
    assert (len(rig.samples), rig.counted) == (1, {"dropped": 6})


@pytest.mark.parametrize("another", [False, True])
def test_if_no_thread_can_be_started_only_the_sample_is_dropped(rig: Forwarding, another: bool) -> None:
    """The client has its response by then. A forwarder that is closed then has nothing to wait for."""
    with no_more_threads():
        serve_by_fp32(rig)
    assert rig.counted == {"dropped": 2}
    if another:
        serve_by_fp32(rig)
        until(lambda: len(rig.samples) == 1, 30, "measured")
    assert rig.forwarder.close(math.inf)
