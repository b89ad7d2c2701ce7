"""How a model's work may be laid out on a machine: so many batches at once, with so many threads each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bf16kit.runtime.hardware import available_cpus

#: What a larger batch must gain before it is worth its latency, and another layout before it is worth its own.
WORTH = 1.03
MOST_INSTANCES = 64  # what serving.yaml takes


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """``threads`` of one execution; 0 where the device has its own."""

    instances: int
    threads: int

    def __str__(self) -> str:
        return f"{self.instances} × {self.threads}" if self.threads else f"{self.instances}"

    def told(self) -> str:
        """The same in words."""
        instances = f"{self.instances} instance{'' if self.instances == 1 else 's'}"
        if not self.threads:
            return instances
        each = "" if self.instances == 1 else " each"
        return f"{instances} of {self.threads} thread{'' if self.threads == 1 else 's'}{each}"


def layouts(device: str) -> list[Layout]:
    """From one batch on all cores to a batch for each core; on another device, one to four batches."""
    if device != "cpu":
        return [Layout(instances, 0) for instances in (1, 2, 4)]
    count = available_cpus()
    numbers = sorted({count, *(1 << power for power in range(count.bit_length()))})
    return [Layout(instances, count // instances) for instances in numbers if instances <= MOST_INSTANCES]


def smallest_worth(rates: Mapping[int, float]) -> int:
    """The smallest batch whose rate is within 3 % of the best; ``rates`` are rows per second by rows, and not empty."""
    best = max(rates.values())
    return min(rows for rows, rate in rates.items() if rate * WORTH >= best)
