"""Registered shared memory: which files, which of their bytes, and that clients cannot harm the server with them."""

import os
import socket
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from bf16kit.messages.errors import AlreadyExists, InvalidRequest
from bf16kit.service.operations import Region
from bf16kit.service.regions import DIRECTORY, RegionTable

Make = Callable[..., Path]


@pytest.fixture
def make() -> Iterator[Make]:
    """Yield a function that creates files in /dev/shm, with a name that may be registered."""
    made: list[Path] = []

    def file(name: str, size: int = 4096, content: bytes = b"") -> Path:
        path = DIRECTORY / f"bf16kit-test-{os.getpid()}-{name}"
        path.write_bytes(content or bytes(size))
        made.append(path)
        return path

    yield file
    for path in made:
        path.unlink(missing_ok=True)


def table(prefix: str = "bf16kit", *, regions: int = 1024, nbytes: int = 1 << 30) -> RegionTable:
    return RegionTable(prefix, DIRECTORY, regions=regions, nbytes=nbytes)


def region(path: Path, name: str = "r", offset: int = 0, byte_size: int = 4096) -> Region:
    return Region(name, f"/{path.name}", offset, byte_size)


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_key_is_read_as_shm_open_reads_it(slash: str) -> None:
    memory = shared_memory.SharedMemory(f"bf16kit-test-{os.getpid()}-key", create=True, size=64)
    try:
        regions = table()
        regions.register(Region("r", f"{slash}{memory.name.removeprefix('/')}", 0, 64))
        assert len(regions.lease("r", 0, 64).read()) == 64
    finally:
        memory.close()
        memory.unlink()


@pytest.mark.parametrize("prefix", ["bf16kit-test", ""])
@pytest.mark.parametrize(
    "key",
    ["", "/", ".", "..", "/../dev/null", "//{name}", "{name}/", "x/{name}", "../shm/{name}", "{name}\0", "\ud800"],
)
def test_a_key_names_a_file_in_the_directory_with_the_prefix(make: Make, key: str, prefix: str) -> None:
    path, regions = make("names"), table(prefix)
    with pytest.raises(InvalidRequest, match="cannot be used: expected a plain file in /dev/shm"):
        regions.register(Region("r", key.format(name=path.name), 0, 1))
    regions.register(region(path))
    with pytest.raises(InvalidRequest):
        table(f"{path.name}-").register(region(path))


def test_anything_but_a_plain_file_with_one_name_gets_the_same_error(tmp_path: Path) -> None:
    (tmp_path / "bf16kit-target").write_bytes(bytes(64))
    (tmp_path / "bf16kit-link").symlink_to(tmp_path / "bf16kit-target")
    (tmp_path / "bf16kit-out").symlink_to("/etc/passwd")
    (tmp_path / "bf16kit-folder").mkdir()
    os.mkfifo(tmp_path / "bf16kit-pipe")
    (tmp_path / "other").write_bytes(bytes(64))
    os.link(tmp_path / "other", tmp_path / "bf16kit-second-name")
    (tmp_path / "bf16kit-good").write_bytes(bytes(64))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "bf16kit-socket"))
        regions = RegionTable("bf16kit", tmp_path)
        regions.register(Region("good", "bf16kit-good", 0, 64))
        texts = set()
        for name in ("link", "out", "folder", "pipe", "socket", "second-name", "nothing"):
            with pytest.raises(InvalidRequest, match="cannot be used") as refused:
                regions.register(Region("r", f"bf16kit-{name}", 0, 1))
            texts.add(str(refused.value).replace(name, ""))
        assert len(texts) == 1, "why, is not said: it would tell which files there are"


def test_another_process_adopts_the_registered_file_even_if_it_was_renamed(make: Make) -> None:
    path, supervisor, worker = make("adopted", content=b"a" * 4096), table(), table()
    supervisor.register(region(path))
    path.unlink()
    path.write_bytes(b"b" * 4096)
    for _ in range(2):
        worker.adopt(region(path), supervisor.descriptor("r"))
    assert list(worker.status("")) == [region(path)]
    supervisor.unregister("")
    assert worker.lease("r", 0, 2).read() == b"aa"
    supervisor.register(region(path))
    for other in (region(path), region(path, offset=16, byte_size=16)):
        with pytest.raises(AlreadyExists):
            worker.adopt(other, supervisor.descriptor("r"))
