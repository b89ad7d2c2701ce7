"""Verifying an artifact that was published: every digest, then its drift from the reference, against its budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bf16kit.artifact import Artifact
from bf16kit.budget import Budget
from bf16kit.drift import METRICS, DriftSummary
from bf16kit.errors import ArtifactError, BudgetExceeded, UsageError
from bf16kit.runtime.loading import load_reference
from converter.model import Feeds
from converter.process.memory import release
from converter.proof import measure, samples
from converter.proof.certify import how, run_profile
from converter.proof.judging import breaches
from converter.report.text import table


def verify(path: Path, given: str | None, profiles: Sequence[str]) -> str:
    """What the drift of ``profiles`` (all, for none named) is, as text; ``given`` are samples as for ``--samples``.

    Raises :class:`ArtifactError` or its kin when the artifact is damaged or has no such profile,
    :class:`~bf16kit.errors.SamplesError` for bad samples, :class:`BudgetExceeded` when drift is over the budget.
    """
    artifact = Artifact.open(path)
    chosen = list(dict.fromkeys(profiles)) or sorted(artifact.manifest.profiles)
    for profile in chosen:
        if profile not in artifact.manifest.profiles:
            raise ArtifactError(
                f"{path}: has no profile {profile}; it has {', '.join(sorted(artifact.manifest.profiles))}"
            )
    feeds, expected, origin = _expected(artifact, given)
    rows: list[tuple[object, ...]] = []
    over: list[str] = []
    ran: list[str] = []
    budget = Budget.from_dict(artifact.manifest.budget)
    for profile in chosen:
        run = run_profile(artifact, profile, feeds, expected)
        summaries = measure.summarise(run.drifts)
        rows += _rows(f"{profile}, emulated" if run.emulated else profile, summaries, budget)
        if not run.emulated and how(run.info):
            ran.append(f"{profile} ran: {'; '.join(filter(None, (how(run.info), run.info.advice)))}")
        over += breaches(profile, budget, summaries)
        release()
    text = table(
        f"Drift from the fp32 reference on {origin}; every digest matches",
        ("profile", "output", "samples", "metric", "judged", "worst", "budget"),
        rows,
    )
    text = "\n".join([text, *ran])
    if over:
        listed = "".join(f"\n  {breach}" for breach in over)
        raise BudgetExceeded(f"drift over budget:{listed}\n\n{text}")
    return text


def _expected(artifact: Artifact, given: str | None) -> tuple[tuple[Feeds, ...], Sequence[Feeds], str]:
    """Feeds and what the reference answers: kept in the artifact, or computed for the samples given."""
    if given is None:
        if artifact.manifest.golden is None:
            raise UsageError(
                f"{artifact.path}: keeps no golden samples (a model with strings); give some with --samples"
            )
        kept = artifact.golden()
        return (kept.inputs,), [kept.outputs], "the golden samples"
    found = samples.load(given, [entry.spec() for entry in artifact.manifest.inputs])
    reference = load_reference(artifact)
    try:
        expected = measure.spool(reference, found, None)
    finally:
        reference.close()
        release()
    return found.feeds, expected, found.origin


def _rows(profile: str, summaries: dict[str, DriftSummary], budget: Budget) -> list[tuple[object, ...]]:
    return [
        (profile, output, summary.samples, metric, judged, summary.worst(metric), budget.bound(metric))
        for output, summary in sorted(summaries.items())
        for metric in (*METRICS, *(name for name in budget.as_dict() if name not in METRICS))
        if (judged := summary.judged(metric)) is not None
    ]
