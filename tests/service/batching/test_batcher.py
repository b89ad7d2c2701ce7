from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from waiting import until

from bf16kit.errors import (
    Cancelled,
    DeadlineExceeded,
    InputRefused,
    InvalidRequest,
    Overloaded,
    RuntimeFailure,
    Unavailable,
)
from service.batching.batcher import Batcher
from service.batching.policy import BatchPolicy
from service.batching.queue import LevelPolicy
from service.contract import Array
from service.request import Cancellation, Reply, Request, Timings

SIZE = 100  # bytes of the message that a request came in


class Heard:
    """What the batcher told its observer."""

    def __init__(self) -> None:
        self.rejections: Counter[str] = Counter()
        self.depth = 0
        self.executions: list[tuple[int, int]] = []  # requests, rows

    def rejected(self, reason: str) -> None:
        self.rejections[reason] += 1

    def queued(self, change: int) -> None:
        self.depth += change

    def executed(self, requests: int, rows: int, timings: Timings) -> None:
        self.executions.append((requests, rows))


class Doubler:
    """A runtime, y = 2x, that can be held while it runs, refuses negative numbers, and remembers its batches."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.running = 0
        self.batches: list[list[float]] = []
        self.threads: set[str] = set()
        self.refusal = RuntimeFailure("negative")
        self.precision = "bf16"
        self.meanwhile: Callable[[], object] = lambda: None  # while any batch but the first runs

    def __call__(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None) -> tuple[dict[str, Array], str]:
        self.running += 1
        self.threads.add(threading.current_thread().name)
        self.batches.append([float(v) for v in feeds["x"].reshape(-1)])
        assert self.gate.wait(20)
        if len(self.batches) > 1:
            self.meanwhile()
        self.running -= 1
        if (feeds["x"] < 0).any():
            raise self.refusal
        return {"y": feeds["x"] * 2}, self.precision


class Bench:
    """A batcher, its runtime, its observer, and callers on threads."""

    def __init__(self, policy: BatchPolicy) -> None:
        self.run, self.heard = Doubler(), Heard()
        self.batcher = Batcher(self.run, policy, self.heard)
        self.batcher.start()
        self.requests: list[Request] = []
        self.callers = ThreadPoolExecutor(32)

    def call(self, *values: float, nbytes: int = SIZE, **more: object) -> Future[Reply]:
        x = np.array(values, np.float32).reshape(-1, 1)
        request = Request({"x": x}, rows=len(values), nbytes=nbytes, **more)  # type: ignore[arg-type]  # the fields of Request
        self.requests.append(request)
        return self.callers.submit(self.batcher.submit, request)

    def hold(self) -> Future[Reply]:
        """One request at work, held; whatever comes now has to queue."""
        self.run.gate.clear()
        held = self.call(0.0)
        until(lambda: self.run.running)
        return held

    def queue(self, *values: float, **more: object) -> Future[Reply]:
        """A call that is known to wait in the queue when this returns."""
        depth = self.heard.depth
        future = self.call(*values, **more)  # type: ignore[arg-type]  # as above
        until(lambda: self.heard.depth > depth or future.done())
        return future

    def timings(self) -> Timings:
        """Of the request that came last."""
        found = self.requests[-1].timings
        assert found is not None
        return found

    def close(self) -> None:
        self.run.gate.set()
        self.batcher.close()
        self.callers.shutdown()


Make = Callable[..., Bench]


@pytest.fixture
def make() -> Iterator[Make]:
    benches: list[Bench] = []

    def build(**policy: object) -> Bench:
        defaults: dict[str, object] = {"axis": 0, "max_rows": 8}
        benches.append(Bench(BatchPolicy(**{**defaults, **policy})))  # type: ignore[arg-type]  # its fields
        return benches[-1]

    yield build
    for bench in benches:
        bench.close()


def values(future: Future[Reply]) -> list[float]:
    return [float(v) for v in future.result(20).outputs["y"].reshape(-1)]


def test_a_request_is_answered(make: Make) -> None:
    assert values(make().call(1.0, 2.0)) == [2.0, 4.0]


@pytest.mark.parametrize("inline", [False, True])
def test_an_answer_says_which_precision_made_it_batch_by_batch(make: Make, inline: bool) -> None:
    bench = make(inline=inline)
    assert bench.call(1.0).result(20).precision == "bf16"
    bench.run.precision = "fp32"
    assert bench.call(1.0).result(20).precision == "fp32"


def test_closing_leaves_a_batch_that_outlasts_the_deadline(make: Make) -> None:
    bench = make()
    held = bench.hold()
    assert not bench.batcher.close(time.monotonic())
    bench.run.gate.set()
    assert values(held) == [0.0]
    assert bench.batcher.close()


def test_what_waits_while_the_model_runs_becomes_one_batch(make: Make) -> None:
    bench = make()
    held = bench.hold()
    waiting = [bench.queue(float(i)) for i in range(1, 6)]
    bench.run.gate.set()
    assert [values(f) for f in [held, *waiting]] == [[0.0], [2.0], [4.0], [6.0], [8.0], [10.0]]
    assert bench.run.batches == [[0.0], [1.0, 2.0, 3.0, 4.0, 5.0]]
    assert bench.heard.executions == [(1, 1), (5, 5)]
    assert bench.heard.depth == 0


def test_a_batch_never_has_more_than_max_rows(make: Make) -> None:
    bench = make(max_rows=4)
    bench.hold()
    waiting = [bench.queue(*[float(i)] * 3) for i in range(1, 4)] + [bench.queue(9.0)]
    bench.run.gate.set()
    for future in waiting:
        future.result(20)
    assert bench.run.batches[1:] == [[1.0, 1.0, 1.0, 9.0], [2.0] * 3, [3.0] * 3]


def test_a_request_larger_than_a_batch_is_refused_with_the_limit(make: Make) -> None:
    with pytest.raises(InvalidRequest, match="has 9 rows; max_batch_size is 8"):
        make().call(*range(9)).result(20)


def test_other_shapes_wait_for_their_own_batch_and_are_not_starved(make: Make) -> None:
    bench = make(max_rows=2)
    bench.hold()
    wide = Request({"x": np.full((1, 2), 7, np.float32)}, rows=1)
    first = bench.queue(1.0)
    depth = bench.heard.depth
    other = bench.callers.submit(bench.batcher.submit, wide)
    until(lambda: bench.heard.depth > depth)
    later = [bench.queue(float(i)) for i in (2, 3, 4)]
    bench.run.gate.set()
    for future in (first, other, *later):
        future.result(20)
    assert bench.run.batches[1:] == [[1.0, 2.0], [7.0, 7.0], [3.0, 4.0]]


def test_without_a_batch_axis_every_request_runs_alone(make: Make) -> None:
    bench = make(axis=None, max_rows=0)
    bench.hold()
    waiting = [bench.queue(1.0), bench.queue(2.0)]
    bench.run.gate.set()
    assert [values(f) for f in waiting] == [[2.0], [4.0]]
    assert bench.run.batches == [[0.0], [1.0], [2.0]]


def test_a_full_queue_refuses_at_once_and_counts(make: Make) -> None:
    bench = make(levels=(LevelPolicy(2),))
    bench.hold()
    bench.queue(1.0), bench.queue(2.0)
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        bench.call(3.0).result(20)
    assert bench.heard.rejections == {"queue_full": 1}


def test_the_cancelled_make_room_in_a_full_queue(make: Make) -> None:
    bench = make(levels=(LevelPolicy(1),))
    bench.hold()
    gone = Cancellation()
    left = bench.queue(1.0, cancellation=gone)
    gone.cancel()
    stays = bench.call(2.0)
    with pytest.raises(Cancelled):
        left.result(20)
    bench.run.gate.set()
    assert values(stays) == [4.0]


def test_a_caller_who_left_is_dropped_before_running_and_counted(make: Make) -> None:
    bench = make()
    bench.hold()
    gone = Cancellation()
    left, stays = bench.queue(1.0, cancellation=gone), bench.queue(2.0)
    gone.cancel()
    bench.run.gate.set()
    with pytest.raises(Cancelled):
        left.result(20)
    assert values(stays) == [4.0]
    assert bench.run.batches == [[0.0], [2.0]]
    assert bench.heard.rejections == {"cancelled": 1}


def test_a_deadline_that_passed_before_the_queue_is_never_run(make: Make) -> None:
    bench = make()
    with pytest.raises(DeadlineExceeded):
        bench.call(1.0, deadline=time.monotonic() - 1).result(20)
    assert bench.run.batches == []
    assert bench.heard.rejections == {"deadline": 1}


def test_a_deadline_that_passes_in_the_queue_answers_then_and_there(make: Make) -> None:
    """The runtime is still held when the caller has its answer."""
    bench = make()
    bench.hold()
    with pytest.raises(DeadlineExceeded):
        bench.queue(1.0, deadline=time.monotonic() + 0.05).result(20)
    bench.run.gate.set()
    assert values(bench.call(2.0)) == [4.0]
    assert [1.0] not in bench.run.batches
    assert bench.heard.rejections == {"deadline": 1}
    assert bench.heard.depth == 0


def test_a_deadline_that_passes_while_running_still_gets_the_answer(make: Make) -> None:
    """Whoever waits decides what to do with it; the work is done by then."""
    bench = make()
    bench.run.gate.clear()
    deadline = time.monotonic() + 0.05
    slow = bench.call(1.0, deadline=deadline)
    until(lambda: bench.run.running)
    until(lambda: time.monotonic() > deadline)
    bench.run.gate.set()
    assert values(slow) == [2.0]


def test_one_callers_bad_input_fails_nobody_else(make: Make) -> None:
    bench = make()
    bench.hold()
    good, bad, also = bench.queue(1.0), bench.queue(-1.0), bench.queue(3.0)
    bench.run.gate.set()
    assert (values(good), values(also)) == ([2.0], [6.0])
    with pytest.raises(RuntimeFailure, match="negative"):
        bad.result(20)


def test_a_batch_with_one_bad_input_is_halved_and_the_good_half_answered_first(make: Make) -> None:
    """Sixteen requests, one of them bad: eight more runs, not sixteen."""
    bench = make(max_rows=16)
    bench.hold()
    waiting = [bench.queue(float(i) if i != 12 else -1.0) for i in range(16)]
    bench.run.gate.set()
    for i, future in enumerate(waiting):
        if i != 12:
            assert values(future) == [2.0 * i]
    with pytest.raises(RuntimeFailure):
        waiting[12].result(20)
    assert [len(batch) for batch in bench.run.batches[1:]] == [16, 8, 8, 4, 4, 2, 1, 1, 2]


def test_a_deadline_that_passes_between_the_reruns_of_a_batch_is_not_run_again(make: Make) -> None:
    bench = make()
    bench.hold()
    deadline = time.monotonic() + 0.2
    late, bad = bench.queue(1.0, deadline=deadline), bench.queue(-1.0)
    bench.run.meanwhile = lambda: until(lambda: time.monotonic() > deadline)
    bench.run.gate.set()
    with pytest.raises(DeadlineExceeded):
        late.result(20)
    with pytest.raises(RuntimeFailure, match="negative"):
        bad.result(20)
    assert bench.run.batches == [[0.0], [1.0, -1.0], [-1.0]]
    assert all(request.timings is not None and request.timings.queue > 0 for request in bench.requests[1:])
    assert bench.heard.rejections == {"deadline": 1}


def test_inputs_that_the_runtime_refuses_are_the_clients_error(make: Make) -> None:
    for inline in (False, True):
        bench = make(inline=inline)
        bench.run.refusal = InputRefused("Gather node /emb failed: out of bounds", "idx=9 is out of bounds")
        with pytest.raises(InvalidRequest, match=r"cannot run on these inputs: idx=9 is out of bounds$"):
            bench.call(-1.0).result(20)


def test_a_client_that_leaves_is_answered_at_once_and_its_place_is_free(make: Make) -> None:
    """The runtime is held all the while: nothing else could take the request out of the queue."""
    bench = make(levels=(LevelPolicy(1),))
    bench.hold()
    gone = Cancellation()
    left = bench.queue(1.0, cancellation=gone)
    gone.cancel()
    with pytest.raises(Cancelled):
        left.result(20)
    assert bench.heard.depth == 0
    assert not bench.queue(2.0).done()
    assert bench.heard.rejections == {"cancelled": 1}


def test_an_urgent_request_overtakes(make: Make) -> None:
    bench = make(max_rows=1, levels=(LevelPolicy(), LevelPolicy()), default_level=2)
    bench.hold()
    later, urgent = bench.queue(1.0), bench.queue(2.0, priority=1)
    bench.run.gate.set()
    assert (values(later), values(urgent)) == ([2.0], [4.0])
    assert bench.run.batches == [[0.0], [2.0], [1.0]]


def test_a_priority_that_does_not_exist_is_refused_and_one_that_is_not_used_ignored(make: Make) -> None:
    with pytest.raises(InvalidRequest, match=r"priority is 3, expected 0 .* to 2"):
        make(levels=(LevelPolicy(), LevelPolicy())).call(1.0, priority=3).result(20)
    assert values(make().call(1.0, priority=3)) == [2.0]


def test_a_queue_that_would_take_too_long_refuses(make: Make) -> None:
    """After one run of 50 ms a second batch would wait as long: over a bound of 20 ms."""
    bench = make(max_rows=1, levels=(LevelPolicy(100, 0.02),))
    held = bench.hold()
    begun = time.monotonic()
    until(lambda: time.monotonic() > begun + 0.05)
    bench.run.gate.set()
    held.result(20)
    bench.hold()
    bench.queue(1.0)
    with pytest.raises(Overloaded, match="would wait"):
        bench.call(2.0).result(20)
    assert bench.heard.rejections == {"queue_wait": 1}


def test_the_executor_outlives_a_failure(make: Make) -> None:
    bench = make()
    with pytest.raises(RuntimeFailure):
        bench.call(-1.0).result(20)
    assert values(bench.call(1.0)) == [2.0]


def test_a_delay_gathers_a_fuller_batch(make: Make) -> None:
    """With a minute's patience, two requests can only run together because the batch is full."""
    bench = make(max_delay_s=60.0, max_rows=2)
    first, second = bench.call(1.0), bench.call(2.0)
    assert (values(first), values(second)) == ([2.0], [4.0])
    assert bench.heard.executions == [(2, 2)]


def test_a_delay_ends(make: Make) -> None:
    bench = make(max_delay_s=0.02)
    assert values(bench.call(1.0)) == [2.0]


def test_a_deadline_within_the_delay_runs_at_once(make: Make) -> None:
    bench = make(max_delay_s=60.0)
    assert values(bench.call(1.0, deadline=time.monotonic() + 30)) == [2.0]


def test_inline_runs_a_lone_request_on_the_callers_thread(make: Make) -> None:
    bench = make(inline=True)
    assert values(bench.call(1.0)) == [2.0]
    assert not any("executor" in name for name in bench.run.threads)


def test_inline_still_batches_what_comes_while_it_runs(make: Make) -> None:
    bench = make(inline=True)
    held = bench.hold()
    waiting = [bench.queue(1.0), bench.queue(2.0)]
    bench.run.gate.set()
    assert [values(f) for f in (held, *waiting)] == [[0.0], [2.0], [4.0]]
    assert bench.heard.executions == [(1, 1), (2, 2)]


def test_inline_failures_reach_the_caller_and_free_the_runtime(make: Make) -> None:
    bench = make(inline=True)
    with pytest.raises(RuntimeFailure):
        bench.call(-1.0).result(20)
    assert values(bench.call(1.0)) == [2.0]


def quick(bench: Bench) -> Bench:
    """One that has been seen to be: whatever this machine's first runs took."""
    for _ in range(200):
        values(bench.call(1.0))
        if (claim := bench.batcher.claim(SIZE)) is not None:
            claim.give_back()
            return bench
    raise AssertionError("no run was quick")


def test_a_quick_model_that_is_idle_can_be_claimed_once_per_instance(make: Make) -> None:
    batcher = quick(make(inline=True, instances=2)).batcher
    first, second = batcher.claim(SIZE), batcher.claim(SIZE)
    assert first is not None
    assert second is not None
    assert batcher.claim(SIZE) is None
    first.give_back()
    first.give_back()  # a second time is nothing
    assert batcher.claim(SIZE) is not None
    assert batcher.claim(SIZE) is None


def test_nothing_can_be_claimed_of_what_is_unknown_slow_at_work_or_closed(make: Make) -> None:
    assert make(inline=True).batcher.claim(SIZE) is None  # unknown: nothing has run
    slow = make(inline=True)
    slow.run.meanwhile = lambda: spend(2e-3)
    for _ in range(20):
        values(slow.call(1.0))
    assert slow.batcher.claim(SIZE) is None
    at_work = quick(make(inline=True))
    held = at_work.hold()
    assert at_work.batcher.claim(SIZE) is None
    at_work.run.gate.set()
    values(held)
    closed = quick(make(inline=True))
    closed.batcher.close()
    assert closed.batcher.claim(SIZE) is None
    executors = make()
    values(executors.call(1.0))
    assert executors.batcher.claim(SIZE) is None


def test_what_is_quick_with_small_requests_cannot_be_claimed_for_a_large_one_until_that_was_quick_too(
    make: Make,
) -> None:
    bench = quick(make(inline=True))
    assert bench.batcher.claim(20 * SIZE) is None
    for _ in range(20):  # slow, which says nothing of the small ones
        bench.run.meanwhile = lambda: spend(2e-3)
        values(bench.call(1.0, nbytes=20 * SIZE))
        bench.run.meanwhile = lambda: None
    assert bench.batcher.claim(20 * SIZE) is None
    claim = bench.batcher.claim(SIZE)
    assert claim is not None
    claim.give_back()
    for _ in range(100):
        values(bench.call(1.0, nbytes=20 * SIZE))
    assert bench.batcher.claim(20 * SIZE) is not None


def spend(seconds: float) -> None:
    """This thread's own time: what it waits for does not count."""
    begun = time.thread_time()
    while time.thread_time() < begun + seconds:
        pass


def test_a_claim_lets_its_request_run_and_is_then_over(make: Make) -> None:
    bench = quick(make(inline=True))
    claim = bench.batcher.claim(SIZE)
    waiting = bench.queue(1.0)  # the runtime is not idle: it is claimed
    assert values(bench.call(3.0, claim=claim)) == [6.0]
    assert values(waiting) == [2.0]  # it was told that the runtime is idle again
    assert claim is not None
    claim.give_back()  # nothing: the request has used it
    until(lambda: bench.batcher.claim(SIZE))  # once the thread that answered the other has said that it is done
    assert bench.batcher.claim(SIZE) is None


def test_a_claim_that_is_given_back_wakes_who_waits(make: Make) -> None:
    bench = quick(make(inline=True))
    claim = bench.batcher.claim(SIZE)
    waiting = bench.queue(1.0)
    assert claim is not None
    claim.give_back()
    assert values(waiting) == [2.0]


def test_a_claim_of_another_generation_is_worth_nothing(make: Make) -> None:
    """The model was replaced between the claim and its request."""
    old, new = quick(make(inline=True)), make(inline=True)
    claim = old.batcher.claim(SIZE)
    held = new.hold()
    waiting = new.queue(1.0, claim=claim)
    assert not waiting.done()
    new.run.gate.set()
    assert (values(held), values(waiting)) == ([0.0], [2.0])
    assert old.batcher.claim(SIZE) is None
    assert claim is not None
    claim.give_back()
    assert old.batcher.claim(SIZE) is not None


def test_only_executors_run_when_inline_is_off(make: Make) -> None:
    bench = make()
    values(bench.call(1.0))
    assert all("executor" in name for name in bench.run.threads)


def test_two_instances_run_two_batches_at_once(make: Make) -> None:
    bench = make(instances=2)
    first = bench.hold()
    second = bench.call(2.0)
    until(lambda: bench.run.running == 2)
    bench.run.gate.set()
    assert (values(first), values(second)) == ([0.0], [4.0])


def test_closing_refuses_what_waits_and_finishes_what_runs(make: Make) -> None:
    bench = make()
    held = bench.hold()
    waiting = bench.queue(1.0)
    closing = threading.Thread(target=bench.batcher.close)
    closing.start()
    with pytest.raises(Unavailable):
        waiting.result(20)
    assert bench.timings().queue > 0
    assert bench.heard.depth == 0
    bench.run.gate.set()
    assert values(held) == [0.0]
    closing.join(20)
    with pytest.raises(Unavailable):
        bench.call(2.0).result(20)
    assert bench.heard.rejections == {"draining": 2}


@pytest.mark.parametrize("value", [1.0, -1.0], ids=["answered", "failed"])
def test_the_time_in_the_queue_and_in_the_runtime_is_stamped_on_the_request(make: Make, value: float) -> None:
    """On one that failed, too: else waiting would be that of survivors only."""
    bench = make()
    bench.hold()
    waiting = bench.queue(value)
    begun = time.monotonic()
    until(lambda: time.monotonic() > begun + 0.02)
    bench.run.gate.set()
    assert (waiting.exception(20) is None) is (value > 0)
    assert 0.02 <= bench.timings().queue < 20
    assert 0 < bench.timings().compute < 20


@pytest.mark.parametrize("value", [1.0, -1.0], ids=["answered", "failed"])
def test_a_request_that_runs_inline_has_waited_for_nothing(make: Make, value: float) -> None:
    bench = make(inline=True)
    bench.call(value).exception(20)
    assert bench.timings().queue == 0
    assert 0 < bench.timings().compute < 20


@pytest.mark.parametrize("leaves", [True, False])
def test_what_a_request_waited_that_left_the_queue_is_stamped_on_it(make: Make, leaves: bool) -> None:
    bench = make()
    bench.hold()
    gone = Cancellation()
    begun = time.monotonic()
    left = bench.queue(1.0, cancellation=gone, deadline=None if leaves else begun + 0.05)
    if leaves:
        until(lambda: time.monotonic() > begun + 0.05)
        gone.cancel()
    assert left.exception(20) is not None
    assert 0.04 < bench.timings().queue < 20
    assert bench.timings().compute == 0


def test_what_a_patient_request_waited_for_a_place_is_stamped_on_it(make: Make) -> None:
    bench = make(levels=(LevelPolicy(1),))
    bench.hold()
    bench.queue(1.0)
    with pytest.raises(DeadlineExceeded):
        bench.call(2.0, patient=True, deadline=time.monotonic() + 0.05).result(20)
    assert 0.04 < bench.timings().queue < 20
    assert bench.heard.rejections == {"deadline": 1}


def test_a_request_that_is_refused_at_once_has_waited_for_nothing_and_counts_in_no_mean(make: Make) -> None:
    bench = make(levels=(LevelPolicy(1),))
    bench.hold()
    bench.queue(1.0)
    with pytest.raises(Overloaded):
        bench.call(2.0).result(20)
    assert bench.requests[-1].timings is None


def test_a_thousand_requests_from_many_threads_all_get_their_own_answer(make: Make) -> None:
    for inline in (False, True):
        bench = make(inline=inline, levels=(LevelPolicy(1000),))
        futures = [bench.call(float(i)) for i in range(1000)]
        assert [values(f) for f in futures] == [[2.0 * i] for i in range(1000)]
        assert sum(rows for _, rows in bench.heard.executions) == 1000
        assert bench.heard.depth == 0
