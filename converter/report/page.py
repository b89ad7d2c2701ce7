"""The conversion report, an HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING

from bf16kit.artifact.disk import DiskSize
from bf16kit.artifact.manifest import FileEntry, Manifest
from bf16kit.converter.process.program import version_of
from bf16kit.converter.report import charts
from bf16kit.converter.report.figures import SEARCHED, Figures, layer_name, plan_parts
from bf16kit.converter.report.inspect import FILES, RECOVERED, needs, recovered_cells, share, training
from bf16kit.drift.measurements import Measurements
from bf16kit.messages.errors import UsageError
from bf16kit.messages.wording import first_few, listed, printable, size
from bf16kit.numerics.tensors import describe as describe_shape

if TYPE_CHECKING:  # imported when a page is drawn: most commands draw none
    from jinja2 import Template

NAME = "report.html"
ROWS = 200  # rows of a table; a browser must be able to open the page of a model with 50,000 nodes
CHARTS = 12  # charts of a kind
WORST = 20  # tensors whose range is shown, and layers in a table
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
    from markupsafe import Markup

    found = Figures(manifest, files, measurements)
    samples = [charts.samples_chart(each, f"samples{i}") for i, each in enumerate(found.samples[:CHARTS])]
    layers = [charts.layers_chart(each, f"layers{i}") for i, each in enumerate(found.layers[:CHARTS])]
    others = {name: entry for name, entry in files.items() if name != NAME}
    beside = len(manifest.amended(files=others).dumps())
    draw = partial(
        _template().render,
        f=found,
        notes=notes,
        m=manifest,
        samples=list(zip(found.samples, map(Markup, samples), strict=False)),  # escaped already
        layers=list(zip(found.layers, map(Markup, layers), strict=False)),
        plan_parts=plan_parts,
        most=ROWS,
        shown=WORST,
        searched=SEARCHED,
        recovered=RECOVERED,
        training=training,
    )
    # The size on disk counts this page and the manifest, which are half of a tiny artifact: a draft tells the page's.
    draft = draw(disk=DiskSize.of(manifest, others, beside))
    return draw(disk=DiskSize.of(manifest, others, beside + len(draft.encode())))


@cache
def _template() -> Template:
    """Return the compiled template: compiling it takes a third of the time of a page."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.finalize = lambda value: printable(value) if type(value) is str else value  # pictures are Markup
    environment.filters |= {
        "bytes": size,
        "shape": describe_shape,
        "number": _number,
        "share": share,
        "position": _position,
        "layer_name": layer_name,
        "needs": needs,
        "abbreviated": lambda names: first_few(names, FILES),
        "cells": recovered_cells,
    }
    text = resources.files("bf16kit.converter.report").joinpath("template.html").read_text(encoding="utf-8")
    return environment.from_string(text)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _position(magnitude: float) -> float:
    """Return the place of ``magnitude`` on the bar of a tensor's range, in percent."""
    return 100 * (math.log2(magnitude) - LOWEST) / (HIGHEST - LOWEST)
