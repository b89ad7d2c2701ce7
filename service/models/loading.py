"""An artifact on disk into something that may answer requests: opened, digests checked, loaded, warmed up, judged.

Each step raises an expected error (:mod:`bf16kit.errors`) with the reason that the log and the status page show.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bf16kit.artifact import Artifact, Golden
from bf16kit.drift import METRICS, Budget, DriftSummary
from bf16kit.errors import (
    ArtifactError,
    Bf16kitError,
    BudgetExceeded,
    ConfigError,
    InvalidRequest,
    RuntimeFailure,
    UsageError,
)
from bf16kit.manifest import MANIFEST, Manifest
from bf16kit.runtime import Runtime, RuntimeInfo, kernel
from bf16kit.tensors import BY_NAME, TensorSpec, check_feeds, describe
from bf16kit.wording import brief
from service.contract import Array
from service.drift.comparison import judge
from service.models import choosing
from service.models.choosing import Clock
from service.models.policy import DEFAULT_MAX_BATCH_SIZE, Serving

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """A verified artifact, and what its manifest and ``serving.yaml`` say together."""

    artifact: Artifact
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batch_axis: int | None
    max_batch_size: int
    budget: Budget
    weight_bytes: int
    first_run_seconds: float  # the most that one run may take before it is ready


@dataclass(frozen=True, slots=True)
class Loaded:
    """A runtime that has shown that it may answer. ``info`` says how it runs, and why it was chosen; ``summary`` the
    same for the log."""

    opened: Opened
    runtime: Runtime
    info: RuntimeInfo
    summary: str


@dataclass(frozen=True, slots=True)
class _Ready:
    """A runtime that may answer, and how it answered the golden samples."""

    runtime: Runtime
    golden: Golden | None
    verdict: str


def load(path: Path, serving: Serving, *, device: str, threads: int | None, clock: Clock = time.perf_counter) -> Loaded:
    """The whole gate. ``device`` is the server's ``--device``, ``threads`` what one execution may use (None = the
    runtime's choice), ``clock`` what tells which profile is faster. Nothing is left behind by one that fails."""
    from bf16kit.runtime import loading

    opened = open_artifact(path, serving)
    (first, *others), where = loading.choose_profiles(opened.artifact, serving.profile, device)
    ready: dict[str, _Ready] = {}
    try:
        ready[first] = _ready(opened, serving, first, where, threads)
        why = [_try(ready, opened, serving, each, where, threads) for each in others]
        profile, words = _choose(ready, opened, clock)
        opened.artifact.verify()  # once more: it may have been replaced meanwhile
    except BaseException:
        for each in ready.values():
            each.runtime.close()
        raise
    chosen = ready.pop(profile)
    for each in ready.values():
        each.runtime.close()
    info = replace(chosen.runtime.info, choice="; ".join(filter(None, [words, *why])))
    batches = f"batches of up to {opened.max_batch_size} rows" if opened.max_batch_size else "no batching"
    return Loaded(opened, chosen.runtime, info, f"{_describe(info)}; {batches}; {chosen.verdict}")


def _ready(opened: Opened, serving: Serving, profile: str, device: str, threads: int | None) -> _Ready:
    """``profile`` loaded, warmed up and judged by its golden samples."""
    from bf16kit.runtime import loading

    runtime = loading.load(opened.artifact, profile, device=device, threads=threads)
    try:
        golden = golden_of(opened.artifact, profile)
        warm_up(runtime, opened, serving.warmup, golden)
        return _Ready(runtime, golden, check_golden(runtime, opened, golden))
    except BaseException:
        runtime.close()
        raise


def _try(
    ready: dict[str, _Ready], opened: Opened, serving: Serving, profile: str, device: str, threads: int | None
) -> str:
    """Add ``profile`` to those ``ready``; or say why it does not come into question. None of that fails a model."""
    native = kernel.multiplies_bf16()
    why = choosing.passed_over(opened.artifact.manifest, profile, opened.budget, native=native)
    if not why:
        try:
            ready[profile] = _ready(opened, serving, profile, device, threads)
        except BudgetExceeded as error:
            why = str(error)
        except Bf16kitError as error:  # what a runtime says is for the log, not for whoever asks over the network
            _log.warning("%s: profile %s was passed over: %s", opened.artifact.path, profile, brief(error))
            why = "it does not run here (the log says why)"
    return f"auto: {profile} was passed over, {why}" if why else ""


def _choose(ready: Mapping[str, _Ready], opened: Opened, clock: Clock) -> tuple[str, str]:
    """The profile that answers, of those that may, and why; "" where there is but one."""
    first = next(iter(ready))
    if len(ready) == 1:
        return first, ""
    # The same samples for all: those of a profile's own may have other shapes.
    feeds = _feeds(opened, 1, None) if (golden := ready[first].golden) is None else golden.inputs

    def run(runtime: Runtime) -> Callable[[], object]:
        return lambda: runtime.run(feeds)

    return choosing.fastest(*choosing.medians({name: run(each.runtime) for name, each in ready.items()}, clock=clock))


def open_artifact(path: Path, serving: Serving) -> Opened:
    """Raises ArtifactError (damaged, no artifact, of a newer schema) or ConfigError (serving.yaml asks too much)."""
    artifact = Artifact.open(path, copies=serving.weights == "copied")
    manifest = artifact.manifest
    inputs = tuple(entry.spec() for entry in manifest.inputs)
    outputs = tuple(entry.spec() for entry in manifest.outputs)
    _check_dims(serving, inputs)
    axis = manifest.batch_axis if _share_batch_dimension((*inputs, *outputs), manifest.batch_axis) else None
    return Opened(
        artifact=artifact,
        inputs=inputs,
        outputs=outputs,
        batch_axis=axis,
        max_batch_size=_max_batch_size(serving, axis),
        budget=_budget(artifact).override(serving.budget),
        weight_bytes=sum(tensor.bytes for tensor in manifest.tensors if tensor.file.startswith("weights.")),
        first_run_seconds=serving.first_run_seconds,
    )


def baseline(manifest: Manifest, profile: str) -> dict[str, dict[str, float]]:
    """The drift measured at conversion, by output and metric: the statistic that a budget bounds, as it was counted."""
    entry = manifest.drift.get(profile)
    if entry is None:
        return {}
    summaries = {output: DriftSummary(entry.samples, stats) for output, stats in entry.outputs.items()}
    return {
        output: {metric: value for metric in METRICS if (value := summary.measured(metric)) is not None}
        for output, summary in summaries.items()
    }


def warm_up(runtime: Runtime, opened: Opened, rows: Sequence[int], golden: Golden | None) -> None:
    """Run once with each number of rows, so that no caller pays for a first run's allocations."""
    for count in rows:
        if count > 1 and opened.batch_axis is None:
            raise ConfigError(f"warmup asks for {count} rows, but this model has no batch axis; leave warmup at [1]")
        _run(runtime, opened, _feeds(opened, count, golden))


def check_golden(runtime: Runtime, opened: Opened, golden: Golden | None) -> str:
    """Run the golden samples and hold their drift against the budget; returns a summary for the log.

    Raises :class:`BudgetExceeded` naming output, metric, what was measured and the bound.
    """
    if golden is None:
        return "no golden samples in the artifact, accuracy not checked"
    outputs = _run(runtime, opened, golden.inputs)
    breaches, summary = judge(golden.outputs, outputs, opened.outputs, opened.batch_axis, opened.budget)
    if breaches:
        raise BudgetExceeded(f"golden samples are over the drift budget: {'; '.join(map(str, breaches))}")
    return f"golden samples within budget ({summary})"


def golden_of(artifact: Artifact, profile: str | None = None) -> Golden | None:
    """The artifact's golden samples, those of ``profile`` where it has its own; None when there are none. ArtifactError
    for inputs that are not the model's."""
    manifest = artifact.manifest
    name = manifest.golden_of(profile)
    if name is None:
        return None
    golden, where = artifact.golden(profile), artifact.path / name
    try:
        check_feeds([entry.spec() for entry in manifest.inputs], golden.inputs)
    except InvalidRequest as error:
        raise ArtifactError(f"{where}: {error}") from None
    axis = manifest.batch_axis
    for name, array in golden.inputs.items():
        if axis is not None and axis < array.ndim and not array.shape[axis]:
            raise ArtifactError(f"{where}: input {name!r} has shape {list(array.shape)}, which is not even one sample")
    return golden


def _run(runtime: Runtime, opened: Opened, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """One run whose outputs' dtypes and ranks are held against the manifest: clients are told what it says.

    Raises ArtifactError naming the output.
    """
    try:
        outputs = runtime.run(feeds, seconds=opened.first_run_seconds)
    except RuntimeFailure as error:
        graph = opened.artifact.manifest.profiles[runtime.info.profile].graph
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


def _budget(artifact: Artifact) -> Budget:
    try:
        return Budget.from_dict(artifact.manifest.budget)
    except UsageError as error:
        raise ArtifactError(f"{artifact.path / MANIFEST}: {error}") from None


def _describe(info: RuntimeInfo) -> str:
    path = f", kernel {info.kernel}" if info.kernel else ""
    note = f" ({info.note})" if info.note else ""
    choice = f"; {info.choice}" if info.choice else ""
    return (
        f"{info.backend} on {info.device}, profile {info.profile}, precision {info.precision},"
        f" accumulation {info.accumulation}{path}{note}{choice}"
    )


def _share_batch_dimension(specs: Sequence[TensorSpec], axis: int | None) -> bool:
    """Whether every input and output has the same free dimension at ``axis``: what concatenating and splitting need."""
    if axis is None or not all(len(spec.shape) > axis for spec in specs):
        return False
    names = {spec.shape[axis] for spec in specs}
    return len(names) == 1 and isinstance(names.pop(), str)


def _check_dims(serving: Serving, inputs: Sequence[TensorSpec]) -> None:
    free = dict.fromkeys(dim for spec in inputs for dim in spec.shape if isinstance(dim, str))
    for name in serving.max_dims:
        if name not in free:
            known = f"those of its inputs are {', '.join(free)}" if free else "its inputs have none"
            raise ConfigError(f"serving.yaml bounds dimension {name!r} (max_dims), which is no free one: {known}")


def _max_batch_size(serving: Serving, axis: int | None) -> int:
    asked = serving.max_batch_size
    if axis is not None:
        return DEFAULT_MAX_BATCH_SIZE if asked is None else asked
    if asked:
        raise ConfigError(
            f"serving.yaml asks for max_batch_size {asked}, but this artifact declares no batch axis; leave it out"
        )
    return 0


def _feeds(opened: Opened, rows: int, golden: Golden | None) -> Mapping[str, Array]:
    """``rows`` rows: the golden samples' first row repeated, or zeros where there are none."""
    axis = opened.batch_axis
    if golden is not None:
        if axis is None:
            return golden.inputs
        return {name: np.repeat(array.take([0], axis), rows, axis) for name, array in golden.inputs.items()}

    def shape(spec: TensorSpec) -> list[int]:
        return [dim if isinstance(dim, int) else rows if at == axis else 1 for at, dim in enumerate(spec.shape)]

    return {spec.name: np.zeros(shape(spec), BY_NAME[spec.dtype].numpy) for spec in opened.inputs}
