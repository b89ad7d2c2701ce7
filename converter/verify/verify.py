"""Verifies a published artifact: every digest, then the drift from its reference, judged by its budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.process.memory import release_memory
from bf16kit.converter.source import Feeds
from bf16kit.converter.verify import measure, samples
from bf16kit.converter.verify.judging import describe_breaches
from bf16kit.converter.verify.measure import Expected, run_export, run_profile
from bf16kit.converter.verify.running import signature
from bf16kit.converter.verify.samples import Samples
from bf16kit.drift.budget import Budget
from bf16kit.drift.slices import Scales, Values
from bf16kit.drift.table import COLUMNS, cells
from bf16kit.drift.verdicts import DriftRow, golden_budget, rows_of
from bf16kit.messages.errors import ArtifactError, BudgetExceeded, UsageError
from bf16kit.messages.wording import plain, table
from bf16kit.runtime.loading import load_reference

VERSION = 1  # of the format that `verify --json` writes


@dataclass(frozen=True, slots=True)
class Verified:
    """The drift found on the samples called ``origin``.

    ``ran`` says how each profile ran, if that is worth telling. ``over`` describes where drift exceeds the budget.
    """

    path: Path
    model: str
    origin: str
    samples: int
    rows: tuple[DriftRow, ...]
    ran: tuple[str, ...]
    over: tuple[str, ...]

    def text(self) -> str:
        """Return the result as text for the user."""
        if not self.rows:
            return "\n".join(self.ran)
        count = f"{self.samples} sample{'' if self.samples == 1 else 's'}"
        title = f"Drift from the fp32 reference on {self.origin}, {count}; every digest matches"
        return "\n".join([table(title, COLUMNS, map(cells, self.rows)), *self.ran])

    def record(self) -> dict[str, Any]:
        """Return the result for programs, see docs/json.md."""
        fields: dict[str, Any] = plain(self)
        return fields | {"version": VERSION, "within": not self.over}

    def check(self) -> None:
        """Raise :class:`BudgetExceeded`, with the places, if drift exceeds the budget."""
        if self.over:
            raise BudgetExceeded("drift over budget:" + "".join(f"\n  {breach}" for breach in self.over))


def verify(path: Path, argument: str | None, profiles: Sequence[str]) -> Verified:
    """Measure the drift of ``profiles`` (all profiles and exports if none is named); ``argument`` as for ``--samples``.

    Raises :class:`ArtifactError` or a subclass if the artifact is damaged or has no such profile, and
    :class:`SamplesError` for bad samples.
    """
    artifact = Artifact.open(path)
    exports = artifact.manifest.exports
    known = [*sorted(artifact.manifest.profiles), *sorted(exports)]
    chosen = list(dict.fromkeys(profiles)) or known
    for profile in chosen:
        if profile not in known:
            raise ArtifactError(f"{path}: has no profile {profile}; it has {', '.join(known)}")
    given_samples = None if argument is None else _run_samples(artifact, argument)
    origin = ""
    rows: list[DriftRow] = []
    over: list[str] = []
    ran: list[str] = []
    samples = 0
    budget = Budget.from_dict(artifact.manifest.budget)
    if given_samples is None:
        budget = golden_budget(artifact.manifest, budget)
    for profile in chosen:
        if profile in exports and artifact.manifest.reference is None:
            ran.append(
                f"{profile}: every digest matches; its drift cannot be measured, because without a residual there is"
                " no fp32 reference"
            )
            continue
        expected, origin = given_samples or _golden(artifact, profile)
        run = (run_export if profile in exports else run_profile)(artifact, profile, expected)
        summaries = measure.summarise(run.drifts)
        for output, summary in sorted(summaries.items()):
            rows += rows_of(profile, output, summary, budget, run.emulated)
            samples = summary.samples
        how = f"on the CPU kernel, path {run.info.kernel}" if run.info.kernel else run.info.note
        if profile not in exports and not run.emulated and how:
            ran.append(f"{profile} ran: {'; '.join(filter(None, (how, run.info.advice)))}")
        over += describe_breaches(profile, budget, summaries)
        release_memory()
    return Verified(path, artifact.manifest.model, origin, samples, tuple(rows), tuple(ran), tuple(over))


def _golden(artifact: Artifact, profile: str) -> tuple[Expected, str]:
    """Return feeds, the reference's outputs and slices, by which a server judges ``profile``, and their name."""
    if artifact.manifest.golden is None:
        raise UsageError(f"{artifact.path}: keeps no golden samples (a model with strings); give some with --samples")
    kept = artifact.golden(profile)
    for spec in signature(artifact.manifest)[1]:
        axes = sum(axis != artifact.manifest.batch_axis for axis in range(len(spec.shape))) or 1
        if spec.name not in kept.outputs or len(kept.scales.get(spec.name, ())) not in (0, axes):
            lacks = f"the golden samples lack output {spec.name!r}, or slices along an axis of it"
            raise ArtifactError(f"{artifact.path}: {lacks}; convert the checkpoint again")
    return Expected((kept.inputs,), [kept.outputs], kept.scales, 1), "the golden samples"


def _run_samples(artifact: Artifact, argument: str) -> tuple[Expected, str]:
    """Return the given samples, the reference's outputs and slices for them, and their name for messages."""
    found = samples.of_artifact(argument, artifact.manifest)
    with closing(load_reference(artifact)) as reference:
        expected = expected_outputs(artifact, reference.run, found)
    release_memory()
    return expected, found.origin


def expected_outputs(artifact: Artifact, run: Callable[[Feeds], Feeds], found: Samples) -> Expected:
    """Return the samples ``found`` with the outputs of ``run``, the reference, and the slices to judge by."""
    expected = measure.spool(run, found, None)
    outputs = signature(artifact.manifest)[1]
    scales = measure.slice_scales(expected, outputs, artifact.manifest.batch_axis)
    if artifact.manifest.golden is not None:
        _excuse(scales, artifact.golden().scales)
    return Expected(found.feeds, expected, scales, len(found.feeds))


def _excuse(scales: Mapping[str, Sequence[Values]], known: Mapping[str, Scales]) -> None:
    """Set ``scales`` to inf for slices that the conversion did not judge, because fp32 does not resolve them."""
    for name, axes in scales.items():
        for scale, own in zip(axes, known.get(name, ()), strict=False):
            scale[: len(own)][np.isinf(own[: len(scale)])] = np.inf
