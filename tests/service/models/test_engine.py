"""Each batch runs on one runtime to its end, even if the engine is switched meanwhile, and never on a closed one."""

from __future__ import annotations

import threading

import pytest
from heldruntime import BlockableRuntime
from waiting import until

from service.models.engine import Engine, SwitchedEngine


@pytest.fixture
def bf16() -> BlockableRuntime:
    return BlockableRuntime("bf16")


@pytest.fixture
def engine(bf16: BlockableRuntime) -> SwitchedEngine:
    return SwitchedEngine(Engine(bf16))


def precision(engine: SwitchedEngine) -> str:
    return engine.run({}, None)[1]


def test_fp32_serves_while_it_is_switched_on_and_is_closed_afterwards(
    engine: SwitchedEngine, bf16: BlockableRuntime
) -> None:
    fp32 = BlockableRuntime("fp32")
    assert (precision(engine), engine.switched) == ("bf16", False)
    engine.switch(fp32)
    assert (precision(engine), engine.switched) == ("fp32", True)
    engine.switch(None)
    assert (precision(engine), engine.switched) == ("bf16", False)
    assert not fp32.open
    assert bf16.open


def test_a_running_batch_ends_on_the_runtime_on_which_it_began(engine: SwitchedEngine) -> None:
    fp32, seen = BlockableRuntime("fp32"), list[str]()
    engine.switch(fp32)
    fp32.go.clear()
    threads = [threading.Thread(target=lambda: seen.append(precision(engine))) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: fp32.running == 3, 30, "three runs")
    engine.switch(None)
    assert precision(engine) == "bf16"
    assert fp32.open
    fp32.go.set()
    for thread in threads:
        thread.join()
    assert seen == ["fp32"] * 3
    assert not fp32.open, "the last of them has closed it"


def test_no_run_fails_however_often_it_is_switched(engine: SwitchedEngine) -> None:
    failed, over = list[BaseException](), threading.Event()

    def ask() -> None:
        try:
            while not over.is_set():
                precision(engine)
        except BaseException as error:  # noqa: BLE001 - the test checks it
            failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        engine.switch(BlockableRuntime("fp32"))
        engine.switch(None)
    over.set()
    for thread in threads:
        thread.join()
    assert failed == []


def test_closing_the_engine_closes_both_runtimes(engine: SwitchedEngine, bf16: BlockableRuntime) -> None:
    fp32 = BlockableRuntime("fp32")
    engine.switch(fp32)
    engine.close()
    assert (bf16.open, fp32.open) == (False, False)
