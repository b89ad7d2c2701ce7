"""Who is to blame for the deaths of the process with all references."""

from __future__ import annotations

import os

import pytest

from service.shadow.blame import FORGIVEN_SECONDS, Blame
from service.shadow.board import Board, Key, Work, label_of

M, N = ("m", 1), ("n", 1)


class Rig:
    """Starts the process, and lets it die."""

    def __init__(self) -> None:
        self.now = 0.0
        self.blame = Blame(lambda: self.now)

    def one_by_one(self) -> bool:
        return self.blame.one_by_one

    def dies(self, *at_work: tuple[Key, Work], after: float = 1.0) -> Key | None:
        file = self.blame.begin()
        board = Board(file)
        os.close(file)
        self.now += after
        held = [board.at_work(label_of(key), work) for key, work in at_work]
        for each in held:
            each.__enter__()
        culprit = self.blame.died([M, N])
        return None if culprit is None else culprit.key


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_who_alone_was_at_work_twice_in_a_row_is_to_blame_and_then_all_begins_anew(rig: Rig) -> None:
    assert not rig.one_by_one()
    assert rig.dies((M, "loading")) is None
    assert rig.one_by_one()
    assert rig.dies((M, "running")) == M
    assert not rig.one_by_one()
    assert rig.dies((M, "loading")) is None


def test_of_several_at_work_the_next_death_tells_whose_it_was(rig: Rig) -> None:
    assert rig.dies((M, "loading"), (N, "running")) is None
    assert rig.dies((N, "running"), (M, "loading")) is None, "which does not happen one by one"
    assert rig.dies((N, "running")) == N


@pytest.mark.parametrize("between", [(), ((N, "running"),)])
def test_a_death_of_another_or_of_nobody_ends_the_row(rig: Rig, between: tuple[tuple[Key, Work], ...]) -> None:
    rig.dies((M, "running"))
    assert rig.dies(*between) is None
    assert rig.dies((M, "running")) is None
    assert rig.dies((M, "running")) == M


def test_a_process_that_ran_for_long_begins_a_row_of_its_own(rig: Rig) -> None:
    """One that is killed by hand now and then is to blame nobody for it."""
    for _ in range(5):
        assert rig.dies((M, "running"), after=FORGIVEN_SECONDS) is None
    assert rig.dies((M, "running"), after=FORGIVEN_SECONDS - 1) == M


def test_a_process_that_was_never_started_dies_of_nobody(rig: Rig) -> None:
    assert rig.blame.died([M]) is None
