"""Writes the bf16 TorchScript module of a TorchScript source: its own graph, with weights of products in bf16.

Nothing is traced again, so branches, loops and free sizes stay. A product reads and returns bf16, and its output is
widened at once, so that all other dtypes in the graph stay right. Operators that do more than a product may round
values inside, so they compute in fp32 as before; their matrices are stored in bf16 and widened at the graph's start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bf16kit.converter.write.torchscript import raw_archive, refuse_changes
from bf16kit.messages.errors import ConversionError
from bf16kit.runtime import scriptgraph

# Products: the position of the weight that must exist, and the positions of other inputs that need its dtype.
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "_convolution", "convolution")
_TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_PRODUCTS: dict[str, tuple[int, tuple[int, ...]]] = {
    **dict.fromkeys((f"aten::{name}" for name in ("linear", *_CONVOLUTIONS, *_TRANSPOSED)), (1, (0, 2))),
    **dict.fromkeys(("aten::matmul", "aten::mm"), (1, (0,))),
    "aten::addmm": (2, (0, 1)),
    "aten::embedding": (0, ()),
}
# Operators that do more than a product with their weights.
_FUSED = frozenset(
    {
        *("aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd"),
        *("aten::gru", "aten::gru_cell", "aten::lstm", "aten::lstm_cell", "aten::rnn_relu", "aten::rnn_tanh"),
        *("aten::rnn_relu_cell", "aten::rnn_tanh_cell"),
    }
)


def narrow_script(script: Any, path: Path) -> None:
    """Write ``script``, a ScriptModule, to ``path`` with its products in bf16.

    The module's own tensors do not change. Raises :class:`ConversionError` if torch cannot rewrite it, or if no product
    has an fp32 weight.
    """
    failed = "torch cannot convert the TorchScript module to bf16"
    with raw_archive(path, failed) as raw:
        frozen = torch.jit.freeze(script, optimize_numerics=False)
        graph = frozen.graph
        refuse_changes(graph, failed)
        if not _Narrowing(frozen, graph).rewrite():
            raise ConversionError("no product of the TorchScript module has an fp32 weight that could become bf16")
        torch._C._jit_pass_dce(graph)
        graph.lint()
        torch.jit.save(frozen, str(raw))


class _Narrowing:
    """One rewriting of ``graph``, in place; each weight is rounded once, for all products that read it."""

    def __init__(self, module: Any, graph: Any) -> None:
        self._module, self._graph = module, graph
        self._weights: dict[tuple[Any, ...], Any] = {}
        self._wide: dict[Any, Any] = {}
        self._head = next(iter(graph.nodes()))  # nodes inserted before it run before all others

    def rewrite(self) -> bool:
        """Narrow every product and every fused operator; return whether there are any."""
        found = list(scriptgraph.nodes(self._graph))
        products = [self._narrow(node) for node in found if node.kind() in _PRODUCTS]
        return any([*products, *(self._store_matrices(node) for node in found if node.kind() in _FUSED)])

    def _narrow(self, node: Any) -> bool:
        position, others = _PRODUCTS[node.kind()]
        weight = self._tensor(node.inputsAt(position))
        if not _is_matrix(weight):
            return False
        node.replaceInput(position, self._rounded(weight))
        for other in (position for position in others if position < node.inputsSize()):
            value = node.inputsAt(other)
            constant = self._tensor(value)
            if constant is not None:
                node.replaceInput(other, self._rounded(constant))
            elif value.type().kind() != "NoneType":
                narrow = self._cast(value, scriptgraph.BFLOAT16, node)
                narrow.insertBefore(node)
                node.replaceInput(other, narrow.output())
        wide = self._cast(node.output(), scriptgraph.FLOAT32, node)
        wide.insertAfter(node)
        node.output().replaceAllUsesAfterNodeWith(wide, wide.output())
        return True

    def _store_matrices(self, node: Any) -> bool:
        """Store the matrices that ``node`` reads, also in a list, in bf16, and widen them for it."""
        stored = False
        for position in range(node.inputsSize()):
            value = node.inputsAt(position)
            in_list = value.type().annotation_str == "List[Tensor]"  # all weights of an LSTM; freezing made a constant
            weights = (value.toIValue() or []) if in_list else [self._tensor(value)]
            if not any(map(_is_matrix, weights)):
                continue
            values = [self._widened(each) if _is_matrix(each) else self._constant(each) for each in weights]
            if in_list:
                joined = self._graph.create("prim::ListConstruct", values, 1)
                joined.output().setType(value.type())
                joined.insertBefore(self._head)
                values = [joined.output()]
            node.replaceInput(position, values[0])
            stored = True
        return stored

    def _widened(self, weight: Any) -> Any:
        """Return ``weight`` stored in bf16 and widened again, at the start of the graph."""
        narrow = self._rounded(weight)
        if narrow not in self._wide:
            cast = self._cast(narrow, scriptgraph.FLOAT32, self._head)
            cast.insertBefore(self._head)
            self._wide[narrow] = cast.output()
        return self._wide[narrow]

    def _tensor(self, value: Any) -> Any:
        """Return the tensor that ``value`` always is, a constant or an attribute; None if it is computed."""
        return scriptgraph.tensor_of(self._module, value.node())

    def _rounded(self, tensor: Any) -> Any:
        """Return ``tensor`` in bf16, a constant at the start of the graph."""
        key = tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
        if key not in self._weights:
            self._weights[key] = self._constant(tensor.to(torch.bfloat16))
        return self._weights[key]

    def _constant(self, tensor: Any) -> Any:
        """Return ``tensor`` as a constant at the start of the graph."""
        self._graph.setInsertPoint(self._head)
        return self._graph.insertConstant(tensor.detach())

    def _cast(self, value: Any, dtype: int, before: Any) -> Any:
        """Return a node that casts ``value``, not inserted yet; its constants are inserted before ``before``."""
        self._graph.setInsertPoint(before)
        constants = [self._graph.insertConstant(one) for one in (dtype, False, False, None)]
        return self._graph.create("aten::to", [value, *constants], 1)


def _is_matrix(tensor: Any) -> bool:
    return tensor is not None and tensor.dtype is torch.float32 and tensor.ndim > 1
