"""Judge the outcome of a mutant: it must end in a correct artifact or in one clear error message."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import external_data_helper, helper, numpy_helper

from fuzzing import jax_edits
from fuzzing.seed import Seed

LONGEST = 600  # characters of a message; a longer one is a dump
_LIBRARY = re.compile(
    r"(/onnxruntime_src/|/home/|/pytorch/|\.(?:cc|cpp|h|py):\d+|0x[0-9a-f]{8,}|Traceback|std::"
    r"|terminate called|frame #\d)"
)

Array = NDArray[Any]
Bits = tuple[str, tuple[int, ...], bytes]


def message_faults(output: str, code: int, source: Seed) -> list[str]:
    """Return what is wrong with an error message."""
    parts = re.split(r"^(?:bf16-convert: error: |Error: )", output, flags=re.MULTILINE)
    if len(parts) != 2:
        return [f"exit code {code} with {len(parts) - 1} messages: {output[-300:]!r}"]
    text = parts[1].strip()
    faults = []
    if "this is a bug" in text or "unexpected " in text[:12]:
        faults.append("calls it a bug")
    if len(text) > LONGEST:
        faults.append(f"is {len(text)} characters long")
    if match := _LIBRARY.search(text):
        faults.append(f"shows a library's inside: {match[0]!r}")
    if not any(name in text for name in (source.main, *source.files)) and not re.search(
        r"'[^']*'|--[a-z]|profile ", text
    ):
        faults.append("names neither file nor tensor")
    if text.startswith("out of memory"):
        faults.append("ran out of memory")
    return [f"{fault}: {text[:400]!r}" for fault in faults]


def artifact_faults(restored: Path, source: Path, seed: Seed) -> list[str]:
    """Return the differences between the restored tensors and the mutant's own, as another reader reads them."""
    expected, found = Counter(own_tensors(source, seed)), Counter(_stored(restored.read_bytes()))
    missing, more = expected - found, found - expected
    return [
        f"{what}: {dtype}{list(shape)}, {len(data)} bytes"
        for what, several in (("not given back", missing), ("given back, and not the source's", more))
        for dtype, shape, data in list(several)[:2]
    ]


def same(tensors: Mapping[str, Array], source: Path, seed: Seed) -> list[str]:
    """Return a fault if ``tensors``, as the converter read them, differ from the mutant's own."""
    mine = Counter((array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes()) for array in tensors.values())
    return [] if mine == Counter(own_tensors(source, seed)) else ["was read as other tensors than another reader finds"]


def own_tensors(source: Path, seed: Seed) -> Iterator[Bits]:
    """Yield the source's tensors as the library of its format reads them."""
    if seed.kind == "onnx":
        yield from _of_onnx(source)
    elif seed.kind == "torch":
        yield from _of_torch(source)
    elif seed.kind == "flax":
        yield from jax_edits.of_flax(source)
    elif seed.kind == "orbax":
        yield from jax_edits.of_orbax(source)
    elif seed.main.endswith(".json"):
        yield from _of_shards(source)
    else:
        yield from _stored(source.read_bytes())


def _of_onnx(source: Path) -> Iterator[Bits]:
    model = _loaded(source)
    graphs, functions = [model.graph], list(model.functions)
    nodes: list[onnx.NodeProto] = [node for function in functions for node in function.node]
    tensors: list[onnx.TensorProto] = []
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            tensors += graph.initializer
            nodes += graph.node
            continue
        node = nodes.pop()
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                graphs.append(attribute.g)
            elif node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
                tensors += _constant(attribute)
    for tensor in tensors:
        if tensor.data_type == onnx.TensorProto.STRING:
            continue
        array = numpy_helper.to_array(tensor)
        if array.dtype.kind in "iub" and array.dtype.name in _INTEGERS and array.nbytes <= 1024:
            continue  # small integer tensors are shape constants, not weights
        yield array.dtype.name, array.shape, array.tobytes()


def _loaded(source: Path) -> onnx.ModelProto:
    """Load the model with its external data. A tensor without a stated length gets the length that its shape needs.

    ONNX's own loader would read the rest of the file. ONNX Runtime reads only as much as it needs.
    """
    model = onnx.load(source, load_external_data=False)
    for tensor in external_data_helper._get_all_tensors(model):  # noqa: SLF001 -- at any level
        entries = {entry.key for entry in tensor.external_data}
        if external_data_helper.uses_external_data(tensor) and "length" not in entries:
            itemsize = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
            tensor.external_data.add(key="length", value=str(math.prod(tensor.dims) * itemsize))
    external_data_helper.load_external_data_for_model(model, str(source.parent))
    return model


_INTEGERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def _constant(attribute: onnx.AttributeProto) -> list[onnx.TensorProto]:
    if attribute.name == "value" and attribute.type == onnx.AttributeProto.TENSOR:
        return [attribute.t]
    if attribute.name == "value_float":
        return [numpy_helper.from_array(np.array(attribute.f, np.float32))]
    if attribute.name == "value_floats":
        return [numpy_helper.from_array(np.array(attribute.floats, np.float32))]
    return []


def _of_torch(source: Path) -> Iterator[Bits]:
    import torch

    loaded = torch.load(source, map_location="cpu", weights_only=True)
    state = loaded
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(loaded.get(key), dict) and not any(isinstance(value, torch.Tensor) for value in loaded.values()):
            state = loaded[key]
            break
    for tensor in state.values():
        if isinstance(tensor, torch.Tensor):
            plain = tensor.detach().contiguous()
            if plain.dtype is torch.bfloat16:
                array: Array = plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            else:
                array = plain.numpy()
            yield array.dtype.name, array.shape, array.tobytes()


def _of_shards(index: Path) -> Iterator[Bits]:
    import json

    weights: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    for name, shard in weights.items():
        found = dict(_entries((index.parent / shard).read_bytes()))
        yield found[name]


def _stored(content: bytes) -> Iterator[Bits]:
    for _, bits in _entries(content):
        yield bits


_NAMES = {
    "BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip


def _entries(content: bytes) -> Iterator[tuple[str, Bits]]:
    from safetensors import deserialize

    for name, entry in deserialize(content):  # type: ignore[no-untyped-call]  # its own
        yield name, (_NAMES[entry["dtype"]], tuple(entry["shape"]), bytes(entry["data"]))
