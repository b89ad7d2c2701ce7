"""Layouts: how many batches of a model run at once on a machine, and with how many threads each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bf16kit.runtime import available_cpus

#: The least gain in rate for which a larger batch, or another layout, is worth its latency.
WORTHWHILE_GAIN = 1.03
MOST_INSTANCES = 64  # the limit of serving.yaml


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """A number of instances, each with ``threads`` threads per execution; 0 if the device has its own."""

    instances: int
    threads: int

    def __str__(self) -> str:
        return f"{self.instances} × {self.threads}" if self.threads else f"{self.instances}"

    def description(self) -> str:
        """Return the layout as text."""
        instances = f"{self.instances} instance{'' if self.instances == 1 else 's'}"
        if not self.threads:
            return instances
        each = "" if self.instances == 1 else " each"
        return f"{instances} of {self.threads} thread{'' if self.threads == 1 else 's'}{each}"


def layouts(device: str) -> list[Layout]:
    """Return the layouts to measure: on a CPU from one batch on all cores to one per core, else 1, 2 and 4 batches."""
    if device != "cpu":
        return [Layout(instances, 0) for instances in (1, 2, 4)]
    count = available_cpus()
    numbers = sorted({count, *(1 << power for power in range(count.bit_length()))})
    return [Layout(instances, count // instances) for instances in numbers if instances <= MOST_INSTANCES]


def smallest_worthwhile(rates: Mapping[int, float]) -> int:
    """Return the smallest batch whose rate is within 3 % of the best.

    ``rates`` has rows per second by batch size in rows, and is not empty.
    """
    best = max(rates.values())
    return min(rows for rows, rate in rates.items() if rate * WORTHWHILE_GAIN >= best)
