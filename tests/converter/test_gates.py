"""Tests of the converter's gates: each breaks one real function, and the real conversion must then be rejected.

Each fault is small enough to be mistaken for bf16's own drift, or does not show in the drift, unless stated otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from architectures import save
from converting import MLP, ONNX_ONLY, Cli, Outcome, tree
from numpy.typing import NDArray
from onnx import helper

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.numerics.panels import strips
from bf16kit.numerics.residual import Encoder
from converter.fuse.functions import ProductVariant
from converter.graph.initializers import initializer
from converter.graph.names import FreshNames, all_value_names
from converter.islands.explanation import measure_layers
from converter.read.torch import onnx_export
from converter.rewrite import batchnorm, clampmasks, lowering, matching, sharing
from converter.verify import certify
from converter.write import graphs as writing
from converter.write import roundweights, torchscript, weights

Array = NDArray[Any]
Patch = pytest.MonkeyPatch

ORACLE = "does not give the outputs of the source itself"
PREPARED = "the prepared graph, before rounding, does not give the outputs of the source itself"
PLAN = "the graph does not follow the plan"


def _refused(outcome: Outcome, target: Path, code: int, *said: str) -> None:
    """Assert that the conversion failed with ``code`` and all of ``said``, published nothing and left no files."""
    outcome.refused(code, *said)
    above = target.parents[1]  # the repository, which did not exist before
    assert not above.exists() or tree(above) == []


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """Write an ONNX file of two products, wide enough for the kernel's panels."""
    path = tmp_path / "wide.onnx"
    onnx.save(graphs.mlp((64, 96, 40)), path)
    return path


@pytest.fixture
def conv(tmp_path: Path) -> Path:
    """Write an ONNX file of a convolution of 16 channels and a BatchNorm, which the converter folds."""
    path = tmp_path / "conv.onnx"
    onnx.save(graphs.conv_bn(channels=16), path)
    return path


class Pair(torch.nn.Module):
    """A module whose two inputs have the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.left(a) - self.right(b)
        return result


# --- the exporter -----------------------------------------------------------------------------------------------------


def _after_export(patch: Patch, change: Callable[[ir.Model], None]) -> None:
    export = onnx_export.to_onnx

    def broken(model: Any, tensors: Mapping[str, Array]) -> ir.Model:
        graph = export(model, tensors)
        change(graph)
        return graph

    patch.setattr(onnx_export, "to_onnx", broken)


def _append_abs(model: ir.Model) -> None:
    graph, fresh = model.graph, FreshNames(all_value_names(model))
    output = graph.outputs[0]
    node = ir.node("Abs", [output], name=fresh.make("abs"))
    node.outputs[0].type, node.outputs[0].shape = output.type, output.shape
    node.outputs[0].name, output.name = output.name, fresh.make("before_abs")
    graph.append(node)
    graph.outputs[0] = node.outputs[0]


def _scale_a_bias(model: ir.Model) -> None:
    value = next(v for name, v in model.graph.initializers.items() if name.endswith("down.bias"))
    assert value.const_value is not None
    value.const_value = ir.tensor(value.const_value.numpy() * np.float32(1.0005), name=value.name)


@pytest.mark.parametrize("change", [_append_abs, _scale_a_bias])
def test_an_export_fault_is_rejected_by_the_oracle(
    cli: Cli, mlp_file: Path, target: Path, monkeypatch: Patch, change: Callable[[ir.Model], None]
) -> None:
    _after_export(monkeypatch, change)
    done = cli("checkpoint", mlp_file, "--out", target, *MLP, *ONNX_ONLY)
    _refused(done, target, 3, ORACLE, "output 'output': relative_l2 is", "fp32 noise explains at most")


def test_swapped_inputs_are_rejected_by_the_oracle(cli: Cli, target: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    def swap(model: ir.Model) -> None:
        a, b = model.graph.inputs
        uses = [(value, tuple(value.uses())) for value in (a, b)]
        for (_, found), other in zip(uses, (b, a), strict=True):
            for use in found:
                use.node.replace_input_with(use.idx, other)

    _after_export(monkeypatch, swap)
    source = save(tmp_path / "two.pt", Pair())
    arguments = ("--model", f"{__name__}:Pair", "--input", "a:float32:n,16", "--input", "b:float32:n,16", *ONNX_ONLY)
    _refused(cli("checkpoint", source, "--out", target, *arguments), target, 3, ORACLE)


def test_an_export_fault_is_rejected_despite_allow_over_budget(
    cli: Cli, mlp_file: Path, target: Path, monkeypatch: Patch
) -> None:
    """--allow-over-budget is about drift; it does not publish a model that the oracle rejects."""
    _after_export(monkeypatch, _append_abs)
    done = cli("checkpoint", mlp_file, "--out", target, *MLP, *ONNX_ONLY, "--allow-over-budget", "--no-residual")
    _refused(done, target, 3, ORACLE)


# --- preparation steps ------------------------------------------------------------------------------------------------


def test_a_batchnorm_folded_with_a_wrong_scale_is_rejected(
    cli: Cli, conv: Path, target: Path, monkeypatch: Patch
) -> None:
    """The scale is wrong by 2 in a thousand, which is a fifth of bf16's own error."""
    affine = batchnorm._affine

    def wrong(node: ir.Node) -> Any:
        found = affine(node)
        return None if found is None else (found[0] * 1.002, found[1])

    monkeypatch.setattr(batchnorm, "_affine", wrong)
    _refused(cli("checkpoint", conv, "--out", target, *ONNX_ONLY), target, 3, PREPARED)


def _masked(path: Path) -> Path:
    """Write an ONNX file: x [batch, 32] → MatMul → + a mask that hides half of the columns → Softmax."""
    mask = np.where(np.arange(32) % 2, np.float32(-3.4e38), np.float32(0))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="product"),
        helper.make_node("Add", ["m", "mask"], ["s"], name="masked"),
        helper.make_node("Softmax", ["s"], ["y"], name="softmax", axis=-1),
    ]
    held = [graphs.initializer("w", graphs.values(32, 32)), graphs.initializer("mask", mask)]
    edges = [graphs.edge("x", ["batch", 32])], [graphs.edge("y", ["batch", 32])]
    onnx.save(graphs.model(nodes, *edges, held), path)
    return path


def test_a_mask_clamped_too_far_is_rejected(cli: Cli, target: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    source = _masked(tmp_path / "masked.onnx")
    cli("checkpoint", source, "--out", target.with_name("2"), *ONNX_ONLY).published()
    monkeypatch.setattr(clampmasks, "LARGEST", 8.0)
    done = cli("checkpoint", source, "--out", target, *ONNX_ONLY)
    done.refused(3, PREPARED)
    assert sorted(path.name for path in target.parent.iterdir()) == ["2"]


def test_a_rewrite_for_cuda_that_changes_the_model_is_rejected(
    cli: Cli, target: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="product"),
        helper.make_node("Clip", ["m", "low", "high"], ["y"], name="clip"),
    ]
    held = [
        graphs.initializer("w", graphs.values(32, 32)),
        graphs.initializer("low", np.array(0, np.float32)),
        graphs.initializer("high", np.array(1, np.float32)),
    ]
    edges = [graphs.edge("x", ["batch", 32])], [graphs.edge("y", ["batch", 32])]
    onnx.save(graphs.model(nodes, *edges, held), tmp_path / "clip.onnx")
    apply = lowering.LowerForCuda.apply

    def swapped(step: lowering.LowerForCuda, model: ir.Model) -> bool:
        changed = apply(step, model)
        for node in model.graph:
            if node.op_type == "Min":
                node.op_type = "Max"
        return changed

    monkeypatch.setattr(lowering.LowerForCuda, "apply", swapped)
    _refused(cli("checkpoint", tmp_path / "clip.onnx", "--out", target, *ONNX_ONLY), target, 3, PREPARED)


def test_unequal_weights_that_are_stored_as_one_are_rejected_by_the_oracle(
    cli: Cli, target: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    onnx.save(graphs.mlp((32, 32, 32)), tmp_path / "equal.onnx")
    monkeypatch.setattr(sharing, "fingerprint", lambda array: array.shape)
    monkeypatch.setattr(sharing, "same_bits", lambda a, b: a.shape == b.shape)
    _refused(cli("checkpoint", tmp_path / "equal.onnx", "--out", target, *ONNX_ONLY), target, 3, ORACLE)


def test_checkpoint_tensors_matched_to_a_wrong_weight_are_rejected(
    cli: Cli, target: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The graphs are right, but ``restore`` would return other values."""
    onnx.save(graphs.mlp((32, 32, 32)), tmp_path / "equal.onnx")
    found = matching.match

    def wrong(
        graph: ir.Graph, checkpoint: Mapping[str, Array], orders: Mapping[str, tuple[int, ...]]
    ) -> dict[str, matching.Match]:
        matches = found(graph, checkpoint, orders)
        return matches | {"w0": matches["w1"]}

    monkeypatch.setattr("converter.rewrite.match", wrong)
    done = cli("checkpoint", tmp_path / "equal.onnx", "--out", target, *ONNX_ONLY)
    _refused(done, target, 3, "tensor 'w0' is not restored bit for bit (the first difference is at [0, 0]")


# --- files of weights -------------------------------------------------------------------------------------------------


def test_a_residual_that_lost_its_low_bits_is_rejected(cli: Cli, wide: Path, target: Path, monkeypatch: Patch) -> None:
    """The drift does not show this fault, because the reference is decoded from the same residual."""
    rows = Encoder.rows

    def coarse(encoder: Encoder, fp32: Array, bf16: Array) -> Iterator[Any]:
        words = np.ascontiguousarray(fp32).view(np.uint32) & np.uint32(0xFFFFFFFC)
        return rows(encoder, words.view(np.float32), bf16)

    monkeypatch.setattr(Encoder, "rows", coarse)
    done = cli("checkpoint", wide, "--out", target, *ONNX_ONLY)
    _refused(done, target, 3, "tensor 'w0' is not restored bit for bit")


def _truncate(x: Array) -> Array:
    return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(ml_dtypes.bfloat16)


def _off_by_one(x: Array) -> Array:
    bits = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    bits.reshape(-1)[::997] += np.uint16(1)
    return bits.view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("given", [(), ("--no-residual",)])
@pytest.mark.parametrize("rounded", [_truncate, _off_by_one])
def test_rounding_that_is_not_to_nearest_even_is_rejected(
    cli: Cli, wide: Path, target: Path, monkeypatch: Patch, rounded: Callable[[Array], Array], given: tuple[str, ...]
) -> None:
    """With a residual, a weight rounded this way is nevertheless restored bit for bit."""

    def wrong(x: Array, *, out: Array, **_options: Any) -> None:
        out[...] = rounded(np.ascontiguousarray(x))

    monkeypatch.setattr(roundweights, "to_bf16", wrong)
    done = cli("checkpoint", wide, "--out", target, *ONNX_ONLY, *given)
    _refused(done, target, 3, "tensor 'w0' has", "bf16 values that differ from the source's rounded values")


def test_a_constant_in_a_graph_that_is_not_rounded_to_nearest_is_rejected(
    cli: Cli, target: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="product"),
        helper.make_node("Mul", ["m", "c"], ["y"], name="scaled"),
    ]
    held = [graphs.initializer("w", graphs.values(32, 32)), graphs.initializer("c", np.array(1.2334, np.float32))]
    edges = [graphs.edge("x", ["batch", 32])], [graphs.edge("y", ["batch", 32])]
    onnx.save(graphs.model(nodes, *edges, held), tmp_path / "scaled.onnx")
    cli("checkpoint", tmp_path / "scaled.onnx", "--out", target.with_name("2"), *ONNX_ONLY).published()

    def truncated(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        bits = np.asarray(np.array(1.2334, np.float32)).view(np.uint32) >> np.uint32(16)
        return initializer(graph, name, ir.tensor(bits.astype(np.uint16).view(ml_dtypes.bfloat16), name=name))

    monkeypatch.setattr("converter.write.insertcasts.initializer", truncated)
    done = cli("checkpoint", tmp_path / "scaled.onnx", "--out", target, *ONNX_ONLY)
    done.refused(3, "tensor 'c/bf16' is not rounded to nearest in cuda.onnx")


def test_a_tensor_that_restore_leaves_out_is_rejected(cli: Cli, wide: Path, target: Path, monkeypatch: Patch) -> None:
    tensors = Artifact.checkpoint_tensors
    monkeypatch.setattr(Artifact, "checkpoint_tensors", lambda artifact: itertools.islice(tensors(artifact), 1, None))
    done = cli("checkpoint", wide, "--out", target, *ONNX_ONLY)
    _refused(done, target, 3, "tensor 'w0' is not restored exactly once")


def test_a_file_that_changes_after_it_was_measured_is_rejected(
    cli: Cli, wide: Path, target: Path, monkeypatch: Patch
) -> None:
    def flipping(draft: Artifact, *given: Any, **options: Any) -> Any:
        found = measure_layers(draft, *given, **options)
        with draft.file("weights.bf16").open("r+b") as file:
            first = file.read(1)
            file.seek(0)
            file.write(bytes([first[0] ^ 1]))
        return found

    monkeypatch.setattr("converter.convert.measure_layers", flipping)
    done = cli("checkpoint", wide, "--out", target, *ONNX_ONLY)
    _refused(done, target, 3, "changed after it was written", "weights.bf16")


def test_panels_packed_in_a_wrong_order_are_rejected(cli: Cli, wide: Path, target: Path, monkeypatch: Patch) -> None:
    def rolled(matrix: Array, axis: int | None) -> Iterator[memoryview]:
        return strips(matrix if axis is None else np.roll(matrix, 1, axis), axis)

    monkeypatch.setattr(weights, "strips", rolled)
    _refused(cli("checkpoint", wide, "--out", target, *ONNX_ONLY), target, 3, "tensor 'w0'")


# --- the graphs -------------------------------------------------------------------------------------------------------


def _after_build(patch: Patch, profile: str, change: Callable[[ir.Model], None]) -> None:
    build = writing.build

    def broken(prepared: Any, plan: Any, chosen: Any, *given: Any) -> ir.Model:
        model = build(prepared, plan, chosen, *given)
        if chosen.name == profile:
            change(model)
        return model

    patch.setattr(writing, "build", broken)


def _round_the_output(model: ir.Model) -> None:
    """Insert a cast to bf16 and one back before the last node: the drift is 1.7e-3, far below the budget."""
    graph, fresh = model.graph, FreshNames(all_value_names(model))
    last = list(graph)[-1]
    value = last.inputs[0]
    assert value is not None
    for dtype in (ir.DataType.BFLOAT16, ir.DataType.FLOAT):
        cast = ir.node("Cast", [value], attributes={"to": int(dtype)}, name=fresh.make("extra"))
        cast.outputs[0].name, cast.outputs[0].shape = fresh.make("extra"), value.shape
        cast.outputs[0].type = ir.TensorType(dtype)
        graph.insert_before(last, cast)
        value = cast.outputs[0]
    last.replace_input_with(0, value)


def test_an_extra_rounding_is_rejected(cli: Cli, conv: Path, target: Path, monkeypatch: Patch) -> None:
    _after_build(monkeypatch, "cpu", _round_the_output)
    done = cli("checkpoint", conv, "--out", target, *ONNX_ONLY)
    _refused(done, target, 3, "cpu.onnx: cast 'extra' rounds to bf16 for", PLAN)


def _always(rounds: bool, monkeypatch: Patch) -> None:
    """Only the name of the kernel's operator states whether it rounds its activations."""
    written = ProductVariant.of.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        ProductVariant, "of", classmethod(lambda cls, *a, **k: written(cls, *a, **(k | {"rounds": rounds})))
    )


def test_a_kernel_product_that_does_not_round_as_planned_is_rejected(
    cli: Cli, wide: Path, target: Path, monkeypatch: Patch
) -> None:
    _always(False, monkeypatch)
    done = cli("checkpoint", wide, "--out", target, *ONNX_ONLY)
    _refused(done, target, 3, "cpu-bf16.onnx: product 'matmul0' should round its activations, and is", PLAN)


def test_a_kernel_product_that_rounds_where_none_should_is_not_published(
    cli: Cli, wide: Path, target: Path, monkeypatch: Patch
) -> None:
    """The comparison with the unfused graph sees it before the plan's check does: these nodes stay as they were."""
    _always(True, monkeypatch)
    done = cli("checkpoint", wide, "--out", target, *ONNX_ONLY).published()
    assert "times the fp32 noise allowed" in done.out + done.err
    nodes = onnx.load(target / "cpu.onnx", load_external_data=False).graph.node
    assert {node.domain for node in nodes} == {""}


def _compute_a_product_in_fp32(model: ir.Model) -> None:
    """Compute a bf16 product in fp32 and round its output: more accurate than the plan, but not as planned."""
    graph, fresh = model.graph, FreshNames(all_value_names(model))
    node = next(n for n in graph if n.op_type == "MatMul")
    for index, value in enumerate(node.inputs):
        assert value is not None
        producer = value.producer()
        if producer is not None and producer.op_type == "Cast":
            node.replace_input_with(index, producer.inputs[0])
            continue
        cast = ir.node("Cast", [value], attributes={"to": int(ir.DataType.FLOAT)}, name=fresh.make("wide"))
        cast.outputs[0].name, cast.outputs[0].shape = fresh.make("wide"), value.shape
        cast.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        graph.insert_before(node, cast)
        node.replace_input_with(index, cast.outputs[0])
    narrow = ir.node("Cast", [node.outputs[0]], attributes={"to": int(ir.DataType.BFLOAT16)}, name=fresh.make("back"))
    narrow.outputs[0].name, narrow.outputs[0].shape = fresh.make("back"), node.outputs[0].shape
    narrow.outputs[0].type = ir.TensorType(ir.DataType.BFLOAT16)
    for use in tuple(node.outputs[0].uses()):
        if use.node is not narrow:
            use.node.replace_input_with(use.idx, narrow.outputs[0])
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    graph.insert_after(node, narrow)


def test_a_product_in_fp32_that_is_planned_in_bf16_is_rejected(
    cli: Cli, wide: Path, target: Path, monkeypatch: Patch
) -> None:
    _after_build(monkeypatch, "cuda", _compute_a_product_in_fp32)
    done = cli("checkpoint", wide, "--out", target, *ONNX_ONLY)
    _refused(done, target, 3, "cuda.onnx: node 'matmul0' is to compute in bf16, and its input", PLAN)


def test_a_missing_cast_between_two_types_is_rejected(cli: Cli, wide: Path, target: Path, monkeypatch: Patch) -> None:
    def drop(model: ir.Model) -> None:
        cast = next(n for n in model.graph if n.op_type == "Cast")
        for use in tuple(cast.outputs[0].uses()):
            use.node.replace_input_with(use.idx, cast.inputs[0])
        model.graph.remove(cast, safe=True)

    _after_build(monkeypatch, "cuda", drop)
    _refused(cli("checkpoint", wide, "--out", target, *ONNX_ONLY), target, 3, "cuda.onnx: types do not match")


def test_a_reference_that_reads_wrong_weights_is_rejected_by_the_oracle(
    cli: Cli, target: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    onnx.save(graphs.mlp((32, 32, 32)), tmp_path / "equal.onnx")
    serialize = writing.serialize

    def swapped(model: ir.Model) -> bytes:
        nodes = [node for node in model.graph if node.op_type == "MatMul" and node.domain == ""]
        if any("residual" in getattr(v.const_value, "location", "") for v in model.graph.initializers.values()):
            first, second = (node.inputs[1] for node in nodes)
            nodes[0].replace_input_with(1, second)
            nodes[1].replace_input_with(1, first)
        return serialize(model)

    monkeypatch.setattr(writing, "serialize", swapped)
    done = cli("checkpoint", tmp_path / "equal.onnx", "--out", target, *ONNX_ONLY)
    _refused(done, target, 3, "the fp32 reference does not give the outputs of the source itself")


@pytest.mark.parametrize("fault", ["residual ignored", "3 permille off"])
def test_a_fault_in_the_path_that_rebuilds_the_reference_is_rejected_by_the_oracle(
    cli: Cli, wide: Path, target: Path, monkeypatch: Patch, fault: str
) -> None:
    """The read-back restores through a call without ``out``, so only the oracle can see this fault."""
    restore = Artifact.restore

    def wrong(artifact: Artifact, name: str, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        if out is None:
            return restore(artifact, name)
        if fault == "residual ignored":
            out[...] = artifact.tensor(name)
        else:
            out[...] = restore(artifact, name) * np.float32(1.003)
        return out

    monkeypatch.setattr(Artifact, "restore", wrong)
    done = cli("checkpoint", wide, "--out", target, *ONNX_ONLY)
    _refused(done, target, 3, "the fp32 reference does not give the outputs of the source itself")


# --- golden samples and drift -----------------------------------------------------------------------------------------


def test_golden_samples_that_differ_from_the_reference_are_rejected(
    cli: Cli, wide: Path, target: Path, monkeypatch: Patch
) -> None:
    write = certify.save_golden
    monkeypatch.setattr(
        certify,
        "save_golden",
        lambda path, feeds, outputs, scales: write(
            path, feeds, {n: a * np.float32(1.001) for n, a in outputs.items()}, scales
        ),
    )
    done = cli("checkpoint", wide, "--out", target, *ONNX_ONLY)
    _refused(done, target, 3, "golden.safetensors: output 'y' differs from the reference's")


def test_a_torchscript_module_with_wrong_weights_is_rejected_by_its_drift(
    cli: Cli, mlp_file: Path, target: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(torchscript, "_rounded", lambda tensor: (tensor * 1.05).to(torch.bfloat16))
    command = ("checkpoint", mlp_file, "--out", target, *MLP)
    done = cli(*command, "--format", "onnx", "--format", "torchscript")
    _refused(done, target, 1, "profile torchscript, output 'output': relative_l2 is", "nothing published")
