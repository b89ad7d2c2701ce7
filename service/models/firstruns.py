"""The first runs of a loaded model: its warm-up, and its golden samples, which must be within the drift budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bf16kit.artifact.artifact import Artifact, Golden
from bf16kit.artifact.manifest import MANIFEST
from bf16kit.drift.metrics import Breach
from bf16kit.messages.errors import ArtifactError, BudgetExceeded, ConfigError, InvalidRequest, RuntimeFailure
from bf16kit.numerics.tensors import BY_NAME, TensorSpec, check_feeds, describe
from bf16kit.runtime import Runtime
from service.contract import Array
from service.drift.gate import judge, run_in_parts
from service.models.opening import OpenedArtifact

#: Golden samples in one run, of up to 64 that there are: attention over long sequences takes gigabytes for so many.
GOLDEN_ROWS = 8
_GRACE_SECONDS = 10.0  # for a run to end after ``first_run_seconds``, which ONNX Runtime checks between two operators
#: Called when a load begins a step, with what it does, as "creating the session of cpu.onnx", and the seconds it may
#: take. It raises if the load was given up.
OnStep = Callable[[str, float], None]


def ignore_step(step: str, seconds: float) -> None:
    """Do nothing: nobody waits for this load."""


def warm_up(
    runtime: Runtime,
    opened: OpenedArtifact,
    rows: Sequence[int],
    golden: Golden | None,
    on_step: OnStep = ignore_step,
) -> None:
    """Run once with each number of rows, so that no client waits for the allocations of a first run."""
    for count in rows:
        if count > 1 and opened.batch_axis is None:
            raise ConfigError(f"warmup asks for {count} rows, but this model has no batch axis; leave warmup at [1]")
        _run(runtime, opened, feeds_of(opened, count, golden), on_step)


def check_golden(runtime: Runtime, opened: OpenedArtifact, golden: Golden | None, on_step: OnStep = ignore_step) -> str:
    """Run the golden samples and check their drift against the budget; return a summary for the log.

    Raises :class:`BudgetExceeded` naming the output, the metric, the measured value and the bound.
    """
    if golden is None:
        return "no golden samples in the artifact, accuracy not checked"
    breaches, summary = judge_golden(lambda feeds: _run(runtime, opened, feeds, on_step), opened, golden)
    if breaches:
        raise BudgetExceeded(f"golden samples are over the drift budget: {'; '.join(map(str, breaches))}")
    return f"golden samples within budget ({summary})"


def judge_golden(
    run: Callable[[Mapping[str, Array]], dict[str, Array]], opened: OpenedArtifact, golden: Golden
) -> tuple[list[Breach], str]:
    """Run the golden samples, a few rows at a time; return what :func:`judge` finds in all of them."""
    most_rows = min(opened.max_batch_size or GOLDEN_ROWS, GOLDEN_ROWS)
    outputs = run_in_parts(run, golden.inputs, opened.batch_axis, most_rows)
    return judge(golden.outputs, outputs, opened.outputs, opened.batch_axis, opened.golden_budget, golden.scales)


def golden_of(artifact: Artifact, profile: str | None = None) -> Golden | None:
    """Return the artifact's golden samples, or None. A profile's own samples take precedence.

    Raises ArtifactError if the inputs do not fit the model.
    """
    manifest = artifact.manifest
    name = manifest.golden_of(profile)
    if name is None:
        return None
    golden, path = artifact.golden(profile), artifact.path / name
    try:
        check_feeds([entry.spec() for entry in manifest.inputs], golden.inputs)
    except InvalidRequest as error:
        raise ArtifactError(f"{path}: {error}") from None
    axis = manifest.batch_axis
    for name, array in golden.inputs.items():
        if axis is not None and axis < array.ndim and not array.shape[axis]:
            raise ArtifactError(f"{path}: input {name!r} has shape {list(array.shape)}, which is less than one sample")
    return golden


def _run(
    runtime: Runtime, opened: OpenedArtifact, feeds: Mapping[str, Array], on_step: OnStep = ignore_step
) -> dict[str, Array]:
    """Run once, and check the outputs' dtypes and ranks against the manifest, which clients rely on.

    Raises ArtifactError naming the output.
    """
    profile = opened.artifact.manifest.profiles.get(runtime.info.profile)
    graph = opened.artifact.manifest.reference if profile is None else profile.graph
    on_step(f"running {graph} for the first time", opened.first_run_seconds + _GRACE_SECONDS)
    try:
        outputs = runtime.run(feeds, seconds=opened.first_run_seconds)
    except RuntimeFailure as error:
        raise RuntimeFailure(f"{graph}, run for the first time: {error}") from error
    for spec in opened.outputs:
        array = outputs[spec.name]
        if array.dtype != BY_NAME[spec.dtype].numpy or len(array.shape) != len(spec.shape):
            raise ArtifactError(
                f"{opened.artifact.path / MANIFEST}: output {spec.name!r} is declared as"
                f" {spec.dtype}{describe(spec.shape)}, and the model gives"
                f" {array.dtype.name}{list(array.shape)}; convert the checkpoint again"
            )
    return outputs


def feeds_of(opened: OpenedArtifact, rows: int, golden: Golden | None) -> Mapping[str, Array]:
    """Return feeds of ``rows`` rows: the first golden row repeated, or zeros without golden samples."""
    axis = opened.batch_axis
    if golden is not None:
        if axis is None:
            return golden.inputs
        return {name: np.repeat(array.take([0], axis), rows, axis) for name, array in golden.inputs.items()}

    def shape(spec: TensorSpec) -> list[int]:
        return [dim if isinstance(dim, int) else rows if at == axis else 1 for at, dim in enumerate(spec.shape)]

    return {spec.name: np.zeros(shape(spec), BY_NAME[spec.dtype].numpy) for spec in opened.inputs}
