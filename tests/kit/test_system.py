"""Limits as a container's files show them, for both versions of control groups; addresses, and versions of packages.

tests/compose uses real groups.
"""

import ctypes
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bf16kit.system import controlgroup, is_older
from bf16kit.system.controlgroup import Memory, find_malloc_trim, release_free_memory
from bf16kit.system.rayaddress import check_reachable

_STAT = "anon 300\nfile 500\nshmem 100\nactive_file 150\ninactive_file 250\n"


def written(tmp_path: Path, files: dict[str, str], membership: str = "0::/\n") -> tuple[Path, Path]:
    """Write a hierarchy of groups and this process' membership; return both paths."""
    root, member = tmp_path / "cgroup", tmp_path / "membership"
    root.mkdir()
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    member.write_text(membership)
    return root, member


@pytest.mark.parametrize(("current", "stat", "left"), [("900\n", _STAT, 500), ("1300", "", 0)])
def test_in_a_container_the_root_is_its_own_group(tmp_path: Path, current: str, stat: str, left: int) -> None:
    """The file cache counts as free, but not files in shared memory. A lowered limit can be below the memory in use."""
    files = {"memory.max": "1000\n", "memory.current": current, "memory.stat": stat}
    assert controlgroup.memory(*written(tmp_path, files)) == Memory(limit=1000, left=left)


def test_the_smallest_limit_up_to_the_root_counts(tmp_path: Path) -> None:
    files = {
        "pod/memory.max": "1000",
        "pod/memory.current": "990",
        "pod/memory.stat": "",
        "pod/inner/memory.max": "600",
        "pod/inner/memory.current": "100",
        "pod/inner/memory.stat": "",
        "pod/inner/memory.events": "low 0\noom 3\noom_kill 2\n",
    }
    found = controlgroup.memory(*written(tmp_path, files, "0::/pod/inner\n"))
    assert found == Memory(limit=600, left=10, oom_kills=2)


def test_version_1_is_read_too(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": "1000",
        "memory/memory.usage_in_bytes": "700",
        "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 200\n",
        "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        "cpu/cpu.cfs_quota_us": "150000",
        "cpu/cpu.cfs_period_us": "100000",
    }
    membership = "9:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/system.slice\n"
    paths = written(tmp_path, files, membership)
    assert controlgroup.memory(*paths) == Memory(limit=1000, left=500, oom_kills=1)
    assert controlgroup.cpus(*paths) == 1.5


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"memory.max": "max", "memory.current": "5"},
        {"memory.max": "junk", "memory.current": "5"},
        {"memory.max": "5"},
        {"memory/memory.limit_in_bytes": str(0x7FFFFFFFFFFFF000), "memory/memory.usage_in_bytes": "5"},
    ],
)
def test_a_missing_or_unreadable_limit_means_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    assert controlgroup.memory(*written(tmp_path, files, "0::/\n9:memory:/\n")) is None


@pytest.mark.parametrize("text", ["", "junk", "0::/../outside\n", "::\n"])
def test_an_unexpected_membership_file_causes_no_failure(tmp_path: Path, text: str) -> None:
    """The path of a process that was moved out of its namespace leads above the root: nothing there is read."""
    files = {
        "memory.max": "max",
        "cpu.max": "max 100000",
        "../outside/memory.max": "9",
        "../outside/memory.current": "1",
    }
    root, member = written(tmp_path, files, text)
    assert controlgroup.memory(root, member) is None
    assert controlgroup.cpus(root, member) is None
    assert controlgroup.memory(root, tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("quota", "expected"), [("200000 100000", 2.0), ("50000 100000", 0.5), ("max 100000", None), ("1 0", None)]
)
def test_a_quota_is_a_number_of_processors(tmp_path: Path, quota: str, expected: float | None) -> None:
    assert controlgroup.cpus(*written(tmp_path, {"cpu.max": quota})) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has it")
def test_a_process_can_ask_to_be_killed_first() -> None:
    script = (
        "from bf16kit.system.controlgroup import maximize_oom_score as ask; ask();"
        "print(open('/proc/self/oom_score_adj').read())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 1000
    controlgroup.maximize_oom_score(2**31 - 1)  # no such process: no failure


_BLOCKS, _BYTES = 256, 64 << 10  # small enough for the heap: glibc maps blocks of 128 KiB and more


def _resident() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.skipif(find_malloc_trim() is None, reason="this C library keeps what it keeps")
def test_memory_freed_below_a_block_in_use_is_given_back() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    blocks = [library.malloc(_BYTES) for _ in range(_BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, _BYTES)
    for block in blocks[:-1]:
        library.free(block)
    before = _resident()
    release_free_memory()
    given = before - _resident()
    library.free(blocks[-1])  # it lies above the others; without it, glibc gives them back by itself
    assert given > _BLOCKS * _BYTES // 2


def test_an_address_needs_a_listener_unless_it_is_one_that_only_ray_understands() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        check_reachable(f"127.0.0.1:{port}")
    with pytest.raises(OSError, match="refused"):
        check_reachable(f"127.0.0.1:{port}")
    with pytest.raises(OSError, match="port 99999 is over 65535"):
        check_reachable("127.0.0.1:99999")
    for address in ("", "auto", "local", "ray://127.0.0.1:1", "127.0.0.1", "host:port", ":1"):
        check_reachable(address)
    try:
        listening = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no ::1")
    with listening:
        check_reachable(f"[::1]:{listening.getsockname()[1]}")


@pytest.mark.parametrize(
    ("version", "other"), [("1.9", "1.24"), ("1.24", "1.24.1"), ("1.30.9", "1.31.1"), ("1.31.1", "2.0.dev1")]
)
def test_versions_are_compared_as_numbers_and_a_pre_release_counts_as_the_release(version: str, other: str) -> None:
    assert is_older(version, other)
    assert not is_older(other, version)
    assert not is_older("1.40.0.dev20270101", "1.40.0")
    assert not is_older("1.24.0rc1", "1.24.0")
