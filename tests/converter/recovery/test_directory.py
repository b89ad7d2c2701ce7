"""The directory in which a recovery keeps what it needs to be resumed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from bf16kit.messages.errors import UsageError
from converter.options import Target, parse_target
from converter.recovery.directory import open_directory


@pytest.fixture
def goal(tmp_path: Path) -> Target:
    return parse_target(tmp_path / "repository" / "m" / "1")


def _keep(file: BinaryIO) -> None:
    file.write(b"weights")


def _interrupt(goal: Target) -> None:
    """Run a recovery to ``goal`` that fails after its first checkpoint."""
    with contextlib.suppress(RuntimeError), open_directory(goal, resume=False) as place:
        place.write_checkpoint(_keep)
        raise RuntimeError


def test_a_recovery_without_a_checkpoint_leaves_nothing(goal: Target, tmp_path: Path) -> None:
    with open_directory(goal, resume=False) as place:
        (place.path / "original").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_kept_until_the_recovery_has_finished(goal: Target) -> None:
    _interrupt(goal)
    with open_directory(goal, resume=True) as place:
        assert place.last is not None
        assert place.last.read_bytes() == b"weights"
        place.finished = True
    assert not place.path.exists()


def test_a_recovery_with_a_checkpoint_is_not_restarted_without_resume(goal: Target) -> None:
    _interrupt(goal)
    with pytest.raises(UsageError, match="--resume, or remove that directory"), open_directory(goal, resume=False):
        pass


def test_resume_without_a_checkpoint_starts_a_recovery(goal: Target) -> None:
    """A job that may be killed at any time can thus always be started with the same command."""
    with open_directory(goal, resume=True) as place:
        assert place.last is None


def test_a_second_recovery_to_a_target_is_rejected_while_the_first_runs(goal: Target) -> None:
    with (
        open_directory(goal, resume=False),
        pytest.raises(UsageError, match=r"another recovery to .* is running"),
        open_directory(goal, resume=True),
    ):
        pass


def test_options_that_changed_since_the_checkpoint_are_named(goal: Target) -> None:
    with open_directory(goal, resume=False) as place:
        place.check_options({"--steps": 10, "--seed": 0})
        place.check_options({"--steps": 20, "--seed": 0})  # nothing was trained yet
        place.write_checkpoint(_keep)
        place.check_options({"--steps": 20, "--seed": 0})
        with pytest.raises(UsageError, match="--resume: --steps is 30 now, and was 20 when this recovery began"):
            place.check_options({"--steps": 30, "--seed": 0})
        (place.path / "recovery.json").write_text("{")
        with pytest.raises(UsageError, match="damaged; remove"):
            place.check_options({"--steps": 20, "--seed": 0})


def test_a_failed_write_leaves_the_previous_checkpoint_and_says_what_to_do(goal: Target) -> None:
    with open_directory(goal, resume=False) as place:
        with pytest.raises(UsageError, match=r"disk full .*, so no checkpoint was kept; free some space"):
            place.write_checkpoint(lambda _: _full())
        place.write_checkpoint(_keep)
        with pytest.raises(
            UsageError, match=r"last.ckpt: disk full .* is intact: free some space, and continue with --res"
        ):
            place.write_checkpoint(lambda _: _full())
        with pytest.raises(UsageError, match=r"cannot be written \(Input/output error\)"):
            place.write_checkpoint(lambda _: _broken())
        with pytest.raises(ValueError, match="a bug"):
            place.write_checkpoint(lambda _: _strange())
        assert place.last is not None
        assert place.last.read_bytes() == b"weights"
        assert sorted(path.name for path in place.path.iterdir()) == ["last.ckpt"]


def _full() -> None:
    raise OSError(28, "No space left on device")


def _broken() -> None:
    raise OSError(5, "Input/output error")


def _strange() -> None:
    raise ValueError("a bug")


_WRITE = """
import resource, sys, torch
from pathlib import Path
from converter.options import parse_target
from converter.recovery.directory import open_directory
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
with open_directory(parse_target(Path(sys.argv[1])), resume=True) as place:
    place.write_checkpoint(lambda file: torch.save({"w": torch.ones(1000)}, file))
    place.write_checkpoint(lambda file: torch.save({"w": torch.ones(1 << 20)}, file))
"""


def test_a_full_disk_is_reported_also_if_torch_writes(goal: Target) -> None:
    """torch.save raises an error of its own; the recovery reports the error of the file instead."""
    done = subprocess.run([sys.executable, "-c", _WRITE, goal.path], capture_output=True, text=True, check=False)
    assert "bf16kit.messages.errors.UsageError" in done.stderr, done.stderr
    assert "disk full (" in done.stderr
    with open_directory(goal, resume=True) as place:
        assert place.last is not None
        assert len(torch.load(place.last, weights_only=True)["w"]) == 1000


_DIE = """
import os, signal, sys
from pathlib import Path
from converter.options import parse_target
from converter.recovery.directory import open_directory
def half(file):
    file.write(b"half of")
    file._file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
with open_directory(parse_target(Path(sys.argv[1])), resume=True) as place:
    place.write_checkpoint(half)
"""


def test_a_recovery_killed_during_a_write_continues_from_the_previous_checkpoint(goal: Target) -> None:
    _interrupt(goal)
    done = subprocess.run([sys.executable, "-c", _DIE, goal.path], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with open_directory(goal, resume=True) as place:
        assert (place.path / "last.ckpt.tmp").read_bytes() == b"half of"
        assert place.last is not None
        assert place.last.read_bytes() == b"weights"
        place.write_checkpoint(lambda file: file.write(b"more"))
        assert place.last.read_bytes() == b"more"
        assert not (place.path / "last.ckpt.tmp").exists()


def test_leftovers_of_a_recovery_killed_before_its_first_checkpoint_are_not_used(goal: Target) -> None:
    """The artifact of the original weights depends on that run's options, and perhaps on another source."""
    path = goal.path.with_name(".1.recovery")
    (path / "original" / "1").mkdir(parents=True)
    (path / "recovery.json").write_text('{"--seed": 0}')
    with open_directory(goal, resume=False) as place:
        place.check_options({"--seed": 1})
        assert not (place.path / "original").exists()
