"""The rows of `bf16-serve list`: one per version, from its manifest and its model's ``serving.yaml``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import Manifest
from bf16kit.drift.budget import Budget
from bf16kit.drift.metrics import DriftSummary
from bf16kit.drift.verdicts import DriftRow, format_budget_ratio, rows_of, tightest_of
from bf16kit.messages.errors import Bf16kitError, ConfigError
from bf16kit.messages.wording import brief, size, table
from service.models.directory import desired_model_of, directories_in, versions_in
from service.models.opened import weight_bytes
from service.models.serving import Serving

VERSION = 1  # of the format of `list --json`
_SHORT = 12  # hexadecimal digits of a digest: enough to tell sources apart


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile of a version. ``tightest`` is the bound that its drift is closest to.

    None if its drift was never measured, or no bound is set.
    """

    name: str
    format: str
    verified: str
    tightest: DriftRow | None


@dataclass(frozen=True, slots=True)
class Row:
    """One version of a model, or a directory that is no model (version 0).

    ``why`` says why it would not be served; ``problem`` is the same text if that is something to fix.
    """

    model: str
    version: int
    served: bool
    why: str = ""
    problem: str = ""
    profiles: tuple[Profile, ...] = ()
    weight_bytes: int = 0
    residual: bool = False
    reference: bool = False
    golden: bool = False
    source: str = ""
    source_sha256: str = ""
    tools: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"model {self.model!r} version {self.version}" if self.version else repr(self.model)


def read_repository(root: Path) -> list[Row]:
    """Return all rows by model and version, damaged artifacts included.

    Raises ConfigError if ``root`` cannot be listed.
    """
    return [row for directory in directories_in(root) for row in _model(directory)]


def text(root: Path, rows: Sequence[Row]) -> str:
    """Return the rows as a table, followed by the reasons why versions are not served."""
    if not rows:
        return f"{root} has no model; put artifacts under <model>/<version>/"
    columns = (
        "model",
        "version",
        "served",
        "drift ÷ budget",
        "weights",
        "residual",
        "reference",
        "source",
        "made with",
    )
    lines = [table(f"Models in {root}", columns, map(_cells, rows))]
    lines += [f"{row.label}: {row.why}" for row in rows if row.why]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[object, ...]:
    served = "yes" if row.served else "NO" if row.problem else "no"
    if not row.profiles:
        return row.model, row.version or None, served, None, None, None, None, None, None
    drift = ", ".join(f"{p.name} {_used(p.tightest)}" for p in row.profiles)
    source = f"{row.source} {row.source_sha256[:_SHORT]}".strip()
    made = f"bf16kit {row.tools['bf16kit']}" if "bf16kit" in row.tools else None
    kept = ["yes" if has else "no" for has in (row.residual, row.reference)]
    return row.model, row.version, served, drift, size(row.weight_bytes), *kept, source, made


def _used(tightest: DriftRow | None) -> str:
    if tightest is None or tightest.used is None:
        return "?"
    return format_budget_ratio(tightest.used) if tightest.within else f"{format_budget_ratio(tightest.used)} OVER"


def _model(directory: Path) -> Iterator[Row]:
    name = directory.name
    try:
        desired = desired_model_of(directory)
    except ConfigError as error:
        yield Row(name, 0, served=False, why=str(error))
        return
    chosen, any_plan = desired.versions, desired.plans[0]  # all versions of a model are served with the same settings
    for version in versions_in(directory):
        if any_plan.broken:
            yield Row(name, version, served=False, why=any_plan.broken, problem=any_plan.broken)
        else:
            yield _version(directory, version, any_plan.serving, served=version in chosen)


def _version(directory: Path, version: int, serving: Serving, *, served: bool) -> Row:
    try:
        artifact = Artifact.open(directory / str(version), verify=False)
        budget = Budget.from_dict(artifact.manifest.budget).override(serving.budget)
    except Bf16kitError as error:
        why = brief(error)
        # A damaged version that is not served is no problem.
        return Row(directory.name, version, served=False, why=why, problem=why if served else "")
    manifest = artifact.manifest
    policy = serving.version_policy.model_dump(mode="json", exclude_defaults=True)
    why = "" if served else "version_policy is " + json.dumps(policy)[1:-1].replace('"', "")
    no_profile = served and not manifest.profiles  # an export for other programs
    if no_profile:
        why = f"holds no profile to serve, only {', '.join(manifest.exports) or 'weights'} for other programs"
    return Row(
        model=directory.name,
        version=version,
        served=served and not no_profile,
        why=why,
        problem=why if no_profile else "",
        profiles=tuple(_profiles(manifest, budget)),
        weight_bytes=weight_bytes(manifest),
        residual=any(tensor.residual is not None for tensor in manifest.tensors),
        reference=manifest.reference is not None,
        golden=manifest.golden is not None,
        source=manifest.source.format,
        source_sha256=manifest.source.sha256,
        tools=dict(manifest.tools),
    )


def _profiles(manifest: Manifest, budget: Budget) -> Iterator[Profile]:
    for name, entry in manifest.profiles.items():
        drift = manifest.drift.get(name)
        rows = [
            row
            for output, stats in (drift.outputs.items() if drift is not None else ())
            for row in rows_of(name, output, DriftSummary(drift.samples if drift else 0, stats), budget, False)
        ]
        yield Profile(name, entry.format, entry.verified, tightest_of(rows))
