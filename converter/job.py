"""What the steps of one conversion share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bf16kit.artifact.manifest import Manifest, Plan, ProfileEntry, SpecEntry
from bf16kit.artifact.manifest import Source as SourceEntry
from bf16kit.artifact.publish import StagingArtifact
from converter.options import Options
from converter.process import versions
from converter.process.progress import Progress
from converter.source import Source
from converter.verify.oracle import OracleRun
from converter.verify.samples import Samples
from converter.write.weights import StoredWeights


@dataclass(slots=True)
class Job:
    """One conversion: what was asked for, what was read, and where it is written.

    ``answers`` are the source's own outputs for the first samples. ``traced`` are the profiles that were written from
    the torch module. ``notes`` are for the user: one sentence each.
    """

    options: Options
    stage: StagingArtifact
    progress: Progress
    source: Source
    samples: Samples
    answers: OracleRun
    traced: dict[str, ProfileEntry] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def release_source(self) -> None:
        """Free the source, with its graph and outputs: nothing needs it once the artifact is written and verified."""
        del self.source, self.answers

    def draft_manifest(self, plan: Plan, stored: StoredWeights, profiles: Mapping[str, ProfileEntry]) -> Manifest:
        """Return the manifest with all that is known before anything has run."""
        options, source = self.options, self.source
        checkpoint = source.checkpoint
        drawn_by = ["matplotlib"] if options.report else []
        return Manifest(
            model=options.target.model,
            inputs=[SpecEntry.of(spec) for spec in source.inputs],
            outputs=[SpecEntry.of(spec) for spec in source.outputs],
            profiles=dict(profiles),
            reference="reference.onnx" if options.residual and source.graph is not None else None,
            tensors=sorted(stored.tensors.values(), key=lambda entry: entry.name),
            checkpoint=list(stored.checkpoint),
            plan=plan,
            budget=options.budget.as_dict(),
            source=SourceEntry(
                format=checkpoint.format,
                sha256=checkpoint.sha256,
                bytes=checkpoint.nbytes,
                tensors=len(checkpoint.tensors),
            ),
            given=list(source.given),
            tools={**versions.versions([*source.tools, *drawn_by]), **source.foreign_versions},
            seed=options.seed,
            options=options.recorded(),
        )
