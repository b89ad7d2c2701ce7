"""The tracker: what the process with the references is doing, as its leader reads it."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from service.shadow.activity import ActivityTracker, new_tracker_memory

M, N = "model 'm' version 1", "model 'n' version 1"
DYING = """
import os, signal, sys
from service.shadow.activity import ActivityTracker
with ActivityTracker(int(sys.argv[1])).track("model 'm' version 1", "running"):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def file() -> Iterator[int]:
    made = new_tracker_memory()
    yield made
    os.close(made)


def test_another_process_reads_what_a_dead_process_was_doing(file: int) -> None:
    done = subprocess.run([sys.executable, "-c", DYING, str(file)], pass_fds=[file], check=False)
    assert done.returncode == -signal.SIGKILL
    assert ActivityTracker(file).read([M, N]) == {M: "running"}


def test_finished_work_is_not_shown(file: int) -> None:
    tracker, reading = ActivityTracker(file), ActivityTracker(file)
    with tracker.track(M, "running"):
        with tracker.track(N, "loading"):
            assert reading.read([M, N]) == {M: "running", N: "loading"}
        with pytest.raises(ZeroDivisionError), tracker.track(N, "loading"):
            raise ZeroDivisionError
        assert reading.read([M, N]) == {M: "running"}
        assert reading.read([N]) == {}
    assert reading.read([M, N]) == {}


def test_work_beyond_the_boards_room_runs_without_being_shown() -> None:
    tracker = ActivityTracker()
    contexts = [tracker.track(f"model {number}", "running") for number in range(300)]
    for each in contexts:
        each.__enter__()
    assert len(tracker.read(f"model {number}" for number in range(300))) == 256
    for each in contexts:
        each.__exit__(None, None, None)
    assert tracker.read(f"model {number}" for number in range(300)) == {}


def test_in_one_by_one_mode_the_second_waits_for_the_first() -> None:
    tracker, told = ActivityTracker(one_by_one=True), threading.Event()

    def second() -> None:
        with tracker.track(N, "running"):
            told.set()

    with tracker.track(M, "running"):
        thread = threading.Thread(target=second)
        thread.start()
        assert not told.wait(0.05)
        assert tracker.read([M, N]) == {M: "running"}
    assert told.wait(20)
    thread.join()


def test_the_boards_file_cannot_be_truncated(file: int) -> None:
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(file, 0)


@pytest.mark.parametrize("byte", [3, 77, 255])
def test_an_entry_that_a_crashing_process_has_overwritten_is_left_out(file: int, byte: int) -> None:
    tracker = ActivityTracker(file)
    with tracker.track(M, "running"), tracker.track(N, "loading"), mmap.mmap(file, 0) as memory:
        for offset in range(0, len(memory), 17):
            memory[offset] = byte if memory[offset] == 1 + 1 else memory[offset]
        assert ActivityTracker(file).read([M, N]) == {N: "loading"}
