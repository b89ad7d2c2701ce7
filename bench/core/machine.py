"""What a result was measured on: hardware and versions, but nothing that names a host or a path."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("numpy", "onnxruntime", "onnxruntime-gpu", "torch", "openvino", "transformers", "grpcio", "protobuf")
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
# The widest that a processor has names its kind; the words of /proc/cpuinfo.
_KINDS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "bf16", "asimd")
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
        "commit": _commit(),
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


def _commit() -> str:
    """The commit measured, marked when the tree differs from it; empty outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
