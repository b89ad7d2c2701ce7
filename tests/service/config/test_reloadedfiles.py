from __future__ import annotations

import gc
import os
import socket
import threading
from pathlib import Path

import pytest
from waiting import until

from service.config import reloadedfiles
from service.config.reloadedfiles import ReloadedFiles, read_regular


@pytest.fixture(autouse=True)
def checked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloadedfiles, "CHECK_SECONDS", 0.01)


def read_number(path: Path) -> int:
    return int(path.read_text())


def test_a_file_is_read_again_only_after_a_change_as_kubernetes_makes_it(tmp_path: Path) -> None:
    link, calls = tmp_path / "link", list[int]()
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    link.symlink_to("a")

    def read() -> int:
        calls.append(read_number(link))
        return calls[-1]

    watched = ReloadedFiles("x", (link,), read)
    watched.check()
    assert (watched.current(), calls) == (1, [1])
    (tmp_path / "next").symlink_to("b")
    (tmp_path / "next").rename(link)
    until(lambda: watched.current() == 2)
    (tmp_path / "new").write_text("3")
    (tmp_path / "new").rename(tmp_path / "b")
    until(lambda: watched.current() == 3)
    assert calls == [1, 2, 3]


def test_a_file_that_cannot_be_read_keeps_the_last_value_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "f"
    path.write_text("1")
    watched = ReloadedFiles("the number", (path,), lambda: read_number(path))
    (tmp_path / "new").write_text("half a num")
    (tmp_path / "new").rename(path)
    until(lambda: caplog.messages)
    for _ in range(3):
        watched.check()
        assert watched.current() == 1
    path.unlink()
    until(lambda: len(caplog.messages) == 2)
    assert watched.current() == 1
    assert caplog.messages[0].startswith("the number cannot be read again; the old ones stay in force: invalid literal")
    path.write_text("3")
    until(lambda: watched.current() == 3)


def test_a_volume_that_hangs_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("1")
    reading, answering = threading.Event(), threading.Event()

    def read() -> int:
        found = read_number(path)
        if found == 2:
            reading.set()
            assert answering.wait(60)
        return found

    watched = ReloadedFiles("x", (path,), read)
    (tmp_path / "new").write_text("2")
    (tmp_path / "new").rename(path)
    assert reading.wait(20)
    assert watched.current() == 1
    answering.set()
    until(lambda: watched.current() == 2)


def test_the_thread_ends_with_its_files(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("1")
    before = set(threading.enumerate())
    watched = ReloadedFiles("x", (tmp_path / "f",), lambda: 1)
    (thread,) = set(threading.enumerate()) - before
    del watched
    gc.collect()
    until(lambda: not thread.is_alive(), what="the end of the thread")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("kind", ["pipe", "socket", "directory", "device"])
def test_only_regular_files_are_read_and_no_other_is_waited_for(tmp_path: Path, kind: str) -> None:
    path, listener = tmp_path / "f", socket.socket(socket.AF_UNIX)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        listener.bind(str(path))
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    before = open_files()
    with pytest.raises(OSError, match=r"it is not a regular file|No such device or address"):
        read_regular(path, 1)
    assert open_files() == before
    listener.close()
