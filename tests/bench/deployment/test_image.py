"""Measurements from an image's sizes and a container's times."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.core.results import Measurement
from bench.deployment import image
from bench.deployment.containers import Container


def by_name(measurements: Iterator[Measurement]) -> dict[str, Measurement]:
    return {each.name: each for each in measurements}


def test_the_layers_are_added_up_and_the_base_is_the_rest() -> None:
    found = by_name(image.sizes([239_000_000, 12_345_678], 328_345_678))
    assert {name: (each.value, each.unit) for name, each in found.items()} == {
        "server without torch, beyond its base": (251.345678, "MB"),
        "its base": (77.0, "MB"),
        "layer 1 of 2": (239.0, "MB"),
        "layer 2 of 2": (12.345678, "MB"),
    }
    assert [each.verdict for each in found.values()] == ["met", None, None, None]
    assert by_name(image.sizes([350_000_001], 400_000_000))["server without torch, beyond its base"].verdict == "missed"


def test_starts_are_reported_as_median_fastest_and_slowest() -> None:
    found = by_name(image.times([1.4, 9.0, 1.3], [1.1, 1.0, 1.2], [0.9, 1.1, 1.0]))
    cold, warm = (found[f"docker run to SERVING with MiniLM, page cache {cache}"] for cache in ("cold", "warm"))
    assert (cold.value, cold.at_most, cold.verdict) == (1.4, 5.0, "met")
    assert (warm.value, warm.verdict) == (1.1, "met")
    assert (found["fastest start, page cache cold"].value, found["slowest start, page cache cold"].value) == (1.3, 9.0)
    assert found["processor time of the container until then"].value == 1.0
    slow = by_name(image.times([6.0, 5.1, 1.0], [1.0], [1.0]))
    assert slow["docker run to SERVING with MiniLM, page cache cold"].verdict == "missed"


def test_a_value_that_could_not_be_measured_is_absent_with_the_reason() -> None:
    """JSON has no NaN, and the median of values that include NaN is undefined."""
    found = by_name(image.times([], [1.1], [0.9, math.nan, 1.0]))
    cold, cpu = (
        found[name]
        for name in (
            "docker run to SERVING with MiniLM, page cache cold",
            "processor time of the container until then",
        )
    )
    assert cold.absent == "needs root, and layers as directories"
    assert cold.verdict is None
    assert cpu.absent == "the engine's processes are not to be seen from here"
    assert "NaN" not in json.dumps([each.as_dict() for each in found.values()])
    assert "fastest start, page cache cold" not in found


def test_health_checks_are_reported_with_elapsed_and_processor_time() -> None:
    found = by_name(image.checked([[0.30, 0.10], [0.20, 0.12], [0.25, 0.11]]))
    assert [(name, each.value) for name, each in found.items()] == [
        ("bf16-serve health within the container", 0.25),
        ("processor time of that", 0.11),
    ]


def test_cold_and_warm_starts_alternate_after_one_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """They alternate so that other load on the machine affects both equally."""
    happened: list[str] = []

    @contextmanager
    def serving(name: str, repository: Path) -> Iterator[Container]:
        happened.append("start")
        yield Container("id", float(len(happened)), 0.5)

    def forget(name: str, *others: Path) -> bool:
        happened.append(f"forget {others[0]}")
        return True

    monkeypatch.setattr(image, "serving", serving)
    monkeypatch.setattr(image, "forget", forget)
    cold, warm, cpu = image._starts("i", Path("models"), 2)
    assert happened == ["start", *["forget models", "start", "start"] * 2]
    assert (cold, warm, cpu) == ([3.0, 6.0], [4.0, 7.0], [0.5, 0.5])
    monkeypatch.setattr(image, "forget", lambda name, *others: False)
    assert image._starts("i", Path("models"), 2)[0] == []


def test_the_program_in_the_container_reports_both_times_of_each_check() -> None:
    code = image._HEALTH.replace('["bf16-serve", "health"]', '[sys.executable, "-c", "sum(range(2_000_000))"]')
    assert code != image._HEALTH
    done = subprocess.run([sys.executable, "-c", code, "3"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert len(found) == 3
    assert all(wall > 0 and 0 < used < 30 for wall, used in found)
