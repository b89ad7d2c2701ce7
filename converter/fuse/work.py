"""The part of a graph that bf16kit's CPU kernel does: found when the plan is made, used when the graph is built.

The plan's reasons, the weights stored in panels and the nodes that are written all come from one :class:`KernelWork`. A
graph is built from a clone of the planned one; there, nodes are found by their names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from converter.fuse.attention import Attention, Mask, SelectionMask, attentions
from converter.fuse.epilogues import Epilogue, epilogue
from converter.fuse.heads import Operand
from converter.fuse.norms import Norm, norms
from converter.fuse.products import Layout, Product, lookups, panelled_weights, products


@dataclass(frozen=True, slots=True)
class FusedProduct:
    """A product that the kernel computes, how the kernel reads the weight, and the epilogue that it computes too."""

    product: Product
    layout: Layout
    epilogue: Epilogue


@dataclass(frozen=True, slots=True)
class KernelWork:
    """The kernel's work: products in graph order, tables by the node that looks rows up in them, attention and
    normalisations. ``panels`` are the weights stored in panels, each with the axis that holds the columns."""

    fused: tuple[FusedProduct, ...] = ()
    lookups: Mapping[ir.Node, ir.Value] = field(default_factory=dict)
    panels: Mapping[str, int] = field(default_factory=dict)
    attentions: tuple[Attention, ...] = ()
    norms: tuple[Norm, ...] = ()

    @classmethod
    def of(cls, model: ir.Model, narrow: Collection[str], panels: Mapping[str, int] | None = None) -> KernelWork:
        """Find what the kernel can do in ``model``, whose initializers in ``narrow`` are stored in bf16.

        ``panels`` names the weights to store in panels; by default, those that :func:`panelled_weights` finds.
        Requires: types are known.
        """
        found = products(model, narrow)
        panels = panelled_weights(found) if panels is None else panels
        return cls(
            tuple(
                FusedProduct(p, layout, epilogue(p)) for p in found.values() if (layout := p.layout(panels)) is not None
            ),
            lookups(model, {name for name, axis in panels.items() if axis == 0}),
            panels,
            tuple(attentions(model)),
            tuple(norms(model)),
        )

    def fused_in(self, model: ir.Model) -> list[FusedProduct]:
        """Return the products in ``model``, a clone of the model that this was found in, with the same names."""
        clone = _CloneIndex(model)
        return [
            FusedProduct(
                replace(each.product, node=clone.node(each.product.node), weight=clone.value(each.product.weight)),
                each.layout,
                _epilogue(each.epilogue, clone),
            )
            for each in self.fused
        ]

    def lookups_in(self, model: ir.Model) -> dict[ir.Node, ir.Value]:
        """Return the look-ups in a clone."""
        clone = _CloneIndex(model)
        return {clone.node(node): clone.value(table) for node, table in self.lookups.items()}

    def attentions_in(self, model: ir.Model) -> list[Attention]:
        """Return the attentions in a clone."""
        clone = _CloneIndex(model)
        return [_attention(each, clone) for each in self.attentions]

    def norms_in(self, model: ir.Model) -> list[Norm]:
        """Return the normalisations in a clone."""
        clone = _CloneIndex(model)
        return [_norm(each, clone) for each in self.norms]


class _CloneIndex:
    """Finds nodes and values in a clone, by name."""

    def __init__(self, model: ir.Model) -> None:
        self._values = {value.name: value for value in (*model.graph.initializers.values(), *model.graph.inputs)}
        self._nodes = {node.name: node for node in model.graph}

    def node(self, node: ir.Node) -> ir.Node:
        return self._nodes[node.name]

    def value(self, value: ir.Value) -> ir.Value:
        producer = value.producer()
        if producer is None:
            return self._values[value.name]
        return self.node(producer).outputs[value.index() or 0]


def _epilogue(epilogue: Epilogue, clone: _CloneIndex) -> Epilogue:
    return replace(
        epilogue,
        bias=None if epilogue.bias is None else clone.value(epilogue.bias),
        nodes=tuple(map(clone.node, epilogue.nodes)),
        result=clone.value(epilogue.result),
        reshape=None if epilogue.reshape is None else clone.node(epilogue.reshape),
    )


def _attention(found: Attention, clone: _CloneIndex) -> Attention:
    q, k, v = (_operand(each, clone) for each in (found.q, found.k, found.v))
    return replace(
        found,
        q=q,
        k=k,
        v=v,
        masks=tuple(_mask(mask, clone) for mask in found.masks),
        softmax=clone.node(found.softmax),
        values=clone.node(found.values),
        nodes=tuple(map(clone.node, found.nodes)),
    )


def _operand(operand: Operand, clone: _CloneIndex) -> Operand:
    return replace(operand, value=clone.value(operand.value))


def _mask(mask: Mask, clone: _CloneIndex) -> Mask:
    return (
        replace(mask, condition=clone.value(mask.condition)) if isinstance(mask, SelectionMask) else clone.value(mask)
    )


def _norm(found: Norm, clone: _CloneIndex) -> Norm:
    return replace(
        found,
        nodes=tuple(map(clone.node, found.nodes)),
        x=clone.value(found.x),
        scale=clone.value(found.scale),
        bias=None if found.bias is None else clone.value(found.bias),
        add=None if found.add is None else clone.node(found.add),
    )
