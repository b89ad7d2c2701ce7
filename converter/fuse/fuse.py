"""Carries out every fusion of a graph in one pass, in which each node belongs to one fusion at most.

A fusion is found and rewritten at the same moment, on the same graph: the next one sees what is left. Attention comes
first, because a normalisation may read its result, and products last, because their epilogues end where others begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from bf16kit.messages.errors import ConversionError
from bf16kit.messages.wording import brief
from bf16kit.runtime.ort.kernel import DOMAIN
from converter.fuse.attend import attend
from converter.fuse.functions import Fusing, Fusion
from converter.fuse.multiply import groups, join, look_up, multiply
from converter.fuse.norms import normalise
from converter.fuse.products import panelled_weights
from converter.graph.initializers import const_dims

_VERSION = 1  # of the kernel's domain
_OLDEST_IR = 8  # the first IR version with functions in a model
_FUSIONS: tuple[Callable[[Fusing, ir.Node], Fusion | None], ...] = (attend, normalise, look_up, multiply)


@dataclass(frozen=True, slots=True)
class Fusions:
    """The fusions ``made`` in a graph, and the weights stored in ``panels``, each with the axis of its columns.

    ``refused`` holds the reason for each node at which a fusion was undone, by the node's name.
    """

    made: tuple[Fusion, ...] = ()
    panels: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


def fuse(
    base: ir.Model,
    narrow: Collection[str],
    panels: Mapping[str, int] | None = None,
    *,
    rounding: Collection[str] = (),
    refused: Mapping[str, str] | None = None,
) -> tuple[ir.Model, Fusions]:
    """Return a copy of ``base`` in which bf16kit's CPU kernel computes what it can, and a record of that.

    ``narrow`` names the initializers stored in bf16; ``panels`` those stored in panels, by default all that can be.
    Products and attention named in ``rounding`` round what they multiply to bf16. Nothing is fused at the nodes in
    ``refused``, nor where a fusion raises an error: those nodes are added to the record's.

    Requires: types and shapes are known.
    """
    reasons = dict(refused or {})
    chosen = panelled_weights(base.graph, narrow) if panels is None else panels
    while True:
        fusing = Fusing(base.clone(), narrow, chosen, rounding, reasons)
        try:
            made = tuple(_carry_out(fusing))
        except Exception as error:  # noqa: BLE001 - a bug must not cost the conversion; the graph may be half rewritten
            reasons[fusing.anchor] = f"{type(error).__name__}: {brief(str(error))}"
        else:
            _define(fusing.model, fusing.functions)
            _flatten(fusing.graph, chosen)
            return fusing.model, Fusions(made, chosen, reasons)


def _carry_out(fusing: Fusing) -> Iterator[Fusion]:
    graph = fusing.graph
    for find_and_replace in _FUSIONS:
        for node in tuple(graph):
            if node.graph is graph and node.domain == "" and node.name not in fusing.refused:
                fusing.anchor = node.name or ""
                fusion = find_and_replace(fusing, node)
                if fusion is not None:
                    yield fusion
    for group in groups(graph):
        fusing.anchor = group[0].name or ""
        join(fusing, group)


def _define(model: ir.Model, functions: Mapping[str, ir.Function]) -> None:
    """Define the operators of the kernel that nodes of ``model`` use."""
    used = {node.op_type for node in model.graph if node.domain == DOMAIN}
    if used:
        model.functions.update({functions[name].identifier(): functions[name] for name in functions if name in used})
        model.opset_imports[DOMAIN] = _VERSION
        model.ir_version = max(model.ir_version, _OLDEST_IR)


def _flatten(graph: ir.Graph, panels: Collection[str]) -> None:
    """Give weights in panels that the kernel reads the shape that they have for it, one row of elements.

    Raises :class:`ConversionError` if another node reads one as a matrix.
    """
    for name in sorted(panels & graph.initializers.keys()):
        weight = graph.initializers[name]
        domains = {use.node.domain for use in weight.uses()}
        if DOMAIN not in domains:
            continue
        if len(domains) > 1:
            raise ConversionError(f"weight {name!r}, stored in panels, is read by the kernel and by another node")
        weight.shape = ir.Shape((math.prod(const_dims(weight)),))
