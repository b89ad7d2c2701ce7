from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest
from onnx import NodeProto, TensorProto, helper

import graphs
from converter.fuse.multiply import Epilogue, epilogue
from converter.fuse.products import product
from converter.graph.step import run
from converter.graph.types import InferTypes

_ROOT, _INVERSE, _SCALE = math.sqrt(2), math.sqrt(0.5), math.sqrt(2 / math.pi)

# What exporters write, with semicolons between nodes: ``m`` is the product, ``y`` the result, numbers are constants.
_ERF = {
    "torch, TorchScript exporter": f"Div m {_ROOT} a; Erf a b; Add b 1 c; Mul m c d; Mul d 0.5 y",
    "torch, dynamo decomposition": f"Mul m {_INVERSE} a; Erf a b; Add b 1 c; Mul m 0.5 d; Mul d c y",
    "half first, operands swapped": f"Mul 0.5 m d; Mul m {_INVERSE} a; Erf a b; Add 1 b c; Mul c d y",
    "half on the bracket": f"Div m {_ROOT} a; Erf a b; Add b 1 c; Mul c 0.5 d; Mul m d y",
    "bracket spread out": f"Mul m {_INVERSE} a; Erf a b; Mul 0.5 b c; Add c 0.5 d; Mul m d y",
    "operator": "Gelu m y",
}
_TANH = {
    "cube as a power": f"Pow m 3 a; Mul a 0.044715 b; Add m b c; Mul c {_SCALE} d; Tanh d e; Add e 1 f; Mul m 0.5 g;"
    " Mul g f y",
    "cube as products": f"Mul m m a; Mul a m b; Mul 0.044715 b c; Add m c d; Mul {_SCALE} d e; Tanh e f; Add 1 f g;"
    " Mul m g h; Mul 0.5 h y",
    "factored out": f"Mul m m a; Mul a 0.044715 b; Add b 1 c; Mul m {_SCALE} d; Mul d c e; Tanh e f; Add f 1 g;"
    " Mul m 0.5 h; Mul h g y",
}
_SILU = {
    "sigmoid": "Sigmoid m a; Mul m a y",
    "sigmoid on the left": "Sigmoid m a; Mul a m y",
    "written out": "Neg m a; Exp a b; Add b 1 c; Div m c y",
    "reciprocal": "Neg m a; Exp a b; Add 1 b c; Reciprocal c d; Mul d m y",
}
_CASES = [
    pytest.param(written, name, id=f"{name}: {which}")
    for name, ways in (("gelu", _ERF), ("gelu_tanh", _TANH), ("silu", _SILU), ("relu", {"operator": "Relu m y"}))
    for which, written in ways.items()
]


def _model(written: str, outputs: Sequence[str] = ("y",), opset: int = graphs.OPSET) -> ir.Model:
    """Return a graph where ``m`` is x [batch, 16] · w [16, 32] and the nodes in ``written`` follow."""
    nodes, constants = [helper.make_node("MatMul", ["x", "w"], ["m"])], dict[str, TensorProto]()
    for line in written.split(";"):
        op, *inputs, output = line.split()
        for word in inputs:
            if word.lstrip("-")[0].isdigit():
                constants[word] = graphs.initializer(word, np.array(float(word), np.float32))
        nodes.append(helper.make_node(op, inputs, [output], name=output))
    return _inferred(nodes, [*constants.values()], outputs, opset)


def _inferred(
    nodes: Sequence[NodeProto], constants: Sequence[TensorProto], outputs: Sequence[str], opset: int
) -> ir.Model:
    proto = graphs.model(
        nodes,
        [graphs.edge("x", ["batch", 16])],
        [graphs.edge(name, ["batch", 32]) for name in outputs],
        [graphs.initializer("w", graphs.values(16, 32)), *constants],
    )
    proto.opset_import[0].version = opset
    return run([InferTypes()], ir.from_proto(proto))


def _epilogue(model: ir.Model) -> Epilogue:
    (found,) = [each for node in model.graph if (each := product(node, {"w"})) is not None]
    return epilogue(found)


@pytest.mark.parametrize(("written", "activation"), _CASES)
def test_an_activation_is_recognised_however_it_is_written(written: str, activation: str) -> None:
    found = _epilogue(_model(written))
    assert found.activation == activation
    assert sorted(node.name or "" for node in found.nodes) == sorted(line.split()[-1] for line in written.split(";"))
    assert found.result.name == "y"


def test_the_attribute_of_gelu_selects_its_form() -> None:
    node = helper.make_node("Gelu", ["m"], ["y"], approximate="tanh")
    model = _inferred([helper.make_node("MatMul", ["x", "w"], ["m"]), node], [], ["y"], graphs.OPSET)
    assert _epilogue(model).activation == "gelu_tanh"


@pytest.mark.parametrize(("alpha", "activation"), [(1.0, "silu"), (1.702, "none")])
def test_swish_is_silu_only_if_its_factor_is_one(alpha: float, activation: str) -> None:
    node = helper.make_node("Swish", ["m"], ["y"], alpha=alpha)
    model = _inferred([helper.make_node("MatMul", ["x", "w"], ["m"]), node], [], ["y"], 24)
    assert _epilogue(model).activation == activation


@pytest.mark.parametrize(
    "written",
    [
        pytest.param("Mul m 1.702 a; Sigmoid a b; Mul m b y", id="Gelu's sigmoid form"),
        pytest.param(f"Div m {_ROOT} a; Erf a b; Add b 1 c; Mul m c y", id="Gelu twice as large"),
        pytest.param("Tanh m y", id="Tanh alone"),
        pytest.param("Elu m y", id="an operator the kernel has not"),
        pytest.param("Mul m 2 a; Relu a y", id="Relu of something else"),
        pytest.param("Sigmoid m a; Mul a a y", id="not the product again"),
        pytest.param("Relu m a; Sub m 2000 b; Relu b c; Sub a c y", id="Relu with a bound that no sample reaches"),
        pytest.param(f"Mul m {_INVERSE * 1.001} a; Erf a b; Add b 1 c; Mul m 0.5 d; Mul d c y", id="Gelu off by 0.1 %"),
        pytest.param("Exp m a; Add a 1 b; Div m b y", id="the sigmoid of the negative"),
    ],
)
def test_other_functions_are_not_taken_as_the_kernel_s_activations(written: str) -> None:
    found = _epilogue(_model(written))
    assert (found.activation, found.nodes, found.result.name) == ("none", (), "m")


def test_an_activation_with_inner_values_that_others_read_is_not_fused() -> None:
    assert _epilogue(_model("Sigmoid m a; Mul m a y", outputs=("y", "a"))).activation == "none"
    assert _epilogue(_model("Sigmoid m a; Mul m a y; Neg a z", outputs=("y", "z"))).activation == "none"
    assert _epilogue(_model("Sigmoid m a; Mul m a y", outputs=("y", "m"))).activation == "none"
    assert _epilogue(_model("Relu m y; Neg m z", outputs=("y", "z"))).activation == "none"


def test_a_reshape_may_come_before_the_activation() -> None:
    """In GPT-2, layers multiply matrices, but apply activations to batches of them."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Reshape", ["m", "split"], ["r"], name="split"),
        helper.make_node("Relu", ["r"], ["y"], name="relu"),
    ]
    split = graphs.initializer("split", np.array([-1, 2, 32]))
    found = _epilogue(_inferred(nodes, [split], ["y"], graphs.OPSET))
    assert found.reshape is not None
    assert (found.activation, [node.name for node in found.nodes], found.reshape.name) == ("relu", ["relu"], "split")
    alone = _epilogue(_inferred([*nodes[:2], helper.make_node("Abs", ["r"], ["y"])], [split], ["y"], graphs.OPSET))
    assert (alone.reshape, alone.result.name) == (None, "m")
