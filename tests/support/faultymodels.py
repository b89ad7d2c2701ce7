"""One small converted model, and copies of it with faults that no digest and no golden sample detects.

``h = x·a``, ``y = relu(sin(h)·b)·c``, ``z = sin(h)·d``, fp32[batch,64] each: a wave, like Fourier features, so
that the model is a different function for inputs of a different magnitude.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from converting import ONNX_ONLY
from onnx import ModelProto, NodeProto, TensorProto, helper

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.reading import Digests
from bf16kit.numerics.tensors import Array
from converter.cli import run

WIDTH = 64
_CHUNK = 4  # columns between two roundings of a sum


def rows(count: int, seed: int, scale: float = 1.0) -> Array:
    """Return inputs [count, 64] of the distribution that the model was calibrated on, times ``scale``."""
    return (np.random.default_rng(seed).standard_normal((count, WIDTH)) * scale).astype(np.float32)


def convert(repository: Path, name: str, scratch: Path, seed: int = 0) -> Path:
    """Convert the model without a fault, with 64 rows of samples. Return the artifact's path.

    Another ``seed`` gives other weights.
    """
    return converted(_waves(seed), repository, name, scratch)


def converted(model: ModelProto, repository: Path, name: str, scratch: Path) -> Path:
    """Convert another model of the same input as :func:`convert` does."""
    scratch.mkdir()
    onnx.save(model, scratch / "source.onnx")
    (scratch / "samples").mkdir()
    for number in range(8):
        np.savez(scratch / "samples" / f"{number}.npz", x=rows(8, number))
    target = repository / name / "1"
    options = ("--profile", "cpu", "--samples", scratch / "samples", *ONNX_ONLY)
    command = ["checkpoint", scratch / "source.onnx", "--out", target, *options]
    assert run([str(argument) for argument in command]) == 0
    return target


def copied(artifact: Path, repository: Path, name: str) -> None:
    """Copy the model without a fault to another name."""
    shutil.copytree(artifact, repository / name / "1")


def damaged(artifact: Path, repository: Path, name: str, damage: Callable[[ModelProto], None]) -> None:
    """Write a copy with a damaged bf16 graph. Digests and reference are correct, and it has no golden samples."""
    graph = _waves(rounded=True)
    damage(graph)
    with_graph(artifact, repository, name, graph)


def with_graph(artifact: Path, repository: Path, name: str, graph: ModelProto) -> None:
    """Write a copy with this bf16 graph, as :func:`damaged` does."""
    target = repository / name / "1"
    copied(artifact, repository, name)
    (target / "cpu.onnx").write_bytes(graph.SerializeToString())
    manifest = Artifact.open(artifact).manifest
    files = manifest.files | {"cpu.onnx": Digests().entry(target / "cpu.onnx")}
    (target / "manifest.json").write_bytes(manifest.model_copy(update={"files": files, "golden": None}).dumps())


def accumulated_in_bf16(model: ModelProto) -> None:
    """Compute ``s·b`` from four columns of ``s`` at a time, and round the sum to bf16 after each."""
    at = [node.name for node in model.graph.node].index("second")
    add, total = [], ""
    for start in range(0, WIDTH, _CHUNK):
        part, bounds = f"part{start}", (f"from{start}", f"to{start}")
        for bound, value in zip(bounds, (start, start + _CHUNK), strict=True):
            model.graph.initializer.append(helper.make_tensor(bound, TensorProto.INT64, [1], [value]))
        add += [
            helper.make_node("Slice", ["s", *bounds, "last"], [f"{part}_s"]),
            helper.make_node("Slice", ["b", *bounds, "first"], [f"{part}_b"]),
            helper.make_node("MatMul", [f"{part}_s", f"{part}_b"], [part]),
        ]
        if total:
            add.append(helper.make_node("Add", [total, part], [f"{part}_sum"]))
        total = f"{part}_rounded"
        add += _rounding(f"{part}_sum" if start else part, total)
    add[-1].output[0] = "g"
    model.graph.initializer.append(helper.make_tensor("last", TensorProto.INT64, [1], [1]))
    model.graph.initializer.append(helper.make_tensor("first", TensorProto.INT64, [1], [0]))
    _replace(model, at, add)


def cancelling(model: ModelProto) -> None:
    """Add 256 to ``h``, round the sum to bf16, and subtract 256 again: few digits of ``h`` are left."""
    at = [node.name for node in model.graph.node].index("first")
    model.graph.initializer.append(helper.make_tensor("much", TensorProto.FLOAT, [], [256.0]))
    first = model.graph.node[at]
    _replace(
        model,
        at,
        [
            helper.make_node("MatMul", first.input, ["h_exact"]),
            helper.make_node("Add", ["h_exact", "much"], ["h_much"]),
            *_rounding("h_much", "h_rounded"),
            helper.make_node("Sub", ["h_rounded", "much"], ["h"]),
        ],
    )


def not_a_number(model: ModelProto) -> None:
    """Set all of ``z`` to NaN in rows whose first input is over 1: one row in six."""
    _scaled_above(model, 1.0, math.nan)


def far_off_in_the_tail(model: ModelProto) -> None:
    """Give 1.15 times ``z``, ten times the budget, in rows whose first input is over 1.645: one row in twenty."""
    _scaled_above(model, 1.645, 1.15)


def _scaled_above(model: ModelProto, above: float, factor: float) -> None:
    at = [node.name for node in model.graph.node].index("fourth")
    fourth = model.graph.node[at]
    for name, value in (("above", above), ("factor", factor)):
        model.graph.initializer.append(helper.make_tensor(name, TensorProto.FLOAT, [1], [value]))
    for name, number in (("begin", 0), ("end", 1), ("axis", 1)):
        model.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [1], [number]))
    _replace(
        model,
        at,
        [
            helper.make_node("MatMul", fourth.input, ["z_sound"]),
            helper.make_node("Slice", ["x", "begin", "end", "axis"], ["x_first"]),
            helper.make_node("Greater", ["x_first", "above"], ["ails"]),
            helper.make_node("Mul", ["z_sound", "factor"], ["z_scaled"]),
            helper.make_node("Where", ["ails", "z_scaled", "z_sound"], ["z"]),
        ],
    )


def _waves(seed: int = 0, *, rounded: bool = False) -> ModelProto:
    """Return the source model; with ``rounded``, its weights are rounded to bf16."""
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], name="first"),
        helper.make_node("Sin", ["h"], ["s"], name="wave"),
        helper.make_node("MatMul", ["s", "b"], ["g"], name="second"),
        helper.make_node("Relu", ["g"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "c"], ["y"], name="third"),
        helper.make_node("MatMul", ["s", "d"], ["z"], name="fourth"),
    ]
    weights = []
    for number, name in enumerate("abcd"):
        weight = graphs.values(WIDTH, WIDTH, seed=4 * seed + number)
        if rounded:
            weight = weight.astype(ml_dtypes.bfloat16).astype(np.float32)
        weights.append(graphs.initializer(name, weight))
    edges = [graphs.edge("x", ["batch", WIDTH])], [graphs.edge(name, ["batch", WIDTH]) for name in ("y", "z")]
    return graphs.model(nodes, *edges, weights)


def _rounding(value: str, rounded: str) -> list[NodeProto]:
    return [
        helper.make_node("Cast", [value], [f"{rounded}_bf16"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", [f"{rounded}_bf16"], [rounded], to=TensorProto.FLOAT),
    ]


def _replace(model: ModelProto, at: int, others: list[NodeProto]) -> None:
    nodes = [*model.graph.node]
    nodes[at : at + 1] = others
    del model.graph.node[:]
    model.graph.node.extend(nodes)
