"""Compares measurements with the budget: which bounds apply, and what happens to a profile over them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bf16kit.artifact.manifest import Manifest
from bf16kit.artifact.publish import StagingArtifact
from bf16kit.converter.options import Options
from bf16kit.converter.verify import measure
from bf16kit.converter.verify.measure import Drifts, Place, golden_part, golden_places
from bf16kit.converter.write import TRACED
from bf16kit.drift.budget import Breach, Budget
from bf16kit.drift.metrics import ROWS, DriftSummary
from bf16kit.drift.table import Drift
from bf16kit.drift.verdicts import drift_rows
from bf16kit.messages.errors import BudgetExceeded, UsageError
from bf16kit.messages.wording import first_few, quoted
from bf16kit.numerics.tensors import Kind, TensorSpec

_LOGITS_ONLY = "top1_agreement"


def with_output_kinds(outputs: Sequence[TensorSpec], kinds: Mapping[str, Kind]) -> tuple[TensorSpec, ...]:
    """Return ``outputs`` with the kinds given by ``--output``; UsageError for a name that no output has."""
    names = [spec.name for spec in outputs]
    for name in kinds:
        if name not in names:
            raise UsageError(f"--output {name}: the model's outputs are {', '.join(names)}")
    return tuple(replace(spec, kind=kinds.get(spec.name, spec.kind)) for spec in outputs)


def check_budget(budget: Budget, outputs: Sequence[TensorSpec]) -> list[str]:
    """Return notes on default bounds that apply to no output; raise UsageError for such a bound if the user stated it.

    Agreement applies to outputs of kind logits only, every other metric to all outputs but labels.
    """
    logits = [spec for spec in outputs if spec.kind == "logits"]
    if budget.bound(_LOGITS_ONLY) is None:
        labels = [quoted(spec.name) for spec in logits if spec.labels]
        unjudged = f"nothing judges {first_few(labels)}: labels have only an agreement, which the budget does not bound"
        return [unjudged] if labels else []
    if logits:
        return []
    kinds = first_few([f"{quoted(spec.name)} is of kind {spec.kind}" for spec in outputs])
    unknown = [spec.name for spec in outputs if spec.kind == "other"]
    name = unknown[0] if len(unknown) == 1 else "NAME"
    why = f"no output is known to hold logits ({kinds}); if one does, pass --output {name}:logits"
    if _LOGITS_ONLY in budget.stated:
        raise UsageError(f"--budget {_LOGITS_ONLY}={budget.bound(_LOGITS_ONLY):g}: {why}")
    return [f"{_LOGITS_ONLY} was not judged: {why}"] if unknown else []


def describe_breaches(profile: str, budget: Budget, summaries: Mapping[str, DriftSummary]) -> list[str]:
    """Describe where ``summaries`` exceed ``budget``, one sentence each."""
    return [
        f"profile {profile}, {breach}"
        for output, summary in sorted(summaries.items())
        for breach in budget.breaches(output, summary)
    ]


def find_breaches(budget: Budget, drifts: Sequence[Drifts]) -> list[Breach]:
    """Return where ``drifts``, one entry per sample, exceed ``budget``."""
    summaries = measure.summarise(drifts)
    return [breach for output in sorted(summaries) for breach in budget.breaches(output, summaries[output])]


def choose_golden(budget: Budget, runs: Collection[Mapping[int, Drifts]]) -> Place | None:
    """Return the first place at which all profiles are within ``budget``; None if there is none.

    ``runs`` has the drift of each profile by sample number. A budget bounds the mean over many samples, but a
    server judges a few rows. One sample over budget does not make the model worse: the model may cancel most of that
    sample's signal.
    """
    shared = set.intersection(*map(set, runs)) if runs else set()
    places = (place for n in sorted(shared) for place in golden_places(n, next(iter(runs))[n]))
    return next((at for at in places if not any(find_breaches(budget, [golden_part(r, at)]) for r in runs)), None)


def check_stated_bounds(budget: Budget, manifest: Manifest) -> None:
    """Raise UsageError if a bound that the user stated judged no output in any profile."""
    summaries = [DriftSummary(e.samples, stats) for e in manifest.drift.values() for stats in e.outputs.values()]
    for name in sorted(budget.stated):
        if summaries and all(summary.judged(name) is None for summary in summaries):
            most = max(summary.samples for summary in summaries)
            few = name.endswith(".p99") and most < ROWS
            why = f"the 99th percentile of {most} samples is not known; give {ROWS} or more, or bound the worst"
            raise UsageError(
                f"--budget {name}={budget.bound(name):g}: {why if few else 'the bound applies to no output'}"
            )


def judge(
    breaches: Mapping[str, Sequence[str]], manifest: Manifest, options: Options, stage: StagingArtifact
) -> tuple[Manifest, list[str]]:
    """Return the manifest to publish, and notes; ``breaches`` describes where each profile exceeds the budget.

    Optional profiles (:attr:`Options.optional_profiles`) over budget are left out. For any other, raises
    :class:`BudgetExceeded` unless the options allow drift over budget, or allow profiles to be dropped and one is left.
    """
    over = {name: found for name, found in breaches.items() if found}
    optional = [name for name in options.optional_profiles if name in over]
    notes = [
        f"no profile {name}, which is faster on some processors: drift over budget; to write it, pass --profile {name}"
        f" and keep the nodes that cause it in fp32 (--keep-fp32 REGEX){_listed(over[name])}"
        for name in optional
    ]
    manifest = without_profiles(stage, manifest, optional)
    failing = [name for name in sorted(over) if name in manifest.profiles or name in manifest.exports]
    if not failing:
        return manifest, notes
    listed = "".join(_listed(over[name]) for name in failing)
    if options.allow_over_budget:
        return manifest, [*notes, f"drift over budget, published because of --allow-over-budget:{listed}"]
    droppable = manifest.profiles.keys() >= set(failing)  # an export was asked for, and may hold the weights
    if options.drop_failing_profiles and droppable and manifest.profiles.keys() - failing:
        notes.append(f"left out, drift over budget: {', '.join(failing)}{listed}")
        return without_profiles(stage, manifest, failing), notes
    text = f"drift over budget, nothing published:{listed}\n{_remedies(failing, manifest, options)}"
    raise BudgetExceeded(text, Drift(drift_rows(manifest)))


def _listed(breaches: Sequence[str]) -> str:
    return "".join(f"\n  {breach}" for breach in breaches)


def _remedies(failing: Collection[str], manifest: Manifest, options: Options) -> str:
    """Say what the user can do about profiles over budget. No flag helps for modules that torch runs."""
    others = "raise the --budget, or pass --allow-over-budget"
    if all(name in TRACED for name in failing):
        titles = " or ".join(TRACED[name].title for name in failing)
        if not manifest.plan.tensors:  # then no graph was made either
            return f"The search cannot mend {titles}, and there is no ONNX graph that it could mend: {others}"
        leave = "leave it out with --format onnx or --drop-failing-profiles"
        if manifest.profiles.keys() == set(failing):
            leave = "convert to ONNX instead (--format onnx), where the search can find fp32 islands"
        return f"The search cannot mend {titles}, because torch.autocast decides where it rounds: {leave}, {others}"
    if any(name in manifest.exports for name in failing):
        return f"Keep the weights that cause it in fp32 (--keep-fp32 REGEX), {others}"
    keep = "Keep the nodes that cause it in fp32 (--keep-fp32 REGEX)"
    if options.drop_failing_profiles:  # otherwise at least one profile would be left
        return f"Every profile is over budget, so none could be dropped. {keep}, {others}"
    return f"{keep}, leave out profiles (--profile, --format, or --drop-failing-profiles for all that fail), {others}"


def without_profiles(stage: StagingArtifact, manifest: Manifest, profiles: Collection[str]) -> Manifest:
    """Return the manifest without ``profiles``, and delete their graphs from the staging directory."""
    for profile in profiles:
        (stage.path / manifest.profiles[profile].graph).unlink()

    def left(entries: Mapping[str, Any]) -> dict[str, Any]:
        return {name: entry for name, entry in entries.items() if name not in profiles}

    plan = manifest.plan.model_copy(update={"nodes": left(manifest.plan.nodes)})
    return manifest.amended(profiles=left(manifest.profiles), drift=left(manifest.drift), plan=plan)
