import gc
import os
import socket
import threading
from pathlib import Path

import pytest
from waiting import until

from bf16kit.service.config import reloadedfiles
from bf16kit.service.config.reloadedfiles import ReloadedFiles, read_regular


@pytest.fixture(autouse=True)
def checked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloadedfiles, "CHECK_SECONDS", 0.01)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "f"
    path.write_text("1")
    return path


def replace(path: Path, content: str) -> None:
    path.with_name("new").write_text(content)
    path.with_name("new").rename(path)


def test_a_file_is_read_again_only_after_a_change_as_kubernetes_makes_it(path: Path) -> None:
    link, calls = path.with_name("link"), list[int]()
    path.with_name("b").write_text("2")
    link.symlink_to(path.name)

    def read() -> int:
        calls.append(int(link.read_text()))
        return calls[-1]

    watched = ReloadedFiles("x", (link,), read)
    watched.check()
    assert (watched.current(), calls) == (1, [1])
    path.with_name("next").symlink_to("b")
    path.with_name("next").rename(link)
    until(lambda: watched.current() == 2)
    replace(path.with_name("b"), "3")
    until(lambda: watched.current() == 3)
    assert calls == [1, 2, 3]


def test_a_file_that_cannot_be_read_keeps_the_last_value_and_is_logged_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = ReloadedFiles("the number", (path,), lambda: int(path.read_text()))
    replace(path, "half a num")
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


def test_a_volume_that_hangs_blocks_nobody(path: Path) -> None:
    reading, answering = threading.Event(), threading.Event()

    def read() -> int:
        found = int(path.read_text())
        if found == 2:
            reading.set()
            assert answering.wait(60)
        return found

    watched = ReloadedFiles("x", (path,), read)
    replace(path, "2")
    assert reading.wait(20)
    assert watched.current() == 1
    answering.set()
    until(lambda: watched.current() == 2)


def test_the_thread_ends_with_its_files(path: Path) -> None:
    before = set(threading.enumerate())
    watched = ReloadedFiles("x", (path,), lambda: 1)
    (thread,) = set(threading.enumerate()) - before
    del watched
    gc.collect()
    until(lambda: not thread.is_alive(), what="the end of the thread")


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
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match=r"it is not a regular file|No such device or address"):
        read_regular(path, 1)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    listener.close()
