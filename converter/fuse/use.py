"""Replaces products by weights stored in bf16, with the bias and the activation after them, by bf16kit's CPU kernel."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from bf16kit.errors import ConversionError
from bf16kit.runtime.kernel import DOMAIN
from converter.fuse.functions import ProductVariant, define, function, lists
from converter.fuse.work import FusedProduct, KernelWork
from converter.graph.initializers import const_dims, initializer
from converter.graph.names import FreshNames, all_value_names
from converter.graph.step import Step

_Dim = int | ir.SymbolicDim | str | None


class UseKernel(Step):
    """Replace the products of ``work`` by ``bf16kit::MatMul_…``, and define each variant as a function.

    Nodes named in ``rounding`` become ``bf16kit::MatMulBf16_…``, which round their activations to bf16.

    Weights stored in panels become flat here, k·n elements, which only the kernel reads. A node keeps its product's
    name. Its output replaces that of the last node it stands for, under the same name.

    Requires: types are known, bf16 weights have not been widened. Ensures: only the kernel reads panels.
    """

    name = "use the CPU kernel"

    def __init__(self, work: KernelWork, rounding: Collection[str] = ()) -> None:
        super().__init__()
        self._work = work
        self._rounding = rounding

    def apply(self, model: ir.Model) -> bool:
        fresh = FreshNames(all_value_names(model) | {node.name or "" for node in model.graph.all_nodes()})
        found = self._work.fused_in(model)
        if not found:
            return False
        transpositions = {t: None for each in found if (t := each.product.transposition) is not None}
        variants = {
            _Rewriting(model.graph, fresh, each, each.product.node.name in self._rounding).run(): None for each in found
        }
        _drop_unread(model.graph, transpositions)
        define(model, [function(variant, model.opset_imports[""]) for variant in variants])
        return True

    def ensures(self, model: ir.Model) -> None:
        for name in sorted(self._work.panels.keys() & model.graph.initializers.keys()):
            others = [use.node.name for use in model.graph.initializers[name].uses() if use.node.domain != DOMAIN]
            if others:
                raise ConversionError(f"node {others[0]!r} reads {name!r}, which is stored in panels")


class _Rewriting:
    """The rewriting of one product and its epilogue into one node."""

    def __init__(self, graph: ir.Graph, fresh: FreshNames, fused: FusedProduct, rounds: bool) -> None:
        self._graph = graph
        self._fresh = fresh
        self._product = fused.product
        self._layout = fused.layout
        self._rounds = rounds
        self._epilogue = epilogue = fused.epilogue
        between = None if epilogue.reshape is None else epilogue.reshape.inputs[0]
        self._old_output = epilogue.result if between is None else between

    def run(self) -> ProductVariant:
        """Insert the new node, remove the old ones, and return the new node's variant."""
        product, epilogue, node = self._product, self._epilogue, self._product.node
        variant = ProductVariant.of(
            self._layout,
            product.k,
            product.n,
            bias=epilogue.bias is not None,
            activation=epilogue.activation,
            rounds=self._rounds,
        )
        inputs = [node.inputs[0], self._weight(), *([] if epilogue.bias is None else [self._bias(epilogue.bias)])]
        pixel = node.op_type == "Conv"
        if pixel:
            inputs[0] = self._rows()
        kernel_node = ir.node(variant.op_type, inputs, self._attributes(), domain=DOMAIN, name=node.name)
        result = self._insert(
            kernel_node, self._old_output.type, (*self._batch(), product.n) if pixel else self._old_output.shape
        )
        if pixel:
            result = self._image(result)
        self._replace(result)
        return variant

    def _attributes(self) -> dict[str, int | str | list[int]]:
        k, n = self._product.k, self._product.n
        sizes = {"k": k, "n": n, "layout": self._layout, "activation": self._epilogue.activation}
        return {**sizes, **lists(self._layout, k, n)}

    def _weight(self) -> ir.Value:
        """Return the weight with the shape it has in its file; panels are one row of elements."""
        weight, k, n = self._product.weight, self._product.k, self._product.n
        weight.shape = ir.Shape((k * n,) if self._layout == "panels" else (n, k))
        return weight

    def _bias(self, bias: ir.Value) -> ir.Value:
        if len(const_dims(bias)) <= 1:
            return bias
        columns = initializer(self._graph, self._name("columns"), ir.tensor([self._product.n]))
        return self._insert(ir.node("Reshape", [bias, columns]), bias.type, (self._product.n,))

    def _batch(self) -> tuple[int | ir.SymbolicDim | None]:
        """Return the first dimension of a Conv's output, as far as it is known."""
        shape = self._old_output.shape
        return (None if shape is None else shape[0],)

    def _rows(self) -> ir.Value:
        """Return the single pixels of a Conv, one row each."""
        pixels = self._product.node.inputs[0]
        flat = ir.node("Flatten", [pixels], attributes={"axis": 1})
        return self._insert(flat, self._old_output.type, (*self._batch(), self._product.k))

    def _image(self, rows: ir.Value) -> ir.Value:
        """Return rows as images of a single pixel."""
        spatial = range(2, len(const_dims(self._product.weight)))
        axes = initializer(self._graph, self._name("axes"), ir.tensor(list(spatial)))
        return self._insert(ir.node("Unsqueeze", [rows, axes]), rows.type, self._old_output.shape)

    def _insert(self, node: ir.Node, kind: ir.TypeProtocol | None, shape: ir.Shape | Sequence[_Dim] | None) -> ir.Value:
        """Insert ``node`` before the product that it replaces, and return its output."""
        node.name = node.name or self._name(node.op_type.lower())
        output = node.outputs[0]
        output.name, output.type = self._name("product"), kind
        output.shape = None if shape is None else ir.Shape(shape)
        self._graph.insert_before(self._product.node, node)
        return output

    def _name(self, suffix: str) -> str:
        return self._fresh.make(f"{self._product.node.name}/{suffix}")

    def _replace(self, result: ir.Value) -> None:
        """Make ``result`` replace the product's output. If a Reshape stays, its output replaces that of the
        activation."""
        new = {self._old_output: result}
        if self._epilogue.reshape is not None:
            new[self._epilogue.result] = self._epilogue.reshape.outputs[0]
        names = [epilogue.name for epilogue in new]
        for epilogue, value in new.items():
            value.type, value.shape = epilogue.type, epilogue.shape
            epilogue.replace_all_uses_with(value, replace_graph_outputs=True)
        self._graph.remove([self._product.node, *self._epilogue.nodes], safe=True)
        for (epilogue, value), name in zip(new.items(), names, strict=True):
            epilogue.name = None
            value.name = name


def _drop_unread(graph: ir.Graph, transpositions: Collection[ir.Node]) -> None:
    """Remove those ``transpositions`` that no node reads any more, because the kernel reads the weights directly."""
    for node in transpositions:
        if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)
