"""The precision plan: which tensors are stored in bf16, which nodes compute in it, and the reason for each.

Weights that bf16 cannot hold are rejected: each is named with its count and a remedy, and nothing is published.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from bf16kit.artifact.manifest import Plan, PlanEntry
from bf16kit.converter.fuse.functions import CONVOLUTIONS
from bf16kit.converter.fuse.fuse import Fusions, fuse
from bf16kit.converter.graph.cuda_kernels import KernelTable
from bf16kit.converter.graph.initializers import blocks, dims, stays_inline
from bf16kit.converter.graph.operators import label
from bf16kit.converter.plan.decisions import Decision, Islands, Overrides, bf16, fp32
from bf16kit.converter.plan.operands import operands
from bf16kit.converter.plan.profiles import PROFILES
from bf16kit.converter.rewrite import Prepared
from bf16kit.converter.rewrite.clampmasks import is_weight
from bf16kit.messages.errors import RangeError
from bf16kit.numerics.rounding import Census, census

SMALLEST = 256  # elements below which narrowing a matrix is not worth it
_SHOWN = 5  # tensors in an error message


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the fusions for the CPU kernel in the profiles that use it; none if no profile does."""

    plan: Plan
    fusions: Fusions


def make_plan(
    prepared: Prepared,
    *,
    keep_fp32: Iterable[str] = (),
    bf16: Iterable[str] = (),
    islands: Islands | None = None,
    profiles: Iterable[str] = ("cpu", "cuda"),
    kernels: KernelTable | None = None,
    panels: Mapping[str, int] | None = None,
    refused: Mapping[str, str] | None = None,
    convolutions: bool = True,
) -> Planned:
    """Plan ``prepared`` for ``profiles``; without ``convolutions``, the CPU kernel computes none of images.

    ``keep_fp32`` and ``bf16`` are regular expressions searched in the names of nodes and tensors. A node that they keep
    in fp32 keeps its weights in fp32 as well. ``islands`` are what a search found; there a node and its weights are
    separate. ``panels`` and ``refused`` are as in :func:`~bf16kit.converter.fuse.fuse.fuse`. Raises
    :class:`UsageError` for a pattern that is no regular expression or matches nothing.
    """
    kernels = kernels or KernelTable.load()
    overrides = Overrides.parse(keep_fp32, bf16, islands)
    names = {node.name or "" for model in (prepared.base, prepared.cuda) for node in model.graph.all_nodes()}
    overrides.check(names | {value.name or "" for value in _stored(prepared)})
    read = prepared.base.graph.initializers
    exact = operands(prepared.base.graph) - prepared.clamped  # a mask is as good in bf16, and stored once
    tensors = [_tensor(v, overrides, exact, only_reference=v.name not in read) for v in _stored(prepared)]
    narrow = narrowed(tensors)
    chosen = [PROFILES[name] for name in profiles]
    # The same for all profiles that use the kernel: they start from the same graph and share the weights.
    bases = (profile.base(prepared) for profile in chosen if profile.uses_kernel)
    convolutions = convolutions and any(profile.rounds_products for profile in chosen)
    fused = (fuse(base, narrow, panels, convolutions=convolutions, refused=refused)[1] for base in bases)
    fusions = next(fused, Fusions())
    nodes: dict[str, list[PlanEntry]] = {}
    for profile in chosen:
        base = profile.base(prepared)
        made = [fusion for fusion in fusions.made if profile.rounds_products or fusion.kind not in CONVOLUTIONS]
        decided = profile.place(base, narrow, kernels, overrides, made)
        named = ((node.name or "", node) for node in base.graph.all_nodes())
        nodes[profile.name] = [decided[name].entry(name, label(node)) for name, node in named]
    return Planned(Plan(tensors=tensors, nodes=nodes), fusions)


def narrowed(tensors: Iterable[PlanEntry]) -> frozenset[str]:
    """Return the names of the tensors that a plan stores in bf16."""
    return frozenset(entry.name for entry in tensors if entry.precision == "bf16")


def is_matrix(shape: Sequence[int]) -> bool:
    """Whether a tensor of this ``shape`` is worth narrowing."""
    return sum(dim > 1 for dim in shape) >= 2 and math.prod(shape) >= SMALLEST


def _stored(prepared: Prepared) -> list[ir.Value]:
    """Return the fp32 tensors for the weights files: those that profiles read, then those only the reference reads."""
    profiles = prepared.base.graph.initializers
    extra = [v for name, v in prepared.reference.graph.initializers.items() if name not in profiles]
    values = [*(profiles[name] for name in sorted(profiles)), *sorted(extra, key=lambda v: v.name or "")]
    return [
        v
        for v in values
        if v.const_value is not None and v.const_value.dtype == ir.DataType.FLOAT and not stays_inline(v.const_value)
    ]


def _tensor(value: ir.Value, overrides: Overrides, exact: Collection[str], *, only_reference: bool) -> PlanEntry:
    readers = [use.node for use in value.uses()]
    ops = ", ".join(sorted({label(node) for node in readers})) or "none"
    if only_reference:
        decision = fp32("reference_only", "read only by the fp32 reference; folded into other weights")
    else:
        decision = _storage(value, [node.name or "" for node in readers], overrides, exact)
    return decision.entry(value.name or "", ops)


def _storage(value: ir.Value, readers: list[str], overrides: Overrides, exact: Collection[str]) -> Decision:
    """Decide how to store ``value``; ``readers`` are the names of the nodes that read it."""
    name = value.name or ""
    shape = () if value.const_value is None else dims(value.const_value)
    if (kept := overrides.tensor_override(name, readers)) is not None:
        return kept
    if (forced := overrides.bf16_pattern(name)) is not None:
        return bf16("asked_for", f"requested by --bf16 {forced}")
    if is_matrix(shape) and name in exact:
        return fp32("operand", "read element by element: bf16 saves nothing on a CPU, and positions would be inexact")
    if is_matrix(shape):
        return bf16("matrix", f"matrix of {math.prod(shape)} values")
    if sum(dim > 1 for dim in shape) < 2:
        reason = "one-dimensional: such tensors are 0.3 % of a transformer's bytes, and half of its drift if rounded"
        return fp32("vector", reason)
    return fp32("small", f"small: {math.prod(shape)} values")


# --- weights that bf16 cannot hold ------------------------------------------------------------------------------------


def take_census(tensor: ir.TensorProtocol) -> Census:
    """Take the census of an fp32 tensor, a block of rows at a time."""
    return sum((census(array) for _, array in blocks(tensor)), Census())


def check_ranges(
    prepared: Prepared, narrow: frozenset[str], found: Mapping[str, Census], *, saturate: bool = False
) -> dict[str, Census]:
    """Return the census of every tensor that is narrowed, as it is rounded: with BatchNorm folded in.

    ``found`` holds the censuses of the tensors that were written; those inside the graph are taken here. RangeError for
    NaN in any of them or in other fp32 weights, infinities outside masks, and values that overflow unless ``saturate``.
    A scalar may be NaN: it marks what a mean leaves out.
    """
    complaints: list[str] = []
    for name, value in sorted(prepared.base.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.dtype != ir.DataType.FLOAT or not tensor.shape:
            continue
        counts = found[name] if name in found else take_census(tensor)
        problem = complaint(counts, name in narrow and is_weight(value), name in narrow and not saturate)
        if problem is not None:
            folded = " (with BatchNorm folded in)" if name in prepared.folds else ""
            complaints.append(f"tensor {name!r}{folded}: {problem}")
    if complaints:
        more = f"\nand {len(complaints) - _SHOWN} more tensors" if len(complaints) > _SHOWN else ""
        raise RangeError("\n".join(complaints[:_SHOWN]) + more)
    return {name: found[name] for name in sorted(narrow)}


def complaint(counts: Census, finite: bool, in_range: bool) -> str | None:
    """Return what is wrong with a tensor that must be ``finite`` and, if ``in_range``, must not overflow; else None."""
    if counts.nan:
        return f"{counts.nan} of {counts.count} values are NaN; the checkpoint is damaged or its training diverged"
    if finite and counts.inf:
        return f"{counts.inf} of {counts.count} values are infinite; the checkpoint is damaged or its training diverged"
    if in_range and counts.overflow:
        return (
            f"{counts.overflow} of {counts.count} values overflow bfloat16 (largest magnitude {counts.max_abs:.6g});"
            " clamp them with --saturate, or leave the tensor in fp32 with --keep-fp32"
        )
    return None
