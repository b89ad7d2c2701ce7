"""Edits of ONNX models: still valid protobuf, but each breaks a rule that the converter or a library relies on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

import graphs

Edit = Callable[[ModelProto, Random], None]

NUMBERS = (-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 16, 1000, 65536, 2**24, 2**31 - 1, 2**32, 2**40, 2**62, 2**63 - 1)
NAMES = (
    "",
    "x",
    "y",
    "w0",
    "matmul0",
    "a" * 5000,
    "a\x00b",
    "ünï",
    "../x",
    "/etc/hostname",
    "'\"{}\n",
    "\x1b[31m",
    "reference",
    "__metadata__",
)
LOCATIONS = (
    "../secret", "../../secret", "sub/../../secret", "/etc/hostname", "/dev/zero", "/proc/self/mem", "", ".", "..",
    "./w0.bin", "link", "w0.bin\x00x", "m.onnx", "missing.bin", "C:\\w", "file:///etc/hostname", "//etc/hostname", "w" * 400,
    "ORT_MEM_ADDR", "*/_ORT_MEM_ADDR_/*", "w0.bin/", "{canary}",
)  # fmt: skip
OPS = ("MatMul", "Add", "Conv", "Loop", "If", "Scan", "LSTM", "Gather", "Reshape", "Resize", "Cast", "Nope", "Constant",
       "BatchNormalization", "Tile", "Range", "ConstantOfShape", "Expand", "Identity", "Softmax", "QuantizeLinear", "Dropout",
       "SequenceConstruct", "Pad", "Slice", "Split", "TopK", "Einsum", "OneHot", "Where", "NonZero", "EyeLike", "Gemm")  # fmt: skip


def graphs_of(model: ModelProto) -> list[GraphProto]:
    """Return the main graph and every nested body."""
    found, todo = [], [model.graph]
    while todo:
        graph = todo.pop()
        found.append(graph)
        todo += [a.g for node in graph.node for a in node.attribute if a.type == AttributeProto.GRAPH]
    return found


def _nodes(model: ModelProto) -> list[NodeProto]:
    found = [node for graph in graphs_of(model) for node in graph.node]
    return found + [node for function in model.functions for node in function.node]


def _tensors(model: ModelProto) -> list[TensorProto]:
    found = [tensor for graph in graphs_of(model) for tensor in graph.initializer]
    attributes = [a for node in _nodes(model) for a in node.attribute]
    return found + [a.t for a in attributes if a.type == AttributeProto.TENSOR]


def _names(model: ModelProto) -> list[str]:
    names = [name for node in _nodes(model) for name in (*node.input, *node.output)]
    return [*names, *(t.name for t in _tensors(model)), *NAMES]


def dims(model: ModelProto, random: Random) -> None:
    tensor = random.choice(_tensors(model))
    if tensor.dims and random.random() < 0.7:
        tensor.dims[random.randrange(len(tensor.dims))] = random.choice(NUMBERS)
    else:
        tensor.dims.extend(random.choices(NUMBERS, k=random.choice((1, 2, 70))))


def huge_without_data(model: ModelProto, random: Random) -> None:
    tensor = random.choice(_tensors(model))
    del tensor.dims[:]
    tensor.dims.extend(random.choice(([2**31, 2**31], [2**20, 2**20], [2**62, 4], [3, 2**61], [0, 2**62], [2**33])))
    if random.random() < 0.5:
        tensor.ClearField("raw_data")


def data_type(model: ModelProto, random: Random) -> None:
    random.choice(_tensors(model)).data_type = random.choice((*range(26), 99, -1, 2**31 - 1))


def raw_data(model: ModelProto, random: Random) -> None:
    tensor = random.choice(_tensors(model))
    tensor.raw_data = random.choice((b"", tensor.raw_data[:-1], tensor.raw_data * 2, tensor.raw_data + b"\0"))


def two_payloads(model: ModelProto, random: Random) -> None:
    tensor = random.choice(_tensors(model))
    random.choice((tensor.float_data, tensor.double_data)).extend([1.0] * random.choice((1, 512)))


def values(model: ModelProto, random: Random) -> None:
    """Replace a weight with NaN, infinity, the largest fp32 number or the smallest subnormal."""
    tensor = random.choice(_tensors(model))
    special = random.choice(
        (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f", b"\x01\x00\x00\x00", b"\xff\xff\xff\xff")
    )
    if len(tensor.raw_data) >= 4:
        position = 4 * random.randrange(len(tensor.raw_data) // 4)
        tensor.raw_data = tensor.raw_data[:position] + special + tensor.raw_data[position + 4 :]


def external(model: ModelProto, random: Random) -> None:
    tensor = random.choice(_tensors(model))
    offset, length = (random.choice((0, 0, 64, *NUMBERS)) for _ in range(2))
    graphs.refer(tensor, random.choice(LOCATIONS), offset, random.choice((None, length)))
    if random.random() < 0.2:
        tensor.external_data[random.randrange(len(tensor.external_data))].value = random.choice(
            ("nan", "1e9", "", "0x10", "-0", "9" * 40, "²")
        )
    if random.random() < 0.1:
        tensor.external_data.add(key=random.choice(("location", "checksum", "offset", "?")), value="7")
    if random.random() < 0.1:
        tensor.ClearField("external_data")


def external_more(model: ModelProto, random: Random) -> None:
    """Change the location, offset or length of external data that exists beside the model."""
    entries = [entry for tensor in _tensors(model) for entry in tensor.external_data]
    if not entries:
        return external(model, random)
    entry = random.choice(entries)
    entry.value = random.choice(LOCATIONS) if entry.key == "location" else str(random.choice(NUMBERS))
    return None


def duplicate(model: ModelProto, random: Random) -> None:
    """Duplicate a node, an initializer, an input, an output, a function or an opset."""
    graph = random.choice(graphs_of(model))
    lists: list[Any] = [graph.node, graph.initializer, graph.input, graph.output, model.opset_import, model.functions]
    chosen = random.choice([found for found in lists if found])
    for _ in range(random.choice((1, 1, 3))):
        chosen.add().CopyFrom(random.choice(chosen))


def drop(model: ModelProto, random: Random) -> None:
    """Remove a node, an initializer, an input, an output, a function or an opset."""
    graph = random.choice(graphs_of(model))
    lists: list[Any] = [graph.node, graph.initializer, graph.input, graph.output, model.opset_import, model.functions]
    chosen = random.choice([found for found in lists if found])
    del chosen[random.randrange(len(chosen))]


def rename(model: ModelProto, random: Random) -> None:
    """Rename one end of an edge, or a tensor or node. This makes cycles, missing values and duplicates."""
    names = _names(model)
    node = random.choice(_nodes(model) or [NodeProto()])
    graph = random.choice(graphs_of(model))
    what = random.randrange(6)
    if what == 0 and node.input:
        node.input[random.randrange(len(node.input))] = random.choice(names)
    elif what == 1 and node.output:
        node.output[random.randrange(len(node.output))] = random.choice(names)
    elif what == 2 and graph.initializer:
        random.choice(graph.initializer).name = random.choice(names)
    elif what == 3 and graph.input:
        random.choice(graph.input).name = random.choice(names)
    elif what == 4 and graph.output:
        random.choice(graph.output).name = random.choice(names)
    else:
        node.name = random.choice(names)


def everywhere(model: ModelProto, random: Random) -> None:
    """Rename a value everywhere, so that the graph stays consistent."""
    old, new = random.choice(_names(model)), random.choice(NAMES)
    for node in _nodes(model):
        for edges in (node.input, node.output):
            for index, name in enumerate(edges):
                if name == old:
                    edges[index] = new
    for graph in graphs_of(model):
        for named in _named(graph):
            if named.name == old:
                named.name = new


def _named(graph: GraphProto) -> list[Any]:
    return [*graph.input, *graph.output, *graph.initializer]


def arity(model: ModelProto, random: Random) -> None:
    node = random.choice(_nodes(model) or [NodeProto()])
    edges = random.choice((node.input, node.output))
    if edges and random.random() < 0.5:
        del edges[random.randrange(len(edges))]
    else:
        edges.append(random.choice(_names(model)))


def operator(model: ModelProto, random: Random) -> None:
    node = random.choice(_nodes(model) or [NodeProto()])
    if random.random() < 0.7:
        node.op_type = random.choice((*OPS, *NAMES))
    else:
        node.domain = random.choice(("ai.onnx", "ai.onnx.ml", "com.microsoft", "own", "nope", "bf16kit", "a" * 3000))


def attribute(model: ModelProto, random: Random) -> None:
    """Change the type or value of an attribute, add one, or remove one."""
    node = random.choice(_nodes(model) or [NodeProto()])
    name = random.choice(("axis", "to", "perm", "value", "kernel_shape", "pads", "strides", "dilations", "group", "hidden_size",
                          "epsilon", "direction", "then_branch", "body", "num_scan_inputs", "transB", "keepdims", "axes"))  # fmt: skip
    if node.attribute and random.random() < 0.3:
        del node.attribute[random.randrange(len(node.attribute))]
        return
    if node.attribute and random.random() < 0.6:
        changed = random.choice(node.attribute)
        name = changed.name
        if random.random() < 0.3:
            changed.type = cast(Any, random.choice(list(range(15))))
            return
        if random.random() < 0.1:
            changed.ref_attr_name = random.choice(NAMES)
            return
        node.attribute.remove(changed)
    big = random.choice(NUMBERS)
    made: Any = random.choice((big, [big], [big] * 4, 0.5, float("nan"), "text", b"\xff\xfe", [], ["a"], GraphProto(), TensorProto(),
                               graphs.initializer("t", graphs.values(3))))  # fmt: skip
    if made == []:
        node.attribute.add(name=name, type=AttributeProto.INTS)
    else:
        node.attribute.append(helper.make_attribute(name, made))


def versions(model: ModelProto, random: Random) -> None:
    if random.random() < 0.6:
        opset = random.choice(model.opset_import) if model.opset_import else model.opset_import.add()
        opset.version = random.choice((*range(-1, 30), 2**31, 2**63 - 1, -(2**31)))
        if random.random() < 0.15:
            opset.domain = random.choice(("ai.onnx", "ai.onnx.ml", "nope"))
    else:
        model.ir_version = random.choice((*range(-1, 15), 2**31, 2**62))


def edges(model: ModelProto, random: Random) -> None:
    """Change the declared type or shape of an input, an output or a value."""
    graph = random.choice(graphs_of(model))
    found = [*graph.input, *graph.output, *graph.value_info]
    if not found:
        return
    kind = random.choice(found).type
    what = random.randrange(5)
    if what == 0:
        kind.tensor_type.elem_type = random.choice((*range(26), 99, 2**31 - 1))
    elif what == 1:
        for dim in kind.tensor_type.shape.dim:
            random.choice(
                (
                    lambda d=dim: setattr(d, "dim_value", random.choice(NUMBERS)),
                    lambda d=dim: setattr(d, "dim_param", random.choice(NAMES)),
                    dim.Clear,
                )
            )()
    elif what == 2:
        kind.tensor_type.ClearField("shape")
    elif what == 3:
        kind.tensor_type.shape.dim.add().dim_value = random.choice(NUMBERS)
    else:
        random.choice(
            (
                kind.Clear,
                lambda: kind.sequence_type.elem_type.tensor_type.SetInParent(),
                lambda: kind.map_type.SetInParent(),
            )
        )()


def nest(model: ModelProto, random: Random) -> None:
    """Nest bodies in bodies, up to the depth that protobuf reads."""
    depth = random.choice((2, 5, 10, 15, 30))
    graph = model.graph
    for level in range(depth):
        inner = GraphProto()
        inner.CopyFrom(graph if random.random() < 0.15 and level < 2 else GraphProto(name="g"))
        if not inner.output:
            inner.node.append(helper.make_node("Identity", ["x"], [f"i{level}"]))
            inner.output.append(graphs.edge(f"i{level}"))
        graph.node.append(helper.make_node("If", ["x"], [f"if{level}"], then_branch=inner, else_branch=inner))
        graph = graph.node[-1].attribute[0].g


def chain(model: ModelProto, random: Random) -> None:
    """Append a chain of 50 or 1,200 nodes. Code that recurses over nodes exceeds Python's limit of 1,000 calls."""
    last = model.graph.output[0].name if model.graph.output else "x"
    op = random.choice(("Identity", "Relu", "Neg", "Sum"))
    count = random.choice((50, 1200))
    for index in range(count):
        model.graph.node.append(helper.make_node(op, [last if not index else f"chain{index - 1}"], [f"chain{index}"]))
    if model.graph.output:
        model.graph.output[0].name = f"chain{count - 1}"


def grow(model: ModelProto, random: Random) -> None:
    """Add a few bytes that need much memory: a huge shape, expansion, range, random tensor or padding."""
    big = random.choice((2**20, 2**42, 2**62))
    out = model.graph.output[0] if model.graph.output else model.graph.output.add()
    shape = random.choice(([big], [2**21, 2**21]))
    model.graph.initializer.append(helper.make_tensor("shape_big", TensorProto.INT64, [len(shape)], shape))
    model.graph.initializer.append(helper.make_tensor("size_big", TensorProto.INT64, [], [big]))
    model.graph.initializer.append(helper.make_tensor("zero_", TensorProto.INT64, [], [0]))
    model.graph.initializer.append(helper.make_tensor("one_", TensorProto.INT64, [], [1]))
    made = random.choice((
        helper.make_node("ConstantOfShape", ["shape_big"], ["grown"]),
        helper.make_node("Expand", ["zero_", "shape_big"], ["grown"]),
        helper.make_node("Range", ["zero_", "size_big", "one_"], ["grown"]),
        helper.make_node("RandomNormal", [], ["grown"], shape=shape),
        helper.make_node("Pad", ["one_", "shape_big"], ["grown"]),
    ))  # fmt: skip
    model.graph.node.insert(0, made)
    if random.random() < 0.7:
        model.graph.node.append(helper.make_node("Cast", ["grown"], ["grown_f"], to=1))
        model.graph.node.append(helper.make_node("ReduceSum", ["grown_f"], ["grown_s"]))
        model.graph.node.append(helper.make_node("Add", [out.name, "grown_s"], ["y_big"]))
        out.name = "y_big"


def endless(model: ModelProto, random: Random) -> None:
    """Add a loop that never ends, or that runs 1,000, 2⁴⁰ or 2⁶³ - 1 times."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go2"]), helper.make_node("Identity", ["h"], ["h2"])],
        "forever",
        [graphs.edge("i", [], 7), graphs.edge("go", [], 9), graphs.edge("h")],
        [graphs.edge("go2", [], 9), graphs.edge("h2")],
    )
    turns = random.choice(("", "turns_"))
    if turns:
        model.graph.initializer.append(
            helper.make_tensor("turns_", TensorProto.INT64, [], [random.choice((1000, 2**40, 2**63 - 1))])
        )
    model.graph.initializer.append(helper.make_tensor("true_", TensorProto.BOOL, [], [1]))
    last = model.graph.output[0].name if model.graph.output else "x"
    model.graph.node.append(helper.make_node("Loop", [turns, "true_", last], ["looped"], body=body))
    if model.graph.output:
        model.graph.output[0].name = "looped"


def messages(message: Message) -> Iterator[Message]:
    """Yield ``message`` and every message nested in it."""
    yield message
    for descriptor, value in cast("list[tuple[FieldDescriptor, Any]]", message.ListFields()):
        if descriptor.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if _repeated(descriptor) else [value]:
                yield from messages(inner)


def any_field(model: ModelProto, random: Random) -> None:
    """Change any field of any message: clear it, add to it, or set another value of its type."""
    message = random.choice(list(messages(model)))
    descriptor = cast(FieldDescriptor, random.choice(list(message.DESCRIPTOR.fields)))
    name = descriptor.name
    if random.random() < 0.25 or descriptor.type == FieldDescriptor.TYPE_MESSAGE:
        if _repeated(descriptor) and len(getattr(message, name)) and random.random() < 0.5:
            getattr(message, name).add().CopyFrom(
                getattr(message, name)[0]
            ) if descriptor.type == FieldDescriptor.TYPE_MESSAGE else message.ClearField(name)
        else:
            message.ClearField(name)
        return
    value: Any = {
        FieldDescriptor.CPPTYPE_STRING: random.choice(NAMES),
        FieldDescriptor.CPPTYPE_INT64: random.choice(NUMBERS),
        FieldDescriptor.CPPTYPE_UINT64: abs(random.choice(NUMBERS)),
        FieldDescriptor.CPPTYPE_INT32: random.choice((-1, 0, 1, 7, 2**31 - 1)),
        FieldDescriptor.CPPTYPE_ENUM: random.choice([v.number for v in descriptor.enum_type.values])
        if descriptor.enum_type
        else 0,
        FieldDescriptor.CPPTYPE_FLOAT: random.choice((0.0, -1.0, 3e38, float("nan"))),
        FieldDescriptor.CPPTYPE_DOUBLE: float("inf"),
    }[descriptor.cpp_type]
    if descriptor.type == FieldDescriptor.TYPE_BYTES:
        value = value.encode()
    if _repeated(descriptor):
        getattr(message, name).append(value)
    else:
        setattr(message, name, value)


def _repeated(descriptor: FieldDescriptor) -> bool:
    return bool(descriptor.is_repeated)


EDITS: tuple[Edit, ...] = (
    dims, huge_without_data, data_type, raw_data, two_payloads, values, external, external, external_more, duplicate, drop, rename,
    rename, everywhere, arity, operator, attribute, attribute, versions, edges, nest, chain, grow, endless, any_field, any_field,
)  # fmt: skip


def edit(content: bytes, random: Random, canary: str) -> tuple[str, bytes]:
    """Return the names of one to three edits, and the edited model. ``canary`` is a file that must not be opened."""
    model = ModelProto.FromString(content)
    names = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        chosen = random.choice(EDITS)
        names.append(chosen.__name__)
        try:
            chosen(model, random)
        except (IndexError, ValueError):  # an earlier edit removed what this one needs, or the value does not fit
            continue
    for entry in (entry for tensor in _tensors(model) for entry in tensor.external_data):
        entry.value = entry.value.replace("{canary}", canary)
    return "+".join(names), model.SerializeToString()
