"""Every value in a graph gets a dtype, and a shape if it can be known; an error names the step that failed."""

from functools import partial
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from converting import ONNX_ONLY, Cli
from onnx import ModelProto, helper

import graphs
from bf16kit.converter.graph.names import values_of
from bf16kit.converter.graph.types import infer_types, run
from bf16kit.messages.errors import ConversionError


def _untyped(proto: ModelProto) -> list[str]:
    model = run([infer_types], ir.from_proto(proto))
    return [value.name or "" for value in values_of(model.graph) if value.dtype is None]


def _chain(*ops: str, domain: str) -> ModelProto:
    """Return x [batch, 16] → MatMul → each of ``ops``, with a Relu after it → y."""
    nodes = " ".join(f"u{i} = {domain}.{op} (v{i}) v{i + 1} = Relu (u{i})" for i, op in enumerate(ops))
    text = f"v0 = MatMul (x, w) {nodes} y = Identity (v{len(ops)})"
    proto = graphs.parsed(f"(float[batch, 16] x) => (float[batch, 16] y) {{ {text} }}", w=graphs.values(16, 16))
    proto.opset_import.append(helper.make_opsetid(domain, 1))
    return proto


def test_types_after_com_microsoft_and_ai_onnx_ml_operators_are_inferred() -> None:
    for domain, ops in (("com.microsoft", ("Gelu", "QuickGelu", "FastGelu")), ("ai.onnx.ml", ("Scaler", "Normalizer"))):
        proto = _chain(*ops, domain=domain)
        model = run([infer_types], ir.from_proto(proto))
        assert _untyped(proto) == []
        shapes = {value.name: value.shape for value in values_of(model.graph)}
        assert shapes["u1"] == shapes["v2"] == ir.Shape(["batch", 16])


def test_a_weight_determines_the_type_of_a_product_of_another_domain() -> None:
    proto = graphs.parsed(
        """(float[batch, 16] x) => (float[batch, 16] y) {
            unknown = com.example.Spell (x) m = com.microsoft.FusedMatMul (unknown, w) y = Relu (m)
        }""",
        w=graphs.values(16, 16),
    )
    proto.opset_import.extend([helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("com.example", 1)])
    assert _untyped(proto) == ["unknown"]  # the output type of Spell cannot be known


@pytest.mark.long
def test_nodes_of_unknown_type_are_named_in_a_note(cli: Cli, target: Path, tmp_path: Path) -> None:
    """``Inverse`` is an operator of ONNX Runtime without a schema that inference could use."""
    model = graphs.parsed(
        """(float[32, 32] x) => (float[32, 32] y) {
            [product] m = MatMul (x, w) [inverse] g = com.microsoft.Inverse (m) [second] y = MatMul (g, v)
        }""",
        w=graphs.values(32, 32),
        v=graphs.values(32, 32, seed=1),
    )
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, tmp_path / "unknown.onnx")
    arguments = ("--allow-over-budget", "--no-search", *ONNX_ONLY)
    out = cli("checkpoint", tmp_path / "unknown.onnx", "--out", target, *arguments).published().out
    assert "the output types of 1 of 3 nodes could not be inferred, the first 'inverse' (Inverse)" in out


def break_it(_model: ir.Model, error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "cause"), [(ConversionError("no moon"), "no moon"), (KeyError("weight"), "KeyError: 'weight'")]
)
def test_an_error_names_the_step_the_steps_before_it_and_the_cause(error: Exception, cause: str) -> None:
    with pytest.raises(ConversionError) as caught:
        run([infer_types, partial(break_it, error=error)], ir.from_proto(graphs.mlp()))
    assert str(caught.value) == f"step 'break it' (after infer types): {cause}"
