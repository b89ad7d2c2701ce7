from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from service.process.reloadedfiles import CHECK_SECONDS, ReloadedFiles


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def tick(self) -> None:
        self.now += CHECK_SECONDS


def never(error: Exception) -> None:
    raise AssertionError(f"told of {error!r}")


def read_number(path: Path) -> int:
    return int(path.read_text())


def test_a_file_is_read_again_only_after_it_was_replaced(tmp_path: Path) -> None:
    path, clock, reads = tmp_path / "f", Clock(), []
    path.write_text("1")

    def read() -> int:
        reads.append(1)
        return read_number(path)

    watched = ReloadedFiles((path,), read, never, clock)
    clock.tick()
    assert (watched.current(), len(reads)) == (1, 1)
    (tmp_path / "new").write_text("2")
    (tmp_path / "new").rename(path)
    assert watched.current() == 1  # the file is checked at most once a second
    clock.tick()
    assert (watched.current(), len(reads)) == (2, 2)


def test_a_link_to_another_file_is_a_change_as_kubernetes_makes_it(tmp_path: Path) -> None:
    clock, link = Clock(), tmp_path / "link"
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    link.symlink_to("a")
    watched = ReloadedFiles((link,), lambda: read_number(link), never, clock)
    (tmp_path / "next").symlink_to("b")
    (tmp_path / "next").rename(link)
    clock.tick()
    assert watched.current() == 2


def test_a_file_that_cannot_be_read_keeps_the_last_value_and_is_reported_once(tmp_path: Path) -> None:
    path, clock, told = tmp_path / "f", Clock(), list[Exception]()
    path.write_text("1")
    watched = ReloadedFiles((path,), lambda: read_number(path), told.append, clock)
    path.write_text("half a num")
    for _ in range(3):
        clock.tick()
        assert watched.current() == 1
    path.unlink()
    clock.tick()
    assert watched.current() == 1
    assert [type(error) for error in told] == [ValueError, FileNotFoundError]
    path.write_text("3")
    clock.tick()
    assert watched.current() == 3


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    """Tested in a separate process: a hard limit cannot be raised again."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))\n"
        "from service.process.reloadedfiles import raise_open_file_limit; raise_open_file_limit()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (512, 512)"
    )
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 512:
        pytest.skip("this system's hard limit is lower still")
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
