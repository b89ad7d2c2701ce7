"""The memory of a model's replica, from the sizes of its artifacts: Ray places it on a node that has as much.

The reservation is all that a replica has, as a container's limit is for a server. The limits of its requests and its
references follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import Manifest
from bf16kit.messages.errors import ArtifactError
from service.config.memory import MEMORY_DIVISOR
from service.config.serverconfig import ServerConfig
from service.models.plan import DesiredModel, Plan
from service.shadow.referencememory import fp32_bytes

# Memory of a replica without a model, and of its second process, which runs the fp32 references: what their imports
# take, measured by tests/ray/test_placement.py, plus a margin.
PROCESS_BYTES = 320 << 20
REFERENCE_PROCESS_BYTES = 160 << 20
_AT_LOAD = 1.5  # times its weights: they are copied and packed for the kernel, and the golden samples run
_FP32_LOADED = 1.4  # times its fp32 weights: loading a reference took up to 1.33 (service/shadow/referencememory.py)
_REFERENCE_RUN_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one replica. ``refused`` says why one of the versions cannot be served; "" if all may be.

    ``config`` and ``desired`` are what it is started with: the given ones, with limits that fit ``memory``.
    """

    model: str
    memory: int  # bytes
    config: ServerConfig
    desired: DesiredModel
    refused: str = ""


def place(desired: DesiredModel, config: ServerConfig) -> Placement:
    """Return the place of one model's replica, served as ``config`` says.

    A model whose artifacts cannot be opened has a place, too: its replica reports why it is not served. Placing the
    result again gives the same place.
    """
    base, measured, refused = PROCESS_BYTES, False, ""
    for plan in desired.plans:
        try:
            manifest = Artifact.open(Path(plan.path), verify=False).manifest
        except ArtifactError as error:
            refused = str(error)
            continue
        base += _memory(plan, manifest)
        measured = measured or _has_reference(plan, manifest)
    if measured:
        base += REFERENCE_PROCESS_BYTES
    share = base // (MEMORY_DIVISOR - 1)  # so that it is 1/MEMORY_DIVISOR of the total
    requests, message = _limit(config, "max_request_bytes", share), _limit(config, "max_message_bytes", share)
    bounded = config.model_copy(update={"max_request_bytes": requests, "max_message_bytes": message})
    # A single request is accepted up to these sizes, whatever else is in use.
    return Placement(desired.name, base + max(requests, message), bounded, desired, refused)


def _limit(config: ServerConfig, key: str, share: int) -> int:
    given: int = getattr(config, key)
    return given if key in config.model_fields_set else min(given, share)


def _has_reference(plan: Plan, manifest: Manifest) -> bool:
    """Return whether a process beside the replica runs this version's reference."""
    shadow = plan.serving.shadow
    return shadow.on and manifest.reference is not None


def _memory(plan: Plan, manifest: Manifest) -> int:
    """Return the bytes that one version takes beyond the processes: its weights, its references, a batch's outputs."""
    serving, files = plan.serving, manifest.files
    weights = sum(entry.bytes for name, entry in files.items() if name.startswith("weights."))
    scripted = max((entry.bytes for name, entry in files.items() if name.endswith((".pt", ".pt2"))), default=0)
    memory = int(_AT_LOAD * max(weights, scripted)) + serving.max_response_bytes // 8
    if _has_reference(plan, manifest):
        memory += int(_FP32_LOADED * fp32_bytes(manifest)) + _REFERENCE_RUN_BYTES
    if serving.fallback.policy == "fp32" and manifest.reference is not None:
        memory += int(_FP32_LOADED * fp32_bytes(manifest))
    return memory
