"""What all fusions share: the graph while they are carried out, and the functions that define the kernel's operators.

Each variant of an operator that a graph uses has its own name and a model-local function in ONNX's operators.
(Overloads of one function work in ONNX Runtime, but not everywhere: onnx 1.23's evaluator silently takes the last one
for all.) If the kernel's library is not registered, ONNX Runtime inlines the function and folds the weight to fp32 at
load. The results are the same within fp32 rounding, with the memory that fp32 takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import onnx_ir as ir

from bf16kit.numerics.panels import WIDTH
from bf16kit.runtime.ort.kernel import DOMAIN
from converter.graph.names import FreshNames, all_value_names

_REDUCTION_AXES_SINCE = 18  # from this opset on, the axes are an input of ReduceMax and ReduceMean
_FLOAT, _BFLOAT16 = int(ir.DataType.FLOAT), int(ir.DataType.BFLOAT16)

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


@dataclass
class Fusing:
    """The graph of ``model`` while fusions are carried out in it.

    ``narrow`` names the initializers stored in bf16, ``panels`` those stored in panels, each with the axis that holds
    the columns. Products named in ``rounding`` round what they multiply. No fusion is anchored at a node in
    ``refused``; ``anchor`` is the node at which one is carried out. ``functions`` are the definitions of the operators
    inserted so far, by name; ``made`` are values that several fusions share, such as masks.
    """

    model: ir.Model
    narrow: Collection[str]
    panels: Mapping[str, int]
    rounding: Collection[str]
    refused: Collection[str]
    anchor: str = ""
    functions: dict[str, ir.Function] = field(default_factory=dict)
    made: dict[object, ir.Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph, self.opset = self.model.graph, self.model.opset_imports[""]
        self._fresh = FreshNames(all_value_names(self.model) | {node.name or "" for node in self.graph.all_nodes()})

    def fresh(self, name: str) -> str:
        return self._fresh.make(name)

    def insert(self, node: ir.Node, before: ir.Node, name: str, kind: ir.TypeProtocol | None, shape: Dims) -> ir.Value:
        """Insert ``node`` before another and return its output; both get fresh names made from ``name``."""
        node.name = self.fresh(name)
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
        name: str | None,
        outputs: int = 1,
    ) -> ir.Node:
        """Insert a node of the kernel's operator that ``function`` defines; its outputs are still unnamed."""
        self.functions[function.name] = function
        node = ir.node(function.name, inputs, attributes, domain=DOMAIN, name=name, num_outputs=outputs)
        self.graph.insert_before(before, node)
        return node

    def replace(
        self,
        kind: Kind,
        anchor: ir.Node,
        nodes: Sequence[ir.Node],
        made: ir.Node,
        replaced: Mapping[ir.Value, ir.Value],
        shape: Dims = None,
    ) -> Fusion:
        """Put each new value in the place of an old one, with its name, type and shape, and remove ``nodes``.

        ``shape`` is given if the new value has another one. Nodes that only ``nodes`` read are removed as well. Returns
        a record of the fusion by the kernel's node ``made``.
        """
        names = [value.name or "" for value in replaced]
        removed = tuple(node.name or "" for node in nodes)
        for old, new in replaced.items():
            new.type, new.shape = old.type, old.shape if shape is None else ir.Shape(shape)
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        self._remove(nodes)
        for (old, new), name in zip(replaced.items(), names, strict=True):
            old.name = None
            new.name = name
        return Fusion(kind, anchor.name or "", made.name or "", removed, tuple(names))

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


def rounds_activations(op_type: str) -> bool:
    """Whether the kernel's operator ``op_type`` rounds its activations to bf16."""
    return op_type.partition("_")[0].endswith("Bf16")


def panel_form(n: int) -> str:
    """Return the form of the panels of ``n`` columns: all whole, with a narrower last one, or only a narrower one."""
    return "panels_narrow" if n < WIDTH else "panels_tail" if n % WIDTH else "panels"


def panel_shapes(k: int, n: int) -> dict[str, list[int]]:
    """Return the int64 lists from which :meth:`FunctionBody.matrix` makes a matrix of [k, n], by name.

    They are attributes that only the function reads: functions cannot compute sizes.
    """
    panels, rest = divmod(n, WIDTH)
    if not panels:
        return {"matrix": [k, n]}
    if not rest:
        return {"panels": [panels, k, WIDTH], "matrix": [k, n]}
    whole = n - rest
    return {"parts": [k * whole, k * rest], "panels": [panels, k, WIDTH], "whole": [k, whole], "tail": [k, rest]}


class FunctionBody:
    """The nodes of a function in the operators of ``opset``, 13 or newer, each output with a name."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[ir.Node] = []

    def add(self, op: str, *inputs: ir.Value, outputs: int = 1, **attributes: Any) -> ir.Value:
        """Add a node and return its first output."""
        node = ir.node(op, list(inputs), attributes, num_outputs=outputs)
        self.nodes.append(node)
        for index, output in enumerate(node.outputs):
            output.name = f"t{len(self.nodes)}_{index}"
        return node.outputs[0]

    def number(self, value: float) -> ir.Value:
        return self.add("Constant", value_float=float(value))

    def integers_attribute(self, attribute: str) -> ir.Value:
        """Return the integer list that the caller passes as ``attribute``."""
        return self.add("Constant", value_ints=ir.RefAttr("value_ints", attribute, ir.AttributeType.INTS))

    def number_attribute(self, attribute: str) -> ir.Value:
        """Return the number that the caller passes as ``attribute``."""
        return self.add("Constant", value_float=ir.RefAttr("value_float", attribute, ir.AttributeType.FLOAT))

    def rounded(self, x: ir.Value) -> ir.Value:
        """Return ``x`` rounded to bf16 (to nearest, ties to even) and widened again.

        ONNX Runtime keeps the two casts, because the second does not restore the first one's input (held by a test).
        """
        return self.add("Cast", self.add("Cast", x, to=_BFLOAT16), to=_FLOAT)

    def over_rows(self, op: str, x: ir.Value) -> ir.Value:
        """Apply ``op``, ReduceMax or ReduceMean, to ``x`` over its last dimension, which stays with size 1."""
        if self.opset >= _REDUCTION_AXES_SINCE:
            return self.add(op, x, self.add("Constant", value_ints=[-1]), keepdims=1)
        return self.add(op, x, axes=[-1], keepdims=1)

    def matrix(self, weight: ir.Value, attributes: Mapping[str, str]) -> ir.Value:
        """Return the matrix [k, n] of ``weight``, k·n elements in panels; ``attributes`` names its panel shapes'."""
        lists = {name: self.integers_attribute(attribute) for name, attribute in attributes.items()}
        if "panels" not in lists:
            return self.add("Reshape", weight, lists["matrix"])
        if "parts" not in lists:
            return self._whole(weight, lists["panels"], lists["matrix"])
        panels = self.add("Split", weight, lists["parts"], outputs=2, axis=0)
        last = self.nodes[-1].outputs[1]
        whole = self._whole(panels, lists["panels"], lists["whole"])
        return self.add("Concat", whole, self.add("Reshape", last, lists["tail"]), axis=1)

    def _whole(self, weight: ir.Value, panels: ir.Value, matrix: ir.Value) -> ir.Value:
        """Return [P, k, 32] → [k, P, 32] → [k, 32·P]."""
        turned = self.add("Transpose", self.add("Reshape", weight, panels), perm=[1, 0, 2])
        return self.add("Reshape", turned, matrix)

    def function(
        self, op_type: str, inputs: Sequence[ir.Value], outputs: Mapping[str, ir.Value], attributes: Iterable[str]
    ) -> ir.Function:
        """Return the nodes as the function of the kernel's operator ``op_type``, whose nodes have ``attributes``."""
        for name, output in outputs.items():
            output.name = name
        graph = ir.Graph(inputs, list(outputs.values()), nodes=self.nodes, opset_imports={"": self.opset}, name=op_type)
        declared = [ir.Attr(name, ir.AttributeType.UNDEFINED, None) for name in attributes]
        return ir.Function(DOMAIN, op_type, graph=graph, attributes=declared)
