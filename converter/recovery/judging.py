"""Judges the artifact that a recovery wrote, by the original fp32 outputs and in comparison with the original bf16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import Manifest
from bf16kit.artifact.publish import StagingArtifact
from bf16kit.artifact.recoveryentries import RecoveryEntry
from bf16kit.messages.errors import BudgetExceeded
from converter.convert import Judgement
from converter.options import Options
from converter.process.progress import Progress
from converter.recovery.batches import Batch
from converter.recovery.comparison import Comparison, accuracy_breaches, compare
from converter.recovery.settings import Settings
from converter.recovery.training import TrainingResult
from converter.verify.judging import without_profiles


@dataclass(frozen=True, slots=True)
class EvaluationData:
    """The batches that judge a recovered artifact, their name, and whether they were held out of training."""

    batches: Sequence[Batch]
    origin: str
    held_out: bool


class MadeWorse(Exception):
    """The trained weights do worse in bf16 than the original ones; the text has the numbers."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Compares the written artifact with the original weights' fp32 outputs."""

    options: Options
    settings: Settings
    before: Artifact
    evaluation: EvaluationData
    training_result: TrainingResult
    recovered_from: str
    directory: Path
    rejection: MadeWorse | None = None

    def __call__(self, stage: StagingArtifact, manifest: Manifest, progress: Progress) -> Judgement:
        budget = self.options.budget
        with progress.step("comparing with the original's fp32 answers"):
            draft = stage.draft(manifest)
            found = compare(self.before, draft, self.evaluation.batches, budget, stage.path)
        self._check_worse(found)
        breaches = accuracy_breaches(found, budget) if self.settings.loss == "cross-entropy" else found.breaches
        manifest, notes = self._drop_failing_optional(
            stage, manifest, {profile: lines for profile, lines in breaches.items() if lines}
        )
        notes += self._remarks(found)
        entry = RecoveryEntry(
            recovered_from=self.recovered_from,
            judged_on=self.evaluation.origin,
            samples=len(self.evaluation.batches),
            held_out=self.evaluation.held_out,
            training=self.training_result.training,
            gradients=list(self.training_result.gradients),
            drift=[row for row in found.drift if row.profile in manifest.profiles],
            accuracy=found.accuracy,
        )
        return Judgement(manifest, entry, tuple(notes))

    def _check_worse(self, found: Comparison) -> None:
        """Raise :class:`MadeWorse` if the original weights did better in bf16; never for those weights themselves."""
        if self.training_result.unchanged or self.rejection is not None:
            return
        reason = found.made_worse(by_labels=self.settings.loss == "cross-entropy")
        if reason is not None:
            raise MadeWorse(reason)

    def _drop_failing_optional(
        self, stage: StagingArtifact, manifest: Manifest, breaches: dict[str, list[str]]
    ) -> tuple[Manifest, list[str]]:
        """Return ``manifest`` without optional profiles over the budget; raise :class:`BudgetExceeded` for others."""
        optional = [profile for profile in breaches if profile in self.options.optional_profiles]
        notes = [f"no profile {profile}: {breach}" for profile in optional for breach in breaches[profile]]
        if optional:
            manifest = without_profiles(stage, manifest, optional)
        failed = "".join(
            f"\n  {breach}" for profile in sorted(breaches) if profile not in optional for breach in breaches[profile]
        )
        if not failed:
            return manifest, notes
        if self.options.allow_over_budget:
            return manifest, [*notes, f"not recovered, published because of --allow-over-budget:{failed}"]
        raise BudgetExceeded(
            "not recovered, nothing published; drift from the fp32 outputs of the original weights, on"
            f" {self.evaluation.origin}:{failed}\nTry more --steps or another --learning-rate (remove {self.directory}"
            " first), keep the nodes that cause it in fp32 (--keep-fp32 REGEX), raise the --budget, or publish this"
            " with --resume --allow-over-budget"
        )

    def _remarks(self, found: Comparison) -> list[str]:
        notes = []
        if not self.evaluation.held_out:
            notes.append(
                "recovery was judged on its training data; pass --eval PKG.MOD:LOADER to judge it on other data"
            )
        bound = self.options.budget.bound("relative_l2")
        judged = [row for row in found.drift if row.metric == "relative_l2" and row.before is not None]
        if bound is not None and judged and all((row.before or 0.0) <= bound for row in judged):
            notes.append(
                "bf16 was within budget before recovery, so none was needed; bf16-convert checkpoint gives an"
                " artifact of the original weights"
            )
        if self.rejection is not None:
            notes.append(
                "the original weights were published, rounded, because the trained weights did worse on"
                f" {self.evaluation.origin}: {self.rejection}"
            )
        elif self.training_result.unchanged:
            notes.append(
                "the original weights were published, rounded, because training never reached a lower loss than"
                f" theirs ({self.training_result.training.loss_before:.3g}); try a lower --learning-rate"
                f" ({self.settings.learning_rate:g}), or more --steps"
            )
        worse = [row for row in judged if row.before is not None and row.after > row.before]
        notes += [
            f"profile {row.profile}, output {row.output!r}: recovery made bf16 worse: relative_l2 from the fp32"
            f" outputs of the original weights rose from {row.before:.3g} to {row.after:.3g}"
            for row in worse
        ]
        return notes
