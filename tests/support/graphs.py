"""Tiny ONNX graphs for tests; each is the smallest graph with one property. Weights are seeded, so always the same.

Opset and IR version are pinned, because ONNX Runtime does not read the newest ones of the onnx package.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper, parser, save

Array = NDArray[Any]
Shape = Sequence[int | str] | None

OPSET = 22
IR_VERSION = 10
ALIGNMENT = 64


def values(*shape: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.float32]:
    """Return seeded Gaussian fp32 values.

    Those of two or more dimensions are divided by the square root of the first, so that layers keep their magnitude.
    """
    generator = np.random.default_rng(seed)
    fan_in = shape[0] if len(shape) > 1 else 1
    array = generator.standard_normal(shape) * scale / np.sqrt(fan_in)
    return np.asarray(array, np.float32)


def edge(name: str, shape: Shape = None, dtype: int = TensorProto.FLOAT) -> ValueInfoProto:
    """Return the declaration of an input or output."""
    return helper.make_tensor_value_info(name, dtype, shape)


def initializer(name: str, array: Array) -> TensorProto:
    """Return ``array``, which may be bfloat16, as a tensor stored in the model."""
    if array.dtype == ml_dtypes.bfloat16:
        return helper.make_tensor(name, TensorProto.BFLOAT16, array.shape, array.tobytes(), raw=True)
    return numpy_helper.from_array(array, name)


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    initializers: Sequence[TensorProto] = (),
) -> ModelProto:
    """Return a model of one graph, with the pinned opset and IR version."""
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


def parsed(text: str, **weights: Array) -> ModelProto:
    """Return a model of one graph in ONNX's text form: ``(inputs) => (outputs) { nodes }``, with these initializers."""
    graph = parser.parse_graph(f"tiny {text}")
    return model(graph.node, graph.input, graph.output, [initializer(*each) for each in weights.items()])


def mlp(sizes: Sequence[int] = (16, 32, 16), seed: int = 0) -> ModelProto:
    """x [batch, sizes[0]] → MatMul, Add, Relu … MatMul, Add → y [batch, sizes[-1]], all fp32: ``w0 b0 w1 b1 …``."""
    nodes: list[NodeProto] = []
    weights: list[TensorProto] = []
    hidden = "x"
    for layer, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        weights.append(initializer(f"w{layer}", values(rows, columns, seed=seed + 2 * layer)))
        weights.append(initializer(f"b{layer}", values(columns, seed=seed + 2 * layer + 1, scale=0.1)))
        nodes.append(helper.make_node("MatMul", [hidden, f"w{layer}"], [f"m{layer}"], name=f"matmul{layer}"))
        if layer == len(sizes) - 2:
            nodes.append(helper.make_node("Add", [f"m{layer}", f"b{layer}"], ["y"], name=f"add{layer}"))
            break
        nodes.append(helper.make_node("Add", [f"m{layer}", f"b{layer}"], [f"a{layer}"], name=f"add{layer}"))
        nodes.append(helper.make_node("Relu", [f"a{layer}"], [f"h{layer}"], name=f"relu{layer}"))
        hidden = f"h{layer}"
    return model(nodes, [edge("x", ["batch", sizes[0]])], [edge("y", ["batch", sizes[-1]])], weights)


def embedding(rows: int = 64, width: int = 16, seed: int = 0) -> ModelProto:
    """ids int64 [batch, seq] → Gather from the fp32 ``table`` [rows, width] → y [batch, seq, width]."""
    text = f"(int64[batch, seq] ids) => (float[batch, seq, {width}] y) {{ [gather] y = Gather (table, ids) }}"
    return parsed(text, table=values(rows, width, seed=seed))


def conv_bn(channels: int = 8, seed: int = 0) -> ModelProto:
    """x [batch, 3, 8, 8] → Conv 3×3 (``kernel``) → BatchNormalization (``gamma beta mean variance``) → Relu → y."""
    return parsed(
        f"""(float[batch, 3, 8, 8] x) => (float[batch, {channels}, 8, 8] y) {{
            [conv] c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, kernel)
            [norm] n = BatchNormalization (c, gamma, beta, mean, variance) [relu] y = Relu (n)
        }}""",
        kernel=values(channels, 3, 3, 3, seed=seed),
        gamma=values(channels, seed=seed + 1) + 1,
        beta=values(channels, seed=seed + 2),
        mean=values(channels, seed=seed + 3),
        variance=np.abs(values(channels, seed=seed + 4)) + 0.5,
    )


def if_branches(width: int = 16, seed: int = 0) -> ModelProto:
    """x [batch, width], flag bool [] → If flag: x·``captured`` (an outer initializer), else x·``inner`` (its own)."""
    then_branch = helper.make_graph(
        [helper.make_node("MatMul", ["x", "captured"], ["then_y"], name="then_matmul")],
        "then",
        [],
        [edge("then_y", ["batch", width])],
    )
    else_branch = helper.make_graph(
        [helper.make_node("MatMul", ["x", "inner"], ["else_y"], name="else_matmul")],
        "else",
        [],
        [edge("else_y", ["batch", width])],
        [initializer("inner", values(width, width, seed=seed + 1))],
    )
    return model(
        [helper.make_node("If", ["flag"], ["y"], name="choice", then_branch=then_branch, else_branch=else_branch)],
        [edge("x", ["batch", width]), edge("flag", [], TensorProto.BOOL)],
        [edge("y", ["batch", width])],
        [initializer("captured", values(width, width, seed=seed))],
    )


def loop(width: int = 16, seed: int = 0) -> ModelProto:
    """x [batch, width], steps int64 [] → steps times: h ← tanh(h·``captured`` + ``own``), from h = x → y.

    ``captured`` is an initializer of the main graph, ``own`` a Constant node inside the body.
    """
    own = numpy_helper.from_array(values(width, seed=seed + 1), "own_value")
    body = helper.make_graph(
        [
            helper.make_node("Constant", [], ["own"], name="own", value=own),
            helper.make_node("MatMul", ["h", "captured"], ["m"], name="body_matmul"),
            helper.make_node("Add", ["m", "own"], ["a"], name="body_add"),
            helper.make_node("Tanh", ["a"], ["h_next"], name="body_tanh"),
            helper.make_node("Identity", ["go"], ["go_next"], name="body_go"),
        ],
        "body",
        [edge("i", [], TensorProto.INT64), edge("go", [], TensorProto.BOOL), edge("h", ["batch", width])],
        [edge("go_next", [], TensorProto.BOOL), edge("h_next", ["batch", width])],
    )
    return model(
        [helper.make_node("Loop", ["steps", "", "x"], ["y"], name="loop", body=body)],
        [edge("x", ["batch", width]), edge("steps", [], TensorProto.INT64)],
        [edge("y", ["batch", width])],
        [initializer("captured", values(width, width, seed=seed))],
    )


def causal(fill: float) -> ModelProto:
    """Return a graph with a causal mask of 32 × 32 values stored as a matrix, as older exporters write it."""
    return parsed(
        """(float[32, 32] x) => (float[32, 32] y) {
            scores = MatMul (x, w) masked = Add (scores, mask) y = Softmax <axis = -1> (masked)
        }""",
        w=values(32, 32),
        mask=np.triu(np.full((32, 32), fill, np.float32), 1),
    )


def constant_nodes(width: int = 16, seed: int = 0) -> ModelProto:
    """x [batch, width] → MatMul with a weight held in a Constant node → y."""
    weight = numpy_helper.from_array(values(width, width, seed=seed), "weight_value")
    return model(
        [
            helper.make_node("Constant", [], ["weight"], name="weight", value=weight),
            helper.make_node("MatMul", ["x", "weight"], ["y"], name="matmul"),
        ],
        [edge("x", ["batch", width])],
        [edge("y", ["batch", width])],
    )


def weights_of(source: ModelProto) -> dict[str, Array]:
    """Return the main graph's initializers by name."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in source.graph.initializer}


def narrow(source: ModelProto) -> ModelProto:
    """Return ``source`` with its matrices (2 dimensions and more) stored as bf16, as in the ``cpu`` profile's graph.

    A Cast widens each matrix, or the rows that a Gather reads from it. Only the main graph's initializers are narrowed.
    """
    result = ModelProto()
    result.CopyFrom(source)
    graph = result.graph
    for tensor in list(graph.initializer):
        array = numpy_helper.to_array(tensor)
        if array.ndim < 2 or array.dtype != np.float32:
            continue
        tensor.CopyFrom(initializer(tensor.name, array.astype(ml_dtypes.bfloat16)))
        _widen_at_use(graph, tensor.name)
    return result


def _widen_at_use(graph: GraphProto, name: str) -> None:
    nodes = list(graph.node)
    gathers = [node for node in nodes if node.op_type == "Gather" and node.input[0] == name]
    for gather in gathers:
        output = gather.output[0]
        gather.output[0] = f"{output}_narrow"
        cast = helper.make_node("Cast", [gather.output[0]], [output], name=f"{output}_widen", to=TensorProto.FLOAT)
        nodes.insert(nodes.index(gather) + 1, cast)
    if not gathers:
        for node in nodes:
            _rename_input(node, name, f"{name}_wide")
        nodes.insert(0, helper.make_node("Cast", [name], [f"{name}_wide"], name=f"{name}_widen", to=TensorProto.FLOAT))
    del graph.node[:]
    graph.node.extend(nodes)


def _rename_input(node: NodeProto, old: str, new: str) -> None:
    """Rename an input of ``node``, also in the bodies of If and Loop, which can use the main graph's values."""
    for index, name in enumerate(node.input):
        if name == old:
            node.input[index] = new
    for attribute in node.attribute:
        for inner in attribute.g.node:
            _rename_input(inner, old, new)


def save_external(source: ModelProto, path: Path, files: Mapping[int, str]) -> Path:
    """Write ``source`` to ``path``, and initializers of each dtype in ``files`` (ONNX number → file name) beside it.

    As in an artifact: ``{TensorProto.BFLOAT16: "weights.bf16", TensorProto.FLOAT: "weights.fp32"}``, 64-byte aligned.
    """
    result = ModelProto()
    result.CopyFrom(source)
    data: dict[str, bytearray] = {}
    for tensor in result.graph.initializer:
        if tensor.data_type not in files:
            continue
        location = files[tensor.data_type]
        content = data.setdefault(location, bytearray())
        content.extend(bytes(-len(content) % ALIGNMENT))
        raw = numpy_helper.to_array(tensor).tobytes()
        refer(tensor, location, len(content), len(raw))
        content.extend(raw)
    for location, content in data.items():
        (path.parent / location).write_bytes(content)
    save(result, path)
    return path


def without_data(source: ModelProto, location: str) -> ModelProto:
    """Return ``source`` with every initializer of the main graph referring to the file ``location``, without writing
    that file."""
    result = ModelProto()
    result.CopyFrom(source)
    for tensor in result.graph.initializer:
        refer(tensor, location)
    return result


def refer(tensor: TensorProto, location: str, offset: int = 0, length: int | None = None) -> None:
    """Remove the data from ``tensor`` and make it refer to the file ``location``."""
    for field in ("raw_data", "float_data", "int32_data", "int64_data", "external_data"):
        tensor.ClearField(field)
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": location, "offset": str(offset)} | ({} if length is None else {"length": str(length)})
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
