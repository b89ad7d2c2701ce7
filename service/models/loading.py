"""Loads an artifact until it may answer requests: opens it, checks digests, loads, warms up, and checks golden samples.

Each step raises an expected error (:mod:`bf16kit.errors`) with the reason that the log and the status page show.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bf16kit.artifact import Artifact, Golden
from bf16kit.drift import Breach
from bf16kit.errors import (
    ArtifactError,
    Bf16kitError,
    BudgetExceeded,
    ConfigError,
    InvalidRequest,
    RuntimeFailure,
)
from bf16kit.manifest import MANIFEST
from bf16kit.runtime import Runtime, RuntimeInfo, kernel
from bf16kit.runtime.hardware import available_cpus
from bf16kit.runtime.weightstore import PRIVATE_STORE, CachingWeightStore, WeightStore
from bf16kit.tensors import BY_NAME, TensorSpec, check_feeds, describe
from bf16kit.wording import brief
from service.contract import Array
from service.drift.gate import judge, run_in_parts
from service.models import profilechoice
from service.models.memorycheck import check_room
from service.models.opening import OpenedArtifact, open_artifact
from service.models.parallelism import ROWS, Clock, Parallelism, choose_parallelism
from service.models.policy import AUTO, Serving

_log = logging.getLogger(__name__)
#: Golden samples in one run, of up to 64 that there are: attention over long sequences takes gigabytes for so many.
GOLDEN_ROWS = 8
#: A step of a load, as opening a session is given up after this time, plus the time to read the artifact from a slow
#: disk. Others load meanwhile, so it is generous: it is for what never ends.
STEP_SECONDS = 600.0
_SLOWEST_DISK = 20e6  # bytes a second
_GRACE_SECONDS = 10.0  # for a run to end after ``first_run_seconds``, which ONNX Runtime checks between two operators
#: Called when a load begins a step, with what it does, as "creating the session of cpu.onnx", and the seconds it may
#: take. It raises if the load was given up.
OnStep = Callable[[str, float], None]


def _ignore_step(step: str, seconds: float) -> None:
    """Do nothing: nobody waits for this load."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runtime that has passed every check before it may answer.

    ``info`` says how the model runs and why that was chosen, ``golden`` how the golden samples came out, ``summary``
    both, for the log.
    """

    opened: OpenedArtifact
    runtime: Runtime
    info: RuntimeInfo
    golden: str
    summary: str
    instances: int = 1
    narrow: Runtime | None = None  # for batches that run beside others, if that has more throughput
    samples: Golden | None = None  # the golden samples

    def close(self) -> None:
        """Free the runtimes of a model that is not going to be served."""
        self.runtime.close()
        if self.narrow is not None:
            self.narrow.close()


@dataclass(frozen=True, slots=True)
class _Resources:
    """Where a runtime runs: its device, the threads of one execution, and the store of its copied weights.

    ``on_step`` is told what is done there; a step takes ``seconds`` at most.
    """

    device: str
    threads: int | None
    weights: WeightStore
    on_step: OnStep
    seconds: float


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A runtime that may answer, and its verdict on the golden samples."""

    runtime: Runtime
    golden: Golden | None
    verdict: str


def load(
    path: Path,
    serving: Serving,
    *,
    device: str,
    threads: int | None,
    weights: WeightStore = PRIVATE_STORE,
    on_step: OnStep = _ignore_step,
    clock: Clock = time.perf_counter,
) -> LoadedModel:
    """Load and check the artifact at ``path``. A failure leaves nothing behind.

    ``device`` is the server's ``--device``. ``threads`` is the number of threads of one execution if ``serving.yaml``
    sets none (None = the runtime's choice). ``weights`` stores copied weights. ``on_step`` is called before every step
    that may take long. ``clock`` times ``instances: auto``.
    """
    from bf16kit.runtime import loading

    seconds = STEP_SECONDS + _bytes_on_disk(path) / _SLOWEST_DISK
    on_step(f"reading and checking the files of {path}", seconds)
    opened = open_artifact(path, serving)
    profiles, chosen_device = loading.choose_profiles(opened.artifact, serving.profile, device)
    native = len(profiles) > 1 and kernel.multiplies_bf16()
    order, reason = profilechoice.in_order(opened.artifact.manifest, profiles, opened.budget, native=native)
    if weights is PRIVATE_STORE:  # in a shared store the weights may be in memory already
        check_room(opened, order[0])
    if serving.instances == AUTO:
        weights = CachingWeightStore(weights)
    threads = threads if serving.threads is None else serving.threads
    resources = _Resources(chosen_device, threads, weights, on_step, seconds)
    chosen, skipped = _load_first(opened, serving, order, resources)
    parallelism = Parallelism()
    try:
        parallelism = _parallelism(chosen, opened, serving, resources, clock)
        on_step(f"checking the files of {path} again", seconds)
        opened.artifact.verify()  # again: files may have been replaced while they were loaded
    except BaseException:
        chosen.runtime.close()
        parallelism.close()
        raise
    info = replace(chosen.runtime.info, choice=skipped or reason)
    batches = f"batches of up to {opened.max_batch_size} rows" if opened.max_batch_size else "no batching"
    summary = "; ".join(filter(None, [_describe(info), batches, parallelism.reason, chosen.verdict]))
    return LoadedModel(
        opened, chosen.runtime, info, chosen.verdict, summary, parallelism.instances, parallelism.narrow, chosen.golden
    )


def _load_first(
    opened: OpenedArtifact, serving: Serving, order: tuple[str, ...], resources: _Resources
) -> tuple[_Candidate, str]:
    """Load the first profile of ``order`` that runs here. Returns it, and why the one before was skipped, if any.

    Only the failure of the last one is the model's.
    """
    *preferred, last = order
    skipped = ""
    for profile in preferred:
        try:
            return _load_candidate(opened, serving, profile, resources), skipped
        except BudgetExceeded as error:
            reason = str(error)
        except Bf16kitError as error:  # a runtime's text is for the log, never for clients
            _log.warning("%s: profile %s was skipped: %s", opened.artifact.path, profile, brief(error))
            reason = "it does not run here (the log says why)"
        skipped = f"auto: {profile} was skipped, {reason}"
    return _load_candidate(opened, serving, last, resources), skipped


def _load_candidate(opened: OpenedArtifact, serving: Serving, profile: str, resources: _Resources) -> _Candidate:
    """Load ``profile``, warm it up and check its golden samples."""
    from bf16kit.runtime import loading

    graph = opened.artifact.manifest.profiles[profile].graph
    resources.on_step(f"creating the session of {graph}", resources.seconds)
    try:
        runtime = loading.load(
            opened.artifact, profile, device=resources.device, threads=resources.threads, weights=resources.weights
        )
    except MemoryError as error:
        raise RuntimeFailure(f"profile {profile} cannot be loaded: {str(error) or 'out of memory'}") from error
    try:
        golden = golden_of(opened.artifact, profile)
        warm_up(runtime, opened, serving.warmup, golden, resources.on_step)
        return _Candidate(runtime, golden, check_golden(runtime, opened, golden, resources.on_step))
    except BaseException:
        runtime.close()
        raise


def _bytes_on_disk(path: Path) -> int:
    """Return what the files in ``path`` occupy on the disk: an artifact's, without the holes of sparse files."""
    try:
        return sum(512 * entry.stat().st_blocks for entry in os.scandir(path))
    except OSError:
        return 0  # opening it reports the error


def _parallelism(
    chosen: _Candidate, opened: OpenedArtifact, serving: Serving, resources: _Resources, clock: Clock
) -> Parallelism:
    """Return how many batches run at once: as ``serving`` says, or as measured here for ``auto``."""
    if serving.instances != AUTO:
        return Parallelism(serving.instances)
    rows, profile = min(opened.max_batch_size, ROWS) or 1, chosen.runtime.info.profile
    resources.on_step("measuring instances: auto", resources.seconds)
    return choose_parallelism(
        chosen.runtime,
        lambda threads: _load_candidate(opened, serving, profile, replace(resources, threads=threads)).runtime,
        _feeds(opened, rows, chosen.golden),
        resources.threads or available_cpus(),
        clock=clock,
    )


def warm_up(
    runtime: Runtime,
    opened: OpenedArtifact,
    rows: Sequence[int],
    golden: Golden | None,
    on_step: OnStep = _ignore_step,
) -> None:
    """Run once with each number of rows, so that no client waits for the allocations of a first run."""
    for count in rows:
        if count > 1 and opened.batch_axis is None:
            raise ConfigError(f"warmup asks for {count} rows, but this model has no batch axis; leave warmup at [1]")
        _run(runtime, opened, _feeds(opened, count, golden), on_step)


def check_golden(
    runtime: Runtime, opened: OpenedArtifact, golden: Golden | None, on_step: OnStep = _ignore_step
) -> str:
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
    runtime: Runtime, opened: OpenedArtifact, feeds: Mapping[str, Array], on_step: OnStep = _ignore_step
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


def _describe(info: RuntimeInfo) -> str:
    path = f", kernel {info.kernel}" if info.kernel else ""
    note = f" ({info.note})" if info.note else ""
    choice = f"; {info.choice}" if info.choice else ""
    return (
        f"{info.backend} on {info.device}, profile {info.profile}, precision {info.precision},"
        f" accumulation {info.accumulation}{path}{note}{choice}"
    )


def _feeds(opened: OpenedArtifact, rows: int, golden: Golden | None) -> Mapping[str, Array]:
    """Return feeds of ``rows`` rows: the first golden row repeated, or zeros without golden samples."""
    axis = opened.batch_axis
    if golden is not None:
        if axis is None:
            return golden.inputs
        return {name: np.repeat(array.take([0], axis), rows, axis) for name, array in golden.inputs.items()}

    def shape(spec: TensorSpec) -> list[int]:
        return [dim if isinstance(dim, int) else rows if at == axis else 1 for at, dim in enumerate(spec.shape)]

    return {spec.name: np.zeros(shape(spec), BY_NAME[spec.dtype].numpy) for spec in opened.inputs}
