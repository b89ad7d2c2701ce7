"""Loads the fp32 reference to answer requests: with all threads, warmed up, and checked on the golden samples."""

from __future__ import annotations

import logging
import time

from bf16kit.messages.errors import ArtifactError
from bf16kit.runtime import Runtime
from bf16kit.runtime.memory.weightstore import PRIVATE_STORE, WeightStore
from service.models.firstruns import check_golden, golden_of, warm_up
from service.models.opening import OpenedArtifact
from service.models.policy import Serving

_log = logging.getLogger(__name__)


def load_fp32(
    label: str, opened: OpenedArtifact, serving: Serving, *, threads: int | None, weights: WeightStore
) -> Runtime:
    """Return the reference of ``opened``, on ``threads`` threads unless ``serving`` sets another number.

    Its large weights are in ``weights`` if processes share that store. Otherwise ONNX Runtime packs its own copy, which
    is faster for a few rows. Raises what loading a model raises; ArtifactError if the files are not those that were
    loaded.
    """
    from bf16kit.runtime.loading import load_reference

    artifact, started = opened.artifact, time.monotonic()
    if artifact.manifest.reference is None:
        raise ArtifactError(f"{artifact.path} has no fp32 reference; convert the checkpoint again with the residual")
    threads = threads if serving.threads is None else serving.threads
    runtime = load_reference(artifact, threads=threads, weights=None if weights is PRIVATE_STORE else weights)
    try:
        golden = golden_of(artifact)
        warm_up(runtime, opened, serving.warmup, golden)
        verdict = check_golden(runtime, opened, golden)
    except BaseException:
        runtime.close()
        raise
    _log.info("%s: the fp32 reference is warm after %.2f s: %s", label, time.monotonic() - started, verdict)
    return runtime
