"""Edits of ONNX models: still valid protobuf, but each breaks a rule that the converter or a library relies on."""

import contextlib
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

import graphs
from fuzzing.bytewise import special

Edit = Callable[[ModelProto, Random], None]
M = TypeVar("M", bound=Message)

NUMBERS = (-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 16, 1000, 65536, 2**24, 2**31 - 1, 2**32, 2**40, 2**62, 2**63 - 1)
NAMES = (
    "", "x", "y", "w0", "matmul0", "a" * 5000, "a\x00b", "ünï", "../x", "/etc/hostname", "'\"{}\n", "\x1b[31m", "reference", "__metadata__",
)  # fmt: skip
LOCATIONS = (
    "../secret", "../../secret", "sub/../../secret", "/etc/hostname", "/dev/zero", "/proc/self/mem", "", ".", "..",
    "./w0.bin", "link", "w0.bin\x00x", "m.onnx", "missing.bin", "C:\\w", "file:///etc/hostname", "//etc/hostname", "w" * 400,
    "ORT_MEM_ADDR", "*/_ORT_MEM_ADDR_/*", "w0.bin/", "{canary}",
)  # fmt: skip
OPS = ("MatMul", "Add", "Conv", "Loop", "If", "Scan", "LSTM", "Gather", "Reshape", "Resize", "Cast", "Nope", "Constant",
       "BatchNormalization", "Tile", "Range", "ConstantOfShape", "Expand", "Identity", "Softmax", "QuantizeLinear", "Dropout",
       "SequenceConstruct", "Pad", "Slice", "Split", "TopK", "Einsum", "OneHot", "Where", "NonZero", "EyeLike", "Gemm")  # fmt: skip


def messages(message: Message) -> Iterator[Message]:
    """Yield ``message`` and every message nested in it."""
    yield message
    for descriptor, value in cast("list[tuple[FieldDescriptor, Any]]", message.ListFields()):
        if descriptor.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if descriptor.is_repeated else [value]:
                yield from messages(inner)


def _every(model: ModelProto, kind: type[M]) -> list[M]:
    """Return the messages of a kind at any level: in nested bodies, attributes and functions, too."""
    return [message for message in messages(model) if isinstance(message, kind)]


def _names(model: ModelProto) -> list[str]:
    names = [name for node in _every(model, NodeProto) for name in (*node.input, *node.output)]
    return [*names, *(tensor.name for tensor in _every(model, TensorProto)), *NAMES]


def any_field(model: ModelProto, random: Random) -> None:
    """Change any field of any message: clear it, set another value of its type, or add or remove an element."""
    message = random.choice(list(messages(model)))
    fields: list[Any] = [descriptor for descriptor, _ in message.ListFields()]
    if not fields or random.random() < 0.3:
        fields = list(message.DESCRIPTOR.fields)
    descriptor = random.choice(fields)
    old: Any = getattr(message, descriptor.name)
    if random.random() < 0.2:
        message.ClearField(descriptor.name)
    elif descriptor.type == FieldDescriptor.TYPE_MESSAGE:
        _part(old, descriptor, random)
    elif descriptor.is_repeated and old and random.random() < 0.3:
        del old[random.randrange(len(old))]
    elif descriptor.is_repeated and old and random.random() < 0.7:
        old[random.randrange(len(old))] = _value(model, descriptor, b"", random)
    elif descriptor.is_repeated:
        old.extend([_value(model, descriptor, b"", random)] * random.choice((1, 2, 70)))
    else:
        setattr(message, descriptor.name, _value(model, descriptor, old, random))


def _part(part: Any, descriptor: FieldDescriptor, random: Random) -> None:
    """Set an empty message, or remove or duplicate one of several."""
    if not descriptor.is_repeated:
        part.SetInParent()
    elif part and random.random() < 0.5:
        del part[random.randrange(len(part))]
    else:
        part.add().CopyFrom(random.choice(part))


def _value(model: ModelProto, descriptor: FieldDescriptor, old: Any, random: Random) -> Any:
    if descriptor.type == FieldDescriptor.TYPE_BYTES:
        return random.choice((b"", old[:-1], old * 2, old + b"\0", random.choice(NAMES).encode()))
    if descriptor.enum_type:
        return random.choice([value.number for value in descriptor.enum_type.values])
    return {
        FieldDescriptor.CPPTYPE_STRING: random.choice(_names(model)),
        FieldDescriptor.CPPTYPE_INT64: random.choice((*range(-1, 30), *NUMBERS)),
        FieldDescriptor.CPPTYPE_UINT64: abs(random.choice(NUMBERS)),
        FieldDescriptor.CPPTYPE_INT32: random.choice((*range(-1, 30), 99, 2**31 - 1)),
        FieldDescriptor.CPPTYPE_FLOAT: random.choice((0.0, -1.0, 3e38, float("nan"))),
        FieldDescriptor.CPPTYPE_DOUBLE: float("inf"),
    }[descriptor.cpp_type]


def huge_without_data(model: ModelProto, random: Random) -> None:
    tensor = random.choice(_every(model, TensorProto))
    tensor.dims[:] = random.choice(([2**31, 2**31], [2**20, 2**20], [2**62, 4], [3, 2**61], [0, 2**62], [2**33]))
    if random.random() < 0.5:
        tensor.ClearField("raw_data")


def tensor(model: ModelProto, random: Random) -> None:
    """Change a size or the dtype of a tensor, or add elements in a second field."""
    chosen, what = random.choice(_every(model, TensorProto)), random.randrange(3)
    if what == 0:
        chosen.dims[random.randrange(len(chosen.dims))] = random.choice(NUMBERS)
    elif what == 1:
        chosen.data_type = random.choice((*range(26), 99, -1, 2**31 - 1))
    else:
        random.choice((chosen.float_data, chosen.double_data)).extend([1.0] * random.choice((1, 512)))


def values(model: ModelProto, random: Random) -> None:
    """Replace a weight with NaN, infinity and the like."""
    tensor = random.choice(_every(model, TensorProto))
    tensor.raw_data = special(tensor.raw_data, random)


def external(model: ModelProto, random: Random) -> None:
    """Move a tensor to a file, or change its location, offset or length there."""
    tensor = random.choice(_every(model, TensorProto))
    if tensor.external_data and random.random() < 0.7:
        entry = random.choice(tensor.external_data)
        texts = [*map(str, NUMBERS), "nan", "1e9", "", "0x10", "-0", "9" * 40, "²"]
        entry.value = random.choice(LOCATIONS if entry.key == "location" else texts)
        return
    offset, length = (random.choice((0, 0, 64, *NUMBERS)) for _ in range(2))
    graphs.refer(tensor, random.choice(LOCATIONS), offset, random.choice((None, length)))


def everywhere(model: ModelProto, random: Random) -> None:
    """Rename a value everywhere, so that the graph stays consistent."""
    old, new = random.choice(_names(model)), random.choice(NAMES)
    for node in _every(model, NodeProto):
        for edges in (node.input, node.output):
            edges[:] = [new if name == old else name for name in edges]
    everything: list[Any] = [*_every(model, ValueInfoProto), *_every(model, TensorProto)]
    for named in everything:
        if named.name == old:
            named.name = new


def edge(model: ModelProto, random: Random) -> None:
    """Have a node read or write another value: this makes cycles, missing values and duplicates."""
    node = random.choice(_every(model, NodeProto))
    edges = random.choice((node.input, node.output))
    edges[random.randrange(len(edges))] = random.choice(_names(model))


def operator(model: ModelProto, random: Random) -> None:
    node = random.choice(_every(model, NodeProto))
    if random.random() < 0.7:
        node.op_type = random.choice((*OPS, *NAMES))
    else:
        node.domain = random.choice(("ai.onnx", "ai.onnx.ml", "com.microsoft", "own", "nope", "bf16kit", "a" * 3000))


def attribute(model: ModelProto, random: Random) -> None:
    """Add an attribute, or replace one by one of another type."""
    node = random.choice(_every(model, NodeProto))
    name = random.choice(("axis", "to", "perm", "value", "kernel_shape", "pads", "strides", "dilations", "group", "hidden_size",
                          "epsilon", "direction", "then_branch", "body", "num_scan_inputs", "transB", "keepdims", "axes"))  # fmt: skip
    if node.attribute and random.random() < 0.7:
        changed = random.choice(node.attribute)
        name = changed.name
        node.attribute.remove(changed)
    big = random.choice(NUMBERS)
    made: Any = random.choice((big, [big], [big] * 4, 0.5, float("nan"), "text", b"\xff\xfe", ["a"], GraphProto(), TensorProto(),
                               graphs.initializer("t", graphs.values(3))))  # fmt: skip
    node.attribute.append(helper.make_attribute(name, made))


def versions(model: ModelProto, random: Random) -> None:
    random.choice(model.opset_import).version = random.choice((*range(-1, 30), 2**31, 2**63 - 1, -(2**31)))
    if random.random() < 0.3:
        model.ir_version = random.choice((*range(-1, 15), 2**31, 2**62))


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


EDITS: tuple[Edit, ...] = (
    any_field, any_field, any_field, any_field, any_field, any_field, tensor, tensor, huge_without_data, values, external, external, external,
    everywhere, edge, edge, operator, attribute, attribute, versions, nest, chain, grow, endless,
)  # fmt: skip


def edit(content: bytes, random: Random, canary: str) -> tuple[str, bytes]:
    """Return the names of one to three edits, and the edited model. ``canary`` is a file that must not be opened."""
    model = ModelProto.FromString(content)
    names = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        chosen = random.choice(EDITS)
        names.append(chosen.__name__)
        with contextlib.suppress(IndexError, ValueError, TypeError):  # an earlier edit removed what this one needs
            chosen(model, random)
    for entry in (entry for each in _every(model, TensorProto) for entry in each.external_data):
        entry.value = entry.value.replace("{canary}", canary)
    return "+".join(names), model.SerializeToString()
