"""An artifact opened for serving: its checked files, and its manifest combined with ``serving.yaml``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import MANIFEST, Manifest
from bf16kit.drift.metrics import METRICS, Budget, DriftSummary
from bf16kit.drift.verdicts import golden_budget
from bf16kit.messages.errors import ArtifactError, ConfigError, UsageError
from bf16kit.messages.wording import brief
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.service.drift.comparison import Comparison, all_finite
from bf16kit.service.drift.detector import Calibration
from bf16kit.service.models.serving import DEFAULT_MAX_BATCH_SIZE, Serving
from bf16kit.system import controlgroup
from bf16kit.system.controlgroup import RESERVE

_log = logging.getLogger(__name__)


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

    @property
    def golden_budget(self) -> Budget:
        """The budget for golden samples."""
        return golden_budget(self.artifact.manifest, self.budget)

    def check_room(self, profile: str) -> None:
        """Raise ConfigError if the container has no room for the weights of ``profile`` and a little memory to run.

        The kernel kills a container that exceeds its memory limit, without a message, and a restarted one would be
        killed again. So a model that clearly does not fit is rejected, and the rest of the server goes on. What loading
        and running take in addition is not known before; if it is too much, the log's last line names the model.
        """
        manifest, memory = self.artifact.manifest, controlgroup.memory()
        entry = manifest.profiles[profile]
        least = self.weight_bytes if entry.format == "onnx" else manifest.files[entry.graph].bytes
        if memory is None or not least:
            return
        if not memory.has_room(least):
            raise ConfigError(
                f"it needs {(least + RESERVE) / 1e6:.0f} MB of memory at least, and {memory}; raise the container's"
                " limit (docker run --memory, resources.limits.memory), or serve fewer models in it"
            )
        _log.info("%s: %.0f MB of weights are loaded now; %s", self.artifact.path, least / 1e6, memory)


def open_artifact(path: Path, serving: Serving) -> OpenedArtifact:
    """Open and check an artifact.

    Raises ArtifactError (damaged, no artifact, of a newer schema) or ConfigError (``serving.yaml`` does not fit it).
    """
    artifact = Artifact.open(path, copies=True)
    manifest = artifact.manifest
    inputs = tuple(entry.spec() for entry in manifest.inputs)
    outputs = tuple(entry.spec() for entry in manifest.outputs)
    if serving.fallback.policy == "fp32" and manifest.reference is None:
        raise ConfigError(
            "fallback is fp32, but the artifact has no fp32 reference; set fallback: alert, or convert again"
        )
    free = dict.fromkeys(dim for spec in inputs for dim in spec.shape if isinstance(dim, str))
    for name in serving.max_dims:
        if name not in free:
            known = f"the free dimensions are {', '.join(free)}" if free else "its inputs have no free dimension"
            raise ConfigError(f"serving.yaml sets max_dims for {name!r}, which is not a free dimension: {known}")
    named = [spec.name for spec in outputs]
    if unknown := [name for name in serving.labels if name not in named]:
        raise ConfigError(f"serving.yaml has labels for unknown {unknown[0]!r}; the model has {', '.join(named)}")
    axis = manifest.batch_axis if _share_batch_dimension((*inputs, *outputs), manifest.batch_axis) else None
    if axis is None and serving.max_batch_size:
        raise ConfigError(
            f"serving.yaml asks for max_batch_size {serving.max_batch_size}, but this artifact declares no batch axis;"
            " leave it out"
        )
    rows = DEFAULT_MAX_BATCH_SIZE if serving.max_batch_size is None else serving.max_batch_size
    try:
        budget = Budget.from_dict(manifest.budget)
    except UsageError as error:
        raise ArtifactError(f"{path / MANIFEST}: {error}") from None
    return OpenedArtifact(
        artifact=artifact,
        inputs=inputs,
        outputs=outputs,
        batch_axis=axis,
        max_batch_size=0 if axis is None else rows,
        budget=budget.override(serving.budget),
        weight_bytes=weight_bytes(manifest),
    )


def weight_bytes(manifest: Manifest) -> int:
    """Return the stored size in bytes of the weights that every profile reads."""
    return sum(tensor.bytes for tensor in manifest.tensors if tensor.file.startswith("weights."))


def drift_at_conversion(manifest: Manifest, profile: str) -> dict[str, DriftSummary]:
    """Return the drift that the conversion measured, by output; empty if it measured none."""
    entry = manifest.drift.get(profile)
    return {} if entry is None else {name: DriftSummary(entry.samples, found) for name, found in entry.outputs.items()}


def baseline(manifest: Manifest, profile: str) -> dict[str, dict[str, float]]:
    """Return the drift measured at conversion, by output and metric: the statistics that a budget limits."""
    return {
        output: {metric: value for metric in METRICS if (value := summary.judged(metric)) is not None}
        for output, summary in drift_at_conversion(manifest, profile).items()
    }


def new_comparison(model: str, version: int, opened: OpenedArtifact) -> Comparison:
    """Return the comparison of live responses with the reference, with the budget in force.

    It reads the artifact's measurements. If they cannot be read, the expected drift is learnt from live samples
    instead, and the log says so.
    """
    try:
        measurements = opened.artifact.measurements()
        golden = None if opened.artifact.manifest.golden is None else opened.artifact.golden()
    except (ArtifactError, OSError) as error:
        _log.warning("model %r version %d: the measurements cannot be read: %s", model, version, brief(error))
        measurements, golden = None, None
    calibration = Calibration.of(opened.artifact.manifest, measurements)
    if golden is not None:
        infinite = frozenset(name for name, output in golden.outputs.items() if not all_finite(output))
        calibration = replace(calibration, scales=golden.scales, infinite=infinite)
    return Comparison(
        opened.outputs, opened.batch_axis, opened.budget, model=model, version=version, calibration=calibration
    )


def _share_batch_dimension(specs: Sequence[TensorSpec], axis: int | None) -> bool:
    """Return whether all inputs and outputs have the same free dimension at ``axis``, as batching requires."""
    if axis is None or not all(len(spec.shape) > axis for spec in specs):
        return False
    names = {spec.shape[axis] for spec in specs}
    return len(names) == 1 and isinstance(names.pop(), str)
