"""``python -m bench.kernel.report``: what the kernel's benchmarks found, as one table, and docs/pictures/kernel.svg.

Reads the results they wrote; measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.core import results
from bench.core.grid import Grid
from bench.core.results import Measurement, Result, table
from bench.kernel import layers as kernel
from bench.kernel.compare import OURS
from bench.kernel.picture import Line, draw
from bench.kernel.sides import FP32

_PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "kernel.svg"
_COMPARED = ("kernel", "kernel_minilm", "kernel_lm")
_OTHERS = ("kernel", "kernel_memory", "kernel_numerics")
_TARGET = "target"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code: 1 when there are no results, or a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernel.report", description="The CPU kernel's numbers.")
    parser.add_argument("--results", type=Path, default=results.here(), help="where results are, bench/results/MACHINE")
    parser.add_argument("--picture", type=Path, default=_PICTURE, help="the picture to write, docs/pictures/kernel.svg")
    chosen = parser.parse_args(arguments)
    found = {name: _read(chosen.results / f"{name}.json") for name in (*_COMPARED, *_OTHERS)}
    compared = [content for name in _COMPARED if (content := found[name])]
    if not compared:
        print(f"no results of the kernel in {chosen.results}: run python -m bench kernel first", file=sys.stderr)
        return 1
    print(_together(compared).text(), end="\n\n")
    others = [result for name in _OTHERS if (content := found[name]) and (result := _rest(name, content)).measurements]
    print(table(others))
    if found["kernel"]:
        chosen.picture.parent.mkdir(parents=True, exist_ok=True)
        chosen.picture.write_text(_picture(found["kernel"]), "utf-8")
        print(f"\n{chosen.picture}")
    return 1 if any(_missed(content) for content in found.values()) else 0


def _read(file: Path) -> dict[str, Any]:
    """The results in ``file``; empty when there are none, or the benchmark was skipped."""
    content: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return {} if "skipped" in content else content


def _missed(content: Mapping[str, Any]) -> bool:
    return any(found.get("met") is False for found in content.get("measurements", ()))


def _together(contents: Sequence[Mapping[str, Any]]) -> Grid:
    """Every piece of work in a row: the target, fp32's time, and how many times as fast as that each side is."""
    grids = [
        (content, Grid.from_dict(grid).ratios_to(FP32)) for content in contents for grid in content.get("grids", ())
    ]
    columns = list(dict.fromkeys(column for _, grid in grids for column in grid.columns))
    rows = {
        label: [_promised(content, label), *(dict(zip(grid.columns, row, strict=True)).get(name) for name in columns)]
        for content, grid in grids
        for label, row in grid.rows.items()
    }
    return Grid(f"How many times as fast as {FP32}", "", (_TARGET, *columns), rows)


def _promised(content: Mapping[str, Any], label: str) -> float | None:
    bounds = [found.get("at_least") for found in content["measurements"] if found["name"].startswith(f"{label}: ")]
    return bounds[0] if bounds else None


def _rest(name: str, content: Mapping[str, Any]) -> Result:
    """Of a result, the measurements that the table above does not show."""
    shown = {label for grid in content.get("grids", ()) for label in grid["rows"]}
    kept = [found for found in content["measurements"] if found["name"].partition(": ")[0] not in shown]
    return Result(name, [_measurement(found) for found in kept])


def _measurement(found: Mapping[str, Any]) -> Measurement:
    return Measurement(found["name"], found["value"], found["unit"], found.get("at_most"), found.get("at_least"))


def _picture(content: Mapping[str, Any]) -> str:
    machine = content["machine"]
    subtitle = (
        f"time of ONNX Runtime fp32 ÷ time, median; {machine['cores']} cores of {machine['cpu']},"
        f" onnxruntime {machine['packages'].get('onnxruntime', '')}, {machine['date']}"
    )
    return draw(
        list(_drawn(Grid.from_dict(content["grids"][0]).ratios_to(FP32))),
        kernel.TARGETS,
        title=f"{kernel.LAYERS} layers of 4096×4096: bf16 weights in our kernel against fp32",
        subtitle=subtitle,
    )


def _drawn(ratios: Grid) -> Iterator[Line]:
    for column, name in enumerate(ratios.columns[1:], start=1):
        points = [
            (float(label.split()[0]), ratio) for label, row in ratios.rows.items() if (ratio := row[column]) is not None
        ]
        if points:
            yield Line(name, points, name.startswith(OURS))


if __name__ == "__main__":
    sys.exit(main())
