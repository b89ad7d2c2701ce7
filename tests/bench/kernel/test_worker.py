"""A worker runs the requested side in the requested cache state, and responds when its threads sleep."""

import io
import json
import threading
import time

import numpy as np
import pytest

from bench.kernel import worker
from bench.kernel.hosts import Prepared
from bench.kernel.worker import Worker, first_output, serve, settle


class Buffer:
    """Stand-in for the buffer that empties the caches; it logs each read."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def sum(self) -> None:
        self._log.append("flush")


@pytest.mark.parametrize(
    ("usual", "cold", "log"),
    [
        (0.001, True, ["run", "flush", "run", "flush", "run"]),  # the first run warms up
        (0.001, False, ["run"] * 3),
        (0.2, False, ["run"] * 2),  # a slow side has no warm-up
    ],
)
def test_the_caches_are_emptied_before_every_cold_run_that_counts(
    monkeypatch: pytest.MonkeyPatch, usual: float, cold: bool, log: list[str]
) -> None:
    monkeypatch.setattr(worker, "last_level_cache", lambda: 8)
    found: list[str] = []
    made = Worker()
    made._flush = Buffer(found)  # type: ignore[assignment]
    made._prepared["side"] = Prepared(lambda: found.append("run"))
    made._usual["side"] = usual
    assert len(made.time({"side": "side", "runs": 2, "cold": cold})["seconds"]) == 2
    assert found == log
    made._prepared["side"] = Prepared(lambda: 7.0, measures=True)  # a limit measures its own seconds
    assert made.time({"side": "side", "runs": 2, "cold": False}) == {"seconds": [7.0, 7.0]}


def settles_after(busy_s: float) -> bool:
    """Return whether ``settle`` lasted as long as a thread that spins for ``busy_s`` seconds."""
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


@pytest.mark.long
@pytest.mark.alone  # a spinning thread shows in the processor time only if a core is free for it
def test_settling_waits_for_a_spinning_thread() -> None:
    """One of five tries is enough: another program may have both cores for the milliseconds of a check."""
    assert any(settles_after(0.1) for _ in range(5))


@pytest.mark.long
def test_a_failed_request_gives_the_reason_and_the_next_one_gets_a_response() -> None:
    requests = [{"do": "open", "side": "no such side"}, {"do": "time", "side": "never opened"}]
    answers = io.StringIO()
    serve(io.StringIO("".join(json.dumps(request) + "\n" for request in requests)), answers)
    assert all("absent" in json.loads(line) for line in answers.getvalue().splitlines())
    assert len(answers.getvalue().splitlines()) == 2


def test_the_first_output_is_found_in_any_form_of_result() -> None:
    array = np.ones((2, 3), np.float32)
    for result in ([array], {"y": array}, (array, array), array):
        assert first_output(result).shape == (2, 3)
