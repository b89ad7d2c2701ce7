"""The queue alone, without threads or a clock: each test passes the time to it."""

from __future__ import annotations

import random

import pytest

from bf16kit.messages.errors import Overloaded
from service.batching.pace import ENOUGH_BATCHES, Pace
from service.batching.queue import PATIENCE_S, Job, LevelPolicy, Queue, QueuePolicy


def queue(pace: Pace | None = None, **policy: object) -> Queue[str]:
    return Queue(QueuePolicy(**{"max_rows": 4, **policy}), pace)  # type: ignore[arg-type]  # its fields


def put(waiting: Queue[str], name: str, arrived: float = 0.0, **more: object) -> Job[str]:
    job = Job(name, arrived, **more)  # type: ignore[arg-type]  # its fields
    waiting.put(job)
    return job


def measured(seconds: float, batches: int = ENOUGH_BATCHES) -> Pace:
    """Return the pace of a model of which ``batches`` batches of one row took ``seconds`` each."""
    pace = Pace()
    for _ in range(batches):
        pace.observe((), 1, seconds)
    return pace


def names(batch: list[Job[str]]) -> str:
    return " ".join(job.work for job in batch)


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

    def test_an_urgent_level_goes_before_any_deadline(self) -> None:
        waiting = queue(max_rows=1, levels=(LevelPolicy(), LevelPolicy()))
        put(waiting, "low", level=1, deadline=0.01)
        put(waiting, "high", level=0)
        assert [names(waiting.pop_batch(0.0)) for _ in range(2)] == ["high", "low"]

    def test_lower_levels_fill_the_batch_of_an_urgent_request(self) -> None:
        waiting = queue(max_rows=3, levels=(LevelPolicy(), LevelPolicy()))
        for name in "ab":
            put(waiting, name, level=1)
        put(waiting, "high", level=0)
        assert names(waiting.pop_batch(0.0)) == "high a b"


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
        assert waiting.next_wakeup(0.3) == 1.5
        assert names(waiting.pop_batch(1.5)) == "alone"

    def test_full_batches_do_not_starve_a_shape_that_is_due(self) -> None:
        waiting = queue(max_rows=2, max_delay_s=1.0, levels=(LevelPolicy(1000),))
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
        assert waiting.next_wakeup(0.1) == 0.1
        assert names(waiting.pop_batch(0.1)) == "young"

    def test_the_request_that_makes_a_batch_due_is_in_that_batch(self) -> None:
        """It is in the batch even if a request that is not due comes before it in the order of deadlines."""
        waiting = queue(max_rows=4, max_delay_s=0.5)
        put(waiting, "first", 0.9, rows=3, deadline=1.45)  # due at 1.4; its place is 1.45
        put(waiting, "due", 0.5, rows=2)  # due at 1.0; its place is 1.5, PATIENCE_S after its arrival
        assert names(waiting.pop_batch(1.0)) == "due"


class TestRoom:
    def test_each_level_has_its_own_limit_of_requests(self) -> None:
        waiting = queue(levels=(LevelPolicy(1), LevelPolicy(2)))
        put(waiting, "a", level=0), put(waiting, "b", level=1), put(waiting, "c", level=1)
        for level, limit in ((0, 1), (1, 2)):
            with pytest.raises(
                Overloaded, match=rf"{limit} requests are waiting \(max_queue_size in serving\.yaml\)"
            ) as refused:
                put(waiting, "more", level=level)
            assert refused.value.reason == "queue_full"

    def test_the_bytes_of_waiting_requests_are_limited(self) -> None:
        waiting = queue(max_bytes=100)
        put(waiting, "a", nbytes=60)
        with pytest.raises(Overloaded, match=r"60 bytes are waiting, the limit is 100;") as refused:
            put(waiting, "b", nbytes=41)
        assert refused.value.reason == "queue_bytes"
        put(waiting, "c", nbytes=40)
        waiting.pop_batch(0.0)
        put(waiting, "d", nbytes=100)

    def test_the_wait_expected_from_the_measured_pace_is_limited(self) -> None:
        waiting = queue(measured(0.030), max_rows=1, levels=(LevelPolicy(100, 0.1),))
        for name in "abcd":
            put(waiting, name)
        with pytest.raises(Overloaded, match=r"would wait 120 ms, the limit is 100 ms \(max_queue_ms in ") as refused:
            put(waiting, "e")
        assert refused.value.reason == "queue_wait"

    def test_a_burst_to_a_model_that_has_hardly_run_is_not_rejected_for_its_wait(self) -> None:
        """The first runs are slow and have few rows: here they make a request expect to wait for 3 s."""
        pace = measured(0.030, ENOUGH_BATCHES - 1)
        waiting = queue(pace, max_rows=1, levels=(LevelPolicy(200, 0.1),))
        for _ in range(100):
            put(waiting, "x")
        pace.observe((), 1, 0.030)
        for _ in range(4):  # only requests that came after enough runs are counted
            put(waiting, "x")
        with pytest.raises(Overloaded, match="would wait 120 ms"):
            put(waiting, "x")

    def test_two_instances_halve_the_wait(self) -> None:
        waiting = queue(measured(0.030), max_rows=1, instances=2, levels=(LevelPolicy(100, 0.1),))
        for _ in range(7):
            put(waiting, "x")
        with pytest.raises(Overloaded, match="105 ms"):
            put(waiting, "x")

    def test_urgent_requests_do_not_wait_for_less_urgent_ones(self) -> None:
        waiting = queue(measured(1.0), max_rows=1, levels=(LevelPolicy(100, 0.1), LevelPolicy(100, 9.0)))
        for _ in range(5):
            put(waiting, "low", level=1)
        put(waiting, "high", level=0)
        with pytest.raises(Overloaded):
            put(waiting, "high", level=0)

    def test_one_batch_may_wait_however_slow_the_model(self) -> None:
        waiting = queue(measured(60.0), max_rows=4, levels=(LevelPolicy(100, 0.1),))
        for _ in range(4):
            put(waiting, "x")
        with pytest.raises(Overloaded):
            put(waiting, "x")

    def test_a_removed_request_leaves_room(self) -> None:
        waiting = queue(levels=(LevelPolicy(1),))
        job = put(waiting, "a")
        assert waiting.remove(job)
        put(waiting, "b")
        assert not waiting.remove(job)


class TestLeaving:
    def test_requests_whose_deadline_has_passed_are_removed(self) -> None:
        waiting = queue()
        put(waiting, "short", deadline=1.0), put(waiting, "long", deadline=3.0), put(waiting, "none")
        assert names(waiting.expire(0.5)) == ""
        assert names(waiting.expire(1.0)) == "short"
        assert names(waiting.expire(3.0)) == "long"
        assert names(waiting.pop_batch(3.0)) == "none"

    def test_clear_removes_and_returns_all_requests(self) -> None:
        waiting = queue()
        put(waiting, "a", shape="s"), put(waiting, "b", shape="t")
        assert sorted(names(waiting.clear()).split()) == ["a", "b"]
        assert len(waiting) == 0
        assert waiting.next_wakeup(0.0) is None


def test_every_job_leaves_once_and_all_totals_return_to_zero() -> None:
    """Compare ten thousand random steps with a plain list; afterwards all counts, bytes and expected seconds are 0."""
    draw = random.Random(3)
    pace = Pace()
    waiting = queue(pace, max_rows=8, max_delay_s=0.01, max_bytes=4000, levels=(LevelPolicy(20), LevelPolicy(30, 0.2)))
    inside: list[Job[str]] = []
    now = 0.0
    for step in range(10_000):
        now += draw.random() * 0.004
        action = draw.random()
        if action < 0.6:
            job = Job(
                str(step), now, draw.randint(1, 8), draw.choice("stu"), now + draw.choice((0.005, 0.1, float("inf"))),
                draw.randint(0, 1), draw.randint(0, 400),
            )  # fmt: skip
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
        assert len(waiting) == len(inside)
    waiting.clear()
    assert (waiting._counts, waiting._seconds, waiting._rows, waiting._nbytes) == ([0, 0], [0.0, 0.0], 0, 0)
    assert waiting._groups == {}
