"""The bf16 TorchScript module of a source that is TorchScript itself: its own graph, products with weights in bf16.

Nothing is traced again: branches, loops and free sizes stay. A product takes bf16 in, gives bf16 out, and is widened at
once, so that whatever else the graph says of dtypes holds; sums inside a product are fp32's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bf16kit.errors import ConversionError
from bf16kit.runtime import scriptgraph
from converter.formats.torchscript import rewrite_archive
from converter.process.quiet import first_line, quiet

# Products, by the place of the weight that must be there, and the places of whatever else must be of its dtype.
_PRODUCTS = {
    "aten::linear": (1, (0, 2)),
    "aten::matmul": (1, (0,)),
    "aten::mm": (1, (0,)),
    "aten::addmm": (2, (0, 1)),
    "aten::conv1d": (1, (0, 2)),
    "aten::conv2d": (1, (0, 2)),
    "aten::conv3d": (1, (0, 2)),
    "aten::_convolution": (1, (0, 2)),
    "aten::convolution": (1, (0, 2)),
    "aten::conv_transpose1d": (1, (0, 2)),
    "aten::conv_transpose2d": (1, (0, 2)),
    "aten::conv_transpose3d": (1, (0, 2)),
    "aten::embedding": (0, ()),
}


def narrow_script(script: Any, path: Path) -> int:
    """Write ``script``, a ScriptModule, to ``path`` with its products in bf16; returns how many there are.

    Its own tensors stay as they are. Raises :class:`ConversionError` when torch cannot rewrite it, or when no product
    has an fp32 weight.
    """
    import torch

    raw = path.with_name(f"{path.name}.raw")
    try:
        with quiet(), torch.no_grad():
            frozen = torch.jit.freeze(script, optimize_numerics=False)
            graph = frozen.graph
            if any(node.kind() == "prim::SetAttr" for node in scriptgraph.nodes(graph)):
                raise ConversionError("it changes attributes of its own")
            count = _Narrowing(frozen, graph).rewrite()
            torch._C._jit_pass_dce(graph)
            graph.lint()
            torch.jit.save(frozen, str(raw))
    except Exception as error:  # torch raises nearly anything of graphs that it does not understand
        raw.unlink(missing_ok=True)
        raise ConversionError(f"torch cannot narrow the TorchScript module: {first_line(error)}") from error
    try:
        if not count:
            raise ConversionError("no product of the TorchScript module has an fp32 weight that could become bf16")
        rewrite_archive(raw, path)
    finally:
        raw.unlink()
    return count


class _Narrowing:
    """One rewriting of ``graph``, in place; each weight is rounded once, however many products it has."""

    def __init__(self, module: Any, graph: Any) -> None:
        self._module, self._graph = module, graph
        self._weights: dict[tuple[Any, ...], Any] = {}

    def rewrite(self) -> int:
        """Narrow every product; how many there were."""
        found = [node for node in scriptgraph.nodes(self._graph) if node.kind() in _PRODUCTS]
        return sum(self._narrow(node) for node in found)

    def _narrow(self, node: Any) -> bool:
        import torch

        place, others = _PRODUCTS[node.kind()]
        weight = self._tensor(node.inputsAt(place))
        if weight is None or weight.dtype is not torch.float32 or weight.ndim < 2:
            return False
        node.replaceInput(place, self._rounded(weight))
        for other in (place for place in others if place < node.inputsSize()):
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

    def _tensor(self, value: Any) -> Any:
        """The tensor that ``value`` always is, a constant or an attribute; None for one that is computed."""
        return next(scriptgraph.tensors_of(self._module, value.node()), None)

    def _rounded(self, tensor: Any) -> Any:
        """A constant at the head of the graph: ``tensor`` in bf16."""
        import torch

        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if key not in self._weights:
            self._graph.setInsertPoint(next(iter(self._graph.nodes())))
            self._weights[key] = self._graph.insertConstant(tensor.detach().to(torch.bfloat16))
        return self._weights[key]

    def _cast(self, value: Any, dtype: int, before: Any) -> Any:
        """A node that casts ``value``, not in its place yet; its constants stand before the node ``before``."""
        self._graph.setInsertPoint(before)
        constants = [self._graph.insertConstant(one) for one in (dtype, False, False, None)]
        return self._graph.create("aten::to", [value, *constants], 1)
