"""Where a recovery keeps what it needs to be resumed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from bf16kit.errors import UsageError
from converter.options import Target, parse_target
from converter.recovery.place import workplace


@pytest.fixture
def goal(tmp_path: Path) -> Target:
    return parse_target(tmp_path / "repository" / "m" / "1")


def _keep(path: Path) -> None:
    path.write_bytes(b"weights")


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


def test_a_write_that_fails_leaves_the_checkpoint_before_it(goal: Target) -> None:
    def failing(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with workplace(goal, resume=False) as place:
        place.keep(_keep)
        with pytest.raises(OSError, match="No space"):
            place.keep(failing)
        assert place.last is not None
        assert place.last.read_bytes() == b"weights"
