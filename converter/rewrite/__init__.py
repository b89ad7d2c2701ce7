"""Turns a source graph into the graphs that are written, by a list of small steps.

``prepare`` runs the whole list. The **reference** is the source graph made explicit, without further changes: functions
inlined, every constant an initializer of the main graph, equal weights stored once, everything named. The **base**
graph is the one that profiles start from. In it, operators are recent enough for bf16, and masks are within bf16's
range. BatchNorm is folded into weights, except those that were bf16 or fp16. The **cuda** graph is the base with
operators that have no bf16 kernel rewritten into operators that have one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import onnx_ir as ir

from bf16kit.converter.graph.types import Step, infer_types, run
from bf16kit.converter.rewrite.batchnorm import fold_batchnorm
from bf16kit.converter.rewrite.clampmasks import clamp_masks
from bf16kit.converter.rewrite.explicit import (
    constants_to_initializers,
    drop_unused,
    hoist_initializers,
    inline_functions,
    name_everything,
    remove_identities,
    share_equal_weights,
)
from bf16kit.converter.rewrite.integers import compute_integers
from bf16kit.converter.rewrite.lowering import check_opset, lower_for_cuda, raise_opset
from bf16kit.converter.rewrite.matching import Match, match
from bf16kit.numerics.residual import Scale, is_half
from bf16kit.numerics.tensors import Array

__all__ = ["Match", "Prepared", "prepare", "run"]


@dataclass(frozen=True)
class Prepared:
    """The three graphs of one model, which share their weights in memory, and how their initializers are related.

    Initializers of the same name in two graphs are the same tensor, with two exceptions. For names in ``folds``, the
    ``reference`` holds the source's weight and the others hold it multiplied by a BatchNorm. For names in ``clamped``,
    the others hold the mask within bf16's range. ``matches`` maps each checkpoint tensor to the initializer of
    ``reference`` that holds it.
    """

    reference: ir.Model
    base: ir.Model
    cuda: ir.Model
    folds: Mapping[str, Scale]
    clamped: frozenset[str]
    matches: Mapping[str, Match]


def prepare(
    model: ir.Model,
    checkpoint: Mapping[str, Array] | None = None,
    *,
    orders: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    half_precision: Collection[str] = (),
) -> Prepared:
    """Prepare ``model`` (fp32, any opset ONNX Runtime accepts; changed in place) for narrowing.

    ``checkpoint`` holds the source's tensors by name. Initializers that match one of them, as it is or transposed, take
    its name. ``orders`` gives the order of axes in the graph for tensors that are permuted otherwise. BatchNorm is not
    folded into tensors that are bf16 or fp16 in the checkpoint or named in ``half_precision``. Raises
    :class:`ConversionError` that names the failed step.
    """
    explicit = [check_opset, inline_functions, name_everything, constants_to_initializers, hoist_initializers]
    reference = run([*explicit, share_equal_weights, infer_types], model)
    checkpoint = checkpoint or {}
    matches = match(reference.graph, checkpoint, orders)
    found = {match.initializer for name, match in matches.items() if is_half(checkpoint[name].dtype.name)}
    folds: dict[str, Scale] = {}
    clamped: set[str] = set()
    fold = partial(fold_batchnorm, folds=folds, half_precision=found.union(half_precision))
    clamp = partial(clamp_masks, clamped=clamped)
    lowering: list[Step] = [remove_identities, raise_opset, compute_integers, fold, clamp, drop_unused, infer_types]
    base = run(lowering, reference.clone())
    cuda = run([lower_for_cuda, infer_types], base.clone())
    return Prepared(reference, base, cuda, folds, frozenset(clamped), matches)
