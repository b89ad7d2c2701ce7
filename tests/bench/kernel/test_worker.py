"""A worker runs what it is told to, with the caches it is told to have, and answers when its threads sleep."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from bench.kernel import worker
from bench.kernel.hosts import Prepared
from bench.kernel.worker import Worker, first_output, last_level_cache, serve, settle


class Buffer:
    """Stands for the one that empties the caches; notes when it is read."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def sum(self) -> None:
        self._log.append("flush")


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], tuple[Worker, list[str]]]:
    """A worker with one side, prepared, that usually takes so many seconds; and what happened in it, in order."""
    monkeypatch.setattr(worker, "last_level_cache", lambda: 8)

    def make(usual: float) -> tuple[Worker, list[str]]:
        log: list[str] = []
        made = Worker()
        made._flush = Buffer(log)  # type: ignore[assignment]
        made._prepared["side"] = Prepared(lambda: log.append("run"))
        made._usual["side"] = usual
        return made, log

    return make


def test_cold_empties_the_caches_before_every_run_that_counts(
    prepared: Callable[[float], tuple[Worker, list[str]]],
) -> None:
    made, log = prepared(0.001)
    assert len(made.time({"side": "side", "runs": 2, "cold": True})["seconds"]) == 2
    assert log == ["run", "flush", "run", "flush", "run"]


def test_warm_runs_follow_each_other(prepared: Callable[[float], tuple[Worker, list[str]]]) -> None:
    made, log = prepared(0.001)
    made.time({"side": "side", "runs": 3, "cold": False})
    assert log == ["run"] * 4


def test_a_slow_side_has_no_run_that_does_not_count(prepared: Callable[[float], tuple[Worker, list[str]]]) -> None:
    made, log = prepared(0.2)
    made.time({"side": "side", "runs": 1, "cold": False})
    assert log == ["run"]


def test_a_limit_says_its_seconds_itself(prepared: Callable[[float], tuple[Worker, list[str]]]) -> None:
    made, _ = prepared(0.001)
    made._prepared["side"] = Prepared(lambda: 7.0, measures=True)
    assert made.time({"side": "side", "runs": 2, "cold": False}) == {"seconds": [7.0, 7.0]}


def settles_after(busy_s: float) -> bool:
    """Whether settling lasted as long as a thread that waits busily did."""
    until = time.perf_counter() + busy_s

    def spin() -> None:
        while time.perf_counter() < until:
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    settle()
    lasted = time.perf_counter() >= until - worker._LOOK_S
    thread.join()
    return lasted


@pytest.mark.alone  # a thread that waits busily is seen by the time it takes, where there is a core to take it from
def test_settling_waits_for_a_thread_that_waits_busily() -> None:
    """Once in five times: another program may have both cores for the milliseconds of a look."""
    assert any(settles_after(0.1) for _ in range(5))


def test_who_fails_says_why_and_the_next_request_is_answered() -> None:
    requests = [{"do": "open", "side": "no such side"}, {"do": "time", "side": "never opened"}]
    answers = io.StringIO()
    serve(io.StringIO("".join(json.dumps(request) + "\n" for request in requests)), answers)
    assert all("absent" in json.loads(line) for line in answers.getvalue().splitlines())
    assert len(answers.getvalue().splitlines()) == 2


def test_the_first_output_is_found_however_a_side_returns_it() -> None:
    array = np.ones((2, 3), np.float32)
    for result in ([array], {"y": array}, (array, array), array):
        assert first_output(result).shape == (2, 3)


def test_the_cache_is_never_taken_for_smaller_than_32_mib() -> None:
    assert last_level_cache() >= 32 << 20
