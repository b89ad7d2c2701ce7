"""What a replica of a model takes of a node, by its artifacts' own sizes: Ray places it where there is as much."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bf16kit.artifact import Artifact
from bf16kit.errors import ArtifactError
from bf16kit.manifest import RESIDUAL
from service.models.plan import Plan, Wish

# A replica without a model, and its second process, which has the fp32 reference: what their imports take, measured by
# tests/ray/test_placement.py, with room to spare.
PROCESS_BYTES = 320 << 20
REFERENCE_PROCESS_BYTES = 160 << 20
_FP32_OVER_BF16 = 2  # the reference rebuilds each bf16 weight
_AT_LOAD = 1.5  # times its weights: a copy is made, packed for the kernel, and the golden samples run


@dataclass(frozen=True, slots=True)
class Place:
    """``refused`` says why one of the versions cannot be served; "" where all may be."""

    model: str
    memory: int  # bytes
    refused: str = ""


def place(wish: Wish) -> Place:
    """Of one model. One whose artifacts cannot be opened has a place all the same: its replica says why it is not
    served."""
    memory, refused = PROCESS_BYTES, ""
    for plan in wish.plans:
        try:
            memory += _memory(plan)
        except ArtifactError as error:
            refused = str(error)
    return Place(wish.name, memory, refused)


def _memory(plan: Plan) -> int:
    """Bytes that one version takes beyond the process: its weights, those of its reference, and a batch's answers."""
    files = Artifact.open(Path(plan.path), verify=False).manifest.files
    weights = sum(entry.bytes for name, entry in files.items() if name.startswith("weights."))
    scripted = max((entry.bytes for name, entry in files.items() if name.endswith((".pt", ".pt2"))), default=0)
    measures = plan.serving.shadow.on
    reference = REFERENCE_PROCESS_BYTES + _FP32_OVER_BF16 * weights if measures and RESIDUAL in files else 0
    return int(_AT_LOAD * max(weights, scripted)) + reference + plan.serving.max_response_bytes // 8
