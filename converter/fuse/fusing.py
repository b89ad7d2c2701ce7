"""The base of fusions: a graph in which they are carried out, and the record of each that was."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import onnx_ir as ir

from bf16kit.runtime.ort.kernel import DOMAIN
from converter.graph.names import FreshNames, all_value_names

Kind = Literal["attention", "normalisation", "lookup", "product"]
Dims = ir.Shape | Sequence[int | ir.SymbolicDim | str | None] | None


@dataclass(frozen=True, slots=True)
class Fusion:
    """The kernel's node ``node``, which computes what ``nodes`` of the graph before computed, in order.

    All are names. ``anchor`` is the node by which the fusion was found: Softmax, the normalisation or its mean, the
    product, the Gather. ``outputs`` are the values that it computes under the names that they had before.
    """

    kind: Kind
    anchor: str
    node: str
    nodes: tuple[str, ...]
    outputs: tuple[str, ...]


class Fusing:
    """A graph while fusions are carried out in it.

    ``narrow`` names the initializers stored in bf16, ``panels`` those stored in panels, each with the axis that holds
    the columns. Products named in ``rounding`` round what they multiply. No fusion is anchored at a node in
    ``refused``. ``functions`` are the definitions of the operators inserted so far, by name.
    """

    def __init__(
        self,
        model: ir.Model,
        narrow: Collection[str],
        panels: Mapping[str, int],
        rounding: Collection[str],
        refused: Collection[str],
    ) -> None:
        self.graph = model.graph
        self.opset = model.opset_imports[""]
        self.narrow = narrow
        self.panels = panels
        self.rounding = rounding
        self.refused = refused
        self.functions: dict[str, ir.Function] = {}
        self.made: dict[object, ir.Value] = {}  # values that several fusions share, such as masks
        self._fresh = FreshNames(all_value_names(model) | {node.name or "" for node in model.graph.all_nodes()})

    def fresh(self, name: str) -> str:
        return self._fresh.make(name)

    def insert(self, node: ir.Node, before: ir.Node, name: str, kind: ir.TypeProtocol | None, shape: Dims) -> ir.Value:
        """Insert ``node`` before another and return its first output; both get fresh names made from ``name``."""
        node.name = node.name or self.fresh(name)
        output = node.outputs[0]
        output.name, output.type = self.fresh(name), kind
        output.shape = None if shape is None else ir.Shape(shape)
        self.graph.insert_before(before, node)
        return output

    def operator(
        self,
        function: ir.Function,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any],
        before: ir.Node,
        *,
        name: str | None,
        outputs: int = 1,
    ) -> Sequence[ir.Value]:
        """Insert a node of the kernel's operator that ``function`` defines, and return its outputs, still unnamed."""
        self.functions[function.name] = function
        node = ir.node(function.name, inputs, attributes, domain=DOMAIN, name=name, num_outputs=outputs)
        self.graph.insert_before(before, node)
        return node.outputs

    def replace(self, replaced: Mapping[ir.Value, ir.Value], nodes: Iterable[ir.Node], shape: Dims = None) -> None:
        """Put each new value in the place of an old one, with its name, type and shape; then remove ``nodes``.

        ``shape`` is given if the new value has another one. Nodes that only ``nodes`` read are removed as well.
        """
        names = [old.name for old in replaced]
        for old, new in replaced.items():
            new.type, new.shape = old.type, old.shape if shape is None else ir.Shape(shape)
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        self._remove(nodes)
        for (old, new), name in zip(replaced.items(), names, strict=True):
            old.name = None
            new.name = name

    def _remove(self, nodes: Iterable[ir.Node]) -> None:
        """Remove ``nodes``, which nothing else reads, and those before them that are then unread."""
        groups = [list(nodes)]
        while groups:
            group = [node for node in groups.pop() if node.graph is self.graph]
            before = dict.fromkeys(v.producer() for node in group for v in node.inputs if v is not None)
            self.graph.remove(group, safe=True)
            groups += [[node] for node in before if node is not None and not any(map(_read, node.outputs))]


def _read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()
