"""The engine: each batch runs on one runtime to its end, whatever is switched, and the reference is there when ordered.

Leases keep a runtime, or a generation, until its last holder has released it.
"""

import math
import threading
import time

import pytest
from heldruntime import BlockableRuntime
from openfiles import no_more_threads
from waiting import until

from bf16kit.messages.errors import ArtifactError, Unavailable
from bf16kit.runtime import Runtime
from bf16kit.service.contract import ActivePrecision
from bf16kit.service.models.engine import Engine, Leases


class Rig:
    """An engine whose reference is loaded while ``go`` is set, or fails with ``error``."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.made: list[BlockableRuntime] = []
        self.begun = 0
        self.error: Exception | None = None
        self.told: list[ActivePrecision] = []
        self.failures = 0
        self.bf16 = BlockableRuntime("bf16")
        self.engine = Engine("the model", self.bf16, self._load, self.told.append, self._failed)

    @property
    def precision(self) -> str:
        return self.engine.run({}, None)[1]

    def _load(self) -> Runtime:
        self.begun += 1
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        self.made.append(BlockableRuntime("fp32"))
        return self.made[-1]

    def _failed(self) -> None:
        self.failures += 1


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_an_ordered_precision_serves_and_is_reported_with_its_reason(rig: Rig) -> None:
    for precision, reason in (("bf16", "y is over"), ("fp32", "drift"), ("fp32", "drift"), ("bf16", "")):
        rig.engine.order(precision, reason).result(30)  # type: ignore[arg-type]  # one of its literals
        assert rig.precision == precision
    assert not rig.made[0].open, "nothing of it stays in memory"
    told = [("bf16", "y is over"), ("fp32", "drift"), ("bf16", "")]
    assert [(active.precision, active.reason) for active in rig.told] == told
    assert (rig.begun, rig.engine.active_precision) == (1, ActivePrecision())


def test_bf16_serves_until_fp32_is_warm(rig: Rig) -> None:
    rig.go.clear()
    told = rig.engine.order("fp32", "drift")
    until(lambda: rig.begun == 1, 30, "being loaded")
    assert (told.done(), rig.precision) == (False, "bf16")
    again = rig.engine.order("fp32", "drift")
    rig.go.set()
    told.result(30)
    again.result(30)
    assert (rig.precision, rig.begun) == ("fp32", 1)


@pytest.mark.parametrize("error", [ArtifactError("no residual"), RuntimeError("a bug")])
def test_a_reference_that_cannot_be_loaded_is_logged_and_counted_and_bf16_goes_on(
    rig: Rig, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    rig.error = error
    assert rig.engine.order("fp32", "drift").exception(30) is error
    assert (rig.precision, rig.failures, rig.told) == ("bf16", 1, [])
    assert str(error) in caplog.text
    rig.error = None
    rig.engine.order("fp32", "drift").result(30)
    assert rig.precision == "fp32"


@pytest.mark.parametrize("end", ["order", "stop"])
def test_a_reference_that_is_no_longer_wanted_when_loaded_is_closed(rig: Rig, end: str) -> None:
    rig.go.clear()
    told = rig.engine.order("fp32", "drift")
    if end == "order":
        rig.engine.order("bf16", "").result(30)
    else:
        rig.engine.stop()
        assert isinstance(rig.engine.order("fp32", "drift").exception(30), Unavailable)
    assert isinstance(told.exception(30), Unavailable)
    rig.go.set()
    until(lambda: bool(rig.made) and not rig.made[0].open, 30, "closed")
    assert rig.precision == "bf16"


def test_an_order_fails_if_no_thread_can_be_started_and_can_be_tried_again(rig: Rig) -> None:
    with no_more_threads():
        assert isinstance(rig.engine.order("fp32", "drift").exception(0), RuntimeError)
    assert (rig.precision, rig.failures) == ("bf16", 1)
    rig.engine.order("fp32", "drift").result(30)
    assert (rig.precision, rig.failures) == ("fp32", 1)


def test_a_running_batch_ends_on_the_runtime_on_which_it_began_and_the_end_closes_both(rig: Rig) -> None:
    rig.engine.order("fp32", "").result(30)
    fp32, seen = rig.made[0], list[str]()
    fp32.go.clear()
    threads = [threading.Thread(target=lambda: seen.append(rig.precision)) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: fp32.running == 3, 30, "three runs")
    rig.engine.order("bf16", "").result(30)
    assert (rig.precision, fp32.open) == ("bf16", True)
    fp32.go.set()
    for thread in threads:
        thread.join()
    assert seen == ["fp32"] * 3
    assert not fp32.open, "the last of them has closed it"
    rig.engine.order("fp32", "").result(30)
    rig.engine.stop()
    rig.engine.close()
    assert (rig.bf16.open, rig.made[1].open) == (False, False)


# --- leases -----------------------------------------------------------------------------------------------------------


def test_a_lease_is_held_until_its_context_ends_even_by_an_error() -> None:
    leases = Leases()
    assert leases.acquire()

    def work() -> None:
        with leases.context("model") as held:
            leases.end()
            assert (held, leases.acquire(), leases.wait(time.monotonic())) == ("model", False, False)
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        work()
    leases.end()  # once more, which changes nothing
    assert leases.wait(time.monotonic())


def test_waiting_ends_with_the_last_holder_and_what_was_leased_is_freed_once() -> None:
    freed: list[int] = []
    leases = Leases(lambda: freed.append(1))
    assert leases.acquire()
    assert leases.acquire()
    leases.end()
    waiting = threading.Thread(target=leases.wait, args=(math.inf,))
    waiting.start()
    leases.release()
    assert (waiting.is_alive(), freed) == (True, [])
    leases.release()
    waiting.join(30)
    assert (waiting.is_alive(), freed) == (False, [1])
