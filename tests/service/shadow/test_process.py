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

from service.drift.sampling import Sample
from service.models.plan import Plan
from service.models.policy import Serving
from service.peers.channel import Body
from service.shadow.process import Hander

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


@pytest.mark.parametrize(("taken", "told"), [(True, []), (False, [("dropped", 2)])])
def test_what_is_not_taken_is_counted(taken: bool, told: list[tuple[str, int]]) -> None:
    def ask(kind: str, body: Mapping[str, object], files: list[int]) -> Future[Body]:
        answer: Future[Body] = Future()
        answer.set_result({"taken": taken})
        return answer

    observer = Observer()
    Hander(ask).hand("m", PLAN, SAMPLE, observer)
    assert observer.told == told


def test_a_request_that_was_answered_does_not_fail_for_its_sample() -> None:
    def ask(kind: str, body: Mapping[str, object], files: list[int]) -> Future[Body]:
        raise AssertionError("there is no file to hand over")

    observer = Observer()
    with no_more_files():
        Hander(ask).hand("m", PLAN, SAMPLE, observer)
    assert observer.told == [("failed", 2)]
