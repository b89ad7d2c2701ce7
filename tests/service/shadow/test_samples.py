"""Samples: packed for the process with the references, and handed over to it."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from openfiles import no_more_files
from waiting import until

from bf16kit.messages.errors import Unavailable
from service.drift.sampler import Sample
from service.models.plan import Plan
from service.models.serving import Serving
from service.peers.channel import Body
from service.shadow import samples as samples_module
from service.shadow.samples import PlanSampleSender, pack, unpack

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
    assert (found.rows, found.nbytes) == (2, 99)
    assert (found.probability, found.precision, found.profile) == (1 / 3, "bf16", "cpu-bf16")
    for kind in ("feeds", "outputs"):
        there, here = getattr(found, kind), getattr(MIXED, kind)
        assert there.keys() == here.keys()
        for name, array in here.items():
            assert there[name].dtype == array.dtype, name
            assert there[name].shape == array.shape, name
            if name == "text":
                assert [_text(each) for each in there[name].flat] == [_text(each) for each in array.flat]
            else:
                np.testing.assert_array_equal(there[name], array)


def _text(element: str | bytes) -> bytes:
    return element if isinstance(element, bytes) else element.encode()


def test_the_file_cannot_be_changed_while_it_is_read() -> None:
    _, file = pack([MIXED])
    with pytest.raises(PermissionError):
        os.truncate(file, 0)
    with pytest.raises(PermissionError):
        os.pwrite(file, b"x", 0)
    assert fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    os.close(file)


def test_a_file_that_does_not_match_its_description_is_rejected() -> None:
    description, file = pack([MIXED])
    description["samples"][0]["tensors"].pop()
    with pytest.raises(ValueError, match="are described as"):
        unpack(description, file)
    os.close(file)


SAMPLE = Sample({"x": np.zeros((2, 4), np.float32)}, {"y": np.zeros((2, 4), np.float32)}, rows=2, nbytes=64)
PLAN = Plan(1, Path("m/1"), Serving(), "stamp")


class Outcomes(list[str]):
    """Records the reported outcomes."""

    def __call__(self, outcome: str) -> None:
        self.append(outcome)


class Leader:
    """Receives requests to measure samples: records them, and responds with ``answer``."""

    def __init__(self) -> None:
        self.asked: list[tuple[Mapping[str, Any], list[Sample]]] = []
        self.answer: Future[Body] = Future()

    def ask(self, kind: str, body: Mapping[str, Any], files: list[int]) -> Future[Body]:
        assert kind == "samples"
        self.asked.append((body, unpack(body, files[0])))
        return self.answer


@pytest.fixture
def leader() -> Leader:
    return Leader()


@pytest.fixture
def sender(leader: Leader) -> Iterator[PlanSampleSender]:
    made = PlanSampleSender("m", PLAN, leader.ask)
    yield made
    made.finish()


def test_each_samples_outcome_is_counted_by_its_own_callback(sender: PlanSampleSender, leader: Leader) -> None:
    told = [Outcomes(), Outcomes(), Outcomes()]
    for outcomes in told:
        sender.send(SAMPLE, outcomes)
    until(lambda: leader.asked)
    leader.answer.set_result({"outcomes": ["measured", "dropped", "failed"]})
    until(lambda: all(told))  # the thread that sends may learn it only after it was set
    assert told == [["measured"], ["dropped"], ["failed"]]


@pytest.mark.long
def test_samples_taken_at_about_the_same_time_are_sent_together(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples_module, "GATHER_S", 2.0)
    sender = PlanSampleSender("m", PLAN, leader.ask)
    for _ in range(4):
        sender.send(SAMPLE, Outcomes())
        time.sleep(0.05)  # time to send each by itself, if it did not wait for others
    until(lambda: leader.asked)
    body, samples = leader.asked[0]
    assert [sample.nbytes for sample in samples] == [64] * 4
    assert (body["model"], body["version"], body["nbytes"]) == ("m", 1, 256)
    sender.finish()


def test_samples_name_their_plan_and_leave_out_its_labels(leader: Leader) -> None:
    """There may be many, and only the process that answers needs them."""
    plan = replace(PLAN, serving=Serving(labels={"y": tuple(map(str, range(20_000)))}))
    sender = PlanSampleSender("m", plan, leader.ask)
    sender.send(SAMPLE, Outcomes())
    until(lambda: leader.asked)
    body, _ = leader.asked[0]
    assert body["plan"] == plan.digest
    assert len(json.dumps(body)) < 1000
    sender.finish()


def test_samples_lost_with_their_process_are_counted_as_failed(sender: PlanSampleSender, leader: Leader) -> None:
    leader.answer.set_exception(Unavailable("the shadow of this server has ended"))
    outcomes = Outcomes()
    sender.send(SAMPLE, outcomes)
    until(lambda: outcomes)
    assert outcomes == ["failed"]


def test_samples_without_a_file_count_as_failed_and_the_next_are_sent(sender: PlanSampleSender, leader: Leader) -> None:
    outcomes = Outcomes()
    sender.send(SAMPLE, Outcomes())  # starts the sending thread
    until(lambda: leader.asked)
    with no_more_files():
        sender.send(SAMPLE, outcomes)
        until(lambda: outcomes)
    assert outcomes == ["failed"]
    sender.send(SAMPLE, Outcomes())
    until(lambda: len(leader.asked) == 2)


def test_samples_that_wait_or_arrive_after_an_unload_are_dropped(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[str] = []
    monkeypatch.setattr(samples_module, "GATHER_S", 60.0)
    sender = PlanSampleSender("m", PLAN, leader.ask, lambda name, desired: gone.append(name))
    outcomes = Outcomes()
    sender.send(SAMPLE, outcomes)
    sender.finish()
    sender.send(SAMPLE, outcomes)
    assert outcomes == ["dropped"] * 2
    assert gone == ["m"]
    assert leader.asked == []


def test_an_unload_waits_for_samples_that_are_being_sent() -> None:
    """Otherwise such a sample would be mistaken for the first one of a model that is served."""
    sending, go, forgot = threading.Event(), threading.Event(), threading.Event()
    seen: list[str] = []

    def ask(kind: str, body: Mapping[str, object], files: list[int]) -> Future[Body]:
        sending.set()
        assert go.wait(20)
        seen.append("sent")
        return Future()

    sender = PlanSampleSender("m", PLAN, ask, lambda name, desired: seen.append("gone"))

    def finish() -> None:
        sender.finish()
        forgot.set()

    sender.send(SAMPLE, Outcomes())
    assert sending.wait(20)
    threading.Thread(target=finish).start()
    dropped = Outcomes()

    def finishing() -> bool:
        sender.send(SAMPLE, dropped)
        return bool(dropped)

    until(finishing)
    assert not forgot.wait(0.05)
    go.set()
    assert forgot.wait(20)
    assert seen == ["sent", "gone"]


def test_after_any_error_samples_count_as_failed_and_the_next_are_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors: list[Exception] = [MemoryError(), ValueError("of ours"), OSError(24, "Too many open files")]
    told = [Outcomes() for _ in range(4)]

    def ask(kind: str, body: Mapping[str, object], files: list[int]) -> Future[Body]:
        told: Future[Body] = Future()
        if len(errors) == 1:
            told.set_exception(errors.pop())
        elif errors:
            raise errors.pop(0)
        else:
            told.set_result({"outcomes": ["measured"]})
        return told

    sender = PlanSampleSender("m", PLAN, ask)
    for outcomes in told:
        sender.send(SAMPLE, outcomes)
        until(lambda outcomes=outcomes: outcomes)  # type: ignore[misc]
    sender.finish()
    assert told == [["failed"]] * 3 + [["measured"]]
    assert [record.getMessage() for record in caplog.records] == [
        "model 'm': samples for live drift cannot be handed on: MemoryError()"
    ]


def test_without_a_thread_samples_are_dropped_without_an_error(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    sender, outcomes = PlanSampleSender("m", PLAN, leader.ask), Outcomes()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        sender.send(SAMPLE, outcomes)
    assert outcomes == ["dropped"]
    sender.send(SAMPLE, Outcomes())
    until(lambda: leader.asked)
    sender.finish()
