"""The last part of a conversion: write the measurements and the report, and rename the artifact into place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.entries import RecoveryEntry
from bf16kit.artifact.manifest import MEASUREMENTS, Manifest
from bf16kit.artifact.publish import StagingArtifact
from bf16kit.drift.measurements import (
    MAX_BYTES,
    MOST_SLICES,
    Layers,
    Measurements,
    ProfileMeasurements,
    SliceEntry,
    input_ranges,
    ranges,
    sample_columns,
)
from bf16kit.drift.metrics import worst_of
from bf16kit.messages.errors import ConversionError
from converter.candidate import Verified
from converter.options import Options
from converter.process.progress import Progress
from converter.report import page
from converter.source import Feeds
from converter.verify.measure import Drifts


def build_measurements(
    manifest: Manifest,
    verified: Verified,
    layers: Mapping[str, Layers],
    feeds: Sequence[Feeds],
    recovery: RecoveryEntry | None = None,
) -> Measurements:
    """Return the content of ``measurements.json`` for the published profiles."""
    certified = verified.certified
    columns = sample_columns({name: run.rows() for name, run in certified.runs.items()})
    searches = {profile: result.entry for profile, result in verified.searches.items()}
    profiles = {
        profile: ProfileMeasurements(
            outputs=columns[profile],
            slices=_worst_slices(certified.runs[profile].drifts),
            layers=layers.get(profile),
            search=searches.get(profile),
        )
        for profile in manifest.drift
    }
    ranged = ranges(verified.census)
    return Measurements(profiles=profiles, ranges=ranged, inputs=input_ranges(feeds), recovery=recovery)


def _worst_slices(found: Sequence[Drifts]) -> dict[str, list[SliceEntry]]:
    by_output = {output: worst_of([one[output] for one in found], MOST_SLICES) for output in found[0]}
    return {
        output: [SliceEntry(error=each.error, axis=each.axis, index=each.index) for each in worst]
        for output, worst in by_output.items()
        if worst
    }


def publish(
    options: Options,
    stage: StagingArtifact,
    manifest: Manifest,
    measurements: Measurements,
    notes: Sequence[str],
    progress: Progress,
) -> Artifact:
    """Write measurements and report into ``stage``, and rename it into place."""
    with progress.step("publishing"):
        measured = measurements.dumps()
        if len(measured) > MAX_BYTES:
            raise ConversionError(
                f"{MEASUREMENTS} would have {len(measured)} bytes, and readers take {MAX_BYTES}; shorten the names of"
                " the model's nodes"
            )
        (stage.path / MEASUREMENTS).write_bytes(measured)
        manifest = manifest.amended(measurements=MEASUREMENTS)
        if options.report:
            files = stage.draft(manifest).manifest.files
            drawn = page.render(manifest, files, notes, measurements)
            (stage.path / page.NAME).write_text(drawn, encoding="utf-8")
        return stage.publish(manifest)
