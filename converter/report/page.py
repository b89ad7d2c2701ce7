"""The conversion report: a page for people, and its few most important lines for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from bf16kit.artifact import Artifact
from bf16kit.manifest import FileEntry, Manifest, OracleEntry
from bf16kit.tensors import describe as describe_shape
from converter.process.progress import size
from converter.report.figures import drift_rows, reasons, sizes
from converter.report.inspect import drift

NAME = "report.html"


def write(path: Path, manifest: Manifest, files: Mapping[str, FileEntry], notes: Sequence[str]) -> None:
    """Write the self-contained HTML page about ``manifest`` and ``files``; everything in it is escaped."""
    path.write_text(render(manifest, files, notes), encoding="utf-8")


def render(manifest: Manifest, files: Mapping[str, FileEntry], notes: Sequence[str]) -> str:
    """The page as text."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"bytes": size, "shape": describe_shape, "reasons": reasons, "number": _number}
    template = resources.files("converter.report").joinpath("template.html").read_text(encoding="utf-8")
    page = environment.from_string(template)
    return page.render(
        manifest=manifest, files=files, sizes=sizes(manifest, files), drift=list(drift_rows(manifest)), notes=notes
    )


def summary(artifact: Artifact, notes: Sequence[str]) -> str:
    """What the command line says when an artifact was published."""
    manifest = artifact.manifest
    figures = sizes(manifest, manifest.files)
    lines = [
        f"converted {manifest.source.tensors} tensors, {size(figures.checkpoint)}, to {artifact.path}",
        f"weights and graphs {size(figures.graphs_and_weights)}, {figures.ratio:.3f} × the checkpoint;"
        f" with the residual {figures.ratio_with_residual:.3f} ×",
        f"profiles {', '.join(sorted(manifest.profiles))}",
        *_certificate(manifest.oracle),
        *(f"note: {note}" for note in notes),
    ]
    return "\n".join(lines) + "\n\n" + drift(manifest)


def _certificate(oracle: OracleEntry | None) -> list[str]:
    """How far the reference is from the source itself; where that was not checked, a note says so."""
    if oracle is None or not oracle.checked:
        return []
    worst = max(oracle.outputs.values(), key=lambda figure: figure.relative_l2, default=None)
    if worst is None:
        return []
    return [
        f"the fp32 reference is within {worst.relative_l2:.2g} of {oracle.how} ({oracle.feeds} samples;"
        f" fp32 noise explains {worst.bound:.2g})"
    ]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
