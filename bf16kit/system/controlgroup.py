"""Memory and CPU limits of this process' control group, which the machine's own figures do not show.

Reads Linux control groups of versions 1 and 2, a container's limits for example. A group's limits bind every group
within it, so the smallest limit on the path to the root applies. Without groups or limits, nothing is limited.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

#: The hierarchy of groups, and the file that names the groups of this process.
ROOT, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60  # version 1 writes a number beyond any memory when there is no limit
# Page cache that the kernel reclaims before it refuses memory. Files in shared memory do not count.
_FILE_CACHE = ("active_file", "inactive_file")
# Bytes that are never filled with weights, but left for runs, for loading, and for the processes that measure drift and
# check health. A server of MiniLM with less was killed: docs/decisions/0028.
RESERVE = 64 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a control group, in bytes: the limit for all its processes together, and what is left of it."""

    limit: int
    left: int
    oom_kills: int = 0  # how many of its processes the kernel has killed so far for lack of memory

    def has_room(self, size: int) -> bool:
        """Return whether ``size`` bytes of weights fit and leave :data:`RESERVE` bytes to run them with."""
        return size + RESERVE <= self.left

    def __str__(self) -> str:
        return f"{self.left / 1e6:.0f} MB are left of the {self.limit / 1e6:.0f} MB that this container may take"


def memory(root: Path | None = None, membership: Path | None = None) -> Memory | None:
    """Return the memory of this process' group now, or None if it is not limited."""
    found = [memory for each in _groups("memory", root, membership) if (memory := _memory_of(each)) is not None]
    if not found:
        return None
    return Memory(min(m.limit for m in found), min(m.left for m in found), max(m.oom_kills for m in found))


def cpus(root: Path | None = None, membership: Path | None = None) -> float | None:
    """Return how many CPUs the group may use, not always a whole number, or None if that is not limited."""
    found = [quota for each in _groups("cpu", root, membership) if (quota := _quota_of(each)) is not None]
    return min(found, default=None)


def maximize_oom_score(process: int | str = "self") -> None:
    """Have the kernel kill this process before others when memory runs out, in the container or on the machine."""
    with contextlib.suppress(OSError):  # not Linux, or the process has ended
        Path(f"/proc/{process}/oom_score_adj").write_text("1000")


def _groups(controller: str, root: Path | None, membership: Path | None) -> Iterator[Path]:
    """Yield the directories of this process' group and of the groups around it, innermost first.

    A container mostly sees its own group as the root, whatever its path is called outside.
    """
    root, membership = root or ROOT, membership or MEMBERSHIP
    try:
        lines = membership.read_text("ascii").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if not names:  # version 2 has one hierarchy
            top = root
        elif controller in names.split(","):
            top = root / controller
        else:
            continue
        parts = PurePosixPath(path).parts[1:]
        parts = () if ".." in parts else parts  # a group outside what is visible here
        for length in range(len(parts), -1, -1):
            directory = top.joinpath(*parts[:length])
            if directory.is_dir():
                yield directory


def _memory_of(group: Path) -> Memory | None:
    limit = _number(group / "memory.max")
    if limit is not None:
        used, prefix = _number(group / "memory.current"), ""
    else:
        limit = _number(group / "memory.limit_in_bytes")
        used, prefix = _number(group / "memory.usage_in_bytes"), "total_"
    if limit is None or limit >= _NO_LIMIT or used is None:
        return None
    counted = _table(group / "memory.stat")
    cache = sum(counted.get(prefix + name, 0) for name in _FILE_CACHE)
    events = _table(group / ("memory.oom_control" if prefix else "memory.events"))
    return Memory(limit, max(0, limit - max(0, used - cache)), events.get("oom_kill", 0))


def _quota_of(group: Path) -> float | None:
    text = _text(group / "cpu.max") or f"{_text(group / 'cpu.cfs_quota_us')} {_text(group / 'cpu.cfs_period_us')}"
    try:
        quota, period = map(int, text.split())
        allowed = quota / period
    except (ValueError, ZeroDivisionError):  # "max 100000": no quota
        return None
    return allowed if allowed > 0 else None  # version 1 writes -1


def _number(file: Path) -> int | None:
    """Return the number in ``file``, or None if the file is missing or holds no number, such as "max"."""
    text = _text(file)
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


def _table(file: Path) -> Mapping[str, int]:
    """Return the pairs of name and number in ``file``, one pair per line."""
    pairs = (line.split() for line in _text(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def find_malloc_trim() -> Callable[[], object] | None:
    """Return a function that has the C library return its free pages; None if it has no such function (musl, macOS)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else lambda: trim(0)


def release_free_memory() -> None:
    """Return the free pages to the system now, which takes a millisecond or two."""
    if (trim := find_malloc_trim()) is not None:
        trim()
