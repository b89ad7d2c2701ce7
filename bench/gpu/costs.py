"""What each node of a written graph computes and moves: FLOPs of its products, bytes that it reads and writes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from bench.gpu.sizes import size

Shape = tuple[int, ...]
_VIEWS = {"Flatten", "Identity", "Reshape", "Shape", "Squeeze", "Unsqueeze"}  # nothing is moved
_PARTS = {"Gather", "GatherElements", "GatherND", "Slice"}  # of what they read, only what they give
_NOT_COSTED = {"Attention", "ConvTranspose", "Einsum", "GRU", "GroupQueryAttention", "If", "LSTM", "Loop"}
_NOT_COSTED |= {"MultiHeadAttention", "RNN", "Scan", "FusedMatMul"}


class NotCosted(Exception):
    """A graph of which not everything can be told: which node, and why."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One node: FLOPs (2 for a multiplication and its addition; of products alone), and bytes read and written."""

    name: str
    op: str
    flops: int
    bytes: int
    precision: str  # bf16 where it reads or gives any of that, else fp32


@dataclass(frozen=True, slots=True)
class Costs:
    """All nodes of a graph in order, and the bytes that every way to run it has to move: weights, inputs, outputs."""

    nodes: tuple[Cost, ...]
    least_bytes: int

    def flops(self, precision: str) -> int:
        """Of the products of that precision."""
        return sum(node.flops for node in self.nodes if node.precision == precision)


def costs(file: Path, dims: Mapping[str, int]) -> Costs:
    """Those of the graph in ``file`` when its named dimensions are ``dims``. NotCosted names what is not known."""
    model = onnx.load(file, load_external_data=False)
    _refuse_unsized(model.graph, dims)
    tensors = _Tensors(model, dims)
    nodes = tuple(_cost(node, tensors) for node in _running(model.graph))
    read = {name for node in model.graph.node for name in node.input}
    weights = sum(tensors.bytes(each.name) for each in model.graph.initializer if each.name in read)
    edges = sum(tensors.bytes(value.name) for value in (*model.graph.input, *model.graph.output))
    return Costs(nodes, weights + edges)


def _refuse_unsized(graph: onnx.GraphProto, dims: Mapping[str, int]) -> None:
    for value in graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if not dim.HasField("dim_value") and size(dim.dim_param, dims) is None:
                name = dim.dim_param or "without a name"
                raise NotCosted(f"input {value.name!r}: dimension {name} has no size; give it: --dim {name}=SIZE")


def _running(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes that every run runs: what constants alone give, ONNX Runtime works out when it loads the graph."""
    constants = {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if all(name in constants for name in node.input if name):
            constants.update(node.output)
        else:
            yield node


class _Tensors:
    """Shapes and dtypes by name: as ONNX infers them from the sizes, else as the converter wrote them."""

    def __init__(self, model: onnx.ModelProto, dims: Mapping[str, int]) -> None:
        self._shapes: dict[str, Shape] = {}
        self._dtypes: dict[str, int] = {}
        for value in (*model.graph.value_info, *model.graph.input, *model.graph.output):
            self._keep(value, dims)
        for tensor in model.graph.initializer:
            self._shapes[tensor.name], self._dtypes[tensor.name] = tuple(tensor.dims), tensor.data_type
        for value in onnx.shape_inference.infer_shapes(_sized(model, self._shapes), data_prop=True).graph.value_info:
            self._keep(value, dims)

    def _keep(self, value: onnx.ValueInfoProto, dims: Mapping[str, int]) -> None:
        kind = value.type.tensor_type
        self._dtypes[value.name] = kind.elem_type
        shape = [dim.dim_value if dim.HasField("dim_value") else size(dim.dim_param, dims) for dim in kind.shape.dim]
        known = tuple(each for each in shape if each is not None)
        if kind.HasField("shape") and len(known) == len(shape):
            self._shapes[value.name] = known

    def shape(self, name: str) -> Shape:
        if name not in self._shapes:
            raise NotCosted(f"the shape of {name!r} does not follow from those of the inputs")
        return self._shapes[name]

    def bytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * int(onnx.helper.tensor_dtype_to_np_dtype(self._dtypes[name]).itemsize)

    def narrow(self, names: Sequence[str]) -> bool:
        return any(self._dtypes.get(name) == onnx.TensorProto.BFLOAT16 for name in names)


def _sized(model: onnx.ModelProto, shapes: Mapping[str, Shape]) -> onnx.ModelProto:
    """A copy whose inputs have sizes, and nothing else has a shape."""
    sized = onnx.ModelProto()
    sized.CopyFrom(model)
    del sized.graph.value_info[:]
    for value in (*sized.graph.input, *sized.graph.output):
        value.type.tensor_type.ClearField("shape")
        for each in shapes.get(value.name, ()):
            value.type.tensor_type.shape.dim.add().dim_value = each
    return sized


def _cost(node: onnx.NodeProto, tensors: _Tensors) -> Cost:
    if node.op_type in _NOT_COSTED:
        raise NotCosted(f"node {node.name!r}: nobody has said what {node.op_type} computes")
    reads, gives = [name for name in node.input if name], [name for name in node.output if name]
    precision = "bf16" if tensors.narrow([*reads, *gives]) else "fp32"
    return Cost(node.name, node.op_type, _flops(node, tensors), sum(_moved(node, reads, gives, tensors)), precision)


def _moved(node: onnx.NodeProto, reads: Sequence[str], gives: Sequence[str], tensors: _Tensors) -> Iterator[int]:
    if node.op_type in _VIEWS:
        return
    yield from (tensors.bytes(name) for name in gives)
    if node.op_type in _PARTS:
        yield from (tensors.bytes(name) for name in gives)
        yield from (tensors.bytes(name) for name in reads[1:])
    else:
        yield from (tensors.bytes(name) for name in reads)


def _flops(node: onnx.NodeProto, tensors: _Tensors) -> int:
    if node.op_type not in ("MatMul", "Gemm", "Conv"):
        return 0
    products = math.prod(tensors.shape(node.output[0]))
    first, second = tensors.shape(node.input[0]), tensors.shape(node.input[1])
    if node.op_type == "Conv":  # [channels out, channels in ÷ groups, …kernel]
        return 2 * products * math.prod(second[1:])
    turned = any(each.name == "transA" and each.i for each in node.attribute)
    return 2 * products * (first[0] if node.op_type == "Gemm" and turned else first[-1])
