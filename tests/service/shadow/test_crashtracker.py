"""Finding the reference that causes the deaths of the process with all references."""

from __future__ import annotations

import os

import pytest

from service.shadow.activity import Activity, ActivityTracker, Key, label_of
from service.shadow.crashtracker import FORGIVEN_SECONDS, CrashTracker

M, N = ("m", 1), ("n", 1)


class Rig:
    """Starts the process, and simulates its death."""

    def __init__(self) -> None:
        self.now = 0.0
        self.crashes = CrashTracker(lambda: self.now)

    def one_by_one(self) -> bool:
        return self.crashes.one_by_one

    def dies(self, *running: tuple[Key, Activity], after: float = 1.0) -> Key | None:
        file = self.crashes.process_started()
        tracker = ActivityTracker(file)
        os.close(file)
        self.now += after
        contexts = [tracker.track(label_of(key), activity) for key, activity in running]
        for each in contexts:
            each.__enter__()
        culprit = self.crashes.process_died([M, N])
        return None if culprit is None else culprit.key


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_reference_that_alone_ran_at_two_deaths_in_a_row_is_blamed_once(rig: Rig) -> None:
    assert not rig.one_by_one()
    assert rig.dies((M, "loading")) is None
    assert rig.one_by_one()
    assert rig.dies((M, "running")) == M
    assert not rig.one_by_one()
    assert rig.dies((M, "loading")) is None


def test_after_a_death_with_several_references_the_next_one_decides(rig: Rig) -> None:
    assert rig.dies((M, "loading"), (N, "running")) is None
    assert rig.dies((N, "running"), (M, "loading")) is None, "which does not happen one by one"
    assert rig.dies((N, "running")) == N


@pytest.mark.parametrize("between", [(), ((N, "running"),)])
def test_a_death_with_another_or_no_reference_restarts_the_count(
    rig: Rig, between: tuple[tuple[Key, Activity], ...]
) -> None:
    rig.dies((M, "running"))
    assert rig.dies(*between) is None
    assert rig.dies((M, "running")) is None
    assert rig.dies((M, "running")) == M


def test_a_death_after_a_long_run_restarts_the_count(rig: Rig) -> None:
    """No reference is blamed if the process is killed by hand now and then."""
    for _ in range(5):
        assert rig.dies((M, "running"), after=FORGIVEN_SECONDS) is None
    assert rig.dies((M, "running"), after=FORGIVEN_SECONDS - 1) == M


def test_no_reference_is_blamed_before_the_first_start(rig: Rig) -> None:
    assert rig.crashes.process_died([M]) is None
