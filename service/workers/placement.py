"""Places the workers: each gets its share of the processors, and its own GPU if there are several."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from bf16kit.runtime import available_cpus

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"nvidia\d+")


def threads_of(asked: int | None, workers: int, cpus: int | None = None) -> int:
    """Return the threads of one run in each of ``workers``: ``asked``, or an equal share of the processors."""
    return asked or max(1, (cpus or available_cpus()) // workers)


def gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that this process may use, as CUDA names them.

    A container has only its own GPUs' device files.
    """
    chosen = environment.get(VISIBLE)
    if chosen is not None:
        return [each.strip() for each in chosen.split(",") if each.strip() not in ("", "-1")]
    return [str(index) for index, _ in enumerate(path for path in devices.iterdir() if _DEVICE.fullmatch(path.name))]


def gpu_for(worker: int, device: str, available: list[str]) -> str | None:
    """Return the one GPU that ``worker`` (from 0) shall see, so that all are used; None if it sees all of the server's.

    A worker that sees one GPU addresses it as cuda:0. ``cuda:N`` selects the same GPU for all workers. The CPU needs
    none.
    """
    if device not in ("auto", "cuda") or len(available) < 2:
        return None
    return available[worker % len(available)]
