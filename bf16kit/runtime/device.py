"""The devices a model can run on, by the names users give them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from bf16kit.messages.errors import ConfigError
from bf16kit.system import controlgroup

CPU = "cpu"
_CUDA = re.compile(r"cuda(?::(\d{1,3}))?")
# x86 dot products (AVX512_BF16), x86 tiles (AMX), and the Arm extension, as the Linux kernel names them.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def canonical(device: str) -> str:
    """``cpu`` or ``cuda:N``; plain ``cuda`` is ``cuda:0``. Raises :class:`ConfigError` for any other text."""
    if device == CPU:
        return device
    found = _CUDA.fullmatch(device)
    if found is None:
        raise ConfigError(f"unknown device {device!r}; devices are cpu and cuda:N, as in cuda:0")
    return f"cuda:{int(found[1] or 0)}"


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the CPU multiplies bf16 in hardware; False if the system does not say.

    Without such instructions a bf16 matrix product on the CPU is emulated, 8 to 10 times slower than fp32.
    """
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, flags = line.partition(":")
            if key.strip() in ("flags", "Features"):
                return not _BF16_FLAGS.isdisjoint(flags.split())
    return False


def available_cpus(quota: Callable[[], float | None] = controlgroup.cpus) -> int:
    """Return how many CPUs this process may use: its affinity, or the control group's ``quota`` if that is smaller.

    A container limited to two CPUs on a machine of 64 sees 64. Threads beyond two would only wait for each other.
    """
    cpus = len(os.sched_getaffinity(0))
    allowed = quota()
    return cpus if allowed is None else max(1, min(cpus, round(allowed)))
