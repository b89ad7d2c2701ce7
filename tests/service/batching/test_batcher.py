import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from beginning import begun
from waiting import stays, until

from bf16kit.messages.errors import (
    Cancelled,
    DeadlineExceeded,
    InputRefused,
    InvalidRequest,
    Overloaded,
    RuntimeFailure,
    Unavailable,
)
from bf16kit.service.batching import batcher as batching
from bf16kit.service.batching.batcher import Batcher
from bf16kit.service.batching.queue import ENOUGH_BATCHES, BatchPolicy
from bf16kit.service.contract import Array
from bf16kit.service.request import Cancellation, Reply, Request, Timings


class Heard:
    """An observer that records what the batcher reports."""

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
    """A runtime, y = 2x for x of any width, that records its batches. A negative number makes a run fail."""

    def __init__(self) -> None:
        self.held: dict[int, threading.Event] = {}  # by width: its runs wait for this
        self.running = 0
        self.batches: list[list[float]] = []  # the first column of each
        self.shapes: list[tuple[int, ...]] = []
        self.refusal = RuntimeFailure("negative")
        self.meanwhile: Callable[[], object] = lambda: None  # called during every run except the first

    def __call__(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None) -> tuple[dict[str, Array], str]:
        x = feeds["x"]
        self.running += 1
        self.batches.append([float(v) for v in x[:, 0]])
        self.shapes.append(x.shape)
        if (gate := self.held.get(x.shape[1])) is not None:
            assert gate.wait(20)
        if len(self.batches) > 1:
            self.meanwhile()
        self.running -= 1
        if (x < 0).any():
            raise self.refusal
        return {"y": x * 2}, "bf16"


class Bench:
    """A batcher with its runtime, its observer, and threads that call it."""

    def __init__(self, policy: BatchPolicy) -> None:
        self.run, self.heard = Doubler(), Heard()
        self.batcher = Batcher(self.run, policy, self.heard)
        self.batcher.start()
        self.requests: list[Request] = []
        self.callers = ThreadPoolExecutor(4)

    def call(self, *values: float, width: int = 1, **more: object) -> Future[Reply]:
        x = np.array(values, np.float32).reshape(-1, 1).repeat(width, axis=1)
        request = Request({"x": x}, rows=len(values), **more)  # type: ignore[arg-type]  # the fields of Request
        self.requests.append(request)
        if request.waits_for_room:
            return self.callers.submit(lambda: begun(self.batcher.begin, request).result(20))
        return begun(self.batcher.begin, request)

    def hold(self, width: int = 1) -> Future[Reply]:
        """Start a request whose run is held, so that later ones of its width have to queue. Return its future."""
        self.run.held[width], batches = threading.Event(), len(self.run.batches)
        held = self.call(0.0, width=width)
        until(lambda: len(self.run.batches) > batches)
        return held

    def let_go(self, width: int = 1) -> None:
        self.run.held.pop(width).set()

    def queue(self, *values: float, **more: object) -> Future[Reply]:
        """Submit a request. Return its future once the request waits in the queue or is done."""
        depth = self.heard.depth
        future = self.call(*values, **more)  # type: ignore[arg-type]  # as above
        until(lambda: self.heard.depth > depth or future.done())
        return future

    def timings(self) -> Timings:
        """Return the timings of the newest request."""
        found = self.requests[-1].timings
        assert found is not None
        return found

    def close(self) -> None:
        for gate in self.run.held.values():
            gate.set()
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
    return [float(v) for v in future.result(20).outputs["y"][:, 0]]


def test_requests_that_wait_while_the_model_runs_become_one_batch(make: Make) -> None:
    bench = make()
    held = bench.hold()
    waiting = [bench.queue(float(i)) for i in range(1, 6)]
    bench.let_go()
    assert [values(f) for f in [held, *waiting]] == [[0.0], [2.0], [4.0], [6.0], [8.0], [10.0]]
    assert held.result().precision == "bf16"
    assert bench.run.batches == [[0.0], [1.0, 2.0, 3.0, 4.0, 5.0]]
    assert bench.heard.executions == [(1, 1), (5, 5)]
    assert bench.heard.depth == 0


def test_a_request_larger_than_a_batch_is_rejected(make: Make) -> None:
    with pytest.raises(InvalidRequest):
        make().call(*range(9)).result(20)


def test_a_full_queue_rejects_at_once_and_counts_the_rejection(make: Make) -> None:
    bench = make(max_requests=2)
    bench.hold()
    bench.queue(1.0), bench.queue(2.0)
    with pytest.raises(Overloaded):
        bench.call(3.0).result(20)
    assert bench.heard.rejections == {"queue_full": 1}
    assert bench.requests[-1].timings is None, "it has neither waited nor run"


def test_a_request_whose_deadline_has_passed_on_arrival_never_runs(make: Make) -> None:
    bench = make()
    with pytest.raises(DeadlineExceeded):
        bench.call(1.0, deadline=time.monotonic() - 1).result(20)
    assert bench.run.batches == []
    assert bench.heard.rejections == {"deadline": 1}


def test_a_request_fails_as_soon_as_its_deadline_passes_in_the_queue(make: Make) -> None:
    """The caller gets the error while the runtime is still held."""
    bench = make()
    bench.hold()
    deadline = time.monotonic() + 0.05
    with pytest.raises(DeadlineExceeded):
        bench.queue(1.0, deadline=deadline).result(20)
    assert deadline <= bench.timings().arrived + bench.timings().queue < deadline + 20
    assert bench.timings().compute == 0
    bench.let_go()
    assert values(bench.call(2.0)) == [4.0]
    assert [1.0] not in bench.run.batches
    assert bench.heard.rejections == {"deadline": 1}
    assert bench.heard.depth == 0


def test_a_request_that_is_rejected_leaves_no_expired_one_unanswered(make: Make) -> None:
    """Its arrival may be what finds that the deadline of another has passed."""
    bench = make(max_requests=1, spare_threads=0)  # no thread waits for deadlines
    held = bench.hold()
    deadline = time.monotonic() + 0.02
    expired = bench.queue(1.0, deadline=deadline)
    until(lambda: time.monotonic() > deadline)
    assert isinstance(bench.call(2.0, deadline=time.monotonic() - 1).exception(20), DeadlineExceeded)
    assert isinstance(expired.exception(20), DeadlineExceeded)
    bench.let_go()
    assert values(held) == [0.0]


def test_each_of_many_deadlines_passes_while_other_batches_begin(make: Make) -> None:
    """Whichever thread waited for a deadline may run a batch by then; another one has to take its place."""
    bench = make(instances=2, max_rows=1)
    for _ in range(5):
        held = [bench.hold(width=2), bench.hold(width=3)]
        with pytest.raises(DeadlineExceeded):
            bench.queue(1.0, deadline=time.monotonic() + 0.02).result(20)
        kept = bench.queue(2.0, deadline=time.monotonic() + 60)
        for width in (2, 3):
            bench.let_go(width)
        assert [values(each) for each in (*held, kept)] == [[0.0], [0.0], [4.0]]


def test_a_request_whose_deadline_passes_during_the_run_still_gets_its_response(make: Make) -> None:
    """The work is done by then; the caller decides what to do with the response."""
    bench = make()
    bench.run.held[1] = threading.Event()
    deadline = time.monotonic() + 0.05
    slow = bench.call(1.0, deadline=deadline)
    until(lambda: bench.run.running and time.monotonic() > deadline)
    bench.let_go()
    assert values(slow) == [2.0]


def test_a_batch_with_one_bad_input_is_halved_until_the_bad_one_is_alone(make: Make) -> None:
    """One bad request among sixteen costs eight more runs, not sixteen."""
    bench = make(max_rows=16)
    bench.hold()
    waiting = [bench.queue(float(i) if i != 12 else -1.0) for i in range(16)]
    bench.let_go()
    for i, future in enumerate(waiting):
        if i != 12:
            assert values(future) == [2.0 * i]
    with pytest.raises(RuntimeFailure):
        waiting[12].result(20)
    assert [len(batch) for batch in bench.run.batches[1:]] == [16, 8, 8, 4, 4, 2, 1, 1, 2]


def test_a_request_is_not_rerun_if_its_deadline_passes_between_the_reruns_of_its_batch(make: Make) -> None:
    bench = make()
    bench.hold()
    deadline = time.monotonic() + 0.2
    late, bad = bench.queue(1.0, deadline=deadline), bench.queue(-1.0)
    bench.run.meanwhile = lambda: until(lambda: time.monotonic() > deadline)
    bench.let_go()
    with pytest.raises(DeadlineExceeded):
        late.result(20)
    with pytest.raises(RuntimeFailure):
        bad.result(20)
    assert bench.run.batches == [[0.0], [1.0, -1.0], [-1.0]]
    assert all(request.timings is not None and request.timings.queue > 0 for request in bench.requests[1:])
    assert bench.heard.rejections == {"deadline": 1}


def test_inputs_that_the_runtime_rejects_are_the_clients_error(make: Make) -> None:
    bench = make()
    bench.run.refusal = InputRefused("Gather node /emb failed: out of bounds", "idx=9 is out of bounds")
    with pytest.raises(InvalidRequest, match=r"cannot run on these inputs: idx=9 is out of bounds$"):
        bench.call(-1.0).result(20)


def test_a_cancelled_request_fails_at_once_and_frees_its_place_in_the_queue(make: Make) -> None:
    """The runtime is held all the time, so only the cancellation can remove the request from the queue."""
    bench = make(max_requests=1)
    bench.hold()
    gone = Cancellation()
    left = bench.queue(1.0, cancellation=gone)
    gone.cancel()
    with pytest.raises(Cancelled):
        left.result(20)
    assert bench.timings().queue > bench.timings().compute == 0
    assert bench.heard.depth == 0
    assert not bench.queue(2.0).done()
    assert bench.heard.rejections == {"cancelled": 1}


def test_a_delay_gathers_a_fuller_batch(make: Make) -> None:
    """The delay is a minute, so the two requests run within this test only because they fill the batch."""
    bench = make(max_delay_s=60.0, max_rows=2)
    first, second = bench.call(1.0), bench.call(2.0)
    assert (values(first), values(second)) == ([2.0], [4.0])
    assert bench.heard.executions == [(2, 2)]


@pytest.mark.long
def test_a_delay_ends_while_the_responses_of_the_batch_before_it_are_sent(make: Make) -> None:
    bench, sending = make(max_delay_s=0.5), Sending()
    bench.run.held[1] = threading.Event()
    bench.batcher.begin(Request({"x": np.ones((1, 1), np.float32)}), sending)
    until(lambda: bench.run.running)
    waiting = bench.queue(1.0)  # its delay ends after the batch
    bench.let_go()
    assert sending.begun.wait(20)
    assert values(waiting) == [2.0]
    sending.done.set()


def test_a_batch_that_is_not_full_runs_when_the_delay_ends(make: Make) -> None:
    bench = make(max_delay_s=0.02)
    assert values(bench.call(1.0)) == [2.0]


class Sending:
    """Gets a reply, and takes until ``done`` to send it."""

    def __init__(self) -> None:
        self.begun, self.done = threading.Event(), threading.Event()

    def __call__(self, _: Reply | Exception) -> None:
        self.begun.set()
        assert self.done.wait(20)


@pytest.mark.parametrize("waits", [False, True])
def test_the_next_batch_runs_while_the_responses_of_the_last_one_are_sent_unless_it_is_short(
    make: Make, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """To wake another thread would take as long as a short batch."""
    bench, sending = make(), Sending()
    if waits:
        monkeypatch.setattr(batching, "LONG_S", 10.0)
        for _ in range(ENOUGH_BATCHES):
            bench.call(1.0).result(20)
    bench.batcher.begin(Request({"x": np.ones((1, 1), np.float32)}), sending)
    assert sending.begun.wait(20)
    other = bench.call(2.0)
    if waits:
        stays(lambda: not other.done(), 0.05, "the wait of the other batch")
        sending.done.set()
    assert values(other) == [4.0]
    sending.done.set()


def test_a_response_that_cannot_be_sent_ends_no_executor(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Reply | Exception) -> None:
        raise OSError("broken")

    bench = make()
    for _ in range(4):
        bench.batcher.begin(Request({"x": np.ones((1, 1), np.float32)}), fail)
        assert values(bench.call(2.0)) == [4.0]
    until(lambda: caplog.text.count("OSError: broken") == 4)


def test_no_client_is_answered_while_the_queue_is_locked(make: Make) -> None:
    """Whoever is answered may begin the next request at once, on the same thread."""
    bench = make(max_requests=1)
    bench.hold()
    gone = Cancellation()
    answered: list[Future[Reply]] = []
    bench.batcher.begin(
        Request({"x": np.ones((1, 1), np.float32)}, cancellation=gone), lambda _: answered.append(bench.call(3.0))
    )
    gone.cancel()
    bench.let_go()
    assert values(answered[0]) == [6.0]


def test_close_rejects_waiting_requests_and_finishes_running_ones(make: Make) -> None:
    bench = make()
    held = bench.hold()
    waiting = bench.queue(1.0)
    assert not bench.batcher.close(time.monotonic()), "a batch still runs"
    with pytest.raises(Unavailable):
        waiting.result(20)
    assert bench.timings().queue > 0
    assert bench.heard.depth == 0
    bench.let_go()
    assert values(held) == [0.0]
    assert bench.batcher.close()
    with pytest.raises(Unavailable):
        bench.call(2.0).result(20)
    assert bench.heard.rejections == {"draining": 2}


@pytest.mark.parametrize("value", [1.0, -1.0], ids=["answered", "failed"])
def test_a_requests_timings_hold_its_time_in_the_queue_and_in_the_runtime(make: Make, value: float) -> None:
    """Failed requests have timings too; otherwise the mean wait would cover successful requests only."""
    bench = make()
    bench.hold()
    waiting = bench.queue(value)
    begun = time.monotonic()
    until(lambda: time.monotonic() > begun + 0.02)
    bench.let_go()
    assert (waiting.exception(20) is None) is (value > 0)
    assert 0.02 <= bench.timings().queue < 20
    assert 0 < bench.timings().compute < 20


def test_a_thousand_requests_all_get_their_own_response(make: Make) -> None:
    bench = make(max_requests=1000)
    futures = [bench.call(float(i)) for i in range(1000)]
    assert [values(f) for f in futures] == [[2.0 * i] for i in range(1000)]
    assert sum(rows for _, rows in bench.heard.executions) == 1000
    assert bench.heard.depth == 0


# --- an extra instance: a batch of another shape beside a running one -------------------------------------------------


@pytest.fixture
def extra(make: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(batching, "LONG_S", 0.0)  # every run is long enough to run beside others
    return lambda **policy: make(**{"extra_instances": 1, **policy})


def test_a_short_request_does_not_wait_for_a_long_one(extra: Make) -> None:
    bench = extra()
    bench.call(1.0, width=4).result(20)
    long = bench.hold(64)
    for _ in range(2):
        assert values(bench.call(1.0, width=4)) == [2.0]
    assert not long.done()


def test_requests_of_the_shape_that_runs_wait_and_share_a_batch(extra: Make) -> None:
    bench = extra()
    bench.hold(4)
    rest = [bench.queue(1.0, width=4) for _ in range(3)]
    bench.let_go(4)
    assert [values(future) for future in rest] == [[2.0]] * 3
    assert bench.run.shapes == [(1, 4), (3, 4)]


def test_no_request_overtakes_one_that_waits_for_its_shape(extra: Make) -> None:
    bench = extra()
    bench.hold(4)
    waiting = [bench.queue(1.0, width=4), bench.queue(1.0, width=8)]
    assert bench.run.shapes == [(1, 4)]
    bench.let_go(4)
    assert [values(future) for future in waiting] == [[2.0]] * 2
    assert bench.run.shapes == [(1, 4), (1, 4), (1, 8)]


def test_no_more_batches_run_at_once_than_allowed(extra: Make) -> None:
    bench = extra()
    bench.hold(64)
    bench.hold(32)
    third = bench.queue(1.0, width=4)
    assert bench.run.shapes == [(1, 64), (1, 32)]
    bench.let_go(64)
    assert values(third) == [2.0]


def test_an_executor_that_takes_a_batch_wakes_another_for_the_next_one_beside_it(extra: Make) -> None:
    """Nothing else wakes the other thread: it went to sleep because the first waiting request could not begin."""
    bench = extra()
    bench.hold(64)
    bench.queue(1.0, width=64)
    short = bench.queue(1.0, width=4)
    long, bench.run.held[64] = bench.run.held[64], threading.Event()
    long.set()
    assert values(short) == [2.0]
    assert bench.run.shapes == [(1, 64), (1, 64), (1, 4)]


@pytest.mark.parametrize("policy", [{"extra_instances": 0}, {"max_delay_s": 1e-3}, {"max_rows": 0}])
def test_one_batch_runs_at_a_time_without_an_extra_one_with_a_delay_or_without_batching(
    extra: Make, policy: dict[str, object]
) -> None:
    bench = extra(**policy)
    bench.hold(64)
    bench.queue(1.0, width=4)
    assert bench.run.shapes == [(1, 64)]


def test_a_quick_request_waits_for_the_running_one(extra: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run shorter than ``LONG_S`` gains nothing beside others: waking a thread for it takes as long."""
    monkeypatch.setattr(batching, "LONG_S", 10.0)
    bench = extra()
    bench.call(1.0, width=4).result(20)
    bench.hold(64)
    bench.queue(1.0, width=4)
    assert bench.run.shapes == [(1, 4), (1, 64)]


def test_a_batch_that_fails_gives_its_place_back(extra: Make) -> None:
    bench = extra()
    bench.hold(64)
    with pytest.raises(RuntimeFailure):
        bench.call(-1.0, width=4).result(20)
    assert values(bench.call(1.0, width=8)) == [2.0]
