"""Replaces attention by one node of bf16kit's CPU kernel: from query, key and value to the merged heads."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from bf16kit.runtime.kernel import DOMAIN
from converter.fuse.attention import Mask, SelectionMask
from converter.fuse.attentionop import AttentionVariant, attributes, function
from converter.fuse.functions import define
from converter.fuse.work import KernelWork
from converter.graph.initializers import initializer
from converter.graph.names import FreshNames, all_value_names
from converter.graph.step import Step
from converter.passes.rewriting import replace_output

FLOAT = ir.DataType.FLOAT


class Attend(Step):
    """Replace each attention of ``work`` by ``bf16kit::Attention_…``, and define each variant as a function.

    If the product with the values is named in ``rounding``, the operator is ``bf16kit::AttentionBf16_…``. The node
    takes the name of that product, and its output the name and place of the output of the Reshape that merged the
    heads. A mask that selects becomes one that is added, made once for all its uses.

    Requires: types and shapes are known.
    """

    name = "use the CPU kernel's attention"

    def __init__(self, work: KernelWork, rounding: Collection[str] = ()) -> None:
        super().__init__()
        self._work = work
        self._rounding = rounding

    def apply(self, model: ir.Model) -> bool:
        found = self._work.attentions_in(model)
        masks = _Masks(model)
        variants: dict[AttentionVariant, None] = {}
        for attention in found:
            variant = AttentionVariant.of(attention, rounds=attention.values.name in self._rounding)
            variants[variant] = None
            operands = [attention.q.value, attention.k.value, attention.v.value]
            mask = masks.sum(attention.masks, attention.values)
            inputs = operands if mask is None else [*operands, mask]
            kernel_node = ir.node(
                variant.op_type, inputs, attributes(attention), domain=DOMAIN, name=attention.values.name
            )
            model.graph.insert_before(attention.values, kernel_node)
            output, old_output = kernel_node.outputs[0], attention.result.outputs[0]
            output.type, output.shape = old_output.type, ir.Shape(attention.shape)
            replace_output(model.graph, attention.result, output)
            model.graph.remove(attention.nodes[-2::-1], safe=True)
        if found:
            define(model, [function(variant, model.opset_imports[""]) for variant in variants])
        return bool(found)


class _Masks:
    """The masks added to scores; made here if the graph has them only in parts or as a selection."""

    def __init__(self, model: ir.Model) -> None:
        self._graph = model.graph
        self._fresh = FreshNames(all_value_names(model) | {node.name or "" for node in model.graph.all_nodes()})
        self._added: dict[SelectionMask, ir.Value] = {}

    def sum(self, masks: Sequence[Mask], before: ir.Node) -> ir.Value | None:
        """Return one value for all ``masks``, computed before the node ``before``; None if there are no masks."""
        total: ir.Value | None = None
        for mask in masks:
            value = self._number(mask, before) if isinstance(mask, SelectionMask) else mask
            total = value if total is None else self._insert(ir.node("Add", [total, value]), before)
        return total

    def _number(self, mask: SelectionMask, before: ir.Node) -> ir.Value:
        """Return a value that is ``mask.number`` where the mask hides, and 0 elsewhere."""
        if mask not in self._added:
            hidden, shown = (self._constant(number) for number in (mask.number, 0.0))
            branches = [hidden, shown] if mask.hides else [shown, hidden]
            self._added[mask] = self._insert(ir.node("Where", [mask.condition, *branches]), before)
        return self._added[mask]

    def _constant(self, number: float) -> ir.Value:
        name = self._fresh.make("attention/number")
        return initializer(self._graph, name, ir.tensor(np.float32(number), name=name))

    def _insert(self, node: ir.Node, before: ir.Node) -> ir.Value:
        node.name = self._fresh.make("attention/mask")
        output = node.outputs[0]
        output.name, output.type = node.name, ir.TensorType(FLOAT)
        self._graph.insert_before(before, node)
        return output
