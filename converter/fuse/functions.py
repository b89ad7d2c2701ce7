"""What all fusions share: the graph while they are carried out, and the functions that define the kernel's operators.

Each variant of an operator that a graph uses has its own name and a model-local function in ONNX's operators, written
in ONNX's text form. (Overloads of one function work in ONNX Runtime, but not everywhere: onnx 1.23's evaluator silently
takes the last one for all.) If the kernel's library is not registered, ONNX Runtime inlines the function and folds the
weight to fp32 at load. The results are the same within fp32 rounding, with the memory that fp32 takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx.parser
import onnx_ir as ir

from bf16kit.converter.graph.initializers import initializer
from bf16kit.converter.graph.names import FreshNames, all_value_names
from bf16kit.numerics.panels import WIDTH
from bf16kit.runtime.ort.kernel import DOMAIN

ROUNDED = ("Cast <to = 16> (#)", "Cast <to = 1> (#)")  # ONNX Runtime keeps both casts (held by a test)
REDUCTION_AXES_SINCE = 18  # from this opset on, the axes are an input of ReduceMax and ReduceMean

Kind = Literal["attention", "normalisation", "lookup", "product", "convolution", "depthwise", "recurrence"]
CONVOLUTIONS: frozenset[Kind] = frozenset({"convolution", "depthwise"})  # only in profiles that round products
Dims = ir.Shape | Sequence[int | ir.SymbolicDim | str | None] | None


@dataclass(frozen=True, slots=True)
class Fusion:
    """The kernel's node ``node``, which computes what ``nodes`` of the graph before computed, in order.

    All are names. ``anchor`` is the node by which the fusion was found: Softmax, the normalisation or its mean, the
    product, the Gather, the LSTM or GRU. ``outputs`` are the values that it computes under the names that they had
    before.
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
    the columns. Products named in ``rounding`` round what they multiply; of the convolutions of images, those named in
    ``images`` are the kernel's; of those, each three in ``blocks`` become one node. No fusion is anchored at a node in
    ``refused``; ``anchor`` is the node at which one is chosen or carried out. ``functions`` are the definitions of the
    operators inserted so far, by name; ``made`` are values that several fusions share, such as masks.
    """

    model: ir.Model
    narrow: Collection[str] = ()
    panels: Mapping[str, int] = field(default_factory=dict)
    rounding: Collection[str] = ()
    refused: Collection[str] = ()
    images: Collection[str] = ()
    blocks: Sequence[tuple[str, ...]] = ()
    anchor: str = ""
    functions: dict[str, ir.Function] = field(default_factory=dict)
    made: dict[object, ir.Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph, self.opset = self.model.graph, self.model.opset_imports[""]
        self._fresh = FreshNames(all_value_names(self.model) | {node.name or "" for node in self.graph.all_nodes()})

    def fresh(self, name: str) -> str:
        return self._fresh.make(name)

    def at(self, nodes: Iterable[ir.Node]) -> Iterator[ir.Node]:
        """Yield ONNX's own nodes among ``nodes`` that are in the graph and not refused, each while it is the anchor."""
        for node in nodes:
            if node.graph is self.graph and node.domain == "" and node.name not in self.refused:
                self.anchor = node.name or ""
                yield node

    def insert(self, node: ir.Node, before: ir.Node, name: str, kind: ir.TypeProtocol | None, shape: Dims) -> ir.Value:
        """Insert ``node`` before another and return its output; both get a fresh name made from ``name``."""
        output, node.name = node.outputs[0], self.fresh(name)
        output.name, output.type, output.shape = node.name, kind, None if shape is None else ir.Shape(shape)
        self.graph.insert_before(before, node)
        return output

    def integers(self, kind: str, *numbers: int) -> ir.Value:
        """Return an initializer of ``numbers``, named after ``kind`` and them; equal ones of a kind are shared."""
        if (kind, numbers) not in self.made:
            name = self.fresh(f"{kind}/{'x'.join(map(str, numbers))}")
            self.made[kind, numbers] = initializer(self.graph, name, ir.tensor(np.array(numbers, np.int64), name=name))
        return self.made[kind, numbers]

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
    """Return the int64 lists with which a function makes a matrix of [k, n] from its panels, by name.

    They are attributes that only the function reads: functions cannot compute sizes.
    """
    panels, rest = divmod(n, WIDTH)
    if not panels:
        return {"matrix": [k, n]}
    if not rest:
        return {"panels": [panels, k, WIDTH], "matrix": [k, n]}
    whole = n - rest
    return {"parts": [k * whole, k * rest], "panels": [panels, k, WIDTH], "whole": [k, whole], "tail": [k, rest]}


def define(
    op_type: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Mapping[str, Any], opset: int, body: str
) -> ir.Function:
    """Return the function of the kernel's operator ``op_type``, whose nodes have ``attributes`` such as these.

    ``body`` is in ONNX's text form, in operators of ``opset``, 13 or newer. An attribute that a node reads as its last
    operand is there by its name, and so is ``last``, the last dimension.
    """
    read = {name: value for name, value in attributes.items() if f", {name})" in body}
    kinds = {name: "ints" if isinstance(value, list) else "float" for name, value in read.items()}
    nodes = [f"{name} = Constant <value_{kind}: {kind} = @{name}> ()" for name, kind in kinds.items()]
    nodes += ["last = Constant <value_ints = [-1]> ()"] if ", last)" in body else []
    own = f', "{DOMAIN}": 1' if f"{DOMAIN}." in body else ""  # it calls other operators of the kernel
    heads = f'<domain: "{DOMAIN}", opset_import: ["": {opset}{own}]> {op_type} <{", ".join(attributes)}>'
    text = f"{heads} ({', '.join(inputs)}) => ({', '.join(outputs)}) {{ {' '.join(nodes)} {body} }}"
    return ir.serde.deserialize_function(onnx.parser.parse_function(text))


def chain(value: str, result: str, *steps: str) -> str:
    """Return nodes that apply ``steps`` to ``value`` in turn; # in each is what it reads. The last gives ``result``."""
    names = [value, *(f"{result}_{place}" for place in range(1, len(steps))), result]
    taken = zip(steps or ("Identity (#)",), names, names[1:], strict=False)
    return "".join(f"{after} = {step.replace('#', before)} " for step, before, after in taken)


def over_rows(op_type: str, opset: int) -> str:
    """Return the step of :func:`chain` that reduces the last dimension to size 1."""
    if opset >= REDUCTION_AXES_SINCE:
        return f"{op_type} <keepdims = 1> (#, last)"
    return f"{op_type} <axes = [-1], keepdims = 1> (#)"
