from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from layers import ours
from lowered import lower
from normed import WIDTH, feeds, residual
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

import graphs
from bf16kit.runtime.loading import load
from bf16kit.runtime.ort.kernel import VARIABLE


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("summed", [False, True])
def test_a_normalised_sum_becomes_one_node_with_the_same_outputs(
    bias: bool, summed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lower(tmp_path / "m" / "1", residual(bias=bias, summed=summed))
    (node,) = ours(made)
    op_type = f"AddLayerNorm{'_bias' if bias else ''}{'_sum' if summed else ''}"
    assert (node.name, node.op_type, [*node.output]) == ("norm", op_type, ["n", "s"] if summed else ["n"])
    assert sorted(made.ops("cpu")) == ["Abs", node.op_type, *(["Neg"] if summed else [])]
    reasons = {entry.name: entry.reason for entry in made.plan.nodes["cpu"]}
    assert reasons["add"] == reasons["norm"] == "computed by the CPU kernel's normalisation"
    expected, answers = made.run_source(feeds()), made.run_kernel(feeds())
    monkeypatch.setenv(VARIABLE, "off")
    fallback = load(made.artifact, "cpu").run(feeds())
    evaluated = ReferenceEvaluator(onnx.load(made.artifact.file("cpu.onnx"))).run(None, feeds())
    assert isinstance(evaluated, list)
    for index, name in enumerate(expected):
        for found in (answers[name], fallback[name], evaluated[index]):
            np.testing.assert_allclose(found, expected[name], rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize(
    "proto",
    [
        residual(axis=1),
        residual(skip=(1, 1, WIDTH)),
        residual(skip=("other", "seq", WIDTH)),
        residual(skip=(WIDTH,)),
    ],
    ids=["another axis", "broadcasts", "another name", "a row"],
)
def test_a_normalisation_that_the_kernel_cannot_do_is_not_replaced(proto: ModelProto, tmp_path: Path) -> None:
    assert ours(lower(tmp_path / "m" / "1", proto)) == []


def test_a_normalisation_whose_statistics_are_read_is_not_replaced(tmp_path: Path) -> None:
    proto = residual()
    proto.graph.node[1].output.append("mean")
    proto.graph.output.append(graphs.edge("mean"))
    assert ours(lower(tmp_path / "m" / "1", proto)) == []


def test_a_sum_with_a_constant_which_may_be_a_bias_is_not_replaced(tmp_path: Path) -> None:
    proto = residual()
    proto.graph.node[0].input[1] = "b1"
    del proto.graph.input[1]
    proto.graph.initializer.append(graphs.initializer("b1", np.ones((1, 1, WIDTH), np.float32)))
    for dim in proto.graph.input[0].type.tensor_type.shape.dim[:2]:
        dim.dim_value = 1
    assert ours(lower(tmp_path / "m" / "1", proto)) == []
