"""Rejects weights that bf16 cannot hold: each is named with its count and a remedy, and nothing is published."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from bf16kit.messages.errors import RangeError
from bf16kit.numerics.rounding import Census, census
from converter.graph.initializers import blocks
from converter.rewrite import Prepared
from converter.rewrite.clampmasks import is_weight

_SHOWN = 5


def take_census(tensor: ir.TensorProtocol) -> Census:
    """Take the census of an fp32 tensor, a block of rows at a time."""
    return sum((census(array) for _, array in blocks(tensor)), Census())


def check_ranges(
    prepared: Prepared, narrow: frozenset[str], found: Mapping[str, Census], *, saturate: bool = False
) -> dict[str, Census]:
    """Return the census of every tensor that is narrowed, as it is rounded: with BatchNorm folded in.

    ``found`` holds the censuses of the tensors that were written; those inside the graph are taken here. Raises
    :class:`RangeError` for NaN in any of them or in other fp32 weights, for infinities outside masks,
    and for finite values that overflow unless ``saturate``.
    """
    complaints: list[str] = []
    for name, value in sorted(prepared.base.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.dtype != ir.DataType.FLOAT:
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
