from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from layers import ours
from lowered import lower
from normed import WIDTH, Rms, exact, feeds, rms
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

import graphs
from bf16kit.runtime.loading import load
from bf16kit.runtime.ort.kernel import VARIABLE

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


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
def test_every_spelling_becomes_one_node_that_gives_float64_s_result(
    spelling: Rms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lower(tmp_path / "m" / "1", rms(spelling))
    (node,) = ours(made)
    wants_sum = spelling.summed and spelling.others
    op_type = f"{'Add' if spelling.summed else ''}RmsNorm{'_sum' if wants_sum else ''}"
    assert (node.name, node.op_type, [*node.output]) == ("n", op_type, ["n", "s"] if wants_sum else ["n"])
    assert sorted(made.ops("cpu")) == sorted([node.op_type, "Abs", *(["Neg"] if spelling.others else [])])
    reasons = {entry.name: entry.reason for entry in made.plan.nodes["cpu"] if entry.name not in ("y", "t")}
    assert set(reasons.values()) == {"computed by the CPU kernel's normalisation"}
    fed = {name: array for name, array in feeds().items() if spelling.summed or name == "x"}
    expected, answers = exact(spelling, fed), made.run_kernel(fed)
    monkeypatch.setenv(VARIABLE, "off")
    fallback = load(made.artifact, "cpu").run(fed)
    evaluated = ReferenceEvaluator(onnx.load(made.artifact.file("cpu.onnx"))).run(None, fed)
    assert isinstance(evaluated, list)
    for found in (answers["y"], fallback["y"], evaluated[0]):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)
    if spelling.others:
        assert np.array_equal(answers["t"], made.run_source(fed)["t"])


def changed(spelling: Rms | None = None, **edits: object) -> ModelProto:
    """Return the spelling with nodes edited: by name, the new operator or the new inputs."""
    proto = rms(spelling or Rms())
    for node in proto.graph.node:
        edit = edits.get(node.name)
        if isinstance(edit, str):
            node.op_type = edit
        elif isinstance(edit, list):
            node.input[:] = edit
    return proto


def read_again(name: str) -> ModelProto:
    """Return a graph in which the value ``name`` is also an output."""
    proto = rms(Rms())
    proto.graph.output.append(graphs.edge(name))
    return proto


def shifted_by(size: int) -> ModelProto:
    proto = rms(Rms())
    (epsilon,) = [tensor for tensor in proto.graph.initializer if tensor.name == "epsilon"]
    epsilon.CopyFrom(graphs.initializer("epsilon", np.full(size, 1e-6, np.float32)))
    return proto


OTHERS = {
    "a power of three": rms(Rms(power=3.0)),
    "over columns": rms(Rms(axes=(1,))),
    "over rows and columns": rms(Rms(axes=(1, 2))),
    "without the dimension": rms(Rms(keepdims=0, axes=(-1,), weight=(WIDTH,))),
    "below zero": rms(Rms(epsilon=-1e-6)),
    "not finite": rms(Rms(epsilon=float("inf"))),
    "epsilons": shifted_by(WIDTH),
    "one weight": rms(Rms(weight=(1,))),
    "weights of a matrix": rms(Rms(weight=(1, WIDTH))),
    "no root": changed(root="Abs"),
    "no reciprocal": changed(factor="Neg"),
    "not what was squared": changed(normal=["skip", "factor"]),
    "a computed weight": changed(n=["normal", "skip"]),
    "added": changed(n="Add"),
    "a maximum": changed(mean="ReduceMax"),
    "subtracted": changed(shifted="Sub"),
    "divided by the reciprocal": changed(normal="Div"),
    "multiplied by the root": changed(normal=["s", "root"]),
    "another operator for the square": changed(sq="Div"),
    "a product of two": changed(Rms(square="mul"), sq=["s", "skip"]),
    "a sum for the square": changed(Rms(square="mul"), sq="Add"),
    "root by x": changed(Rms(divide="div"), normal=["root", "s"]),
    **{f"{name} read again": read_again(name) for name in ("sq", "mean", "shifted", "root", "factor", "normal")},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_computations_are_not_replaced(name: str, tmp_path: Path) -> None:
    assert ours(lower(tmp_path / "m" / "1", OTHERS[name])) == []


@pytest.mark.parametrize(("op", "wrong"), [("over", 2.0), ("inverse", 0.5), ("pow", -0.5), ("pow", 0.25)])
def test_a_spelling_with_another_constant_is_not_replaced(op: str, wrong: float, tmp_path: Path) -> None:
    spelling = Rms(root="pow", divide="div") if op == "pow" else Rms(divide=op)
    proto = rms(spelling)
    (number,) = [tensor for tensor in proto.graph.initializer if tensor.name == ("one" if op == "over" else "power")]
    number.CopyFrom(graphs.initializer(number.name, np.asarray(wrong, np.float32)))
    assert ours(lower(tmp_path / "m" / "1", proto)) == []


def test_a_sum_that_broadcasts_is_not_fused(tmp_path: Path) -> None:
    proto = rms(Rms())
    proto.graph.input[1].CopyFrom(graphs.edge("skip", [1, 1, WIDTH]))
    (node,) = ours(lower(tmp_path / "m" / "1", proto))
    assert (node.op_type, [*node.input]) == ("RmsNorm", ["s", "w"])


@pytest.mark.parametrize("attributes", [{"axis": 1}, {"stash_type": 16}])
def test_an_operator_with_other_attributes_is_not_replaced(attributes: dict[str, int], tmp_path: Path) -> None:
    proto = rms(replace(SPELLINGS[0], divide="operator", opset=23))
    (node,) = [node for node in proto.graph.node if node.op_type == "RMSNormalization"]
    node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in attributes.items())
    assert ours(lower(tmp_path / "m" / "1", proto)) == []
