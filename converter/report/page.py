"""The conversion report: an HTML page, and its most important lines for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import FileEntry, Manifest
from bf16kit.drift.measurements import Measurements
from bf16kit.drift.verdicts import format_budget_ratio
from bf16kit.messages.errors import UsageError
from bf16kit.messages.wording import listed, printable, size
from bf16kit.numerics.tensors import describe as describe_shape
from converter.process.program import version_of
from converter.report import charts
from converter.report.figures import SEARCHED, Figures
from converter.report.inspect import RECOVERED, abbreviated, drift, needs, recovered_cells, training
from converter.report.layers import layer_name

NAME = "report.html"
ROWS = 200  # rows of a table; a browser must be able to open the page of a model with 50,000 nodes
CHARTS = 12  # charts of a kind
TENSORS = 20  # tensors whose range is shown
LOWEST, HIGHEST = -150, 134  # exponents at the ends of the bar of a tensor's range


def check_installed() -> None:
    """Raise UsageError now, and not at the end of a conversion, if a package that draws the report is missing."""
    missing = [name for name in ("jinja2", "matplotlib") if version_of(name) is None]
    if missing:
        raise UsageError(
            f"the report needs {listed(missing)}: pip install 'bf16kit[convert]', or convert with --no-report"
        )


def render(
    manifest: Manifest,
    files: Mapping[str, FileEntry],
    notes: Sequence[str],
    measurements: Measurements | None = None,
) -> str:
    """Return the self-contained HTML page on ``manifest`` and ``files``; everything in it is escaped."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_escape_controls
    )
    environment.filters |= {
        "bytes": size,
        "shape": describe_shape,
        "number": _number,
        "share": _share,
        "position": _position,
        "layer_name": layer_name,
        "needs": needs,
        "abbreviated": abbreviated,
        "cells": recovered_cells,
    }
    template = resources.files("converter.report").joinpath("template.html").read_text(encoding="utf-8")
    found = Figures(manifest, files, measurements, notes)
    samples = [charts.samples_chart(each, f"samples{i}") for i, each in enumerate(found.samples[:CHARTS])]
    layers = [charts.layers_chart(each, f"layers{i}") for i, each in enumerate(found.layers[:CHARTS])]
    return environment.from_string(template).render(
        f=found,
        m=manifest,
        samples=list(zip(found.samples, map(Markup, samples), strict=False)),  # escaped already
        layers=list(zip(found.layers, map(Markup, layers), strict=False)),
        entries=[
            ("tensors", manifest.plan.tensors),
            *((f"{p} nodes", e) for p, e in sorted(manifest.plan.nodes.items())),
        ],
        most=ROWS,
        shown=TENSORS,
        searched=SEARCHED,
        recovered=RECOVERED,
        training=training,
    )


def summary(artifact: Artifact, notes: Sequence[str]) -> str:
    """Return the text that the command line prints when an artifact was published."""
    manifest = artifact.manifest
    found = Figures(manifest, manifest.files)
    lines = [
        f"converted {manifest.source.tensors} tensors, {size(found.sizes.checkpoint)}, to {artifact.path}",
        f"weights and graphs {size(found.sizes.graphs_and_weights)}, {found.sizes.ratio:.3f} × the checkpoint;"
        f" with the residual {found.sizes.ratio_with_residual:.3f} ×",
        *([f"profiles {', '.join(sorted(manifest.profiles))}"] if manifest.profiles else []),
        *(f"export {name}: {abbreviated(entry.files)}" for name, entry in sorted(manifest.exports.items())),
        *([f"the fp32 reference is {found.reference.sentence}"] if found.reference.checked else []),
        *(f"note: {note}" for note in notes),
    ]
    return "\n".join(lines) + "\n\n" + drift(found)


def _escape_controls(value: Any) -> Any:
    """Escape control characters except line ends, in all values of the template that are no pictures."""
    from markupsafe import Markup

    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "–" if value is None else format_budget_ratio(value)


def _position(magnitude: float) -> float:
    """Return the place of ``magnitude`` on the bar of a tensor's range, in percent."""
    return 100 * (math.log2(magnitude) - LOWEST) / (HIGHEST - LOWEST)
