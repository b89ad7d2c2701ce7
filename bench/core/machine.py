"""What a result was measured on: hardware and versions, but nothing that names a host or a path."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import resource
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from bf16kit.runtime.ort.kernel import LIBRARY

ROOT = Path(__file__).parents[2]
UNMEASURED = ("README.md", "CHANGELOG.md", "docs", "bench/results")
_PACKAGES = ("numpy", "onnxruntime", "onnxruntime-gpu", "torch", "openvino", "transformers", "grpcio", "protobuf")
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
# The widest that a processor has names its kind; the words of /proc/cpuinfo.
_KINDS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "bf16", "asimd")
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_VENDORS = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}


def key() -> str:
    """What tells kinds of machines apart, short: ``amd-19h-11h-avx512bf16-2cpu`` is vendor, family and model of the
    processor, its widest instructions for this work, and how many processors this process may use."""
    vendor = _VENDORS.get(_cpu_field("vendor_id"), platform.machine())
    flags = (_cpu_field("flags") or _cpu_field("Features")).split()
    kind = next((name.replace("_", "") for name in _KINDS if name in flags), "plain")
    return "-".join((vendor, *_model(), kind, f"{len(os.sched_getaffinity(0))}cpu"))


def _model() -> list[str]:
    """Family and model, as their makers write them: in hexadecimal."""
    numbers = [_cpu_field(field) for field in ("cpu family", "model")]
    return [f"{int(number):02x}h" for number in numbers if number.isdigit()]


def describe() -> dict[str, Any]:
    """The machine and the software, as plain values for JSON."""
    return {
        "key": key(),
        "cpu": _cpu_field("model name") or platform.machine(),
        "instructions": [name for name in _INSTRUCTIONS if name in _cpu_field("flags").split()],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_average_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "packages": _versions(),
        "commit": _git("rev-parse", "--short=8", "HEAD"),
        "clean": clean(),
        "kernel": _digest(LIBRARY),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _cpu_field(field: str) -> str:
    """The first value of ``field`` in /proc/cpuinfo, empty where there is none."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field), "")


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def clean() -> bool:
    """Whether what is measured is what the commit has. Documentation is not measured, and results are what is written
    meanwhile. Outside a checkout nobody knows."""
    unmeasured = [f":(exclude){path}" for path in UNMEASURED]
    return bool(_git("rev-parse", "HEAD")) and not _git("status", "--porcelain", "--", ".", *unmeasured)


def unchanged(described: Mapping[str, Any]) -> bool:
    """Whether the tree is still that of the commit in ``described``, which was read before the measurement."""
    return clean() and _git("rev-parse", "HEAD").startswith(described["commit"])


def in_history(commit: str) -> bool:
    """Whether ``commit`` is the one checked out, or one before it. Without the history (no checkout, or a shallow one)
    nobody can tell, and the answer is yes: from there nothing new is published, see :func:`clean`."""
    if _git("rev-parse", "--is-shallow-repository") != "false":
        return True
    if re.fullmatch("[0-9a-f]{7,40}", commit) is None:
        return False
    command = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def _git(*arguments: str) -> str:
    """What git says about this checkout; empty outside one."""
    command = ["git", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def _digest(file: Path) -> str:
    """Which build of the kernel ran: git does not know it. Empty where there is none."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.exists() else ""


# --- who else was at work ---------------------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent ends first, as servers do that start some and do not wait for
    them: :func:`own_seconds` then has what they used."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class OtherProgramsTime:
    """How much of this process' processors went to other programs, and to other machines on the same host."""

    def __init__(self) -> None:
        self._before = _ticks(), own_seconds(), time.monotonic()

    def shares(self) -> dict[str, float]:
        """Since the start: fractions of these processors' time. Our own children count once they have ended."""
        (busy, stolen), own, started = self._before
        (busy_now, stolen_now), own_now = _ticks(), own_seconds()
        available = (time.monotonic() - started) * len(os.sched_getaffinity(0)) or 1.0
        others = max(0.0, (busy_now - busy) - (own_now - own)) / available
        return {"other_programs": round(others, 4), "stolen": round((stolen_now - stolen) / available, 4)}


def _ticks() -> tuple[float, float]:
    """Seconds that this process' processors were busy, and that the host took, since the machine started."""
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    busy = stolen = 0.0
    for name, *fields in (line.split() for line in Path("/proc/stat").read_text().splitlines()):
        if name in ours:
            user, nice, system, _, _, interrupts, soft, steal, *_ = map(int, fields)
            busy, stolen = busy + user + nice + system + interrupts + soft, stolen + steal
    per_second = os.sysconf("SC_CLK_TCK")
    return busy / per_second, stolen / per_second


def own_seconds() -> float:
    """Processor time of this process and of all it started that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
