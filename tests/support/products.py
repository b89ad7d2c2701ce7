"""Hand-written graphs with one node of the kernel, correct or deliberately wrong; ``MatMul`` with its function."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx.parser
from numpy.typing import NDArray
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, helper

import graphs
from bf16kit.numerics.panels import WIDTH, pack
from bf16kit.runtime.ort import kernel
from bf16kit.runtime.ort.onnxgraph import kernel_for
from bf16kit.runtime.ort.session import Session, as_runtime_failure, open_session

Array = NDArray[Any]
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
LAYOUTS = ("panels", "transposed")
_OPSETS = [helper.make_opsetid("", graphs.OPSET), helper.make_opsetid("bf16kit", 1)]


def product(
    weight: Array,
    bias: Array | None = None,
    *,
    layout: str = "panels",
    activation: str = "none",
    x: Sequence[int | str] = ("rows", "k"),
    stored: Array | None = None,
    operator: str = "MatMul",
    **attributes: int | str | None,
) -> ModelProto:
    """Return y = activation(x · ``weight`` + ``bias``), ``weight`` [K, N] rounded to bf16. ``x`` is the input's shape.

    ``attributes`` replace those of the node, None removes one; ``stored`` replaces the stored weight. Only the plainest
    products have a function, with which ONNX Runtime runs them without the kernel: panels, no bias, at most a relu.
    """
    k, n = weight.shape
    given = {"k": k, "n": n, "layout": layout, "activation": activation} | attributes
    narrow = weight.astype(ml_dtypes.bfloat16)
    weights = pack(narrow, 1) if layout == "panels" else np.ascontiguousarray(narrow.T)
    inputs = ["x", "w", *(["b"] if bias is not None else [])]
    node = helper.make_node(operator, inputs, ["y"], domain="bf16kit")
    _set(node, given)
    tensors = [
        graphs.initializer("w", weights if stored is None else stored),
        *([graphs.initializer("b", bias)] if bias is not None else []),
    ]
    edges = [graphs.edge("x", [k if dim == "k" else dim for dim in x])], [graphs.edge("y", [*x[:-1], n])]
    model = graphs.model([node], *edges, tensors)
    _ours(model)
    plain = operator == "MatMul" and layout == "panels" and bias is None and stored is None and not attributes
    if plain and activation in ("none", "relu"):
        model.functions.append(_function(k, n, activation == "relu"))
    return model


def one_node(op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> ModelProto:
    """Return one node ``op`` without a function, of inputs and outputs of any shape."""
    node = helper.make_node(op, inputs, outputs, domain="bf16kit", **attributes)
    return _ours(graphs.model([node], list(map(graphs.edge, inputs)), list(map(graphs.edge, outputs))))


def attention(op: str, **attributes: Any) -> ModelProto:
    """Return attention: 4 heads of 16, scale 0.25, unless ``attributes`` say otherwise."""
    names = ["q", "k", "v", *(["m"] if op.endswith("mask") else [])]
    given = {"heads": 4, "kv_heads": 2 if "grouped" in op else 4, "scale": 0.25} | attributes
    return one_node(op, names, ["y"], **given)


def norm_inputs(op: str) -> list[str]:
    """Return the names of the inputs of the norm ``op``."""
    return ["x", *(["skip"] if "Add" in op else []), "scale", *(["bias"] if "bias" in op else [])]


def norm(op: str, epsilon: float = 1e-5) -> ModelProto:
    return one_node(op, norm_inputs(op), ["y", *(["sum"] if "sum" in op else [])], epsilon=epsilon)


def joined(k: int, columns: Sequence[int], stored: Sequence[Array] | None = None, /, **attributes: Any) -> ModelProto:
    """Return y1, y2 … = x [rows, k] · w1, w2 …, of ``columns`` each, as one node without a function.

    ``attributes`` replace those of the node; None removes one. ``stored`` replaces the stored weights.
    """
    positions = range(1, len(columns) + 1)
    weights = stored or [np.zeros(k * n, ml_dtypes.bfloat16) for n in columns]
    names = [f"w{i}" for i in positions]
    edges = [graphs.edge("x", ["rows", k])], [graphs.edge(f"y{i}", ["rows", f"n{i}"]) for i in positions]
    node = helper.make_node(
        f"MatMul{len(columns)}_panels", ["x", *names], [f"y{i}" for i in positions], domain="bf16kit"
    )
    _set(node, {"k": k} | {f"n{i}": n for i, n in zip(positions, columns, strict=True)} | attributes)
    return _ours(graphs.model([node], *edges, list(map(graphs.initializer, names, weights))))


def lookup(k: int, n: int, stored: Array | None = None, /, **attributes: Any) -> ModelProto:
    """Return y = the rows ids of a table [n, k], as one node without a function. The rest is as for :func:`joined`."""
    table = np.zeros(k * n, ml_dtypes.bfloat16) if stored is None else stored
    node = helper.make_node("Gather_panels", ["ids", "w"], ["y"], domain="bf16kit")
    _set(node, {"k": k, "n": n} | attributes)
    edges = [graphs.edge("ids", ["count"], TensorProto.INT64)], [graphs.edge("y", ["count", "k"])]
    return _ours(graphs.model([node], *edges, [graphs.initializer("w", table)]))


def session(model: ModelProto, *, threads: int = 1) -> Session:
    """Open a session for ``model`` with the kernel's operators that it uses."""
    operators = kernel_for(model).operators
    return open_session(model.SerializeToString(), threads=threads, library=kernel.LIBRARY, operators=operators)


def run(model: ModelProto, *inputs: Array, threads: int = 1) -> Array:
    """Return the first output of ``model`` for ``inputs``. Raises :class:`RuntimeFailure` if the load or run fails."""
    return results(model, *inputs, threads=threads)[0]


def results(model: ModelProto, *inputs: Array, threads: int = 1) -> list[Array]:
    """Return all outputs of ``model`` for ``inputs``. Raises :class:`RuntimeFailure` if the load or the run fails."""
    opened = session(model, threads=threads)
    with as_runtime_failure("running"):
        found: list[Array] = opened.run(None, dict(zip((e.name for e in model.graph.input), inputs, strict=True)))
    return found


def with_computed_weight(model: ModelProto) -> ModelProto:
    """Turn the first initializer, the weight, into an input of the graph."""
    weight = model.graph.initializer[0]
    model.graph.input.append(graphs.edge(weight.name, list(weight.dims), TensorProto.BFLOAT16))
    del model.graph.initializer[0]
    return model


def exact(x: Array, weight: Array, bias: Array | None = None, activation: str = "none") -> NDArray[np.float64]:
    """Return the result of :func:`product` in float64, computed from the rounded weight."""
    sums = x.astype(np.float64) @ weight.astype(ml_dtypes.bfloat16).astype(np.float64)
    sums = sums if bias is None else sums + bias
    if activation == "relu":
        return np.asarray(np.maximum(sums, 0))
    if activation == "silu":
        return np.asarray(sums / (1 + np.exp(-sums)))
    if activation == "gelu_tanh":
        return np.asarray(0.5 * sums * (1 + np.tanh(np.sqrt(2 / np.pi) * (sums + 0.044715 * sums**3))))
    if activation == "gelu":
        return np.asarray(0.5 * sums * (1 + np.vectorize(math.erf)(sums / np.sqrt(2))))
    return np.asarray(sums)


def _set(node: NodeProto, attributes: Mapping[str, Any]) -> None:
    node.attribute.extend(helper.make_attribute(name, each) for name, each in attributes.items() if each is not None)


def _ours(model: ModelProto) -> ModelProto:
    """Declare the kernel's opset in the graph, so that it may use the kernel's operators."""
    del model.opset_import[:]
    model.opset_import.extend(_OPSETS)
    return model


def _function(k: int, n: int, relu: bool) -> FunctionProto:
    """Return a product of panels in ONNX's operators: each panel becomes a matrix, and they lie side by side."""
    widths = [min(WIDTH, n - first) for first in range(0, n, WIDTH)]
    flat, panels = [f"F{i}" for i in range(len(widths))], [f"P{i}" for i in range(len(widths))]
    sizes = [k * width for width in widths]
    body = f"S = Constant <value_ints = {sizes}> () {', '.join(flat)} = Split <axis = 0> (W, S) "
    for i, width in enumerate(widths):
        body += f"D{i} = Constant <value_ints = [{k}, {width}]> () P{i} = Reshape (F{i}, D{i}) "
    body += f"M = Concat <axis = 1> ({', '.join(panels)}) C = Cast <to = 1> (M) L = MatMul (X, C) "
    body += f"Y = {'Relu' if relu else 'Identity'} (L)"
    opsets = f'["" : {graphs.OPSET}, "bf16kit" : 1]'
    head = f'<domain: "bf16kit", opset_import: {opsets}> MatMul <k, n, layout, activation> (X, W) => (Y)'
    return onnx.parser.parse_function(f"{head} {{ {body} }}")
