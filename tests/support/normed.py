"""Normalised residual sums, as exporters write them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper

import graphs

Array = NDArray[Any]
WIDTH = 40


def residual(
    *, bias: bool = True, summed: bool = False, skip: str = f"batch, seq, {WIDTH}", axis: int = -1
) -> ModelProto:
    """Return the model x and skip → y = |LayerNormalization(x + skip)|. If ``summed``, t = -(x + skip) is an output."""
    shape = f"float[batch, seq, {WIDTH}]"
    return graphs.parsed(
        f"""({shape} x, float[{skip}] skip) => ({shape} y{f", {shape} t" * summed}) {{
            [add] s = Add (x, skip) {"[neg] t = Neg (s)" * summed}
            [norm] n = LayerNormalization <axis = {axis}> (s, w{", b" * bias}) [abs] y = Abs (n)
        }}""",
        w=graphs.values(WIDTH, seed=0),
        b=graphs.values(WIDTH, seed=1),
    )


def feeds() -> dict[str, Array]:
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal((2, 3, WIDTH), np.float32) for name in ("x", "skip")}


@dataclass(frozen=True)
class Rms:
    """How the graph writes w · x / √(mean of x² + epsilon).

    ``square`` is ``pow`` or ``mul``, ``root`` is ``sqrt`` or ``pow``. ``divide`` is ``div`` (a division by the root), a
    product with the result of Reciprocal (``reciprocal``), of 1/root (``over``) or of one Pow (``inverse``), or
    ``operator``: one RMSNormalization for all of it. ``swapped`` swaps the operands of Mul and Add. ``axes`` and
    ``keepdims`` are those of the mean. With ``summed``, x is a sum; with ``others``, another node reads that sum too.
    """

    square: str = "pow"
    root: str = "sqrt"
    divide: str = "reciprocal"
    swapped: bool = False
    axes: tuple[int, ...] = (-1,)
    keepdims: int = 1
    summed: bool = True
    others: bool = False
    power: float = 2.0
    epsilon: float = 1e-6
    weight: tuple[int, ...] = (WIDTH,)
    opset: int = 22


def rms(spelling: Rms) -> ModelProto:
    """Return the model x, and skip if ``summed`` → y, absolute values. If ``others``, t = -sum is also an output."""
    s = spelling
    shape: list[int | str] = ["batch", "seq", WIDTH]
    nodes, tensors = list[NodeProto](), {"w": graphs.values(*s.weight, seed=1)}

    def add(op: str, *inputs: str, to: str, **attributes: Any) -> str:
        operands = reversed(inputs) if s.swapped and op in ("Mul", "Add") else inputs
        nodes.append(helper.make_node(op, [*operands], [to], name=to, **attributes))
        return to

    def const(name: str, value: Any, dtype: Any = np.float32) -> str:
        tensors[name] = np.asarray(value, dtype)
        return name

    total = add("Add", "x", "skip", to="s") if s.summed else "x"
    if s.divide == "operator":
        result = add("RMSNormalization", total, "w", to="n", epsilon=s.epsilon)
    else:
        squares = (
            add("Pow", total, const("two", s.power), to="sq")
            if s.square == "pow"
            else add("Mul", total, total, to="sq")
        )
        axes = {"axes": list(s.axes)} if s.opset < 18 else {}
        axes_input = [] if axes else [const("axes", list(s.axes), np.int64)]
        mean = add("ReduceMean", squares, *axes_input, to="mean", keepdims=s.keepdims, **axes)
        shifted = add("Add", mean, const("epsilon", s.epsilon), to="shifted")
        normal = _divided(s, add, const, total, shifted)
        result = add("Mul", normal, "w", to="n")
    add("Abs", result, to="y")
    outputs = [graphs.edge("y", shape)]
    if s.others:
        add("Neg", total, to="t")
        outputs.append(graphs.edge("t", shape))
    weights = [graphs.initializer(name, array) for name, array in tensors.items()]
    inputs = [graphs.edge(name, shape) for name in ("x", *(["skip"] if s.summed else []))]
    made = graphs.model(nodes, inputs, outputs, weights)
    made.opset_import[0].version = s.opset
    return made


def _divided(s: Rms, add: Any, const: Any, total: str, shifted: str) -> str:
    if s.divide == "inverse":
        factor = add("Pow", shifted, const("power", -0.5), to="factor")
    else:
        root = (
            add("Sqrt", shifted, to="root") if s.root == "sqrt" else add("Pow", shifted, const("power", 0.5), to="root")
        )
        if s.divide == "div":
            return str(add("Div", total, root, to="normal"))
        one = () if s.divide == "reciprocal" else (const("one", 1.0),)
        factor = add("Reciprocal" if not one else "Div", *one, root, to="factor")
    return str(add("Mul", total, factor, to="normal"))


def exact(spelling: Rms, fed: dict[str, Array]) -> Array:
    """Return y, computed in float64."""
    total = fed["x"] + fed["skip"] if spelling.summed else fed["x"]
    wide = total.astype(np.float64)
    normal = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + spelling.epsilon)
    return np.asarray(np.abs(normal * graphs.values(*spelling.weight, seed=1)))
