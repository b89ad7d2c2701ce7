"""Opens an artifact for serving: checks its files, and combines its manifest with ``serving.yaml``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import MANIFEST, SINCE_SLICES, Manifest
from bf16kit.drift.metrics import METRICS, Budget, DriftSummary
from bf16kit.messages.errors import (
    ArtifactError,
    ConfigError,
    UsageError,
)
from bf16kit.numerics.tensors import TensorSpec
from service.models.policy import DEFAULT_MAX_BATCH_SIZE, Serving


@dataclass(frozen=True, slots=True)
class OpenedArtifact:
    """A verified artifact, and the settings that follow from its manifest and ``serving.yaml``."""

    artifact: Artifact
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batch_axis: int | None
    max_batch_size: int
    budget: Budget
    weight_bytes: int
    first_run_seconds: float  # time limit of one run before the model is ready

    @property
    def golden_budget(self) -> Budget:
        """The budget for golden samples.

        A converter before schema version 7 let the agreement of a few rows pass by its upper confidence limit, so it
        did not choose golden samples that are within the bound.
        """
        older = self.artifact.manifest.schema_version < SINCE_SLICES
        return self.budget.override({"top1_agreement": None}) if older else self.budget


def open_artifact(path: Path, serving: Serving) -> OpenedArtifact:
    """Open and check an artifact.

    Raises ArtifactError (damaged, no artifact, of a newer schema) or ConfigError (``serving.yaml`` does not fit it).
    """
    artifact = Artifact.open(path, copies=serving.weights == "copied")
    manifest = artifact.manifest
    inputs = tuple(entry.spec() for entry in manifest.inputs)
    outputs = tuple(entry.spec() for entry in manifest.outputs)
    if serving.fallback.policy == "fp32" and manifest.reference is None:
        raise ConfigError(
            "fallback is fp32, but the artifact has no fp32 reference; set fallback: alert, or convert again"
        )
    _check_dims(serving, inputs)
    _check_labels_and_formats(serving, inputs, outputs)
    axis = manifest.batch_axis if _share_batch_dimension((*inputs, *outputs), manifest.batch_axis) else None
    return OpenedArtifact(
        artifact=artifact,
        inputs=inputs,
        outputs=outputs,
        batch_axis=axis,
        max_batch_size=_max_batch_size(serving, axis),
        budget=_budget(artifact).override(serving.budget),
        weight_bytes=weight_bytes(manifest),
        first_run_seconds=serving.first_run_seconds,
    )


def weight_bytes(manifest: Manifest) -> int:
    """Return the stored size in bytes of the weights that every profile reads."""
    return sum(tensor.bytes for tensor in manifest.tensors if tensor.file.startswith("weights."))


def baseline(manifest: Manifest, profile: str) -> dict[str, dict[str, float]]:
    """Return the drift measured at conversion, by output and metric: the statistics that a budget limits."""
    entry = manifest.drift.get(profile)
    if entry is None:
        return {}
    summaries = {output: DriftSummary(entry.samples, stats) for output, stats in entry.outputs.items()}
    return {
        output: {metric: value for metric in METRICS if (value := summary.judged(metric)) is not None}
        for output, summary in summaries.items()
    }


def _budget(artifact: Artifact) -> Budget:
    try:
        return Budget.from_dict(artifact.manifest.budget)
    except UsageError as error:
        raise ArtifactError(f"{artifact.path / MANIFEST}: {error}") from None


def _share_batch_dimension(specs: Sequence[TensorSpec], axis: int | None) -> bool:
    """Return whether all inputs and outputs have the same free dimension at ``axis``, as batching requires."""
    if axis is None or not all(len(spec.shape) > axis for spec in specs):
        return False
    names = {spec.shape[axis] for spec in specs}
    return len(names) == 1 and isinstance(names.pop(), str)


def _check_dims(serving: Serving, inputs: Sequence[TensorSpec]) -> None:
    free = dict.fromkeys(dim for spec in inputs for dim in spec.shape if isinstance(dim, str))
    for name in serving.max_dims:
        if name not in free:
            known = f"the free dimensions are {', '.join(free)}" if free else "its inputs have no free dimension"
            raise ConfigError(f"serving.yaml sets max_dims for {name!r}, which is not a free dimension: {known}")


def _check_labels_and_formats(serving: Serving, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    for key, named, specs in (("labels", serving.labels, outputs), ("formats", serving.formats, inputs)):
        known = [spec.name for spec in specs]
        for name in named:
            if name not in known:
                raise ConfigError(f"serving.yaml has {key} for unknown {name!r}; the model has {', '.join(known)}")


def _max_batch_size(serving: Serving, axis: int | None) -> int:
    requested = serving.max_batch_size
    if axis is not None:
        return DEFAULT_MAX_BATCH_SIZE if requested is None else requested
    if requested:
        raise ConfigError(
            f"serving.yaml asks for max_batch_size {requested}, but this artifact declares no batch axis; leave it out"
        )
    return 0
