"""Samples: packed for the process with the references, and handed over to it."""

import fcntl
import json
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from openfiles import no_more_files, no_more_threads
from waiting import until

from bf16kit.messages.errors import Unavailable
from bf16kit.service.drift.sampler import Sample
from bf16kit.service.models.plan import Plan
from bf16kit.service.models.serving import Serving
from bf16kit.service.peers.channel import Body
from bf16kit.service.shadow import references
from bf16kit.service.shadow import samples as samples_module
from bf16kit.service.shadow.samples import PlanSampleSender, pack, unpack

MIXED = Sample(
    feeds={
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "text": np.array([["a", "é"], ["", "b"]], np.object_),
        "mask": np.array([True, False]),
        "empty": np.zeros((2, 0), np.int64),
    },
    outputs={"y": np.array([1.5, -2.0]).astype(ml_dtypes.bfloat16), "z": np.array(3, np.float32)},
    rows=2,
    nbytes=99,
    probability=1 / 3,
    precision="bf16",
    profile="cpu-bf16",
)


def test_a_sample_is_unchanged_by_packing_and_unpacking() -> None:
    other = Sample({"x": np.ones(1)}, {"y": np.zeros(1)}, rows=1, nbytes=1)
    description, file = pack([other, MIXED])
    first, found = unpack(json.loads(json.dumps(description)), file)
    os.close(file)
    assert description["nbytes"] == 100
    np.testing.assert_array_equal(first.feeds["x"], other.feeds["x"])
    assert replace(found, feeds={}, outputs={}) == replace(MIXED, feeds={}, outputs={})
    for there, here in ((found.feeds, MIXED.feeds), (found.outputs, MIXED.outputs)):
        assert there.keys() == here.keys()
        for name, array in here.items():
            np.testing.assert_array_equal(there[name], array, strict=True)


def test_the_file_cannot_be_changed_while_it_is_read() -> None:
    _, file = pack([MIXED])
    with pytest.raises(PermissionError):
        os.truncate(file, 0)
    with pytest.raises(PermissionError):
        os.pwrite(file, b"x", 0)
    assert fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    os.close(file)


SAMPLE = Sample({"x": np.zeros((2, 4), np.float32)}, {"y": np.zeros((2, 4), np.float32)}, rows=2, nbytes=64)
PLAN = Plan(1, Path("m/1"), Serving(), "stamp")


class Outcomes(list[str]):
    """Records the reported outcomes."""

    def __call__(self, outcome: str) -> None:
        self.append(outcome)


class Leader:
    """Receives requests to measure samples: records them, and responds with ``answer``, or fails with ``error``."""

    def __init__(self) -> None:
        self.asked: list[tuple[Mapping[str, Any], list[Sample]]] = []
        self.answer: Future[Body] = Future()
        self.error: Exception | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.gone: list[str] = []

    def ask(self, kind: str, body: Mapping[str, Any], files: list[int]) -> Future[Body]:
        assert kind == "samples"
        self.asked.append((body, unpack(body, files[0])))
        assert self.may_answer.wait(20)
        if self.error is not None:
            raise self.error
        return self.answer

    def sender(self, plan: Plan = PLAN) -> PlanSampleSender:
        return PlanSampleSender("m", plan, self.ask, lambda name, digest: self.gone.append(name))


@pytest.fixture
def leader() -> Leader:
    return Leader()


@pytest.fixture
def sender(leader: Leader) -> Iterator[PlanSampleSender]:
    made = leader.sender()
    yield made
    made.finish()


def sent(sender: PlanSampleSender) -> Outcomes:
    """Send a sample, and return its outcome once it is known."""
    outcomes = Outcomes()
    sender.send(SAMPLE, outcomes)
    until(lambda: outcomes)
    return outcomes


def test_each_samples_outcome_is_counted_by_its_own_callback(sender: PlanSampleSender, leader: Leader) -> None:
    told = [Outcomes(), Outcomes(), Outcomes()]
    for outcomes in told:
        sender.send(SAMPLE, outcomes)
    until(lambda: leader.asked)
    leader.answer.set_result({"outcomes": ["measured", "dropped", "failed"]})
    until(lambda: all(told))  # the thread that sends may learn it only after it was set
    assert told == [["measured"], ["dropped"], ["failed"]]


def test_samples_taken_at_about_the_same_time_are_sent_together_and_name_their_plan(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the plan's labels there may be many, and only the process that answers needs them."""
    monkeypatch.setattr(samples_module, "GATHER_S", 1.0)
    plan = replace(PLAN, serving=Serving(labels={"y": tuple(map(str, range(20_000)))}))
    sender = leader.sender(plan)
    for _ in range(4):
        sender.send(SAMPLE, Outcomes())
    until(lambda: leader.asked)
    body, samples = leader.asked[0]
    assert [sample.nbytes for sample in samples] == [64] * 4
    assert (body["model"], body["version"], body["plan"], body["nbytes"]) == ("m", 1, plan.digest, 256)
    assert len(json.dumps(body)) < 2000
    sender.finish()


def test_samples_without_a_file_count_as_failed_and_the_next_are_sent(sender: PlanSampleSender, leader: Leader) -> None:
    leader.answer.set_result({"outcomes": ["measured"]})
    assert sent(sender) == ["measured"]  # its thread runs by now, and has closed the sample's file
    with no_more_files():
        assert sent(sender) == ["failed"]
    assert sent(sender) == ["measured"]


def test_samples_that_wait_or_arrive_after_an_unload_are_dropped(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples_module, "GATHER_S", 60.0)
    sender, outcomes = leader.sender(), Outcomes()
    sender.send(SAMPLE, outcomes)
    sender.finish()
    sender.send(SAMPLE, outcomes)
    assert outcomes == ["dropped"] * 2
    assert (leader.gone, leader.asked) == (["m"], [])


def test_an_unload_waits_for_samples_that_are_being_sent(leader: Leader) -> None:
    """Otherwise such a sample would be mistaken for the first one of a model that is served."""
    leader.may_answer.clear()
    sender, dropped = leader.sender(), Outcomes()
    sender.send(SAMPLE, Outcomes())
    until(lambda: leader.asked)
    finishing = threading.Thread(target=sender.finish)
    finishing.start()

    def has_begun() -> bool:
        sender.send(SAMPLE, dropped)
        return bool(dropped)

    until(has_begun)
    finishing.join(0.05)
    assert leader.gone == []
    leader.may_answer.set()
    finishing.join(20)
    assert leader.gone == ["m"]


def test_after_any_error_samples_count_as_failed_and_the_next_are_sent(
    sender: PlanSampleSender, leader: Leader, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (MemoryError(), ValueError("of ours")):
        leader.error = error
        assert sent(sender) == ["failed"]
    leader.error = None
    for lost in (Unavailable("the shadow of this server has ended"), OSError(24, "Too many open files")):
        leader.answer = Future()
        leader.answer.set_exception(lost)
        assert sent(sender) == ["failed"]
    leader.answer = Future()
    leader.answer.set_result({"outcomes": ["measured"]})
    assert sent(sender) == ["measured"]
    assert [record.getMessage() for record in caplog.records] == [
        "model 'm': samples for live drift cannot be handed on: MemoryError()"
    ]


def test_without_a_thread_samples_are_dropped_without_an_error(sender: PlanSampleSender, leader: Leader) -> None:
    with no_more_threads():
        assert sent(sender) == ["dropped"]
    sender.send(SAMPLE, Outcomes())
    until(lambda: leader.asked)


def test_outcomes_are_returned_in_order_once_all_are_known() -> None:
    outcomes = references.Outcomes(3)
    outcomes.record(2, "measured")
    outcomes.record(0, "dropped")
    assert not outcomes.response.done()
    outcomes.record(1, "failed")
    assert outcomes.response.result() == {"outcomes": ["dropped", "failed", "measured"]}
