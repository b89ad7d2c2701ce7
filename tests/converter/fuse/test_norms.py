"""Normalisations, operators or written out, become one node with the sum before them; other computations stay."""

from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from layers import answers, ours
from lowered import lower
from normed import WIDTH, Rms, exact, feeds, residual, rms
from onnx import ModelProto

import graphs

SPELLINGS = [
    *(Rms(*spelled) for spelled in product(("pow", "mul"), ("sqrt", "pow"), ("reciprocal", "over", "div"))),
    Rms(divide="inverse"),
    *(Rms(divide=divide, swapped=True) for divide in ("reciprocal", "div")),
    Rms(axes=(2,)),
    Rms(epsilon=0.0),
    Rms(opset=17),
    Rms(divide="operator", opset=23),
    *(Rms(summed=summed, others=others) for summed, others in product((False, True), repeat=2)),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("summed", [False, True])
def test_a_normalised_sum_becomes_one_node_with_the_same_outputs(
    bias: bool, summed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lower(tmp_path / "m" / "1", residual(bias=bias, summed=summed))
    (node,) = ours(made)
    op_type = f"AddLayerNorm{'_bias' * bias}{'_sum' * summed}"
    assert (node.name, node.op_type, [*node.output]) == ("norm", op_type, ["n", "s"] if summed else ["n"])
    assert sorted(made.ops("cpu")) == ["Abs", node.op_type, *(["Neg"] if summed else [])]
    reasons = {entry.name: entry.reason for entry in made.plan.nodes["cpu"]}
    assert reasons["add"] == reasons["norm"] == "computed by the CPU kernel's normalisation"
    expected = made.run_source(feeds())
    for found in answers(made, feeds(), monkeypatch):
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
def test_every_spelling_becomes_one_node_that_gives_float64_s_result(
    spelling: Rms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lower(tmp_path / "m" / "1", rms(spelling))
    (node,) = ours(made)
    wants_sum = spelling.summed and spelling.others
    op_type = f"{'Add' * spelling.summed}RmsNorm{'_sum' * wants_sum}"
    assert (node.name, node.op_type, [*node.output]) == ("n", op_type, ["n", "s"] if wants_sum else ["n"])
    assert sorted(made.ops("cpu")) == sorted([node.op_type, "Abs", *(["Neg"] if spelling.others else [])])
    fed = {name: array for name, array in feeds().items() if spelling.summed or name == "x"}
    for found in answers(made, fed, monkeypatch):
        np.testing.assert_allclose(found["y"], exact(spelling, fed), rtol=1e-5, atol=2e-6)
        if spelling.others:
            assert np.array_equal(found["t"], made.run_source(fed)["t"])


def _changed(spelling: Rms | None = None, **edits: str | list[str]) -> ModelProto:
    """Return the spelling with nodes edited: by name, the new operator or the new inputs."""
    proto = rms(spelling or Rms())
    for node in proto.graph.node:
        edit = edits.get(node.name, node.op_type)
        if isinstance(edit, str):
            node.op_type = edit
        else:
            node.input[:] = edit
    return proto


def _read_again(proto: ModelProto, name: str) -> ModelProto:
    """Return ``proto`` with the value ``name`` also as an output."""
    proto.graph.output.append(graphs.edge(name))
    return proto


def _number(spelling: Rms, name: str, value: object) -> ModelProto:
    """Return the spelling with another constant ``name``."""
    proto = rms(spelling)
    (tensor,) = [each for each in proto.graph.initializer if each.name == name]
    tensor.CopyFrom(graphs.initializer(name, np.asarray(value, np.float32)))
    return proto


def _attribute(name: str, value: int) -> ModelProto:
    proto = rms(Rms(divide="operator", opset=23))
    (node,) = [node for node in proto.graph.node if node.op_type == "RMSNormalization"]
    node.attribute.append(onnx.helper.make_attribute(name, value))
    return proto


def _with_statistics() -> ModelProto:
    proto = residual()
    proto.graph.node[1].output.append("mean")
    return _read_again(proto, "mean")


def _with_a_constant() -> ModelProto:
    proto = residual()
    proto.graph.node[0].input[1] = "b1"
    del proto.graph.input[1]
    proto.graph.initializer.append(graphs.initializer("b1", np.ones((1, 1, WIDTH), np.float32)))
    for dim in proto.graph.input[0].type.tensor_type.shape.dim[:2]:
        dim.dim_value = 1
    return proto


_POW = Rms(root="pow", divide="div")
OTHERS = {
    "LayerNormalization of another axis": residual(axis=1),
    "a sum that broadcasts": residual(skip=f"1, 1, {WIDTH}"),
    "a sum of other dimensions": residual(skip=f"other, seq, {WIDTH}"),
    "a sum with a row": residual(skip=f"{WIDTH}"),
    "statistics that are read": _with_statistics(),
    "a constant, which may be a bias": _with_a_constant(),
    "an operator of another axis": _attribute("axis", 1),
    "an operator in another precision": _attribute("stash_type", 16),
    "a power of three": rms(Rms(power=3.0)),
    "over columns": rms(Rms(axes=(1,))),
    "over rows and columns": rms(Rms(axes=(1, 2))),
    "without the dimension": rms(Rms(keepdims=0, axes=(-1,), weight=(WIDTH,))),
    "below zero": rms(Rms(epsilon=-1e-6)),
    "not finite": rms(Rms(epsilon=float("inf"))),
    "epsilons": _number(Rms(), "epsilon", np.full(WIDTH, 1e-6)),
    "two over": _number(Rms(divide="over"), "one", 2.0),
    "the root instead of the inverse": _number(Rms(divide="inverse"), "power", 0.5),
    "the inverse instead of the root": _number(_POW, "power", -0.5),
    "another root": _number(_POW, "power", 0.25),
    "one weight": rms(Rms(weight=(1,))),
    "weights of a matrix": rms(Rms(weight=(1, WIDTH))),
    "no root": _changed(root="Abs"),
    "no reciprocal": _changed(factor="Neg"),
    "not what was squared": _changed(normal=["skip", "factor"]),
    "a computed weight": _changed(n=["normal", "skip"]),
    "added": _changed(n="Add"),
    "a maximum": _changed(mean="ReduceMax"),
    "subtracted": _changed(shifted="Sub"),
    "divided by the reciprocal": _changed(normal="Div"),
    "multiplied by the root": _changed(normal=["s", "root"]),
    "another operator for the square": _changed(sq="Div"),
    "a product of two": _changed(Rms(square="mul"), sq=["s", "skip"]),
    "a sum for the square": _changed(Rms(square="mul"), sq="Add"),
    "root by x": _changed(Rms(divide="div"), normal=["root", "s"]),
    **{f"{n} read again": _read_again(rms(Rms()), n) for n in ("sq", "mean", "shifted", "root", "factor", "normal")},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_computations_are_not_replaced(name: str, tmp_path: Path) -> None:
    assert ours(lower(tmp_path / "m" / "1", OTHERS[name])) == []


def test_a_sum_that_broadcasts_stays_before_the_normalisation(tmp_path: Path) -> None:
    proto = rms(Rms())
    proto.graph.input[1].CopyFrom(graphs.edge("skip", [1, 1, WIDTH]))
    (node,) = ours(lower(tmp_path / "m" / "1", proto))
    assert (node.op_type, [*node.input]) == ("RmsNorm", ["s", "w"])
