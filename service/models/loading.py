"""Loads an artifact until it may answer requests: opens it, checks digests, loads, warms up, and checks golden samples.

Each step raises an expected error (:mod:`bf16kit.messages.errors`) with the reason that the log and the status page
show.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from bf16kit.artifact.artifact import Golden
from bf16kit.messages.errors import (
    Bf16kitError,
    BudgetExceeded,
    RuntimeFailure,
)
from bf16kit.messages.wording import brief
from bf16kit.runtime import Runtime, RuntimeInfo, available_cpus
from bf16kit.runtime.memory.weightstore import PRIVATE_STORE, CachingWeightStore, WeightStore
from bf16kit.runtime.ort import kernel
from service.models import profilechoice
from service.models.firstruns import OnStep, check_golden, feeds_of, golden_of, ignore_step, warm_up
from service.models.memorycheck import check_room
from service.models.opening import OpenedArtifact, open_artifact
from service.models.parallelism import ROWS, Clock, Parallelism, choose_parallelism
from service.models.policy import AUTO, Serving

_log = logging.getLogger(__name__)
#: A step of a load, as opening a session is given up after this time, plus the time to read the artifact from a slow
#: disk. Others load meanwhile, so it is generous: it is for what never ends.
STEP_SECONDS = 600.0
_SLOWEST_DISK = 20e6  # bytes a second


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
    on_step: OnStep = ignore_step,
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
        opened,
        chosen.runtime,
        info,
        chosen.verdict,
        summary,
        parallelism.instances,
        parallelism.narrow,
        chosen.golden,
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
        feeds_of(opened, rows, chosen.golden),
        resources.threads or available_cpus(),
        clock=clock,
    )


def _describe(info: RuntimeInfo) -> str:
    path = f", kernel {info.kernel}" if info.kernel else ""
    note = f" ({info.note})" if info.note else ""
    choice = f"; {info.choice}" if info.choice else ""
    return (
        f"{info.backend} on {info.device}, profile {info.profile}, precision {info.precision},"
        f" accumulation {info.accumulation}{path}{note}{choice}"
    )
