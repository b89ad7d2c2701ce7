"""How much a process works, or waits for a processor to work on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

#: Seconds per thread, by thread id. The counts of different moments can be compared with :func:`grown`.
ThreadSeconds = Mapping[int, float]


def active_seconds(pid: int) -> ThreadSeconds:
    """Return for how long each thread of a process has run, or was ready to run and waited for a processor.

    A kernel without ``schedstat`` (CONFIG_SCHED_INFO) tells only how long the whole process has run. Empty if the
    process has ended.
    """
    found: dict[int, float] = {}
    with suppress(OSError, ValueError):  # it has ended, or one of its threads has
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError, ValueError):
                # /proc/PID/schedstat has the main thread only.
                ran, waited, _ = (task / "schedstat").read_text().split()
                found[int(task.name)] = (int(ran) + int(waited)) / 1e9
    return found or _cpu_seconds(pid)


def grown(before: ThreadSeconds, after: ThreadSeconds) -> float:
    """Return by how many seconds the counts have grown. A thread that has ended meanwhile counts as 0."""
    return sum(max(0.0, seconds - before.get(thread, 0.0)) for thread, seconds in after.items())


def _cpu_seconds(pid: int) -> ThreadSeconds:
    try:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except (OSError, ValueError):
        return {}
    return {pid: (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")}
