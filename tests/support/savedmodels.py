"""SavedModels written without TensorFlow, byte by byte: an index, its data, and a graph of a few nodes."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from converter.read.tensorflow import sstable
from converter.read.tensorflow.messages import message

FLOAT, STRING = 1, 7
_CODES = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "bool": 10, "bfloat16": 14, "float16": 19}
Array = NDArray[Any]


def table(entries: Mapping[bytes, bytes], *, shared: bool = True) -> bytes:
    """Return ``entries`` as a LevelDB table of one block. If ``shared``, a key omits the prefix of the previous key."""
    data, before = bytearray(), b""
    for key, value in sorted(entries.items()):
        same = 0
        while shared and same < min(len(key), len(before)) and key[same] == before[same]:
            same += 1
        data += varint(same) + varint(len(key) - same) + varint(len(value)) + key[same:] + value
        before = key
    file = bytearray()
    block = _put(file, _ended(bytes(data)))
    meta = _put(file, _ended(b""))
    index = _put(file, _ended(varint(0) + varint(1) + varint(len(block)) + b"\xff" + block))
    footer = (meta + index).ljust(40, b"\0") + sstable._MAGIC.to_bytes(8, "little")
    return bytes(file) + footer


def varint(value: int) -> bytes:
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*result, value))


def _ended(block: bytes) -> bytes:
    return block + (0).to_bytes(4, "little") + (1).to_bytes(4, "little")  # one restart, at the start


def _put(file: bytearray, block: bytes) -> bytes:
    offset = len(file)
    crc = sstable._masked(sstable._crc32c(block + b"\0"))
    file += block + b"\0" + crc.to_bytes(4, "little")
    return varint(offset) + varint(len(block))


def entry(dtype: int, shape: Iterable[int], offset: int, size: int, shard: int = 0) -> Any:
    found = message("BundleEntry")(dtype=dtype, shard=shard, offset=offset, size=size)
    for dim in shape:
        found.shape.dim.add(size=dim)
    return found


def write_bundle(
    prefix: Path,
    tensors: Mapping[str, Array],
    *,
    shards: int = 1,
    strings: bool = True,
    full: Mapping[str, str] | None = None,
) -> None:
    """Write ``tensors`` alternately to ``shards`` files, as TensorFlow does. ``full`` gives full names by key."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    data = [bytearray() for _ in range(shards)]
    entries = {b"": message("BundleHeader")(num_shards=shards).SerializeToString()}
    if strings:  # this string puts all later tensors at unaligned offsets
        data[0] += _string(objects(full or {}))
        entries[b"_CHECKPOINTABLE_OBJECT_GRAPH"] = entry(STRING, (), 0, len(data[0])).SerializeToString()
    for number, (name, array) in enumerate(tensors.items()):
        shard = number % shards
        found = entry(_CODES[array.dtype.name], array.shape, len(data[shard]), array.nbytes, shard)
        entries[name.encode()] = found.SerializeToString()
        data[shard] += array.tobytes()
    prefix.with_name(f"{prefix.name}.index").write_bytes(table(entries))
    for shard, content in enumerate(data):
        prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}").write_bytes(bytes(content))


def objects(full: Mapping[str, str]) -> bytes:
    """Return the object graph, which gives the variables under these keys their full names."""
    found = message("Objects")()
    for key, name in full.items():
        found.node.add().attribute.add(key=key, full_name=name)
    return bytes(found.SerializeToString())


def _string(text: bytes) -> bytes:
    length = varint(len(text))
    return length + sstable._masked(sstable._crc32c(length)).to_bytes(4, "little") + text


def tensor(name: str, *shape: int, dtype: int = FLOAT) -> Any:
    found = message("TensorInfo")(name=name, dtype=dtype)
    found.shape.dim.extend(message("Dim")(size=size) for size in shape)
    return found


def node(name: str, op: str, *inputs: str, call: str = "", dtype: int = 0) -> Any:
    found = message("Node")(name=name, op=op, input=inputs)
    if call:
        found.attr.add(key="f").value.func.name = call
    if dtype:
        found.attr.add(key="T").value.type = dtype
    return found


def meta_graph(
    nodes: Iterable[Any],
    signatures: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]],
    *,
    functions: Mapping[str, Iterable[Any]] | None = None,
    tags: Iterable[str] = ("serve",),
    restore: str = "",
) -> Any:
    graph = message("MetaGraph")()
    graph.info.tags.extend(tags)
    graph.graph.node.extend(nodes)
    for name, body in (functions or {}).items():
        function = graph.graph.library.function.add()
        function.signature.name = name
        function.node.extend(body)
    graph.saver.restore_op = restore
    for name, (inputs, outputs) in signatures.items():
        found = graph.signatures.add(key=name)
        for key, value in inputs.items():
            found.value.inputs.add(key=key).value.CopyFrom(value)
        for key, value in outputs.items():
            found.value.outputs.add(key=key).value.CopyFrom(value)
    return graph


def mlp_graph(**more: Any) -> Any:
    """Return the model x → x @ w → y as TensorFlow 2 saves it: the signature calls a function that reads variables."""
    nodes = [
        node("x", "Placeholder"),
        node("w", "VarHandleOp"),
        node("call", "StatefulPartitionedCall", "x", "w", call="forward"),
        node("restore", "StatefulPartitionedCall", "w", call="restoring"),
    ]
    functions = {
        "forward": [node("read", "ReadVariableOp", "w"), node("product", "MatMul", "x", "read:value:0")],
        "restoring": [node("of", "RestoreV2"), node("put", "AssignVariableOp", "w", "of:tensors:0")],
    }
    signatures = {"serving_default": ({"x": tensor("x:0", -1, 16)}, {"y": tensor("call:0", -1, 32)})}
    return meta_graph(nodes, signatures, functions=functions, restore="restore", **more)


def write(directory: Path, *graphs: Any, tensors: Mapping[str, Array] | None = None) -> Path:
    """Write a SavedModel of ``graphs``, by default :func:`mlp_graph`, and ``tensors``."""
    directory.mkdir(parents=True, exist_ok=True)
    model = message("SavedModel")(meta_graphs=graphs or (mlp_graph(),))
    (directory / "saved_model.pb").write_bytes(model.SerializeToString())
    if tensors is not None:
        write_bundle(directory / "variables" / "variables", tensors)
    return directory


_PROGRAM = """#!{python}
import json, os, sys, time
if "-c" in sys.argv:
    print(json.dumps({versions}))
    sys.exit()
ASK = sys.stdin
def reply(**what):
    sys.stdout.write(json.dumps(what) + "\\n")
    sys.stdout.flush()
{code}
"""
VERSIONS: Mapping[str, str | None] = {"python": "3.11.7", "tensorflow": "2.21.0", "tf2onnx": "1.17.0"}


def stand_in(path: Path, code: str, versions: Mapping[str, str | None] = VERSIONS) -> Path:
    """Write a program that replaces the Python with TensorFlow: it reports ``versions`` and runs ``code``."""
    path.write_text(_PROGRAM.format(python=sys.executable, versions=dict(versions), code=code))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# Code that responds like TensorFlow's process, with an ONNX file that exists already. {twist} may change the outputs.
TRANSLATES = """
import shutil, numpy as np, onnxruntime as ort
for line in ASK:
    request = json.loads(line)
    if request["do"] == "start":
        reply(versions={{"tensorflow": "2.21.0", "tf2onnx": "1.17.0"}})
        continue
    if request["do"] == "translate":
        shutil.copy({onnx!r}, request["to"])
    elif request["do"] == "answer":
        feeds = {{name: np.load(file) for name, file in request["feeds"].items()}}
        session = ort.InferenceSession({onnx!r})
        for (name, file), value in zip(request["answers"].items(), session.run(list(request["answers"]), feeds)):
            np.save(file, value{twist})
    reply()
"""


def many(count: int) -> dict[str, Array]:
    """Return ``count`` small variables."""
    return {f"layer{n}/kernel": np.full((2, n + 1), n, np.float32) for n in range(count)}
