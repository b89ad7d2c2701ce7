"""Random models of which bf16 destroys one slice of the output, hidden behind values that dominate every norm."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from numpy.typing import NDArray

import graphs

Hidden = Literal["fill", "infinity", "large slice", "sink", "one of many", "samples", "row"]
KINDS: tuple[Hidden, ...] = ("fill", "infinity", "large slice", "sink", "one of many", "samples", "row")
_WIDTH = 16
_ROWS = 4  # of a model whose first axis is fixed, so that it is no batch axis
_CANCELLED = 2.0**-14  # what is left of two products: bf16's rounding of either is 32 times as much


@dataclass(frozen=True, slots=True)
class Case:
    """A model in a file, and the slice of its output that bf16 destroys: index ``index`` of ``axis``; -1 for none.

    Axis 0 is the batch, or the rows of a model that takes a fixed number of them.
    """

    path: Path
    hidden: Hidden
    axis: int
    index: int


def write(path: Path, seed: int, *, destroyed: bool) -> Case:
    """Write the model of ``seed`` to ``path``: x [batch or 4, 16] → y [batch or 4, 1 to 3 axes]."""
    random = np.random.default_rng(seed)
    hidden = KINDS[seed % len(KINDS)]
    if hidden == "one of many":
        shape: tuple[int, ...] = (int(random.integers(500, 1000)),)
    else:
        rank = int(random.integers(1, 4))
        shape = tuple(int(size) for size in random.integers(*((64, 100) if rank == 1 else (8, 14)), rank))
    axis = int(random.integers(len(shape)))
    index = int(random.integers(shape[axis]))
    spoilt = np.zeros(shape, bool)
    if destroyed:
        np.moveaxis(spoilt, axis, 0)[index] = True
    if hidden == "row":
        spoilt[:] = destroyed
        axis, index = -1, int(random.integers(_ROWS))
    nodes, weights = _nodes(hidden, shape, axis, index, spoilt, random)
    rows = _ROWS if hidden == "row" else "batch"
    edges = f"(float[{rows}, {_WIDTH}] x) => (float[{rows}, {', '.join(map(str, shape))}] y)"
    onnx.save(graphs.parsed(f"{edges} {{ {nodes} }}", **weights), path)
    return Case(path, hidden, axis + 1, index if destroyed else -1)


def _nodes(
    hidden: Hidden,
    shape: tuple[int, ...],
    axis: int,
    index: int,
    spoilt: NDArray[np.bool_],
    random: np.random.Generator,
) -> tuple[str, dict[str, NDArray[np.generic]]]:
    size = math.prod(shape)
    a, rest = (random.standard_normal((_WIDTH, size)).astype(np.float32) for _ in range(2))
    weights: dict[str, NDArray[np.generic]] = {
        "a": a,
        # The two products differ in the spoilt elements by what bf16 cannot resolve; elsewhere the second is another.
        "b": np.where(spoilt.reshape(-1), a * (1 + _CANCELLED * rest), rest).astype(np.float32),
        "back": np.where(spoilt, 1 / _CANCELLED, 1.0).astype(np.float32),
        "shape": np.array([-1, *shape]),
    }
    nodes = """[product_a] ya = MatMul (x, a) [product_b] yb = MatMul (x, b) [difference] flat = Sub (ya, yb)
        [reshape] shaped = Reshape (flat, shape) [scale] scaled = Mul (shaped, back)"""
    if hidden in ("fill", "infinity"):
        slot = np.zeros(shape, bool)
        slot.reshape(-1)[random.choice(np.flatnonzero(~spoilt))] = True  # it must not cover what is destroyed
        fill = float(random.choice([-1e4, 1e4, -1e9, 1e9]) if hidden == "fill" else random.choice([-np.inf, np.inf]))
        weights |= {"slot": slot, "filling": np.array(fill, np.float32)}
        nodes += "[fill] y = Where (slot, filling, scaled)"
    elif hidden in ("samples", "row"):  # the slice is wrong in two thirds of the samples, or all of a small row
        weights["quiet"] = (rest * 10.0 ** random.uniform(2, 5) if hidden == "row" else rest).astype(np.float32)
        nodes += """[product_q] yq = MatMul (x, quiet) [reshape_q] quiet_shaped = Reshape (yq, shape)
            [select] y = Where (chosen, scaled, quiet_shaped)"""
        if hidden == "row":
            weights["chosen"] = (np.arange(_ROWS) == index).reshape(-1, *(1 for _ in shape))
        else:
            weights |= {"first": np.array(0), "limit": np.array([-0.4], np.float32)}
            weights["column"] = np.array([-1, *(1 for _ in shape)])
            chosen = """[first] x0 = Gather <axis = 1> (x, first) [as_column] x0c = Reshape (x0, column)
                [choose] chosen = Greater (x0c, limit)"""
            nodes = chosen + nodes
    else:
        factor = np.ones(shape, np.float32)
        others = [i for i in range(shape[axis]) if i != index]
        large = random.choice(others, size=max(1, len(others) // 8), replace=False)
        np.moveaxis(factor, axis, 0)[large] = 10.0 ** random.uniform(2, 5)
        weights["factor"] = factor
        nodes += "[spread] y = Mul (scaled, factor)"
    return nodes, weights
