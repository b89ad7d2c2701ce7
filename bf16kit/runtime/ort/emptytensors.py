"""Refuses inputs on which ONNX Runtime would end the process: some of its operators do if a tensor has no elements.

A client's request may have no rows, or so small an image that nothing of it is left behind some pools. So the shapes
within such a graph are inferred, unless inputs that were no larger have run before. Both branches of an ``If`` count.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from operator import ge
from typing import TYPE_CHECKING, Any

from bf16kit.messages.errors import InputRefused
from bf16kit.numerics.tensors import describe
from bf16kit.runtime import Array
from bf16kit.runtime.ort.kernel import DOMAIN, Kernel
from bf16kit.runtime.ort.onnxgraph import messages

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from onnx import ModelProto, NodeProto

# Operators that end the process in some ONNX Runtime of 1.24 to 1.32 (SIGABRT, SIGFPE, SIGSEGV) without rows or steps.
_ENDS = frozenset(
    {
        *(("", name) for name in ("ConvTranspose", "DFT", "Einsum", "GRU", "GatherND", "GridSample", "LRN", "LSTM")),
        *(("", name) for name in ("LpNormalization", "OneHot", "TopK", "Unique")),
        *(("", name) for name in ("AveragePool", "MaxPool")),  # behind a Conv, if no pixel is left
        ("ai.onnx.ml", "FeatureVectorizer"),
        *(("com.microsoft", name) for name in ("DynamicQuantizeLSTM", "GroupQueryAttention", "MultiHeadAttention")),
        *(("com.microsoft", f"{name}Normalization") for name in ("SkipLayer", "SkipSimplifiedLayer")),
        ("com.microsoft", "QAttention"),
    }
)
_POOLS = ("AveragePool", "MaxPool")
_OPERANDS = 3  # its first inputs; attention's later ones are a cache, which may be empty
_SMALL = 1024  # bytes of a constant whose values shape inference may need
_KEPT = 16  # combinations of sizes


class EmptyTensors:
    """The check for one graph. ``model`` is only read; with ``kernel``, the bodies of its functions do not run."""

    def __init__(self, model: ModelProto, kernel: Kernel) -> None:
        run = [each for each in model.functions if not (kernel.path and each.domain == DOMAIN)]
        ends = {(each.domain, each.name) for each in run if _uses(each, _ENDS)}
        self._ends = _ENDS | ends
        self._model = _without_weights(model) if _uses(model.graph, self._ends) else None
        self._names = [] if self._model is None else [edge.name for edge in self._model.graph.input]
        self._lock = threading.Lock()
        self._enough: list[tuple[int, ...]] = []  # the smallest sizes of inputs that were large enough

    def check(self, feeds: Mapping[str, Array]) -> tuple[int, ...]:
        """Raise :class:`InputRefused` if ONNX Runtime would end the process on inputs of these shapes.

        Returns the sizes for :meth:`ran`, () if no smaller ones need to be known.
        """
        if self._model is None:
            return ()
        sizes = tuple(size for name in self._names if name in feeds for size in feeds[name].shape)
        if any(_covers(sizes, enough) for enough in self._enough):
            return ()
        with self._lock:
            found = self._inferred(self._model, feeds)
        if found:
            given = ", ".join(f"{name} {describe(array.shape)}" for name, array in feeds.items())
            reason = f"the inputs are too small: with {given}, nothing is left for the model's {found}"
            raise InputRefused(reason, reason)
        return sizes

    def ran(self, sizes: tuple[int, ...]) -> None:
        """Infer no shapes again for inputs that are no smaller than these, on which ONNX Runtime has run."""
        with self._lock:
            self._enough = [sizes, *(each for each in self._enough if not _covers(each, sizes))][:_KEPT]

    def _inferred(self, model: ModelProto, feeds: Mapping[str, Array]) -> str:
        """Return the operator that would get, or give, a tensor without elements; "" if none is known to."""
        from onnx import shape_inference

        for edge in model.graph.input:
            del edge.type.tensor_type.shape.dim[:]
            for size in feeds[edge.name].shape if edge.name in feeds else ():
                edge.type.tensor_type.shape.dim.add().dim_value = size
        # What is behind an operator without shape inference is unknown: it has no rows if an input has none.
        other = 0 if any(array.shape[:1] == (0,) for array in feeds.values()) else 1
        try:
            graph = shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
        except Exception:  # noqa: BLE001 - sizes do not fit, which ONNX Runtime reports, but not of an empty tensor
            other = 0 if any(0 in array.shape for array in feeds.values()) else 1
            try:
                graph = shape_inference.infer_shapes(model, data_prop=True).graph
            except Exception:  # noqa: BLE001 - ONNX does not know the graph's opsets, for one
                return ""
        values = [edge for edge in messages(graph, "ValueInfoProto") if edge.type.tensor_type.HasField("shape")]
        sizes = {edge.name: _sizes(edge, other) for edge in values}
        sizes |= {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        for node in messages(graph, "NodeProto"):
            if _key(node) in self._ends and any(size <= 0 for size in _operand_sizes(node, sizes, other)):
                return str(node.op_type)
        return ""


def _operand_sizes(node: NodeProto, sizes: Mapping[str, tuple[int, ...]], other: int) -> Iterator[int]:
    """Yield what must not be 0: of a pool the sizes of the image that it gives, of others those of all operands."""
    pool = node.op_type in _POOLS
    for name in node.output[:1] if pool else (*node.input[:_OPERANDS], *node.output[:1]):
        if name:
            yield from sizes.get(name, (other,) * 3)[2 if pool else 0 :]


def _covers(sizes: tuple[int, ...], smaller: tuple[int, ...]) -> bool:
    return len(sizes) == len(smaller) and all(map(ge, sizes, smaller))


def _uses(part: Message, ends: Collection[tuple[str, str]]) -> bool:
    return any(_key(node) in ends for node in messages(part, "NodeProto"))


def _key(node: NodeProto) -> tuple[str, str]:
    return "" if node.domain == "ai.onnx" else node.domain, node.op_type


def _sizes(edge: Any, other: int) -> tuple[int, ...]:
    """Return the sizes of a value; an unknown one is ``other``."""
    return tuple(dim.dim_value if dim.HasField("dim_value") else other for dim in edge.type.tensor_type.shape.dim)


def _without_weights(model: ModelProto) -> ModelProto:
    """Copy the graph without large tensors' values, and without what is known of shapes: they depend on the inputs."""
    import onnx

    copied = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    copied.graph.node.extend(model.graph.node)
    weights = {tensor.name for tensor in model.graph.initializer}  # up to IR version 3, these are inputs as well
    copied.graph.input.extend(edge for edge in model.graph.input if edge.name not in weights)
    for edge in model.graph.output:
        copied.graph.output.add(name=edge.name)
    for tensor in model.graph.initializer:
        if tensor.ByteSize() <= _SMALL:
            copied.graph.initializer.append(tensor)
        else:
            copied.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    return copied
