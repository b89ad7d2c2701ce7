"""Random changes to ONNX files: to their bytes, and to the model in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, TensorProto, helper

SIZES = (0, -1, 1, 3, 2**31, 2**40, 2**62, -(2**62))
LOCATIONS = (
    "", ".", "..", "/etc/passwd", "../../../../etc/passwd", "nothing.bin", "manifest.json", "residual.bin",
    "golden.safetensors", "*/_ORT_MEM_ADDR_/*", "weights.bf16\0x", "./weights.bf16", "residual.rebuilt",
)  # fmt: skip
VALUES = (
    "",
    "-1",
    "0",
    "1",
    "63",
    "64",
    "128",
    "4096",
    "18446744073709551615",
    "99999999999999999999999",
    "1e3",
    " 64",
    "٣",
)
OPERATORS = (
    "MatMul", "Relu", "Nothing", "Identity", "Loop", "If", "Gather", "Reshape", "ConstantOfShape", "Tile", "Cast",
    "Conv", "QLinearMatMul", "SequenceAt", "Scan", "Expand", "Range", "RandomNormal", "StringNormalizer", "LSTM",
    "Einsum",
)  # fmt: skip


def change_bytes(file: Path, choice: random.Random) -> str:
    """Damage the bytes of a protobuf file."""
    data = bytearray(file.read_bytes())
    kind = choice.randrange(4)
    for _ in range(choice.choice((1, 3, 20))):
        at = (
            choice.randrange(len(data) + 1)
            if len(data) < 8 or choice.random() < 0.5
            else choice.randrange(len(data) // 2)
        )
        if kind == 0 and at < len(data):
            data[at] = choice.randrange(256)
        elif kind == 1:
            data[at:at] = choice.randbytes(choice.randrange(9))
        elif kind == 2:
            del data[at : at + choice.randrange(1, 9)]
        elif kind == 3:
            data[at:at] = data[at : at + choice.randrange(100)]
    file.write_bytes(bytes(data))
    return f"bytes, kind {kind}"


def change_graph(file: Path, choice: random.Random) -> str:
    """Change something in the graph. The file remains valid protobuf."""
    try:
        model = onnx.load(file, load_external_data=False)
    except DecodeError:
        return change_bytes(file, choice)
    change = choice.choice(CHANGES)
    try:
        description = change(model, choice)
    except (
        IndexError,
        ValueError,
        TypeError,
        DecodeError,
    ):  # the model has no such part, or the value does not fit
        description = "nothing"
    file.write_bytes(model.SerializeToString())
    return f"{change.__name__.strip('_').replace('_', ' ')}: {description}"


def _versions(model: onnx.ModelProto, choice: random.Random) -> str:
    if choice.random() < 0.3:
        model.ir_version = choice.choice((0, 1, 3, 99, -1, 2**62))
        return f"IR {model.ir_version}"
    opset = choice.choice(model.opset_import)
    if choice.random() < 0.2:
        model.opset_import.remove(opset)
        return "gone"
    opset.version = choice.choice((0, 1, 5, 11, 26, 99, -1, 2**62))
    return f"{opset.domain} {opset.version}"


def _nodes(model: onnx.ModelProto, choice: random.Random) -> list[onnx.NodeProto]:
    return [*model.graph.node, *(node for function in model.functions for node in function.node)]


def _operator(model: onnx.ModelProto, choice: random.Random) -> str:
    node = choice.choice(_nodes(model, choice))
    if choice.random() < 0.2:
        node.domain = choice.choice(("", "bf16kit", "com.microsoft", "nobody", "ai.onnx.ml"))
        return f"domain {node.domain}"
    node.op_type = choice.choice(OPERATORS)
    return node.op_type


def _edge(model: onnx.ModelProto, choice: random.Random) -> str:
    """Change a node's input or output: to another value (possibly its own), to none, or to one that does not exist."""
    node = choice.choice(_nodes(model, choice))
    names = choice.choice((node.input, node.output))
    at = choice.randrange(len(names))
    everything = [name for other in _nodes(model, choice) for name in (*other.input, *other.output)]
    names[at] = choice.choice(("", "nobody", *everything))
    return f"{node.op_type} {at} = {names[at]}"


def _count(model: onnx.ModelProto, choice: random.Random) -> str:
    """Remove or duplicate a node, an initializer, an input, an output or a function."""
    graph = model.graph
    things: Any = choice.choice((graph.node, graph.initializer, graph.input, graph.output, model.functions))
    at = choice.randrange(len(things))
    if choice.random() < 0.5:
        del things[at]
        return f"{at} is gone"
    things.append(things[at])
    return f"{at} is there twice"


def _shape(model: onnx.ModelProto, choice: random.Random) -> str:
    edge = choice.choice((*model.graph.input, *model.graph.output, *model.graph.value_info))
    kind = edge.type.tensor_type
    if choice.random() < 0.3:
        kind.elem_type = choice.choice((*range(24), 99))
        return f"{edge.name} of type {kind.elem_type}"
    at = choice.randrange(len(kind.shape.dim))
    if choice.random() < 0.3:
        del kind.shape.dim[at]
        return f"{edge.name} without dimension {at}"
    kind.shape.dim[at].dim_value = choice.choice(SIZES)
    return f"{edge.name} {at} = {kind.shape.dim[at].dim_value}"


def _tensor(model: onnx.ModelProto, choice: random.Random) -> str:
    tensor = choice.choice(model.graph.initializer)
    kind = choice.randrange(5)
    if kind == 0:
        tensor.data_type = choice.choice((*range(24), 99))
    elif kind == 1:
        tensor.dims[choice.randrange(len(tensor.dims))] = choice.choice(SIZES)
    elif kind == 2:
        tensor.dims.append(choice.choice(SIZES))
    elif kind == 3:
        tensor.ClearField("external_data")
        tensor.data_location = TensorProto.DEFAULT
        tensor.raw_data = choice.randbytes(choice.choice((0, 3, 512)))
    else:
        external = tensor.data_location == TensorProto.EXTERNAL
        tensor.data_location = TensorProto.DEFAULT if external else TensorProto.EXTERNAL
    return f"{tensor.name}, kind {kind}"


def _external(model: onnx.ModelProto, choice: random.Random) -> str:
    tensor = choice.choice([t for t in model.graph.initializer if t.external_data])
    if choice.random() < 0.3:
        key = choice.choice(("location", "offset", "length", "checksum", "nothing"))
        tensor.external_data.add(key=key, value=choice.choice((*VALUES, *LOCATIONS)))
        return f"more {key}"
    entry = choice.choice(tensor.external_data)
    entry.value = choice.choice(LOCATIONS if entry.key == "location" else VALUES)
    return f"{entry.key} {entry.value!r}"


def _attribute(model: onnx.ModelProto, choice: random.Random) -> str:
    node = choice.choice(_nodes(model, choice))
    if choice.random() < 0.2 or not node.attribute:
        node.attribute.append(
            helper.make_attribute(choice.choice(("k", "n", "axis", "to", "body")), choice.choice((-1, 2**62)))
        )
        return f"{node.op_type} has one more"
    attribute = choice.choice(node.attribute)
    kind = choice.randrange(4)
    if kind == 0:
        node.attribute.remove(attribute)
    elif kind == 1:
        attribute.i = choice.choice(SIZES)
    elif kind == 2:
        attribute.s = choice.choice((b"", b"none", b"gelu", b"\xff\xfe", b"x" * 70_000))
    else:
        attribute.type = getattr(AttributeProto, choice.choice(("FLOAT", "INT", "STRING", "TENSOR", "GRAPH", "INTS")))
    return f"{node.op_type}.{attribute.name}, kind {kind}"


def _depth(model: onnx.ModelProto, choice: random.Random) -> str:
    """Add bodies nested in bodies."""
    levels = choice.choice((3, 12, 25))
    body = helper.make_graph(
        [helper.make_node("Identity", ["nobody"], ["out"])], "body", [], [helper.make_tensor_value_info("out", 1, None)]
    )
    for _ in range(levels):
        node = helper.make_node("If", [model.graph.node[0].input[0]], ["out"], then_branch=body, else_branch=body)
        if levels > 3:
            node.attribute.pop()
        body = helper.make_graph([node], "body", [], [helper.make_tensor_value_info("out", 1, None)])
    model.graph.node.append(body.node[0])
    return f"{levels} levels"


def _more(model: onnx.ModelProto, choice: random.Random) -> str:
    """Add nodes whose results are unused: a huge tensor, a cycle, or a chain of 2,000 nodes."""
    name = choice.choice(("sizes", "endless", "chain"))
    if name == "sizes":
        shape = helper.make_tensor("huge", TensorProto.INT64, [2], [2**20, choice.choice((-1, 2**40))])
        model.graph.initializer.append(shape)
        model.graph.node.append(helper.make_node("ConstantOfShape", ["huge"], ["unread"]))
    elif name == "endless":
        model.graph.node.append(helper.make_node("Identity", ["round"], ["round"]))
    else:
        model.graph.node.extend(helper.make_node("Identity", [f"c{i}"], [f"c{i + 1}"]) for i in range(2000))
    return name


CHANGES: tuple[Callable[[onnx.ModelProto, random.Random], str], ...] = (
    _versions, _operator, _edge, _count, _shape, _tensor, _external, _external, _attribute, _attribute, _depth, _more,
)  # fmt: skip
