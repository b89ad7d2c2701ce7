"""Who gives a model's fp32 answers, as its serving.yaml says: this process, or another server."""

from __future__ import annotations

import logging

from bf16kit.errors import ConfigError
from service.drift.policy import ShadowPolicy
from service.drift.shadow import Reference
from service.models.opening import Opened
from service.shadow.memory import Memory, default_bound, fp32_bytes

_log = logging.getLogger(__name__)


def open_reference(name: str, policy: ShadowPolicy, opened: Opened, memory: Memory) -> Reference:
    """Loaded here, or at another server; for the thread of low priority that will ask it.

    Raises ConfigError for one that takes more memory than it may, and what loading it raises; nothing where another
    server cannot be reached, which is asked again.
    """
    if policy.remote is not None:
        from service.shadow.remote import RemoteReference  # gRPC, which nobody else needs here

        remote = RemoteReference(name, policy.remote, opened.inputs, opened.outputs, policy.max_bytes)
        remote.connect()
        return remote
    from bf16kit.runtime import onnx as _onnx  # noqa: F401 -- now: what the library takes is no reference's
    from bf16kit.runtime import rebuilt as _rebuilt  # noqa: F401 -- as above
    from bf16kit.runtime.loading import load_reference

    weights = fp32_bytes(opened.artifact.manifest)
    bound = policy.reference_memory_bytes or default_bound(weights)
    if weights > bound:
        raise ConfigError(
            f"its weights are {weights} bytes in fp32, over shadow.reference_memory_bytes {bound}; raise that in"
            " serving.yaml, or have another server run the reference (shadow.reference: grpc://…)"
        )
    _log.info("%s: its fp32 reference is being loaded", name)  # the last word, should that end the process
    return memory.load(name, bound, lambda: load_reference(opened.artifact, threads=1, low_priority=True))
