"""What sessions cost: an idle one, the import, and the deadlines of runs, which one thread watches."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from waiting import until

import graphs
from bf16kit.runtime.ort.session import Deadlines, Session, open_session

_QUIET, _TRIES = 0.1, 20  # seconds


def idle_cost(session: Session) -> float:
    """Return the processor time (seconds) used in the ``_QUIET`` seconds after a run: the least of some tries."""
    feeds = {"x": graphs.values(64, 256)}
    costs = []
    for _ in range(_TRIES):
        session.run(None, feeds)
        before = time.process_time()
        time.sleep(_QUIET)
        costs.append(time.process_time() - before)
        if costs[-1] < _QUIET / 100:
            break
    return min(costs)


@pytest.mark.alone  # spinning threads show in the processor time only if cores are free for them
@pytest.mark.parametrize("threads", [2, 4])
def test_an_idle_session_takes_no_processor_time(threads: int) -> None:
    """The pool's threads sleep between runs; they do not spin."""
    model = graphs.mlp((256, 256, 256)).SerializeToString()
    assert idle_cost(open_session(model, threads=threads)) < _QUIET / 100


def test_nothing_is_written_to_the_home_directory(tmp_path: Path) -> None:
    """With its default settings, ONNX Runtime's telemetry writes a device id to ~/.cache at import."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ORT_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", "import bf16kit.runtime.ort.onnx"],
        env=environment | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.rglob("*")) == []


# --- deadlines of runs ------------------------------------------------------------------------------------------------


def test_only_the_callback_of_a_run_that_takes_too_long_is_called_and_one_thread_watches() -> None:
    deadlines, over = Deadlines(), threading.Event()
    before = threading.active_count()
    for _ in range(100):
        with deadlines.after(0.2, over.set):
            assert threading.active_count() <= before + 1
    time.sleep(0.3)
    assert not over.is_set()
    begun = time.monotonic()
    with deadlines.after(0.1, over.set):
        assert over.wait(20)
        assert time.monotonic() - begun >= 0.1


def test_a_deadline_earlier_than_the_pending_ones_is_met() -> None:
    deadlines, over = Deadlines(), threading.Event()
    with deadlines.after(60.0, over.clear):
        until(lambda: deadlines._wakes_at > 0, 20, "the thread waits for that one")
        with deadlines.after(0.05, over.set):
            assert over.wait(20)


def test_of_many_concurrent_runs_only_the_late_ones_get_their_callback() -> None:
    deadlines, told = Deadlines(), set[int]()
    held = threading.Event()

    def run(number: int) -> None:
        late = number % 3 == 0
        with deadlines.after(0.01 * (1 + number % 7) if late else 30.0, lambda: told.add(number)):
            if late:
                until(lambda: number in told)
            else:
                assert held.wait(20)

    with ThreadPoolExecutor(48) as pool:
        runs = [pool.submit(run, number) for number in range(48)]
        until(lambda: told == set(range(0, 48, 3)))
        held.set()
        assert [each.result(20) for each in runs] == [None] * 48
    assert told == set(range(0, 48, 3))
    assert deadlines._waiting == {}
