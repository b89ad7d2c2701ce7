"""The queue alone, without threads or a clock: each test passes the time to it."""

import math
import random

import pytest

from bf16kit.messages.errors import Overloaded
from bf16kit.service.batching.queue import ENOUGH_BATCHES, PATIENCE_S, BatchPolicy, Job, Pace, Queue


class Named(Job):
    """A job with a name."""

    def __init__(self, name: str, *fields: object, **more: object) -> None:
        super().__init__(*fields, **more)  # type: ignore[arg-type]  # its fields
        self.name = name


def queue(pace: Pace | None = None, **policy: object) -> Queue[Named]:
    return Queue(BatchPolicy(**{"axis": 0, "max_rows": 4, **policy}), pace)  # type: ignore[arg-type]  # its fields


def put(waiting: Queue[Named], name: str, arrived: float = 0.0, **more: object) -> Named:
    job = Named(name, arrived, **more)
    waiting.put(job)
    return job


def measured(seconds: float, batches: int = ENOUGH_BATCHES) -> Pace:
    """Return the pace of a model of which ``batches`` batches of one row took ``seconds`` each."""
    pace = Pace()
    for _ in range(batches):
        pace.observe((), 1, seconds)
    return pace


def names(batch: list[Named]) -> str:
    return " ".join(job.name for job in batch)


class TestOrder:
    def test_the_first_request_to_arrive_runs_first(self) -> None:
        waiting = queue(max_rows=2)
        for name in "abcde":
            put(waiting, name)
        assert [names(waiting.pop_batch(0.0)) for _ in range(4)] == ["a b", "c d", "e", ""]

    def test_the_earliest_deadline_goes_first(self) -> None:
        waiting = queue(max_rows=1)
        put(waiting, "late", deadline=0.9)
        put(waiting, "soon", deadline=0.1)
        assert names(waiting.pop_batch(0.0)) == "soon"

    def test_a_request_without_a_deadline_ranks_as_if_due_a_second_after_arrival(self) -> None:
        """Otherwise a stream of requests with deadlines would keep a request without one waiting forever."""
        waiting = queue(max_rows=1)
        put(waiting, "patient", 0.0)
        put(waiting, "in time", 0.5, deadline=PATIENCE_S - 0.1)
        put(waiting, "later", 0.5, deadline=PATIENCE_S + 0.1)
        assert [names(waiting.pop_batch(0.5)) for _ in range(3)] == ["in time", "patient", "later"]


class TestBatches:
    def test_a_batch_has_one_shape_and_at_most_max_rows(self) -> None:
        waiting = queue(max_rows=4)
        put(waiting, "a", rows=2, shape="s")
        put(waiting, "b", rows=1, shape="t")
        put(waiting, "c", rows=3, shape="s")
        put(waiting, "d", rows=2, shape="s")
        assert [names(waiting.pop_batch(0.0)) for _ in range(3)] == ["a d", "b", "c"]

    def test_without_batching_every_request_runs_alone(self) -> None:
        waiting = queue(max_rows=0)
        put(waiting, "a"), put(waiting, "b")
        assert names(waiting.pop_batch(0.0)) == "a"

    def test_a_full_batch_of_any_shape_does_not_wait_for_another_shapes_delay(self) -> None:
        waiting = queue(max_rows=2, max_delay_s=1.5)
        put(waiting, "alone", 0.0, shape="s")
        put(waiting, "x", 0.1, shape="t")
        assert waiting.pop_batch(0.1) == []
        put(waiting, "y", 0.2, shape="t")
        assert names(waiting.pop_batch(0.2)) == "x y"
        assert waiting.pop_batch(0.3) == []
        assert waiting.next_wakeup(0.3, waits=True) == 1.5
        assert names(waiting.pop_batch(1.5)) == "alone"

    def test_full_batches_do_not_starve_a_shape_that_is_due(self) -> None:
        waiting = queue(max_rows=2, max_delay_s=1.0, max_requests=1000)
        put(waiting, "alone", 0.0, shape="s")
        taken = []
        for tick in range(20):
            now = tick / 10
            for _ in range(4):
                put(waiting, "full", now, shape="t")
            taken.append(names(waiting.pop_batch(now)))
        assert taken.index("alone") == 10

    def test_a_younger_requests_deadline_ends_the_delay(self) -> None:
        """Otherwise the deadline would pass while an idle runtime waits for the end of an older request's delay."""
        waiting = queue(max_delay_s=1.5)
        put(waiting, "old", 0.0, shape="s")
        put(waiting, "young", 0.1, shape="t", deadline=0.4)
        assert waiting.next_wakeup(0.1, waits=True) == 0.1
        assert names(waiting.pop_batch(0.1)) == "young"

    def test_the_request_that_makes_a_batch_due_is_in_that_batch(self) -> None:
        """It is in the batch even if a request that is not due comes before it in the order of deadlines."""
        waiting = queue(max_rows=4, max_delay_s=0.5)
        put(waiting, "first", 0.9, rows=3, deadline=1.45)  # due at 1.4; its place is 1.45
        put(waiting, "due", 0.5, rows=2)  # due at 1.0; its place is 1.5, PATIENCE_S after its arrival
        assert names(waiting.pop_batch(1.0)) == "due"


class TestRoom:
    def test_the_bytes_of_waiting_requests_are_limited(self) -> None:
        waiting = queue(max_bytes=100)
        put(waiting, "a", nbytes=60)
        with pytest.raises(Overloaded) as refused:
            put(waiting, "b", nbytes=41)
        assert refused.value.reason == "queue_bytes"
        put(waiting, "c", nbytes=40)
        waiting.pop_batch(0.0)
        put(waiting, "d", nbytes=100)

    @pytest.mark.parametrize(("instances", "most", "fit"), [(1, 0.1, 4), (2, 0.1, 7), (1, 0.02, 1)])
    def test_the_wait_expected_from_the_measured_pace_is_limited(self, instances: int, most: float, fit: int) -> None:
        waiting = queue(measured(0.030), max_rows=1, instances=instances, max_requests=100, max_wait_s=most)
        for _ in range(fit):
            put(waiting, "x")
        with pytest.raises(Overloaded) as refused:
            put(waiting, "x")
        assert refused.value.reason == "queue_wait"

    def test_a_burst_to_a_model_that_has_hardly_run_is_not_rejected_for_its_wait(self) -> None:
        """The first runs are slow and have few rows: here they make a request expect to wait for 3 s."""
        pace = measured(0.030, 9)
        waiting = queue(pace, max_rows=1, max_requests=200, max_wait_s=0.1)
        for _ in range(100):
            put(waiting, "x")
        pace.observe((), 1, 0.030)
        for _ in range(4):  # only requests that came after enough runs are counted
            put(waiting, "x")
        with pytest.raises(Overloaded, match="would wait 120 ms"):
            put(waiting, "x")

    def test_one_batch_may_wait_however_slow_the_model(self) -> None:
        waiting = queue(measured(60.0), max_rows=4, max_requests=100, max_wait_s=0.1)
        for _ in range(4):
            put(waiting, "x")
        with pytest.raises(Overloaded):
            put(waiting, "x")


def test_requests_whose_deadline_has_passed_are_removed() -> None:
    waiting = queue()
    put(waiting, "short", deadline=1.0), put(waiting, "long", deadline=3.0), put(waiting, "none")
    assert names(waiting.expire(0.5)) == ""
    assert names(waiting.expire(1.0)) == "short"
    assert names(waiting.expire(3.0)) == "long"
    assert names(waiting.pop_batch(3.0)) == "none"


def test_every_job_leaves_once_and_all_totals_return_to_zero() -> None:
    """Compare ten thousand random steps with a plain list; afterwards all counts, bytes and expected seconds are 0."""
    draw = random.Random(3)
    pace = Pace()
    waiting = queue(pace, max_rows=8, max_delay_s=0.01, max_bytes=4000, max_requests=50, max_wait_s=0.2)
    inside: list[Named] = []
    now = 0.0
    for step in range(10_000):
        now += draw.random() * 0.004
        action = draw.random()
        if action < 0.6:
            deadline = now + draw.choice((0.005, 0.1, float("inf")))
            job = Named(str(step), now, draw.randint(1, 8), draw.choice("stu"), deadline, draw.randint(0, 400))
            try:
                waiting.put(job)
            except Overloaded:
                continue
            inside.append(job)
        elif action < 0.7 and inside:
            assert waiting.remove(inside.pop(draw.randrange(len(inside))))
        else:
            late = waiting.expire(now)
            assert all(job.deadline <= now for job in late)
            batch = waiting.pop_batch(now)
            assert sum(job.rows for job in batch) <= 8
            assert len({job.shape for job in batch}) <= 1
            assert all(job.deadline > now for job in batch)
            if batch:
                pace.observe(batch[0].shape, sum(job.rows for job in batch), 0.001 * len(batch))
            for job in (*late, *batch):
                inside.remove(job)
                assert not waiting.remove(job)
        assert len(waiting) == len(inside)
    assert len(waiting.clear()) == len(inside)
    assert waiting.next_wakeup(now, waits=True) == math.inf
    new = queue(pace, max_rows=8, max_delay_s=0.01, max_bytes=4000, max_requests=50, max_wait_s=0.2)
    for shape in "stu" * 40:
        pace.observe(shape, 1, 1.0)  # so slow that only a batch may wait
    for step in range(200):  # it has exactly the room of a new queue
        jobs = [Named(str(step), now, 1 + step % 8, "stu"[step % 3], nbytes=step % 90) for _ in range(2)]
        assert _rejection(waiting, jobs[0]) == _rejection(new, jobs[1])
    assert 0 < len(waiting) == len(new) < 200


def _rejection(waiting: Queue[Named], job: Named) -> str:
    try:
        waiting.put(job)
    except Overloaded as error:
        return error.reason
    return ""


class TestPace:
    def test_rows_of_a_shape_are_expected_to_take_as_long_as_before_and_other_shapes_as_all(self) -> None:
        pace = Pace()
        assert pace.seconds("any", 4) == 0.0
        pace.observe("short", 8, 0.4)
        assert pace.seconds("short", 2) == pytest.approx(0.1)
        assert pace.seconds("unseen", 3) == pytest.approx(0.15)

    def test_the_newest_batches_count_most(self) -> None:
        pace = Pace()
        pace.observe("x", 1, 1.0)
        for _ in range(40):
            pace.observe("x", 1, 0.01)
        assert pace.seconds("x", 1) == pytest.approx(0.01, rel=0.05)

    def test_a_batch_without_rows_does_not_divide_by_zero(self) -> None:
        pace = Pace()
        pace.observe("x", 0, 0.5)
        assert pace.seconds("x", 0) == 0.5

    def test_the_shapes_not_run_for_the_longest_time_are_forgotten_first(self) -> None:
        pace = Pace()
        for shape in range(1000):
            pace.observe(shape, 1, 1.0)
            pace.observe("always", 1, 5.0)
        assert pace.seconds("always", 1) == 5.0
        assert sum(pace.seconds(shape, 1) == 1.0 for shape in range(1000)) == 255
