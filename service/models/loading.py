"""Loads an artifact until it may answer requests: opens it, checks digests, loads, warms up, and checks golden samples.

Each step raises an expected error (:mod:`bf16kit.messages.errors`) with the reason that the log and the status page
show.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from bf16kit.artifact.artifact import Golden
from bf16kit.artifact.manifest import MANIFEST, Manifest
from bf16kit.drift.metrics import Budget
from bf16kit.messages.errors import ArtifactError, Bf16kitError, BudgetExceeded, ConfigError, RuntimeFailure
from bf16kit.messages.wording import brief
from bf16kit.numerics.tensors import BY_NAME, TensorSpec, describe
from bf16kit.runtime import Runtime, RuntimeInfo, available_cpus
from bf16kit.runtime.memory.weightstore import PRIVATE_STORE, WeightStore
from bf16kit.runtime.ort import kernel
from bf16kit.service.contract import Array
from bf16kit.service.models.goldengate import check_golden, golden_of
from bf16kit.service.models.opened import OpenedArtifact, drift_at_conversion, open_artifact
from bf16kit.service.models.serving import Serving

_log = logging.getLogger(__name__)
#: A step of a load, such as opening a session, is given up after this time. Others load meanwhile, so it is generous:
#: it is for what never ends, and not for a large artifact on a slow disk.
STEP_SECONDS = 1800.0
#: Time limit of a run at load: a graph may never end. ONNX Runtime checks it between two operators.
FIRST_RUN_SECONDS = 300.0
_GRACE_SECONDS = 10.0  # for a run to end after that
#: Called when a load begins a step, with what it does, as "creating the session of cpu.onnx", and the seconds it may
#: take. It raises if the load was given up.
OnStep: TypeAlias = Callable[[str, float], None]


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
    samples: Golden | None = None  # the golden samples

    def close(self) -> None:
        """Free the runtime of a model that is not going to be served."""
        self.runtime.close()


def load(
    path: Path,
    serving: Serving,
    on_step: OnStep = lambda step, seconds: None,
    *,
    device: str,
    threads: int | None,
    weights: WeightStore = PRIVATE_STORE,
) -> LoadedModel:
    """Load and check the artifact at ``path``. A failure leaves nothing behind.

    ``device`` and ``threads`` are those of the server (:func:`threads_of_a_run`). ``weights`` stores copied weights.
    ``on_step`` is called before every step that may take long.
    """
    from bf16kit.runtime import loading

    on_step(f"reading and checking the files of {path}", STEP_SECONDS)
    opened = open_artifact(path, serving)
    manifest = opened.artifact.manifest
    profiles, device = loading.choose_profiles(opened.artifact, serving.profile, device)
    native = len(profiles) > 1 and kernel.multiplies_bf16()
    order, reason = profile_order(manifest, profiles, opened.budget, native=native)
    if weights is PRIVATE_STORE:  # in a shared store the weights may be in memory already
        opened.check_room(order[0])

    def candidate(profile: str) -> tuple[Runtime, Golden | None, str]:
        on_step(f"creating the session of {manifest.profiles[profile].graph}", STEP_SECONDS)
        try:
            runtime = loading.load(
                opened.artifact,
                profile,
                device=device,
                threads=threads_of_a_run(serving.instances, threads),
                weights=weights,
            )
        except MemoryError as error:
            raise RuntimeFailure(f"profile {profile} cannot be loaded: {str(error) or 'out of memory'}") from error
        golden, verdict = _check(runtime, opened, serving, profile, on_step)
        return runtime, golden, verdict

    *preferred, last = order
    for profile in preferred:  # only the failure of the last one is the model's
        try:
            runtime, golden, verdict = candidate(profile)
            break
        except BudgetExceeded as error:
            reason = f"auto: {profile} was skipped, {error}"
        except Bf16kitError as error:  # a runtime's text is for the log, never for clients
            _log.warning("%s: profile %s was skipped: %s", path, profile, brief(error))
            reason = f"auto: {profile} was skipped, it does not run here (the log says why)"
    else:
        runtime, golden, verdict = candidate(last)
    try:
        info = replace(runtime.info, choice=reason)
        on_step(f"checking the files of {path} again", STEP_SECONDS)
        opened.artifact.verify()  # again: files may have been replaced while they were loaded
    except BaseException:
        runtime.close()
        raise
    batches = f"batches of up to {opened.max_batch_size} rows" if opened.max_batch_size else "no batching"
    summary = "; ".join([_describe(info), batches, verdict])
    return LoadedModel(opened, runtime, info, verdict, summary, golden)


def load_fp32(
    label: str, opened: OpenedArtifact, serving: Serving, *, threads: int | None, weights: WeightStore
) -> Runtime:
    """Return the fp32 reference of ``opened`` to answer requests: warm, and checked on the golden samples.

    Its large weights are in ``weights`` if processes share that store. Otherwise ONNX Runtime packs its own copy, which
    is faster for a few rows. Raises what loading a model raises; ArtifactError if there is none, or if the files are
    not those that were loaded.
    """
    from bf16kit.runtime.loading import load_reference

    artifact, started = opened.artifact, time.monotonic()
    shared = None if weights is PRIVATE_STORE else weights
    runtime = load_reference(artifact, threads=threads_of_a_run(serving.instances, threads), weights=shared)
    _, verdict = _check(runtime, opened, serving, None, lambda step, seconds: None)
    _log.info("%s: the fp32 reference is warm after %.2f s: %s", label, time.monotonic() - started, verdict)
    return runtime


def threads_of_a_run(instances: int, threads: int | None) -> int | None:
    """Return the threads of one execution: an equal part of the server's ``threads``, or else of the processors.

    None, for a single instance on a server that sets none, leaves the number to the runtime.
    """
    return threads if instances == 1 else max(1, (threads or available_cpus()) // instances)


# --- the choice of a profile ------------------------------------------------------------------------------------------


def profile_order(
    manifest: Manifest, profiles: tuple[str, ...], budget: Budget, *, native: bool
) -> tuple[tuple[str, ...], str]:
    """Return the profiles to try, and why the first of them is the one to serve; "" if there is no choice.

    ``profiles`` are those for the device, the most accurate first. The others need fewer bits and are faster, so the
    last of them that nothing rules out goes first. It is a rule that needs no measurement, so every process, restart
    and replica serves the same profile on processors of one kind (docs/decisions/0035). ``budget`` is the one in force,
    which may be stricter than the artifact's. ``native``: the kernel does not emulate the bf16 of the others.
    """
    first, *others = profiles
    reason = ""
    for profile in reversed(others):
        measured = drift_at_conversion(manifest, profile)
        breaches = [str(each) for output, found in sorted(measured.items()) for each in budget.breaches(output, found)]
        if not measured:
            skipped = "its drift was never measured"
        elif breaches:
            skipped = f"its drift is over budget: {'; '.join(breaches)}"
        elif not native:
            skipped = "bf16 would be emulated here"
        else:
            return (profile, first), f"auto: {profile} is within budget, and this processor multiplies bf16"
        reason = f"auto: {profile} was skipped, {skipped}"
    return (first,), reason


# --- the first runs ---------------------------------------------------------------------------------------------------


def _check(
    runtime: Runtime, opened: OpenedArtifact, serving: Serving, profile: str | None, on_step: OnStep
) -> tuple[Golden | None, str]:
    """Warm up, then check the golden samples; return these and the verdict. Closes ``runtime`` if anything fails."""
    try:
        golden = golden_of(opened.artifact, profile)
        run = partial(_first_run, runtime, opened, on_step)
        for rows in serving.warmup:  # so that no client waits for the allocations of a first run
            if rows > 1 and opened.batch_axis is None:
                raise ConfigError(f"warmup asks for {rows} rows, but this model has no batch axis; leave warmup at [1]")
            run(feeds_of(opened, rows, golden))
        return golden, check_golden(run, opened, golden)
    except BaseException:
        runtime.close()
        raise


def _first_run(
    runtime: Runtime, opened: OpenedArtifact, on_step: OnStep, feeds: Mapping[str, Array]
) -> dict[str, Array]:
    """Run once, and check the outputs' dtypes and ranks against the manifest, which clients rely on.

    Raises ArtifactError naming the output.
    """
    profile = opened.artifact.manifest.profiles.get(runtime.info.profile)
    graph = opened.artifact.manifest.reference if profile is None else profile.graph
    on_step(f"running {graph} for the first time", FIRST_RUN_SECONDS + _GRACE_SECONDS)
    try:
        outputs = runtime.run(feeds, seconds=FIRST_RUN_SECONDS)
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

    def shape(spec: TensorSpec) -> Sequence[int]:
        return [dim if isinstance(dim, int) else rows if at == axis else 1 for at, dim in enumerate(spec.shape)]

    return {spec.name: np.zeros(shape(spec), BY_NAME[spec.dtype].numpy) for spec in opened.inputs}


# --- words ------------------------------------------------------------------------------------------------------------


def _describe(info: RuntimeInfo) -> str:
    path = f", kernel {info.kernel}" if info.kernel else ""
    note = f" ({info.note})" if info.note else ""
    choice = f"; {info.choice}" if info.choice else ""
    return (
        f"{info.backend} on {info.device}, profile {info.profile}, precision {info.precision},"
        f" accumulation {info.accumulation}{path}{note}{choice}"
    )
