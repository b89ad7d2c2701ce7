"""The models the CPU kernel is measured on, and the graphs its peers are given: the same weights in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

from bench.core.workspace import Workspace
from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import PROFILES
from bf16kit.runtime.ort.onnxgraph import REBUILT, locations

LAYERS, WIDTH = 4, 4096
_OPSET, _IR = 22, 10
_LARGE = 256  # elements of a matrix that the converter stores in bf16


# --- models -----------------------------------------------------------------------------------------------------------


def layers(workspace: Workspace) -> tuple[Path, Path]:
    """:data:`LAYERS` products of [rows, 4096] by [4096, 4096], nothing between them: its ONNX file and its artifact."""
    file = workspace.root / "layers" / "layers.onnx"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        names = ["x", *(f"h{layer}" for layer in range(1, LAYERS)), "y"]
        products = [(names[layer], f"w{layer}", names[layer + 1]) for layer in range(LAYERS)]
        weights = {f"w{layer}": _weight(WIDTH, WIDTH, seed=layer) for layer in range(LAYERS)}
        nodes = [helper.make_node("MatMul", [x, w], [y], w.replace("w", "product")) for x, w, y in products]
        x, y = (helper.make_tensor_value_info(edge, TensorProto.FLOAT, ["rows", WIDTH]) for edge in "xy")
        tensors = [numpy_helper.from_array(weight, key) for key, weight in weights.items()]
        graph = helper.make_graph(nodes, "products", [x], [y], tensors)
        _save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR), file)
    return file, workspace.converted("layers", file, *_flags())


def language_model(workspace: Workspace, *, tied: bool) -> Path:
    """The artifact of :mod:`bench.kernel.torch_lm`, its output layer tied to the embedding, or its own."""
    from bench.kernel import torch_lm

    name = "lm_tied" if tied else "lm"
    workspace.root.mkdir(parents=True, exist_ok=True)
    file = workspace.root / f"{name}.pt"
    if not file.exists():
        torch_lm.save(file, tied=tied)
    build = ["--model", "bench.kernel.torch_lm:step", "--model-args", f'{{"tied": {str(tied).lower()}}}']
    inputs = [word for text in torch_lm.inputs() for word in ("--input", text)]
    return workspace.converted(name, file, *build, *inputs, *_flags(), "--budget", "top1_agreement=0.9")


def _flags() -> list[str]:
    """Every profile for CPUs. What these models say means nothing, so neither does what rounding does to it."""
    profiles = [flag for profile in PROFILES if profile.startswith("cpu") for flag in ("--profile", profile)]
    return ["--format", "onnx", *profiles, "--no-report", "--budget", "relative_l2=0.1"]


def _weight(rows: int, columns: int, seed: int) -> NDArray[np.float32]:
    """Gaussian, scaled so that products neither grow nor fade from layer to layer."""
    return np.random.default_rng(seed).standard_normal((rows, columns), np.float32) * np.float32(rows**-0.5)


# --- what the peers read ----------------------------------------------------------------------------------------------


def fp32_graph(artifact: Path, file: Path) -> Path:
    """The source model in fp32 as the converter read it, as one ONNX graph: the artifact's reference, its weights
    restored bit for bit and written beside ``file``."""
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    opened = Artifact.open(artifact, verify=False)
    reference = artifact / str(opened.manifest.reference)
    model = onnx.load(reference, load_external_data=False)
    rebuilt = {tensor.name for tensor in model.graph.initializer if REBUILT in locations(tensor)}
    for tensor in model.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        array = opened.restore(tensor.name) if tensor.name in rebuilt else opened.tensor(tensor.name)
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), tensor.name))
    _save(model, file)
    return file


def bf16_stored(graph: Path, file: Path) -> Path:
    """``graph`` with its matrices stored in bf16 and widened by a Cast, as other runtimes are given such weights."""
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    model = onnx.load(graph)
    casts = []
    for tensor in model.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT or len(tensor.dims) != 2 or np.prod(tensor.dims) < _LARGE:
            continue
        name, stored = tensor.name, f"{tensor.name}_bf16"
        narrow = numpy_helper.to_array(tensor).astype(ml_dtypes.bfloat16)
        tensor.CopyFrom(helper.make_tensor(stored, TensorProto.BFLOAT16, narrow.shape, narrow.tobytes(), raw=True))
        casts.append(helper.make_node("Cast", [stored], [name], f"widen_{name}", to=TensorProto.FLOAT))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    _save(model, file)
    return file


def _save(model: onnx.ModelProto, file: Path) -> None:
    """Large tensors go to a file of their own beside ``file``, aligned so that ONNX Runtime can map them."""
    data = file.with_name(f"{file.name}.data")
    with data.open("wb") as stream:
        for tensor in model.graph.initializer:
            if len(tensor.raw_data) < _LARGE * 4:
                continue
            offset = -(-stream.tell() // _PAGE) * _PAGE
            stream.write(b"\0" * (offset - stream.tell()))
            stream.write(tensor.raw_data)
            set_external_data(tensor, data.name, offset=offset, length=len(tensor.raw_data))
            tensor.ClearField("raw_data")
    onnx.save(model, file)


_PAGE = 4096


def feeds(rows: int) -> dict[str, NDArray[Any]]:
    """Gaussian float32 ``x`` [rows, 4096]."""
    return {"x": np.random.default_rng(0).standard_normal((rows, WIDTH), np.float32)}
