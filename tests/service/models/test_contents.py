"""The listing of the repository that calls of the index share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from waiting import until

from service.models.contents import FRESH_S, Contents
from service.models.directory import Directory


class Counted(Directory):
    """A directory that counts its listings. Each waits for ``may_list``."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.listings = 0
        self.may_list = threading.Event()
        self.may_list.set()

    def versions(self) -> dict[str, list[int]]:
        self.listings += 1
        assert self.may_list.wait(60)
        return super().versions()


class Clock:
    now = 100.0
    calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return self.now


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    (tmp_path / "m" / "1").mkdir(parents=True)
    return Counted(tmp_path)


def test_the_repository_is_listed_once_a_second(counted: Counted) -> None:
    clock = Clock()
    contents = Contents(counted, clock)
    assert [contents.versions() for _ in range(100)] == [{"m": [1]}] * 100
    (counted.root / "m" / "2").mkdir()
    clock.now += 0.9 * FRESH_S
    assert (contents.versions(), counted.listings) == ({"m": [1]}, 1)
    clock.now += 0.1 * FRESH_S
    assert (contents.versions(), counted.listings) == ({"m": [1, 2]}, 2)


def test_it_is_listed_again_once_it_is_outdated(counted: Counted) -> None:
    clock = Clock()
    contents = Contents(counted, clock)
    contents.versions()
    (counted.root / "n" / "1").mkdir(parents=True)
    contents.outdate()
    assert contents.versions() == {"m": [1], "n": [1]}


def test_a_listing_that_was_in_progress_when_it_became_outdated_is_not_kept(counted: Counted) -> None:
    clock = Clock()
    contents = Contents(counted, clock)
    counted.may_list.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(contents.versions)
        until(lambda: counted.listings == 1, what="the listing")
        clock.now += 0.1
        contents.outdate()
        counted.may_list.set()
        first.result(60)
    clock.now += 0.1
    contents.versions()
    assert counted.listings == 2


def test_calls_at_the_same_time_share_one_listing_however_long_it_takes(counted: Counted) -> None:
    clock = Clock()
    contents = Contents(counted, clock)
    counted.may_list.clear()
    with ThreadPoolExecutor(32) as pool:
        results = [pool.submit(contents.versions) for _ in range(32)]
        until(lambda: counted.listings == 1, what="the listing")
        until(lambda: clock.calls == 33, what="all calls")  # one each, and one when the listing begins
        clock.now += 10 * FRESH_S
        counted.may_list.set()
        assert [each.result(60) for each in results] == [{"m": [1]}] * 32
    assert counted.listings == 1


def test_a_repository_that_cannot_be_listed_is_empty(tmp_path: Path) -> None:
    assert Contents(Directory(tmp_path / "gone"), Clock()).versions() == {}
