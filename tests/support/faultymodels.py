"""One small converted model, and copies of it with faults that no digest and no golden sample detects.

``h = x·a``, ``y = relu(sin(h)·b)·c``, ``z = sin(h)·d``, fp32[batch,64] each: a wave, like Fourier features, so
that the model is a different function for inputs of a different magnitude.
"""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from converting import ONNX_ONLY
from onnx import ModelProto

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.reading import Digests
from bf16kit.converter.cli import run
from bf16kit.numerics.tensors import Array

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
    nodes, constants = "", {"columns": 1, "rows": 0}
    for start in range(0, WIDTH, _CHUNK):
        end = start + _CHUNK
        constants |= {f"at{start}": start, f"at{end}": end}
        total = f"Add(total{start}, p{start})" if start else "Identity(p0)"
        nodes += f"""
            s{start} = Slice(s, at{start}, at{end}, columns)
            b{start} = Slice(b, at{start}, at{end}, rows)
            p{start} = MatMul(s{start}, b{start})
            sum{start} = {total}
            {_rounding(f"sum{start}", f"total{end}" if end < WIDTH else "g")}"""
    _replace(model, "second", nodes, **constants)


def cancelling(model: ModelProto) -> None:
    """Add 256 to ``h``, round the sum to bf16, and subtract 256 again: few digits of ``h`` are left."""
    rounding = _rounding("h_much", "h_rounded")
    nodes = f"h_exact = MatMul(x, a) h_much = Add(h_exact, much) {rounding} h = Sub(h_rounded, much)"
    _replace(model, "first", nodes, much=256.0)


def not_a_number(model: ModelProto) -> None:
    """Set all of ``z`` to NaN in rows whose first input is over 1: one row in six."""
    _scaled_above(model, 1.0, math.nan)


def far_off_in_the_tail(model: ModelProto) -> None:
    """Give 1.15 times ``z``, ten times the budget, in rows whose first input is over 1.645: one row in twenty."""
    _scaled_above(model, 1.645, 1.15)


def _scaled_above(model: ModelProto, above: float, factor: float) -> None:
    nodes = """
        z_sound = MatMul(s, d)
        x_first = Slice(x, begin, end, axis)
        ails = Greater(x_first, above)
        z_scaled = Mul(z_sound, factor)
        z = Where(ails, z_scaled, z_sound)"""
    _replace(model, "fourth", nodes, above=above, factor=factor, begin=0, end=1, axis=1)


def _waves(seed: int = 0, *, rounded: bool = False) -> ModelProto:
    """Return the source model; with ``rounded``, its weights are rounded to bf16."""
    weights = {name: graphs.values(WIDTH, WIDTH, seed=4 * seed + number) for number, name in enumerate("abcd")}
    if rounded:
        weights = {name: each.astype(ml_dtypes.bfloat16).astype(np.float32) for name, each in weights.items()}
    text = f"(float[batch,{WIDTH}] x) => (float[batch,{WIDTH}] y, float[batch,{WIDTH}] z)"
    nodes = "[first] h = MatMul(x, a) [wave] s = Sin(h) [second] g = MatMul(s, b) [relu] r = Relu(g)"
    return graphs.parsed(f"{text} {{ {nodes} [third] y = MatMul(r, c) [fourth] z = MatMul(s, d) }}", **weights)


def _rounding(value: str, rounded: str) -> str:
    return f"{rounded}_bf16 = Cast<to = 16>({value}) {rounded} = Cast<to = 1>({rounded}_bf16)"


def _replace(model: ModelProto, name: str, nodes: str, **constants: float) -> None:
    """Put ``nodes`` in the place of the one called ``name``; the constants of integers are int64[1], others fp32[1]."""
    arrays = {
        key: np.array([each], np.int64 if isinstance(each, int) else np.float32) for key, each in constants.items()
    }
    others = graphs.parsed(f"(float x) => (float y) {{ {nodes} }}", **arrays).graph
    at = [node.name for node in model.graph.node].index(name)
    kept = [*model.graph.node[:at], *others.node, *model.graph.node[at + 1 :]]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    model.graph.initializer.extend(others.initializer)
