"""How fast weights are rounded to bf16, against how fast this machine copies memory.

Both are counted in bytes read and bytes written: a copy moves 8 for each fp32 value, rounding 6. Source and result lie
in memory that was touched before; source and result are larger than any cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np

from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace
from bf16kit.numerics import residual
from bf16kit.numerics import rounding as numerics
from bf16kit.numerics.rounding import BF16
from bf16kit.runtime import available_cpus

_AT_LEAST = 0.8
_ELEMENTS, _QUICK = 1 << 26, 1 << 22
_ROUNDS = 15


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """The median over rounds in which all are measured one after the other, by one thread and by all."""
    if numerics.loops() is None:
        return Result("rounding_speed", skipped="the kernel was not built: no C++17 compiler")
    count = _QUICK if quick else _ELEMENTS
    x = np.random.default_rng(0).standard_normal(count, np.float32)
    copy, out = np.ones_like(x), np.ones(count, BF16)
    threads = available_cpus()
    with ThreadPoolExecutor(threads) as pool:
        jobs: dict[str, tuple[Callable[[], object], int]] = {
            "copy, one thread": (lambda: np.copyto(copy, x), 8),
            "rounding, one thread": (lambda: numerics.to_bf16(x, out=out), 6),
            "copy, all threads": (lambda: _shared(pool, threads, count, lambda s: np.copyto(copy[s], x[s])), 8),
            "rounding, all threads": (
                lambda: _shared(pool, threads, count, lambda s: numerics.to_bf16(x[s], out=out[s])),
                6,
            ),
            "census": (lambda: numerics.census(x), 4),
            "residual": (lambda: sum(len(piece) for piece in residual.encode_chunks(x, out)), 8),
        }
        rates: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(2 if quick else _ROUNDS):
            for name, (job, width) in jobs.items():
                start = time.perf_counter()
                job()
                rates[name].append(count * width / (time.perf_counter() - start) / 1e9)
    found = {name: median(values) for name, values in rates.items()}
    ratios = (
        Measurement(f"rounding ÷ copy, {who}", found[f"rounding, {who}"] / found[f"copy, {who}"], at_least=_AT_LEAST)
        for who in ("one thread", "all threads")
    )
    return Result(
        "rounding_speed",
        (*ratios, *(Measurement(name, rate, "GB/s") for name, rate in found.items())),
        settings={"elements": count, "threads": threads, "rounds": _ROUNDS},
        notes=("GB/s of bytes read and written; the residual is that of the rounded values, its bytes not written",),
    )


def _shared(pool: ThreadPoolExecutor, threads: int, count: int, job: Callable[[slice], object]) -> None:
    """``job`` on equal parts of ``count`` elements, one per thread."""
    step = -(-count // threads)
    list(pool.map(job, (slice(start, start + step) for start in range(0, count, step))))
