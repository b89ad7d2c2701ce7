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


def nodes(text: str) -> list[NodeProto]:
    """Return the nodes of ``text``, in ONNX's text form."""
    return list(parser.parse_graph(f"g (float none) => (float none) {{ {text} }}").node)


def mlp(sizes: Sequence[int] = (16, 32, 16), seed: int = 0) -> ModelProto:
    """x [batch, sizes[0]] → MatMul, Add, Relu … MatMul, Add → y [batch, sizes[-1]], all fp32: ``w0 b0 w1 b1 …``."""
    nodes, weights, hidden, last = "", dict[str, Array](), "x", len(sizes) - 2
    for i, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        weights[f"w{i}"] = values(rows, columns, seed=seed + 2 * i)
        weights[f"b{i}"] = values(columns, seed=seed + 2 * i + 1, scale=0.1)
        total = "y" if i == last else f"a{i}"
        nodes += f"[matmul{i}] m{i} = MatMul ({hidden}, w{i}) [add{i}] {total} = Add (m{i}, b{i}) "
        nodes += "" if i == last else f"[relu{i}] h{i} = Relu (a{i}) "
        hidden = f"h{i}"
    return parsed(f"(float[batch, {sizes[0]}] x) => (float[batch, {sizes[-1]}] y) {{ {nodes} }}", **weights)


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
    rows = f"float[batch, {width}]"
    made = parsed(
        f"""({rows} x, bool flag) => ({rows} y) {{
            [choice] y = If (flag) <
                else_branch = else () => ({rows} else_y) {{ [else_matmul] else_y = MatMul (x, inner) }},
                then_branch = then () => ({rows} then_y) {{ [then_matmul] then_y = MatMul (x, captured) }}
            >
        }}""",
        captured=values(width, width, seed=seed),
    )
    own = initializer("inner", values(width, width, seed=seed + 1))
    made.graph.node[0].attribute[0].g.initializer.append(own)
    return made


def loop(width: int = 16, seed: int = 0) -> ModelProto:
    """x [batch, width], steps int64 [] → steps times: h ← tanh(h·``captured`` + ``own``), from h = x → y.

    ``captured`` is an initializer of the main graph, ``own`` a Constant node inside the body.
    """
    made = parsed(
        f"""(float[batch, {width}] x, int64 steps) => (float[batch, {width}] y) {{
            [loop] y = Loop <body = body (int64 i, bool go, float[batch, {width}] h)
                                 => (bool go_next, float[batch, {width}] h_next) {{
                [own] own = Constant <value = float[1] {{0}}> () [body_matmul] m = MatMul (h, captured)
                [body_add] a = Add (m, own) [body_tanh] h_next = Tanh (a) [body_go] go_next = Identity (go)
            }}> (steps, , x)
        }}""",
        captured=values(width, width, seed=seed),
    )
    own = initializer("own_value", values(width, seed=seed + 1))
    made.graph.node[0].attribute[0].g.node[0].attribute[0].t.CopyFrom(own)
    return made


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
    nodes = "[weight] weight = Constant <value = float[1] {0}> () [matmul] y = MatMul (x, weight)"
    made = parsed(f"(float[batch, {width}] x) => (float[batch, {width}] y) {{ {nodes} }}")
    made.graph.node[0].attribute[0].t.CopyFrom(initializer("weight_value", values(width, width, seed=seed)))
    return made


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
