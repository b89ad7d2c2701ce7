"""The fp32 reference of a generation: loaded when it is ordered, freed when it is not; bf16 serves if it fails."""

from __future__ import annotations

import logging
import threading

import pytest
from heldruntime import BlockableRuntime
from waiting import until

from bf16kit.messages.errors import ArtifactError, Unavailable
from bf16kit.runtime import Runtime
from service.contract import ActivePrecision
from service.models.engine import Engine, SwitchedEngine
from service.models.standby import ReferenceStandby


class Loading:
    """Loads the reference while ``go`` is set, or fails with ``error``."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.made: list[BlockableRuntime] = []
        self.begun = 0
        self.error: Exception | None = None

    def __call__(self) -> Runtime:
        self.begun += 1
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        self.made.append(BlockableRuntime("fp32"))
        return self.made[-1]


class Rig:
    def __init__(self) -> None:
        self.load = Loading()
        self.engine = SwitchedEngine(Engine(BlockableRuntime("bf16")))
        self.told: list[ActivePrecision] = []
        self.failures = 0
        self.standby = ReferenceStandby("the model", self.engine, self.load, self.told.append, self._failed)

    def _failed(self) -> None:
        self.failures += 1


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_an_ordered_precision_serves_and_is_reported_with_its_reason(rig: Rig) -> None:
    for precision, reason in (("fp32", "drift"), ("fp32", "drift"), ("bf16", "")):
        rig.standby.order(precision, reason).result(30)  # type: ignore[arg-type]  # one of its literals
        assert rig.engine.switched == (precision == "fp32")
    assert not rig.load.made[0].open, "nothing of it stays in memory"
    assert rig.told == [ActivePrecision("fp32", "drift"), ActivePrecision("bf16", "")]
    assert rig.load.begun == 1
    assert rig.standby.active_precision == ActivePrecision()


def test_bf16_serves_until_fp32_is_warm(rig: Rig) -> None:
    rig.load.go.clear()
    told = rig.standby.order("fp32", "drift")
    until(lambda: rig.load.begun == 1, 30, "being loaded")
    assert not told.done()
    assert not rig.engine.switched
    again = rig.standby.order("fp32", "drift")
    rig.load.go.set()
    told.result(30)
    again.result(30)
    assert (rig.engine.switched, rig.load.begun) == (True, 1)


def test_a_change_of_the_reason_alone_is_reported_too(rig: Rig) -> None:
    rig.standby.order("bf16", "over its budget").result(30)
    assert rig.told == [ActivePrecision("bf16", "over its budget")]


def test_if_fp32_cannot_be_loaded_bf16_keeps_serving_and_fp32_can_be_tried_again(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.load.error = ArtifactError("no residual")
    with caplog.at_level(logging.ERROR), pytest.raises(ArtifactError, match="no residual"):
        rig.standby.order("fp32", "drift").result(30)
    assert "the model: the fp32 reference cannot be loaded to answer: no residual" in caplog.text
    assert (rig.engine.switched, rig.failures, rig.told) == (False, 1, [])
    rig.load.error = None
    rig.standby.order("fp32", "drift").result(30)
    assert rig.engine.switched


@pytest.mark.parametrize("end", ["order", "close"])
def test_a_reference_that_is_no_longer_wanted_when_loaded_is_closed(rig: Rig, end: str) -> None:
    rig.load.go.clear()
    told = rig.standby.order("fp32", "drift")
    if end == "order":
        rig.standby.order("bf16", "").result(30)
    else:
        rig.standby.close()
    with pytest.raises(Unavailable):
        told.result(30)
    rig.load.go.set()
    until(lambda: bool(rig.load.made) and not rig.load.made[0].open, 30, "closed")
    assert not rig.engine.switched


def test_an_order_for_an_unloaded_model_is_rejected(rig: Rig) -> None:
    rig.standby.close()
    with pytest.raises(Unavailable, match="the model is unloaded"):
        rig.standby.order("fp32", "drift").result(30)


def test_an_order_fails_if_no_thread_can_be_started_and_can_be_tried_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            rig.standby.order("fp32", "drift").result(0)
    assert (rig.engine.switched, rig.failures, rig.standby.active_precision) == (False, 1, ActivePrecision())
    rig.standby.order("fp32", "drift").result(30)
    assert (rig.engine.switched, rig.failures) == (True, 1)
