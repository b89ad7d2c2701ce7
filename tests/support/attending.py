"""Attention graphs as exporters write them, in the spelling that a test chooses, and their output in float64."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

import graphs

Array = NDArray[Any]
DEPTH, WIDTH = 8, 16
LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Spelling:
    """How the graph is written.

    ``forms``: for each of q, k and v, whether the input is in rows (``r``) or in heads (``h``). ``scale``: where the
    factor 1/4 is applied: ``mul`` or ``div`` (to the scores), ``q``, ``both`` (1/2 to q and 1/2 to k), ``rows`` (to q
    before it is split into heads), or ``none`` (nowhere). ``mask``: ``add``, ``add_first`` (the mask is the left
    operand), ``where``, ``where_not``, ``two`` (an Add and a Where) or ``none``. ``turn``: whether k is transposed to
    columns in ``one`` Transpose or in ``two``.
    """

    forms: str = "rrr"
    scale: str = "mul"
    mask: str = "add"
    turn: str = "one"
    heads: int = 4
    kv_heads: int = 4
    mask_shape: tuple[int | str, ...] = ("batch", 1, "queries", "keys")


class _Drawing:
    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.tensors: list[TensorProto] = []

    def add(self, op: str, *inputs: str, to: str = "", **attributes: Any) -> str:
        output = to or f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def const(self, value: Any, dtype: Any = np.float32) -> str:
        name = f"c{len(self.tensors)}"
        self.tensors.append(graphs.initializer(name, np.asarray(value, dtype)))
        return name

    def heads(self, rows: str, count: int, columns: int, perm: tuple[int, ...]) -> str:
        view = self.add("Reshape", rows, self.const([0, 0, count, columns], np.int64))
        return self.add("Transpose", view, perm=perm)

    def repeated(self, value: str, heads: int, shared: int, keys: int, columns: int) -> str:
        """Repeat each of the ``heads`` heads ``shared`` times, as Hugging Face's ``repeat_kv`` does."""
        apart = self.add("Unsqueeze", value, self.const([2], np.int64))
        wide = self.add("Expand", apart, self.const([1, 1, shared, 1, 1], np.int64))
        return self.add("Reshape", wide, self.const([0, heads * shared, keys, columns], np.int64))


def attention(spelling: Spelling, sizes: Mapping[str, int] | None = None) -> ModelProto:
    """Return q, k, v and mask → y [batch, queries, heads · WIDTH]; ``sizes`` fixes dimensions."""
    s, sizes = spelling, sizes or {}
    drawing = _Drawing()
    q, k, v = _query(drawing, s), _key(drawing, s, sizes), _value(drawing, s, sizes)
    scores = drawing.add("MatMul", q, k, to="scores")
    if s.scale == "mul":
        scores = drawing.add("Mul", scores, drawing.const(0.25))
    elif s.scale == "div":
        scores = drawing.add("Div", scores, drawing.const([4]))
    scores = _masked(drawing, s, scores)
    product = drawing.add("MatMul", drawing.add("Softmax", scores, to="weights", axis=-1), v, to="summed")
    rows = drawing.add("Transpose", product, perm=[0, 2, 1, 3])
    drawing.add("Reshape", rows, drawing.const([0, 0, s.heads * WIDTH], np.int64), to="y")
    edges = [graphs.edge(name, _sized(shape, sizes), dtype) for name, (shape, dtype) in _inputs(s).items()]
    output = graphs.edge("y", _sized(["batch", "queries", s.heads * WIDTH], sizes))
    return graphs.model(drawing.nodes, edges, [output], drawing.tensors)


def feeds(s: Spelling, batch: int = 2, queries: int = 5, keys: int = 7) -> dict[str, Array]:
    """Return random values for every input. A mask hides about 30 % of the keys, and never all keys of a row."""
    sizes = {"batch": batch, "queries": queries, "keys": keys}
    generator, found = np.random.default_rng(0), dict[str, Array]()
    for name, (shape, dtype) in _inputs(s).items():
        dims = [sizes[d] if isinstance(d, str) else d for d in shape]
        if name in ("mask", "seen"):
            shown = generator.random(dims) > 0.3
            shown[..., 0] = True
            if dtype == TensorProto.BOOL:
                found[name] = shown if s.mask != "where_not" else ~shown
            else:
                found[name] = np.where(shown, generator.standard_normal(dims), LOWEST).astype(np.float32)
        else:
            found[name] = generator.standard_normal(dims, np.float32) * 2
    return found


def exact(s: Spelling, fed: Mapping[str, Array]) -> Array:
    """Return y, computed in float64."""
    q, k, v = (
        _in_heads(fed[name].astype(np.float64), s.forms[i], s.heads if i == 0 else s.kv_heads)
        for i, name in enumerate("qkv")
    )
    k, v = (np.repeat(each, s.heads // s.kv_heads, axis=1) for each in (k, v))
    scores = q @ k.swapaxes(2, 3) * (1.0 if s.scale == "none" else 0.25)
    if "mask" in fed:
        scores = scores + fed["mask"] if fed["mask"].dtype != bool else scores
    seen = fed.get("seen", fed.get("mask"))
    if seen is not None and seen.dtype == bool:
        scores = np.where(seen if s.mask != "where_not" else ~seen, scores, LOWEST)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    y = p / p.sum(-1, keepdims=True) @ v
    return np.asarray(y.transpose(0, 2, 1, 3).reshape(y.shape[0], y.shape[2], -1))


def _inputs(s: Spelling) -> dict[str, tuple[list[int | str], int]]:
    found: dict[str, tuple[list[int | str], int]] = {}
    for name, form, heads, columns in zip(
        "qkv", s.forms, (s.heads, s.kv_heads, s.kv_heads), (DEPTH, DEPTH, WIDTH), strict=True
    ):
        rows = "queries" if name == "q" else "keys"
        shape: list[int | str] = ["batch", rows, heads * columns] if form == "r" else ["batch", heads, rows, columns]
        found[name] = shape, TensorProto.FLOAT
    if s.mask != "none":
        found["mask"] = [*s.mask_shape], TensorProto.BOOL if s.mask.startswith("where") else TensorProto.FLOAT
    if s.mask == "two":
        found["seen"] = ["batch", 1, 1, "keys"], TensorProto.BOOL
    return found


def _sized(shape: list[int | str], sizes: Mapping[str, int]) -> list[int | str]:
    return [sizes.get(d, d) if isinstance(d, str) else d for d in shape]


def _in_heads(value: Array, form: str, heads: int) -> Array:
    return value if form == "h" else value.reshape(*value.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def _query(drawing: _Drawing, s: Spelling) -> str:
    q = drawing.add("Mul", drawing.const(0.25), "q") if s.scale == "rows" else "q"
    if s.forms[0] == "r":
        q = drawing.heads(q, s.heads, DEPTH, (0, 2, 1, 3))
    factor = {"q": 0.25, "both": 0.5}.get(s.scale)
    return q if factor is None else drawing.add("Mul", q, drawing.const(factor))


def _key(drawing: _Drawing, s: Spelling, sizes: Mapping[str, int]) -> str:
    grouped, k = s.kv_heads != s.heads, "k"
    if s.forms[1] == "r":
        once = s.turn == "one" and not grouped and s.scale != "both"
        k = drawing.heads(k, s.kv_heads, DEPTH, (0, 2, 3, 1) if once else (0, 2, 1, 3))
        if once:
            return k
    if grouped:
        k = drawing.repeated(k, s.kv_heads, s.heads // s.kv_heads, sizes["keys"], DEPTH)
    turned = drawing.add("Transpose", k, perm=[0, 1, 3, 2])
    return drawing.add("Mul", turned, drawing.const(0.5)) if s.scale == "both" else turned


def _value(drawing: _Drawing, s: Spelling, sizes: Mapping[str, int]) -> str:
    v = drawing.heads("v", s.kv_heads, WIDTH, (0, 2, 1, 3)) if s.forms[2] == "r" else "v"
    if s.kv_heads == s.heads:
        return v
    return drawing.repeated(v, s.kv_heads, s.heads // s.kv_heads, sizes["keys"], WIDTH)


def _masked(drawing: _Drawing, s: Spelling, scores: str) -> str:
    if s.mask == "none":
        return scores
    if s.mask == "where":
        return drawing.add("Where", "mask", scores, drawing.const(LOWEST))
    if s.mask == "where_not":
        return drawing.add("Where", "mask", drawing.const(LOWEST), scores)
    if s.mask == "two":
        scores = drawing.add("Where", "seen", scores, drawing.const(LOWEST))
    return drawing.add("Add", "mask", scores) if s.mask == "add_first" else drawing.add("Add", scores, "mask")
