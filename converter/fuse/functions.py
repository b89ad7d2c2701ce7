"""Defines the kernel's ``bf16kit::MatMul_…`` in ONNX's own operators, for where its library is not registered.

``bf16kit::MatMulBf16_…`` also round the activations to bf16 before the product.

Each variant of the product that a graph uses is an operator with its own name and a model-local function. (Overloads of
one function work in ONNX Runtime, but not everywhere: onnx 1.23's evaluator silently takes the last one for all.) If
the operator is not registered, ONNX Runtime inlines the function and folds the weight to fp32 at load. The results are
the same within fp32 rounding, with the memory that fp32 takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import onnx_ir as ir

from bf16kit.runtime.ort.kernel import DOMAIN
from converter.fuse.activations import Activation
from converter.fuse.products import Layout
from converter.fuse.unpanel import matrix_nodes, panel_form, panel_shapes
from converter.graph.names import FreshNames, all_value_names

_GELU_SINCE = 20
_REDUCTION_AXES_SINCE = 18  # from this opset on, the axes are an input of ReduceMax and ReduceMean


@dataclass(frozen=True, slots=True)
class ProductVariant:
    """One variant of the operator. ``lists`` names the integer lists among its attributes. With ``rounds``, x is
    rounded to bf16 before the product."""

    layout: Layout
    lists: tuple[str, ...]
    bias: bool
    activation: Activation
    rounds: bool = False

    @classmethod
    def of(
        cls, layout: Layout, k: int, n: int, *, bias: bool, activation: Activation, rounds: bool = False
    ) -> ProductVariant:
        return cls(layout, tuple(lists(layout, k, n)), bias, activation, rounds)

    @property
    def op_type(self) -> str:
        """The operator's name, as ``MatMul_panels_tail_bias_relu``; kernels/ort/operators.cpp registers them all."""
        parts: list[str] = [stem(1, self.rounds), panel_form(self.lists) if self.layout == "panels" else self.layout]
        if self.bias:
            parts.append("bias")
        if self.activation != "none":
            parts.append(self.activation)
        return "_".join(parts)


def stem(count: int, rounds: bool) -> str:
    """Return the beginning of the names of operators with ``count`` products."""
    return f"MatMul{count if count > 1 else ''}{'Bf16' if rounds else ''}"


def rounds_activations(op_type: str) -> bool:
    """Whether the kernel's operator ``op_type`` rounds its activations to bf16."""
    return op_type.partition("_")[0].endswith("Bf16")


def lists(layout: Layout, k: int, n: int) -> dict[str, list[int]]:
    """Return the attributes that are integer lists. Only the function reads them: functions cannot compute sizes."""
    return panel_shapes(k, n) if layout == "panels" else {}


def function(variant: ProductVariant, opset: int) -> ir.Function:
    """Return the function of ``variant`` in the operators of ``opset``, 13 or newer.

    X [..., k], W (k·n in panels, or [n, k]), and the bias [n] if it has one → Y [..., n].
    """
    inputs = [ir.Value(name=name) for name in ("X", "W", "B")[: 3 if variant.bias else 2]]
    body = FunctionBody(opset)
    x = body.rounded(inputs[0]) if variant.rounds else inputs[0]
    result = body.product(x, _matrix(body, variant, inputs[1]), inputs[2] if variant.bias else None)
    result = _ACTIVATIONS[variant.activation](body, result)
    result.name = "Y"
    return body.function(variant.op_type, inputs, [result], ("k", "n", "layout", "activation", *variant.lists))


class FunctionBody:
    """The nodes of a function, each output with a name."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[ir.Node] = []

    def add(self, op: str, *inputs: ir.Value, **attributes: int | float | str | list[int]) -> ir.Value:
        self.extend([ir.node(op, list(inputs), attributes=attributes)])
        return self.nodes[-1].outputs[0]

    def extend(self, nodes: list[ir.Node]) -> None:
        for node in nodes:
            self.nodes.append(node)
            for index, output in enumerate(node.outputs):
                output.name = f"t{len(self.nodes)}_{index}"

    def rounded(self, x: ir.Value) -> ir.Value:
        """Return ``x`` rounded to bf16 (to nearest, ties to even) and widened again.

        ONNX Runtime keeps the two casts, because the second does not restore the first one's input (held by a test).
        """
        return self.add("Cast", self.add("Cast", x, to=int(ir.DataType.BFLOAT16)), to=int(ir.DataType.FLOAT))

    def product(self, x: ir.Value, matrix: ir.Value, bias: ir.Value | None) -> ir.Value:
        """Return x · matrix, with the matrix widened to fp32, plus the bias if there is one."""
        result = self.add("MatMul", x, self.add("Cast", matrix, to=int(ir.DataType.FLOAT)))
        return result if bias is None else self.add("Add", result, bias)

    def function(
        self, op_type: str, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], attributes: Iterable[str]
    ) -> ir.Function:
        """Return the nodes as the function of the kernel's operator ``op_type``, whose nodes have ``attributes``."""
        graph = ir.Graph(inputs, outputs, nodes=self.nodes, opset_imports={"": self.opset}, name=op_type)
        declared = [ir.Attr(name, ir.AttributeType.UNDEFINED, None) for name in attributes]
        return ir.Function(DOMAIN, op_type, graph=graph, attributes=declared)

    def number(self, value: float) -> ir.Value:
        return self.add("Constant", value_float=float(value))

    def integers_attribute(self, attribute: str) -> ir.Value:
        """Return the integer list that the caller passes as ``attribute``."""
        return self._attribute_constant("value_ints", attribute, ir.AttributeType.INTS)

    def number_attribute(self, attribute: str) -> ir.Value:
        """Return the number that the caller passes as ``attribute``."""
        return self._attribute_constant("value_float", attribute, ir.AttributeType.FLOAT)

    def over_rows(self, op: str, x: ir.Value) -> ir.Value:
        """Apply ``op``, ReduceMax or ReduceMean, to ``x`` over its last dimension, which stays with size 1."""
        if self.opset >= _REDUCTION_AXES_SINCE:
            return self.add(op, x, self.add("Constant", value_ints=[-1]), keepdims=1)
        return self.add(op, x, axes=[-1], keepdims=1)

    def _attribute_constant(self, name: str, attribute: str, kind: ir.AttributeType) -> ir.Value:
        self.extend([ir.Node("", "Constant", [], [ir.RefAttr(name, attribute, kind)])])
        return self.nodes[-1].outputs[0]


def _matrix(body: FunctionBody, variant: ProductVariant, weight: ir.Value) -> ir.Value:
    if variant.layout == "transposed":
        return body.add("Transpose", weight, perm=[1, 0])
    body.extend(matrix_nodes(weight, {name: body.integers_attribute(name) for name in variant.lists}))
    return body.nodes[-1].outputs[0]


def _none(body: FunctionBody, x: ir.Value) -> ir.Value:
    return x


def _relu(body: FunctionBody, x: ir.Value) -> ir.Value:
    return body.add("Relu", x)


def _gelu(body: FunctionBody, x: ir.Value) -> ir.Value:
    """x·½·(1 + erf(x/√2)); before ONNX has Gelu, in the form that ONNX Runtime fuses."""
    if body.opset >= _GELU_SINCE:
        return body.add("Gelu", x)
    erf = body.add("Erf", body.add("Div", x, body.number(math.sqrt(2))))
    return body.add("Mul", body.add("Mul", x, body.add("Add", erf, body.number(1))), body.number(0.5))


def _gelu_tanh(body: FunctionBody, x: ir.Value) -> ir.Value:
    """x·½·(1 + tanh(√(2/π)·(x + 0.044715·x³)))."""
    if body.opset >= _GELU_SINCE:
        return body.add("Gelu", x, approximate="tanh")
    cubed = body.add("Mul", body.add("Pow", x, body.number(3)), body.number(0.044715))
    inner = body.add("Mul", body.add("Add", x, cubed), body.number(math.sqrt(2 / math.pi)))
    doubled = body.add("Add", body.add("Tanh", inner), body.number(1))
    return body.add("Mul", body.add("Mul", x, doubled), body.number(0.5))


def _silu(body: FunctionBody, x: ir.Value) -> ir.Value:
    return body.add("Mul", x, body.add("Sigmoid", x))


_ACTIVATIONS: Mapping[Activation, Callable[[FunctionBody, ir.Value], ir.Value]] = {
    "none": _none,
    "relu": _relu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
}


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
