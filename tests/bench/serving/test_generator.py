"""The times at which calls of an open loop are due."""

from itertools import pairwise
from statistics import mean

import pytest

from bench.serving.generator import plan


def test_calls_without_a_seed_are_evenly_spaced_and_messages_take_turns() -> None:
    assert plan(2, rate=4.0, seconds=1.0) == [(0.0, 0), (0.25, 1), (0.5, 0), (0.75, 1)]


def test_calls_with_a_seed_come_at_random_at_the_same_rate() -> None:
    calls = plan(4, rate=100.0, seconds=100.0, seed=1)
    due = [at for at, _ in calls]
    gaps = [later - earlier for earlier, later in pairwise(due)]
    assert len(calls) == 10_000
    assert due == sorted(due)
    assert mean(gaps) == pytest.approx(0.01, rel=0.05)
    assert mean(gap > 0.01 for gap in gaps) == pytest.approx(0.368, abs=0.02)  # 1/e, as in an exponential distribution
    assert {message for _, message in calls} == {0, 1, 2, 3}
    assert calls == plan(4, rate=100.0, seconds=100.0, seed=1) != plan(4, rate=100.0, seconds=100.0, seed=2)
