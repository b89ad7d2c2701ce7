"""A test that is marked ``alone`` has nothing beside it, and is not kept waiting by those that come after it."""

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from turns import Turns
from waiting import until


@contextmanager
def _process(directory: Path) -> Iterator[Turns]:
    """Stands for a process of the run: its files, opened by itself, exclude others' as a process' would."""
    turns = Turns(directory)
    try:
        yield turns
    finally:
        turns.close()


def _kept(path: Path) -> bool:
    """Whether somebody holds the lock."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_tests_run_side_by_side(tmp_path: Path) -> None:
    with (
        _process(tmp_path) as one,
        _process(tmp_path) as other,
        one.turn(alone=False),
        other.turn(alone=False),
    ):
        assert _kept(tmp_path / "room")
    assert not _kept(tmp_path / "room")


def test_who_is_alone_waits_for_those_who_are_there_and_those_who_come_wait_for_it(tmp_path: Path) -> None:
    seen: list[str] = []

    def run(turns: Turns, name: str, *, alone: bool) -> None:
        with turns.turn(alone=alone):
            seen.append(f"{name} comes")
            if alone:
                until(lambda: _kept(tmp_path / "door"), what="the late one at the door")
            seen.append(f"{name} goes")

    with _process(tmp_path) as first, _process(tmp_path) as lone, _process(tmp_path) as late:
        waiting = threading.Thread(target=run, args=(lone, "lone"), kwargs={"alone": True})
        behind = threading.Thread(target=run, args=(late, "late"), kwargs={"alone": False})
        with first.turn(alone=False):
            waiting.start()
            until(lambda: seen or _kept(tmp_path / "door"), what="the lone one at the door")
            behind.start()
            behind.join(0.2)
            assert not seen, "somebody came in while the lone one waited"
        for thread in (waiting, behind):
            thread.join(20)
    assert seen == ["lone comes", "lone goes", "late comes", "late goes"]
