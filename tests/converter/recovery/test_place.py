"""Where a recovery keeps what it needs to be resumed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from bf16kit.errors import UsageError
from converter.options import Target, parse_target
from converter.recovery.place import workplace


@pytest.fixture
def goal(tmp_path: Path) -> Target:
    return parse_target(tmp_path / "repository" / "m" / "1")


def _keep(file: BinaryIO) -> None:
    file.write(b"weights")


def _interrupt(goal: Target) -> None:
    """A recovery to ``goal`` that ends after its first checkpoint."""
    with contextlib.suppress(RuntimeError), workplace(goal, resume=False) as place:
        place.keep(_keep)
        raise RuntimeError


def test_nothing_is_left_where_nothing_can_be_resumed(goal: Target, tmp_path: Path) -> None:
    with workplace(goal, resume=False) as place:
        (place.path / "original").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_stays_until_the_recovery_has_ended(goal: Target) -> None:
    _interrupt(goal)
    with workplace(goal, resume=True) as place:
        assert place.last is not None
        assert place.last.read_bytes() == b"weights"
        place.finished = True
    assert not place.path.exists()


def test_work_that_was_done_is_not_begun_again_unasked(goal: Target) -> None:
    _interrupt(goal)
    with pytest.raises(UsageError, match="--resume, or remove that directory"), workplace(goal, resume=False):
        pass


def test_resuming_what_was_never_begun_begins_it(goal: Target) -> None:
    """For jobs that may be killed at any time and are always started alike."""
    with workplace(goal, resume=True) as place:
        assert place.last is None


def test_two_recoveries_to_one_target_do_not_mix(goal: Target) -> None:
    with (
        workplace(goal, resume=False),
        pytest.raises(UsageError, match=r"another recovery to .* is running"),
        workplace(goal, resume=True),
    ):
        pass


def test_other_options_than_before_are_named(goal: Target) -> None:
    with workplace(goal, resume=False) as place:
        place.agree({"--steps": 10, "--seed": 0})
        place.agree({"--steps": 20, "--seed": 0})  # nothing was trained yet
        place.keep(_keep)
        place.agree({"--steps": 20, "--seed": 0})
        with pytest.raises(UsageError, match="--resume: --steps is 30 now, and was 20 when this recovery began"):
            place.agree({"--steps": 30, "--seed": 0})
        (place.path / "recovery.json").write_text("{")
        with pytest.raises(UsageError, match="damaged; remove"):
            place.agree({"--steps": 20, "--seed": 0})


def test_a_write_that_fails_leaves_the_checkpoint_before_it_and_says_what_to_do(goal: Target) -> None:
    with workplace(goal, resume=False) as place:
        with pytest.raises(UsageError, match=r"disk full .*, so no checkpoint was kept; free some space"):
            place.keep(lambda _: _full())
        place.keep(_keep)
        with pytest.raises(
            UsageError, match=r"last.ckpt: disk full .* is intact: free some space, and continue with --res"
        ):
            place.keep(lambda _: _full())
        with pytest.raises(UsageError, match=r"cannot be written \(Input/output error\)"):
            place.keep(lambda _: _broken())
        with pytest.raises(ValueError, match="a bug"):
            place.keep(lambda _: _strange())
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
from converter.recovery.place import workplace
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
with workplace(parse_target(Path(sys.argv[1])), resume=True) as place:
    place.keep(lambda file: torch.save({"w": torch.ones(1000)}, file))
    place.keep(lambda file: torch.save({"w": torch.ones(1 << 20)}, file))
"""


def test_a_disk_that_is_full_is_told_of_torchs_own_writing_too(goal: Target) -> None:
    """torch.save says something else of it: what failed is what the file said."""
    done = subprocess.run([sys.executable, "-c", _WRITE, goal.path], capture_output=True, text=True, check=False)
    assert "bf16kit.errors.UsageError" in done.stderr, done.stderr
    assert "disk full (" in done.stderr
    with workplace(goal, resume=True) as place:
        assert place.last is not None
        assert len(torch.load(place.last, weights_only=True)["w"]) == 1000


_DIE = """
import os, signal, sys
from pathlib import Path
from converter.options import parse_target
from converter.recovery.place import workplace
def half(file):
    file.write(b"half of")
    file._file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
with workplace(parse_target(Path(sys.argv[1])), resume=True) as place:
    place.keep(half)
"""


def test_killed_in_the_middle_of_a_write_it_goes_on_from_the_checkpoint_before(goal: Target) -> None:
    _interrupt(goal)
    done = subprocess.run([sys.executable, "-c", _DIE, goal.path], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with workplace(goal, resume=True) as place:
        assert (place.path / "last.ckpt.tmp").read_bytes() == b"half of"
        assert place.last is not None
        assert place.last.read_bytes() == b"weights"
        place.keep(lambda file: file.write(b"more"))
        assert place.last.read_bytes() == b"more"
        assert not (place.path / "last.ckpt.tmp").exists()


def test_killed_before_its_first_checkpoint_it_leaves_nothing_that_another_would_use(goal: Target) -> None:
    """The artifact of the weights as they were is of that run's options, and perhaps of another source."""
    path = goal.path.with_name(".1.recovery")
    (path / "original" / "1").mkdir(parents=True)
    (path / "recovery.json").write_text('{"--seed": 0}')
    with workplace(goal, resume=False) as place:
        place.agree({"--seed": 1})
        assert not (place.path / "original").exists()
