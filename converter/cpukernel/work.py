"""The part of a graph that bf16kit's CPU kernel does: found when the plan is made, used when the graph is built.

The plan's reasons, the weights stored in panels and the nodes that are written all come from one :class:`Work`. A graph
is built from a clone of the planned one; there, nodes are found by their names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from converter.cpukernel.attention import Attention, Choice, Mask, attentions
from converter.cpukernel.epilogues import Epilogue, epilogue
from converter.cpukernel.heads import Operand
from converter.cpukernel.norms import Norm, norms
from converter.cpukernel.products import Layout, Product, lookups, panelled, products


@dataclass(frozen=True, slots=True)
class Fused:
    """A product that the kernel computes, how the kernel reads the weight, and the epilogue that it computes too."""

    product: Product
    layout: Layout
    epilogue: Epilogue


@dataclass(frozen=True, slots=True)
class Work:
    """The kernel's work: products in graph order, tables by the node that looks rows up in them, attention and
    normalisations. ``panels`` are the weights stored in panels, each with the axis that holds the columns."""

    fused: tuple[Fused, ...] = ()
    lookups: Mapping[ir.Node, ir.Value] = field(default_factory=dict)
    panels: Mapping[str, int] = field(default_factory=dict)
    attentions: tuple[Attention, ...] = ()
    norms: tuple[Norm, ...] = ()

    @classmethod
    def of(cls, model: ir.Model, narrow: Collection[str], panels: Mapping[str, int] | None = None) -> Work:
        """Find what the kernel can do in ``model``, whose initializers in ``narrow`` are stored in bf16.

        ``panels`` names the weights to store in panels; by default, those that :func:`panelled` finds. Requires: types
        are known.
        """
        found = products(model, narrow)
        panels = panelled(found) if panels is None else panels
        return cls(
            tuple(Fused(p, layout, epilogue(p)) for p in found.values() if (layout := p.layout(panels)) is not None),
            lookups(model, {name for name, axis in panels.items() if axis == 0}),
            panels,
            tuple(attentions(model)),
            tuple(norms(model)),
        )

    def fused_in(self, model: ir.Model) -> list[Fused]:
        """Return the products in ``model``, a clone of the model that this was found in, with the same names."""
        there = _There(model)
        return [
            Fused(
                replace(each.product, node=there.node(each.product.node), weight=there.value(each.product.weight)),
                each.layout,
                _moved(each.epilogue, there),
            )
            for each in self.fused
        ]

    def lookups_in(self, model: ir.Model) -> dict[ir.Node, ir.Value]:
        """Return the look-ups in a clone."""
        there = _There(model)
        return {there.node(node): there.value(table) for node, table in self.lookups.items()}

    def attentions_in(self, model: ir.Model) -> list[Attention]:
        """Return the attentions in a clone."""
        there = _There(model)
        return [_attention(each, there) for each in self.attentions]

    def norms_in(self, model: ir.Model) -> list[Norm]:
        """Return the normalisations in a clone."""
        there = _There(model)
        return [_norm(each, there) for each in self.norms]


class _There:
    """Finds nodes and values in a clone, by name."""

    def __init__(self, model: ir.Model) -> None:
        self._given = {value.name: value for value in (*model.graph.initializers.values(), *model.graph.inputs)}
        self._nodes = {node.name: node for node in model.graph}

    def node(self, node: ir.Node) -> ir.Node:
        return self._nodes[node.name]

    def value(self, value: ir.Value) -> ir.Value:
        producer = value.producer()
        if producer is None:
            return self._given[value.name]
        return self.node(producer).outputs[value.index() or 0]


def _moved(epilogue: Epilogue, there: _There) -> Epilogue:
    return replace(
        epilogue,
        bias=None if epilogue.bias is None else there.value(epilogue.bias),
        nodes=tuple(map(there.node, epilogue.nodes)),
        result=there.value(epilogue.result),
        reshape=None if epilogue.reshape is None else there.node(epilogue.reshape),
    )


def _attention(found: Attention, there: _There) -> Attention:
    q, k, v = (_operand(each, there) for each in (found.q, found.k, found.v))
    return replace(
        found,
        q=q,
        k=k,
        v=v,
        masks=tuple(_mask(mask, there) for mask in found.masks),
        softmax=there.node(found.softmax),
        values=there.node(found.values),
        nodes=tuple(map(there.node, found.nodes)),
    )


def _operand(operand: Operand, there: _There) -> Operand:
    return replace(operand, value=there.value(operand.value))


def _mask(mask: Mask, there: _There) -> Mask:
    return replace(mask, condition=there.value(mask.condition)) if isinstance(mask, Choice) else there.value(mask)


def _norm(found: Norm, there: _There) -> Norm:
    return replace(
        found,
        nodes=tuple(map(there.node, found.nodes)),
        x=there.value(found.x),
        scale=there.value(found.scale),
        bias=None if found.bias is None else there.value(found.bias),
        add=None if found.add is None else there.node(found.add),
    )
