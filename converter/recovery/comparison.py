"""Compares the recovered bf16 artifact and the original one with the original's fp32 outputs, and judges by that.

The user wants bf16 outputs as good as the fp32 ones were. So the measure is the outputs of the *original* weights in
fp32. The artifact's own drift, from the recovered weights in fp32, only shows what rounding still costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import Manifest
from bf16kit.artifact.publish import StagingArtifact
from bf16kit.artifact.recoveryentries import RecoveredDrift, RecoveryEntry
from bf16kit.drift.metrics import DriftSummary
from bf16kit.messages.errors import BudgetExceeded
from bf16kit.runtime.loading import load_reference
from converter.convert import Judgement
from converter.options import Options
from converter.process.memory import release_memory
from converter.process.progress import Progress
from converter.verify import measure
from converter.verify.judging import describe_breaches, without_profiles
from converter.verify.running import open_profile
from converter.verify.samples import Samples


class MadeWorse(Exception):
    """The trained weights do worse in bf16 than the original ones; the text has the numbers."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Judges the artifact of a recovery by ``batches``; ``worse`` says why it has the original weights again."""

    options: Options
    before: Artifact
    batches: Samples
    entry: RecoveryEntry
    worse: str | None = None

    def __call__(self, stage: StagingArtifact, manifest: Manifest, progress: Progress) -> Judgement:
        """Raise :class:`MadeWorse` if the original weights did better in bf16, or :class:`BudgetExceeded`."""
        with progress.step("comparing with the original's fp32 answers"):
            rows, breaches = self._compare(stage.draft(manifest))
        judged = [row for row in rows if row.metric == "relative_l2" and row.before is not None]
        now, was = max(row.after for row in judged), max(row.before or 0.0 for row in judged)
        if now > was and self.worse is None and (self.entry.training.kept or self.entry.training.biases_corrected):
            raise MadeWorse(f"relative_l2 {now:.3g}, {was:.3g} before")
        optional = [name for name in self.options.optional_profiles if breaches.get(name)]
        notes = [f"no profile {name}: {breach}" for name in optional for breach in breaches.pop(name)]
        failed = "".join(f"\n  {breach}" for lines in breaches.values() for breach in lines)
        if failed and not self.options.allow_over_budget:
            raise BudgetExceeded(
                "not recovered, nothing published; drift from the fp32 outputs of the original weights, on"
                f" {self.batches.origin}:{failed}\nTry more --steps or another --learning-rate, keep nodes in fp32"
                " (--keep-fp32 REGEX), raise the --budget, or publish this with --resume --allow-over-budget"
            )
        if failed:
            notes.append(f"not recovered, published because of --allow-over-budget:{failed}")
        manifest = without_profiles(stage, manifest, optional) if optional else manifest
        entry = self.entry.model_copy(update={"drift": [row for row in rows if row.profile not in optional]})
        bound = self.options.budget.bound("relative_l2")
        return Judgement(manifest, entry, (*notes, *self._remarks(within=bound is not None and was <= bound)))

    def _remarks(self, *, within: bool) -> Iterator[str]:
        if not self.entry.held_out:
            yield "recovery was judged on its training data; pass --eval PKG.MOD:LOADER to judge it on other data"
        if within:
            yield "bf16 was within budget before recovery, so none was needed: bf16-convert checkpoint"
        reason = self.worse and f"the trained weights did worse on {self.batches.origin}: {self.worse}"
        if not self.entry.training.kept and not self.entry.training.biases_corrected:
            reason = "training never reached a lower loss than theirs; try a lower --learning-rate, or more --steps"
        if reason:
            yield f"the original weights were published, rounded, because {reason}"

    def _compare(self, after: Artifact) -> tuple[list[RecoveredDrift], dict[str, list[str]]]:
        """Return the drift of both artifacts, and by profile where ``after`` is over the budget, one sentence each."""
        outputs, axis = [entry.spec() for entry in after.manifest.outputs], self.before.manifest.batch_axis
        reference = measure.spool(load_reference(self.before), self.batches, after.path)
        scales = measure.slice_scales(reference, outputs, axis)

        def drift(artifact: Artifact, profile: str) -> dict[str, DriftSummary]:
            if profile not in artifact.manifest.profiles:
                return {}
            runtime, _ = open_profile(artifact, profile)
            answers = measure.run_all(runtime, self.batches.feeds)
            found = measure.summarise(measure.drifts(reference, answers, outputs, axis, scales))
            runtime.close()
            release_memory()
            return found

        rows, breaches, budget = [], {}, self.options.budget
        for profile, measured in sorted(after.manifest.drift.items()):
            was, now = drift(self.before, profile), drift(after, profile)
            breaches[profile] = describe_breaches(profile, budget, now)
            for output, summary in sorted(now.items()):
                own, before = DriftSummary(measured.samples, measured.outputs[output]), was.get(output)
                for metric in dict.fromkeys(["relative_l2", *budget.as_dict()]):
                    found = {"before": before and before.judged(metric), "bound": budget.bound(metric)}
                    found |= {"after": summary.judged(metric), "own": own.judged(metric)}
                    if None not in (found["after"], found["own"]):
                        where = {"profile": profile, "output": output, "metric": metric}
                        rows.append(RecoveredDrift.model_validate(where | found))
        return rows, breaches
