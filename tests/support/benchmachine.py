"""The machine on which made-up results of benchmarks were measured: all of it is fit to be published."""

from typing import Any

MACHINE: dict[str, Any] = {
    "key": "k-2cpu", "cpu": "Test CPU", "cores": 2, "commit": "abc1234", "clean": True, "date": "2026-01-02",
    "other_programs": 0.01, "stolen": 0.0,
}  # fmt: skip
