"""The versions of the manifest's schema: what each added, and the oldest that can express a manifest."""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bf16kit.artifact.entries import DriftEntry, TensorEntry
    from bf16kit.artifact.manifest import Plan, ProfileEntry

SCHEMA_VERSION = 7  # the newest
SINCE_SLICES = 7  # drift is judged in slices, and top1_agreement at its measured value
ADDITIONS = {
    2: "panels",
    3: "oracle, measurements, requirements, reason codes or bounds of quantiles",
    4: "profile cpu-bf16 or golden samples of a profile's own",
    5: "exports, or profiles of format pt2",
    6: "files that were given beside the checkpoint",
    7: "slice errors",
}
SINCE_3 = ("measurements", "oracle")
_SINCE_4 = frozenset({"cpu-bf16"})  # profiles
SINCE_5 = ("exports",)
SINCE_6 = ("given",)
FIELD = "digest"
_LINE = re.compile(rb'^ "digest": "([0-9a-f]{64})",?$', re.MULTILINE)  # one space of indentation: the top level
_ZEROS = b"0" * 64


def required_schema_version(fields: dict[str, Any]) -> int:
    """Return the oldest schema version that can express ``fields``, so that old readers reject no more than needed."""
    plan: Plan | None = fields.get("plan")
    plans = () if plan is None else (plan.tensors, *plan.nodes.values())
    coded = any(entry.code for entries in plans for entry in entries)
    quantiles = any("." in bound for bound in fields.get("budget", {}))
    packed = any(_is_packed(tensor) for tensor in fields.get("tensors", []))
    profiles: dict[str, ProfileEntry] = fields.get("profiles", {})
    drift: dict[str, DriftEntry] = fields.get("drift", {})
    judged = (metrics for entry in drift.values() for metrics in entry.outputs.values())
    if "slice_error" in fields.get("budget", {}) or any("slice_error" in metrics for metrics in judged):
        return SINCE_SLICES
    if any(fields.get(name) for name in SINCE_6):
        return 6
    if any(fields.get(name) for name in SINCE_5) or any(entry.format == "pt2" for entry in profiles.values()):
        return 5
    if not _SINCE_4.isdisjoint(profiles) or any(entry.golden for entry in profiles.values()):
        return 4
    needing = any(entry.requires for entry in profiles.values())
    if coded or quantiles or packed or needing or any(fields.get(name) for name in SINCE_3):
        return 3
    return 2 if any(tensor.panels is not None for tensor in fields.get("tensors", [])) else 1


def _is_packed(tensor: TensorEntry) -> bool:
    """Return whether the residual of ``tensor`` has packed low halves."""
    return tensor.residual is not None and tensor.residual.bytes < tensor.bytes


def dump(fields: dict[str, Any]) -> bytes:
    """Return ``fields`` as canonical JSON (sorted keys, one space, UTF-8, a newline at the end) with its digest."""
    unsealed = fields | {FIELD: _ZEROS.decode()}
    data = (json.dumps(unsealed, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
    return _with_digest(data, hashlib.sha256(data).hexdigest().encode())


def is_intact(data: bytes) -> bool:
    """Return whether ``data`` carries a digest and is exactly what was sealed."""
    found = _LINE.search(data)
    return found is not None and hashlib.sha256(_with_digest(data, _ZEROS)).hexdigest().encode() == found[1]


def _with_digest(data: bytes, digest: bytes) -> bytes:
    return _LINE.sub(lambda line: line[0].replace(line[1], digest), data, count=1)
