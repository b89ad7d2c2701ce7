"""Samples that are handed to the process with the references."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from bf16kit.errors import Unavailable
from service.drift.sampling import Sample
from service.models.plan import Plan
from service.models.policy import Serving
from service.peers.channel import Body
from service.shadow.handing import PlannedHand

SAMPLE = Sample({"x": np.zeros((2, 4), np.float32)}, {"y": np.zeros((2, 4), np.float32)}, rows=2, nbytes=64)
PLAN = Plan(1, Path("m/1"), Serving(), "stamp")


class Observer:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def sampled(self, outcome: str, samples: int) -> None:
        self.told.append((outcome, samples))

    def drift(self, *seen: object) -> None:
        """Nothing is measured here."""


@contextmanager
def no_more_files() -> Iterator[None]:
    """The process may open no further file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("outcome", ["measured", "dropped", "failed"])
def test_what_became_of_a_sample_is_counted_where_it_was_taken(outcome: str) -> None:
    def ask(kind: str, body: Mapping[str, object], files: list[int]) -> Future[Body]:
        answer: Future[Body] = Future()
        answer.set_result({"outcome": outcome})
        return answer

    observer = Observer()
    PlannedHand("m", PLAN, ask).give(SAMPLE, observer)
    assert observer.told == [(outcome, 2)]


def test_a_sample_that_its_process_died_with_is_counted_as_failed() -> None:
    def ask(kind: str, body: Mapping[str, object], files: list[int]) -> Future[Body]:
        answer: Future[Body] = Future()
        answer.set_exception(Unavailable("the shadow of this server has ended"))
        return answer

    observer = Observer()
    PlannedHand("m", PLAN, ask).give(SAMPLE, observer)
    assert observer.told == [("failed", 2)]


def test_a_request_that_was_answered_does_not_fail_for_its_sample() -> None:
    def ask(kind: str, body: Mapping[str, object], files: list[int]) -> Future[Body]:
        raise AssertionError("there is no file to hand over")

    observer = Observer()
    with no_more_files():
        PlannedHand("m", PLAN, ask).give(SAMPLE, observer)
    assert observer.told == [("failed", 2)]
