"""``bf16-serve list``: lists what a repository holds, and which of it would be served."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.disk import disk_size
from bf16kit.artifact.manifest import Manifest
from bf16kit.drift.budget import Budget
from bf16kit.drift.metrics import DriftSummary
from bf16kit.drift.verdicts import DriftRow, format_budget_ratio, rows_of, tightest_of
from bf16kit.messages.errors import Bf16kitError, ConfigError
from bf16kit.messages.wording import brief, size, table
from bf16kit.service.commands import output
from bf16kit.service.config.serverconfig import load_config
from bf16kit.service.models.opened import weight_bytes
from bf16kit.service.models.plan import desired_model_of, directories_in, versions_in
from bf16kit.service.models.serving import Serving

_SHORT = 12  # hexadecimal digits of a digest: enough to tell sources apart
_COLUMNS = (
    "model", "version", "served", "drift ÷ budget", "weights", "disk", "residual", "reference", "source", "made with",
)  # fmt: skip
_Row = dict[str, Any]  # one version, or a directory that is no model (version 0), with the keys in docs/json.md


@click.command("list")
@output.repository
@output.config_file
@output.as_json
def list_models(repository: str | None, file: Path | None, as_json: bool) -> None:
    """List models and versions: which would be served, their profiles, sizes, and drift as it was measured.

    Reads manifests and the names and sizes of files, never the weights: `check` looks at those. Exit codes: 0; 1 where
    something in the repository cannot be served; 2 wrong usage.
    """
    with output.exit_on_errors("list"):
        root = load_config({"repository": repository}, file).repository
        rows = [row for directory in directories_in(root) for row in _model(directory)]
    if as_json:
        output.echo_json({"version": 1, "repository": str(root), "models": rows})
    elif not rows:
        output.echo(f"{root} has no model; put artifacts under <model>/<version>/")
    else:
        output.echo(table(f"Models in {root}", _COLUMNS, map(_cells, rows)))
        for row in rows:
            if row["why"]:
                label = f"model {row['model']!r} version {row['version']}" if row["version"] else repr(row["model"])
                output.echo(f"{label}: {row['why']}")
    sys.exit(output.FAILED if any(row["problem"] for row in rows) else 0)


def _cells(row: _Row) -> tuple[object, ...]:
    served = "yes" if row["served"] else "NO" if row["problem"] else "no"
    if not row["profiles"]:
        return row["model"], row["version"] or None, served, *[None] * 7
    drift = ", ".join(f"{each['name']} {_used(each['tightest'])}" for each in row["profiles"])
    source = f"{row['source']} {row['source_sha256'][:_SHORT]}".strip()
    made = f"bf16kit {row['tools']['bf16kit']}" if "bf16kit" in row["tools"] else None
    sizes = [size(row["weight_bytes"]), size(row["disk_bytes"])]
    kept = ["yes" if row[part] else "no" for part in ("residual", "reference")]
    return row["model"], row["version"], served, drift, *sizes, *kept, source, made


def _used(tightest: DriftRow | None) -> str:
    if tightest is None or tightest.used is None:
        return "?"
    return format_budget_ratio(tightest.used) if tightest.within else f"{format_budget_ratio(tightest.used)} OVER"


def _row(model: str, version: int, why: str, *, problem: bool, **manifest: Any) -> _Row:
    """Return a row. ``why`` says why it would not be served, and is a problem if that is something to fix."""
    absent = {"profiles": [], "weight_bytes": 0, "residual": False, "reference": False, "golden": False}
    absent |= {"disk_bytes": 0, "source": "", "source_sha256": "", "tools": {}}
    reasons = {"served": not why, "why": why, "problem": why if problem else ""}
    return {"model": model, "version": version, **reasons, **absent, **manifest}


def _model(directory: Path) -> Iterator[_Row]:
    try:
        desired = desired_model_of(directory)
    except ConfigError as error:
        yield _row(directory.name, 0, str(error), problem=False)
        return
    chosen, any_plan = desired.versions, desired.plans[0]  # all versions of a model are served with the same settings
    for version in versions_in(directory):
        if any_plan.broken:
            yield _row(directory.name, version, any_plan.broken, problem=True)
        else:
            yield _version(directory, version, any_plan.serving, wanted=version in chosen)


def _version(directory: Path, version: int, serving: Serving, *, wanted: bool) -> _Row:
    try:
        artifact = Artifact.open(directory / str(version), verify=False)
        disk = disk_size(artifact).total
        budget = Budget.from_dict(artifact.manifest.budget).override(serving.budget)
    except Bf16kitError as error:  # a damaged version that is not served is no problem
        return _row(directory.name, version, brief(error), problem=wanted)
    manifest = artifact.manifest
    policy = serving.version_policy.model_dump(mode="json", exclude_defaults=True)
    why = "" if wanted else "version_policy is " + json.dumps(policy)[1:-1].replace('"', "")
    if wanted and not manifest.profiles:
        why = f"holds no profile to serve, only {', '.join(manifest.exports) or 'weights'} for other programs"
    return _row(
        directory.name,
        version,
        why,
        problem=wanted,
        profiles=list(_profiles(manifest, budget)),
        weight_bytes=weight_bytes(manifest),
        disk_bytes=disk,
        residual=any(tensor.residual is not None for tensor in manifest.tensors),
        reference=manifest.reference is not None,
        golden=manifest.golden is not None,
        source=manifest.source.format,
        source_sha256=manifest.source.sha256,
        tools=dict(manifest.tools),
    )


def _profiles(manifest: Manifest, budget: Budget) -> Iterator[dict[str, object]]:
    """Yield the profiles, each with the bound that its drift is closest to; None without a bound or a measurement."""
    for name, entry in manifest.profiles.items():
        drift = manifest.drift.get(name)
        rows: list[DriftRow] = []
        if drift is not None:
            for tensor, stats in drift.outputs.items():
                rows += rows_of(name, tensor, DriftSummary(drift.samples, stats), budget, False)
        yield {"name": name, "format": entry.format, "verified": entry.verified, "tightest": tightest_of(rows)}
