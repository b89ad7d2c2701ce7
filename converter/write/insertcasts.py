"""Makes values bf16 where the plan says so, and inserts casts exactly where bf16 and fp32 meet."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import ml_dtypes
import onnx_ir as ir

from bf16kit.messages.errors import ConversionError
from bf16kit.runtime.ort.kernel import DOMAIN as KERNEL
from converter.graph.initializers import const, initializer, stays_inline
from converter.graph.names import FreshNames, all_value_names
from converter.graph.operators import SHAPE_ONLY, Bf16Form, bf16_form
from converter.graph.step import Step

NARROWED = "/bf16"  # ends the name of a constant that was rounded within the graph
FLOAT, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16


class Narrow(Step):
    """Give the nodes of the main graph named in ``bf16_nodes`` bf16 inputs and outputs, and insert casts.

    ``bf16_tensors`` names the initializers stored in bf16. Their type changes here; their data is attached when the
    graph is written. A value is cast at most once in each direction, always from where it was computed, so casts never
    follow each other. Constants inside the graph are rounded instead of cast. The graph's inputs and outputs keep their
    types. The CPU kernel's nodes read their weights as stored, whether they are named or not.

    Requires: types are known, masks are clamped, no graph output is an initializer.
    """

    name = "narrow"

    def __init__(self, bf16_tensors: Collection[str], bf16_nodes: Collection[str]) -> None:
        super().__init__()
        self._tensors = frozenset(bf16_tensors)
        self._nodes = frozenset(bf16_nodes)

    def apply(self, model: ir.Model) -> bool:
        graph, opset = model.graph, model.opset_imports[""]
        forms = {n: _form(n, opset) for n in graph if n.name in self._nodes or n.domain == KERNEL}
        narrow = [value for name, value in graph.initializers.items() if name in self._tensors]
        narrow += [node.outputs[i] for node, form in forms.items() for i in form.outputs]
        narrow = [value for value in narrow if value.dtype == FLOAT and value.name is not None]
        for computed in narrow:
            computed.type = ir.TensorType(BFLOAT16)
        casts = _Casts(graph, FreshNames(all_value_names(model)))
        for computed in narrow:
            _widen_for_others(computed, forms, casts)
        for node, form in forms.items():
            for index in form.inputs:
                value = node.inputs[index]
                if value is not None and value.dtype == FLOAT:
                    node.replace_input_with(index, casts.to(value, BFLOAT16))
        casts.insert()
        return bool(narrow)


def _form(node: ir.Node, opset: int) -> Bf16Form:
    form = bf16_form(node, opset)
    if form is None:
        raise ConversionError(f"node {node.name!r}: {node.op_type} has no bf16 form in opset {opset}")
    return form


def _widen_for_others(value: ir.Value, forms: Mapping[ir.Node, Bf16Form], casts: _Casts) -> None:
    """Make every reader of the bf16 ``value`` that does not take bf16, also in subgraphs, read its cast to fp32."""
    for use in tuple(value.uses()):
        form = forms.get(use.node)
        if use.node.op_type not in SHAPE_ONLY and (form is None or use.idx not in form.inputs):
            use.node.replace_input_with(use.idx, casts.to(value, FLOAT))
    if not value.is_graph_output() or value.graph is None:
        return
    name, wide = value.name, casts.to(value, FLOAT)
    for index, output in enumerate(value.graph.outputs):
        if output is value:
            value.graph.outputs[index] = wide
    value.name = casts.fresh.make(f"{name}/bf16")
    wide.name = name


class _Casts:
    """The casts of one graph: one per value and direction, inserted right after the value."""

    def __init__(self, graph: ir.Graph, fresh: FreshNames) -> None:
        self._graph = graph
        self.fresh = fresh
        self._made: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def to(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        key = (value, dtype)
        if key not in self._made:
            tensor = const(value)
            inline = tensor is not None and value.dtype == FLOAT and stays_inline(tensor)
            self._made[key] = self._round(value, tensor) if tensor is not None and inline else self._cast(value, dtype)
        return self._made[key]

    def insert(self) -> None:
        """Insert the new nodes into the graph: after the producer, or first for inputs and initializers."""
        first = next(iter(self._graph), None)
        for (value, _), result in self._made.items():
            cast, producer = result.producer(), value.producer()
            if cast is not None and producer is not None:
                self._graph.insert_after(producer, cast)
            elif cast is not None and first is not None:
                self._graph.insert_before(first, cast)

    def _cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        name = self.fresh.make(f"{value.name}/{'bf16' if dtype == BFLOAT16 else 'fp32'}")
        result = ir.node("Cast", [value], attributes={"to": int(dtype)}, name=name).outputs[0]
        result.name, result.type, result.shape = name, ir.TensorType(dtype), value.shape
        return result

    def _round(self, value: ir.Value, tensor: ir.TensorProtocol) -> ir.Value:
        name = self.fresh.make(f"{value.name}{NARROWED}")
        return initializer(self._graph, name, ir.tensor(tensor.numpy().astype(ml_dtypes.bfloat16), name=name))
