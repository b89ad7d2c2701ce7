"""A temporary file to map: it leaves no name behind, reserves its space at once, and its errors give the reason."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from openfiles import files_of_at_most

from bf16kit.runtime.memory import scratch
from bf16kit.runtime.memory.scratch import ScratchUnavailable, scratch_file

HOLD = """
import sys
from pathlib import Path
from bf16kit.runtime.memory.scratch import scratch_file
with scratch_file(1000, Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def make(size: int, directory: Path) -> None:
    with scratch_file(size, directory):
        pass


@pytest.fixture
def held(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that holds a scratch file in ``tmp_path``."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_file_holds_what_is_written_and_stays_mapped_when_its_name_is_gone(tmp_path: Path) -> None:
    with scratch_file(5000, tmp_path) as (path, mapped):
        mapped[...] = np.arange(5000) % 251
        assert path.read_bytes() == (np.arange(5000) % 251).astype(np.uint8).tobytes()
        assert path.stat().st_mode & 0o777 == 0o600
        other = np.memmap(path, np.uint8, mode="r")
    assert files(tmp_path) == []
    assert other[4999] == 4999 % 251


def test_the_next_file_removes_that_of_a_killed_process_but_not_of_a_running_one(
    tmp_path: Path, held: subprocess.Popen[str]
) -> None:
    (tmp_path / "mine").write_text("")
    (tmp_path / ".bf16kit-weights-link").symlink_to("mine")
    before = files(tmp_path)
    make(100, tmp_path)
    assert files(tmp_path) == before
    assert held.poll() is None
    held.send_signal(signal.SIGKILL)
    held.wait()
    assert files(tmp_path) == before
    with pytest.raises(KeyError), scratch_file(100, tmp_path):
        raise KeyError
    assert files(tmp_path) == [".bf16kit-weights-link", "mine"]


def test_a_directory_in_memory_is_used_only_if_that_is_allowed() -> None:
    with pytest.raises(ScratchUnavailable, match="/dev/shm lies in memory"):
        make(100, Path("/dev/shm"))
    with scratch_file(100, Path("/dev/shm"), in_memory=True) as (path, mapped):
        assert path.parent == Path("/dev/shm")
        assert mapped.nbytes == 100
    assert not path.exists()


def test_a_directory_that_cannot_hold_files_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ScratchUnavailable, match=r"/proc/\d+ cannot be used"):
        make(100, Path("/proc/self"))

    def nothing() -> str:
        raise FileNotFoundError

    monkeypatch.setattr("tempfile.gettempdir", nothing)
    with pytest.raises(ScratchUnavailable), scratch_file(100):
        pass


def test_a_lack_of_space_is_detected_before_anything_is_written(tmp_path: Path) -> None:
    """If a full disk were detected only when a mapped page is written, the process would be killed."""
    with files_of_at_most(1 << 20), pytest.raises(ScratchUnavailable):
        make(2 << 20, tmp_path)
    assert files(tmp_path) == []


@pytest.mark.parametrize("step", ["lock", "map"])
def test_a_file_that_cannot_be_locked_or_mapped_is_removed_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if step == "lock":
        monkeypatch.setattr(fcntl, "flock", fail)
    else:
        monkeypatch.setattr(np, "memmap", fail)
    said = re.escape(f"{tmp_path} cannot be used (No locks available)")
    with pytest.raises(ScratchUnavailable, match=said), scratch_file(100, tmp_path):
        pass
    assert files(tmp_path) == []


def test_a_file_that_is_being_made_is_not_taken_for_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its creation and its lock, a file looks like one that a killed process left."""
    lock = fcntl.flock

    def lock_late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        make(100, tmp_path)  # as another process would
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with scratch_file(1 << 12, tmp_path) as (path, array):
        assert files(tmp_path) == [path.name]
        assert array.size == 1 << 12


@pytest.mark.parametrize(
    ("stage", "system", "chosen"),
    [
        ("disk", "disk", "stage"),
        ("memory", "disk", "system"),
        ("disk", "memory", "stage"),
        ("memory",) * 2 + ("stage",),
    ],
)
def test_on_disk_prefers_a_directory_on_disk_to_one_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, system: str, chosen: str
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        roots = {"disk": tmp_path, "memory": Path(memory)}
        directories = {"stage": roots[stage] / "stage", "system": roots[system] / "system"}
        for directory in directories.values():
            directory.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(directories["system"]))
        assert scratch.on_disk(directories["stage"]) == directories[chosen]
        assert scratch.on_disk() == directories["system"]
