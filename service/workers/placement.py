"""Where each of several workers runs: its share of the processors, and its own GPU where there are several."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from bf16kit.runtime.hardware import available_cpus

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"nvidia\d+")


def threads_of(asked: int | None, workers: int, cpus: int | None = None) -> int:
    """The threads of one run in each of ``workers``: as ``asked``, or an equal part of the processors."""
    return asked or max(1, (cpus or available_cpus()) // workers)


def gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that this process may use, as CUDA names them. A container has the files of its own only."""
    chosen = environment.get(VISIBLE)
    if chosen is not None:
        return [each.strip() for each in chosen.split(",") if each.strip() not in ("", "-1")]
    return [str(index) for index, _ in enumerate(path for path in devices.iterdir() if _DEVICE.fullmatch(path.name))]


def gpu_for(worker: int, device: str, available: list[str]) -> str | None:
    """The one GPU that ``worker`` (from 0) shall see, so that all are used; None where it sees what the server does.

    A worker that sees one GPU knows it as cuda:0. ``cuda:N`` names one for all of them, and the CPU needs none.
    """
    if device not in ("auto", "cuda") or len(available) < 2:
        return None
    return available[worker % len(available)]
