"""Tests of the converter's gates: each breaks one real function, and the real conversion must then be rejected.

Each fault is small enough to be mistaken for bf16's own drift, or does not show in the drift, unless stated otherwise.
A fault is a function that breaks the converter; :func:`gate` says which source is converted, and what must be said.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from architectures import Mlp, save
from converting import MLP, ONNX_ONLY, Cli, tree
from numpy.typing import NDArray

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.converter import rewrite
from bf16kit.converter.fuse.multiply import ProductVariant
from bf16kit.converter.graph.initializers import initializer
from bf16kit.converter.graph.names import FreshNames, all_value_names
from bf16kit.converter.islands.explanation import measure_layers
from bf16kit.converter.read import onnx_export
from bf16kit.converter.rewrite import batchnorm, clampmasks, explicit, lowering, matching
from bf16kit.converter.source import TorchModel
from bf16kit.converter.verify import certify, golden
from bf16kit.converter.write import graphs as writing
from bf16kit.converter.write import torchscript, weights
from bf16kit.numerics.panels import strips
from bf16kit.numerics.residual import Encoder

Array = NDArray[Any]
Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]
Convert = Callable[[Path], Sequence[str | Path]]  # writes a source; returns the arguments that convert it

ORACLE = "does not give the outputs of the source itself"
REFERENCE = "the fp32 reference does not give the outputs of the source itself"
PREPARED = "the prepared graph, before rounding, does not give the outputs of the source itself"
PLAN = "the graph does not follow the plan"


# --- the sources ------------------------------------------------------------------------------------------------------


class Pair(torch.nn.Module):
    """A module whose two inputs have the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.left(a) - self.right(b)
        return result


def _module(tmp_path: Path) -> Sequence[str | Path]:
    return save(tmp_path / "mlp.pt", Mlp()), *MLP, *ONNX_ONLY


def _pair(tmp_path: Path) -> Sequence[str | Path]:
    inputs = ("--input", "a:float32:n,16", "--input", "b:float32:n,16")
    return save(tmp_path / "two.pt", Pair()), "--model", f"{__name__}:Pair", *inputs, *ONNX_ONLY


def _onnx(make: Callable[[], onnx.ModelProto]) -> Convert:
    def write(tmp_path: Path) -> Sequence[str | Path]:
        onnx.save(make(), tmp_path / "m.onnx")
        return tmp_path / "m.onnx", *ONNX_ONLY

    return write


_wide = _onnx(partial(graphs.mlp, (64, 96, 40)))  # wide enough for the kernel's panels
_equal = _onnx(partial(graphs.mlp, (32, 32, 32)))  # two products of the same shape
_conv = _onnx(partial(graphs.conv_bn, channels=16))  # a convolution, and a BatchNorm that the converter folds


def _product(nodes: str, **constants: Any) -> Convert:
    """x [batch, 32] → MatMul → m → ``nodes``, which read ``constants`` → y."""
    text = f"(float[batch, 32] x) => (float[batch, 32] y) {{ [product] m = MatMul (x, w) {nodes} }}"
    arrays = {name: np.asarray(value, np.float32) for name, value in constants.items()}
    return _onnx(partial(graphs.parsed, text, w=graphs.values(32, 32), **arrays))


_clip = _product("[clip] y = Clip (m, low, high)", low=0, high=1)
_scaled = _product("[scaled] y = Mul (m, c)", c=1.2334)
_masked = _product(  # the mask hides half of the columns
    "[masked] s = Add (m, mask) [softmax] y = Softmax <axis = -1> (s)", mask=np.where(np.arange(32) % 2, -3.4e38, 0)
)

# --- the gates --------------------------------------------------------------------------------------------------------

GATES: dict[str, tuple[Fault, Convert, Sequence[str], int, Sequence[str]]] = {}


def gate(
    convert: Convert, *said: str, flags: Sequence[str] = (), code: int = 3, name: str = ""
) -> Callable[[Fault], Fault]:
    """Register a fault: the conversion must end with ``code`` and ``said``."""

    def register(fault: Fault) -> Fault:
        GATES[f"{fault.__name__}{name and f' {name}'}"] = (fault, convert, flags, code, said)
        return fault

    return register


@pytest.mark.parametrize("name", ["equal", "conv", "clip", "scaled", "masked", "pair"])
def test_without_a_fault_the_sources_are_published(cli: Cli, target: Path, tmp_path: Path, name: str) -> None:
    cli("checkpoint", *globals()[f"_{name}"](tmp_path), "--out", target).published()


@pytest.mark.long
def test_a_fault_is_rejected_and_nothing_is_published(
    cli: Cli, target: Path, tmp_path: Path, monkeypatch: Patch, fault: str
) -> None:
    make, convert, flags, code, said = GATES[fault]
    arguments = convert(tmp_path)
    make(monkeypatch)
    cli("checkpoint", *arguments, "--out", target, *flags).refused(code, *said)
    above = target.parents[1]  # the repository, which did not exist before
    assert not above.exists() or tree(above) == []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the test of faults for each that this file registers."""
    if "fault" in metafunc.fixturenames:
        metafunc.parametrize("fault", GATES)


# --- the exporter -----------------------------------------------------------------------------------------------------


def _after_export(patch: Patch, change: Callable[[ir.Model], None]) -> None:
    export = onnx_export.to_onnx

    def broken(model: Any, tensors: Mapping[str, Array]) -> ir.Model:
        graph = export(model, tensors)
        change(graph)
        return graph

    patch.setattr(onnx_export, "to_onnx", broken)


@gate(_module, ORACLE, "output 'output': relative_l2 is", "fp32 noise explains at most")
@gate(_module, ORACLE, flags=("--allow-over-budget", "--no-residual"), name="allowed over budget")
def an_output_made_positive(patch: Patch) -> None:
    """--allow-over-budget is about drift; it does not publish a model that the oracle rejects."""

    def append_abs(model: ir.Model) -> None:
        graph, fresh = model.graph, FreshNames(all_value_names(model))
        output = graph.outputs[0]
        node = ir.node("Abs", [output], name=fresh.make("abs"))
        node.outputs[0].type, node.outputs[0].shape = output.type, output.shape
        node.outputs[0].name, output.name = output.name, fresh.make("before_abs")
        graph.append(node)
        graph.outputs[0] = node.outputs[0]

    _after_export(patch, append_abs)


@gate(_module, ORACLE, "output 'output': relative_l2 is", "fp32 noise explains at most")
def a_bias_half_a_permille_off(patch: Patch) -> None:
    def scale(model: ir.Model) -> None:
        value = next(v for name, v in model.graph.initializers.items() if name.endswith("down.bias"))
        assert value.const_value is not None
        value.const_value = ir.tensor(value.const_value.numpy() * np.float32(1.0005), name=value.name)

    _after_export(patch, scale)


@gate(_pair, ORACLE)
def swapped_inputs(patch: Patch) -> None:
    def swap(model: ir.Model) -> None:
        a, b = model.graph.inputs
        uses = [(value, tuple(value.uses())) for value in (a, b)]
        for (_, found), other in zip(uses, (b, a), strict=True):
            for use in found:
                use.node.replace_input_with(use.idx, other)

    _after_export(patch, swap)


@gate(_module, "the model's own tensor 'module.up.weight'")
def a_module_that_exporting_changes(patch: Patch) -> None:
    export = onnx_export.to_onnx

    def changing(model: TorchModel, tensors: Mapping[str, Array]) -> ir.Model:
        graph = export(model, tensors)
        with torch.no_grad():
            model.module.get_parameter("module.up.weight").mul_(0.5)
        return graph

    patch.setattr(onnx_export, "to_onnx", changing)


# --- preparation steps ------------------------------------------------------------------------------------------------


@gate(_conv, PREPARED)
def a_batchnorm_folded_with_a_wrong_scale(patch: Patch) -> None:
    """The scale is wrong by 2 in a thousand, which is a fifth of bf16's own error."""
    affine = batchnorm._affine

    def wrong(node: ir.Node) -> Any:
        found = affine(node)
        return None if found is None else (found[0] * 1.002, found[1])

    patch.setattr(batchnorm, "_affine", wrong)


@gate(_masked, PREPARED)
def a_mask_clamped_too_far(patch: Patch) -> None:
    patch.setattr(clampmasks, "LARGEST", 8.0)


@gate(_clip, PREPARED)
def a_rewrite_for_cuda_that_changes_the_model(patch: Patch) -> None:
    def swapped(model: ir.Model) -> None:
        lowering.lower_for_cuda(model)
        for node in model.graph:
            if node.op_type == "Min":
                node.op_type = "Max"

    patch.setattr(rewrite, "lower_for_cuda", swapped)


@gate(_equal, ORACLE)
def unequal_weights_stored_as_one(patch: Patch) -> None:
    patch.setattr(explicit, "fingerprint", lambda array: array.shape)
    patch.setattr(explicit, "same_bits", lambda a, b: a.shape == b.shape)


@gate(_equal, "tensor 'w0' is not restored bit for bit (the first difference is at [0, 0]")
def a_checkpoint_tensor_matched_to_a_wrong_weight(patch: Patch) -> None:
    """The graphs are right, but ``restore`` would return other values."""
    found = matching.match

    def wrong(*given: Any) -> dict[str, matching.Match]:
        matches = found(*given)
        return matches | {"w0": matches["w1"]}

    patch.setattr("bf16kit.converter.rewrite.match", wrong)


# --- files of weights -------------------------------------------------------------------------------------------------


@gate(_wide, "tensor 'w0' is not restored bit for bit")
def a_residual_that_lost_its_low_bits(patch: Patch) -> None:
    """The drift does not show this fault, because the reference is decoded from the same residual."""
    rows = Encoder.rows

    def coarse(encoder: Encoder, fp32: Array, bf16: Array) -> Iterator[Any]:
        words = np.ascontiguousarray(fp32).view(np.uint32) & np.uint32(0xFFFFFFFC)
        return rows(encoder, words.view(np.float32), bf16)

    patch.setattr(Encoder, "rows", coarse)


def _round_weights_by(patch: Patch, rounded: Callable[[Array], Array]) -> None:
    def wrong(x: Array, *, out: Array, **_options: Any) -> None:
        out[...] = rounded(np.ascontiguousarray(x))

    patch.setattr(weights, "to_bf16", wrong)


_MISROUNDED = ("tensor 'w0' has", "bf16 values that differ from the source's rounded values")


@gate(_wide, *_MISROUNDED)
@gate(_wide, *_MISROUNDED, flags=("--no-residual",), name="no residual")
def weights_truncated(patch: Patch) -> None:
    """With a residual, a weight rounded this way is nevertheless restored bit for bit."""
    _round_weights_by(patch, lambda x: (x.view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16))


@gate(_wide, *_MISROUNDED)
@gate(_wide, *_MISROUNDED, flags=("--no-residual",), name="no residual")
def one_weight_in_997_rounded_to_the_other_neighbour(patch: Patch) -> None:
    def off_by_one(x: Array) -> Array:
        bits = x.astype(ml_dtypes.bfloat16).view(np.uint16)
        bits.reshape(-1)[::997] += np.uint16(1)
        return bits.view(ml_dtypes.bfloat16)

    _round_weights_by(patch, off_by_one)


@gate(_scaled, "tensor 'c/bf16' is not rounded to nearest in cuda.onnx")
def a_constant_in_a_graph_that_is_truncated(patch: Patch) -> None:
    def truncated(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        bits = np.asarray(np.array(1.2334, np.float32)).view(np.uint32) >> np.uint32(16)
        return initializer(graph, name, ir.tensor(bits.astype(np.uint16).view(ml_dtypes.bfloat16), name=name))

    patch.setattr("bf16kit.converter.write.graphs.initializer", truncated)


@gate(_wide, "tensor 'w0' is not restored exactly once")
def a_tensor_that_restore_leaves_out(patch: Patch) -> None:
    tensors = Artifact.checkpoint_tensors
    patch.setattr(Artifact, "checkpoint_tensors", lambda artifact: itertools.islice(tensors(artifact), 1, None))


@gate(_wide, "changed after it was written", "weights.bf16")
def a_file_that_changes_after_it_was_measured(patch: Patch) -> None:
    def flipping(draft: Artifact, *given: Any, **options: Any) -> Any:
        found = measure_layers(draft, *given, **options)
        with draft.file("weights.bf16").open("r+b") as file:
            first = file.read(1)
            file.seek(0)
            file.write(bytes([first[0] ^ 1]))
        return found

    patch.setattr("bf16kit.converter.convert.measure_layers", flipping)


@gate(_wide, "tensor 'w0'")
def panels_packed_in_a_wrong_order(patch: Patch) -> None:
    def rolled(matrix: Array, axis: int | None) -> Iterator[memoryview]:
        return strips(matrix if axis is None else np.roll(matrix, 1, axis), axis)

    patch.setattr(weights, "strips", rolled)


# --- the graphs -------------------------------------------------------------------------------------------------------


def _after_build(patch: Patch, profile: str, change: Callable[[ir.Model], None]) -> None:
    build = writing.build

    def broken(prepared: Any, plan: Any, chosen: Any, *given: Any) -> ir.Model:
        model = build(prepared, plan, chosen, *given)
        if chosen.name == profile:
            change(model)
        return model

    patch.setattr(writing, "build", broken)


def _cast(value: ir.Value | None, dtype: ir.DataType, name: str) -> ir.Node:
    assert value is not None
    node = ir.node("Cast", [value], attributes={"to": int(dtype)}, name=name)
    node.outputs[0].name, node.outputs[0].shape, node.outputs[0].type = name, value.shape, ir.TensorType(dtype)
    return node


@gate(_conv, "cpu.onnx: cast 'extra' rounds to bf16 for", PLAN)
def an_extra_rounding(patch: Patch) -> None:
    """A cast to bf16 and one back before the last node: the drift is 1.7e-3, far below the budget."""

    def round_the_output(model: ir.Model) -> None:
        graph, fresh = model.graph, FreshNames(all_value_names(model))
        last = list(graph)[-1]
        narrow = _cast(last.inputs[0], ir.DataType.BFLOAT16, fresh.make("extra"))
        back = _cast(narrow.outputs[0], ir.DataType.FLOAT, fresh.make("extra"))
        graph.insert_before(last, [narrow, back])
        last.replace_input_with(0, back.outputs[0])

    _after_build(patch, "cpu", round_the_output)


def _always(rounds: bool, monkeypatch: Patch) -> None:
    """Only the name of the kernel's operator states whether it rounds its activations."""
    monkeypatch.setattr(
        "bf16kit.converter.fuse.multiply.ProductVariant", lambda **given: ProductVariant(**(given | {"rounds": rounds}))
    )


@gate(_wide, "cpu-bf16.onnx: product 'matmul0' should round its activations, and is", PLAN)
def a_kernel_product_that_does_not_round_as_planned(patch: Patch) -> None:
    _always(False, patch)


@pytest.mark.long
def test_a_kernel_product_that_rounds_where_none_should_is_not_published(
    cli: Cli, target: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The comparison with the unfused graph sees it before the plan's check does: these nodes stay as they were."""
    arguments = _wide(tmp_path)
    _always(True, monkeypatch)
    done = cli("checkpoint", *arguments, "--out", target).published()
    assert "times the fp32 noise allowed" in done.out + done.err
    nodes = onnx.load(target / "cpu.onnx", load_external_data=False).graph.node
    assert {node.domain for node in nodes} == {""}


@gate(_wide, "cuda.onnx: node 'matmul0' is to compute in bf16, and its input", PLAN)
def a_product_in_fp32_that_is_planned_in_bf16(patch: Patch) -> None:
    """It is computed in fp32 and its output is rounded: more accurate than the plan, but not as planned."""

    def widen(model: ir.Model) -> None:
        graph, fresh = model.graph, FreshNames(all_value_names(model))
        node = next(n for n in graph if n.op_type == "MatMul")
        for index, value in enumerate(node.inputs):
            assert value is not None
            producer = value.producer()
            if producer is not None and producer.op_type == "Cast":
                node.replace_input_with(index, producer.inputs[0])
                continue
            cast = _cast(value, ir.DataType.FLOAT, fresh.make("wide"))
            graph.insert_before(node, cast)
            node.replace_input_with(index, cast.outputs[0])
        readers = tuple(node.outputs[0].uses())
        narrow = _cast(node.outputs[0], ir.DataType.BFLOAT16, fresh.make("back"))
        for use in readers:
            use.node.replace_input_with(use.idx, narrow.outputs[0])
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        graph.insert_after(node, narrow)

    _after_build(patch, "cuda", widen)


@gate(_wide, "cuda.onnx: types do not match")
def a_missing_cast_between_two_types(patch: Patch) -> None:
    def drop(model: ir.Model) -> None:
        cast = next(n for n in model.graph if n.op_type == "Cast")
        for use in tuple(cast.outputs[0].uses()):
            use.node.replace_input_with(use.idx, cast.inputs[0])
        model.graph.remove(cast, safe=True)

    _after_build(patch, "cuda", drop)


@gate(_equal, REFERENCE)
def a_reference_that_reads_wrong_weights(patch: Patch) -> None:
    serialize = writing.serialize

    def swapped(model: ir.Model) -> bytes:
        nodes = [node for node in model.graph if node.op_type == "MatMul" and node.domain == ""]
        if any("residual" in getattr(v.const_value, "location", "") for v in model.graph.initializers.values()):
            first, second = (node.inputs[1] for node in nodes)
            nodes[0].replace_input_with(1, second)
            nodes[1].replace_input_with(1, first)
        return serialize(model)

    patch.setattr(writing, "serialize", swapped)


def _when_rebuilt(patch: Patch, change: Callable[[Artifact, str, Array], Array]) -> None:
    """Change what rebuilds the reference: the read-back calls without ``out``, so only the oracle can see a fault."""
    restore = Artifact.restore

    def wrong(artifact: Artifact, name: str, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        found = restore(artifact, name)
        if out is None:
            return found
        out[...] = change(artifact, name, found)
        return out

    patch.setattr(Artifact, "restore", wrong)


@gate(_wide, REFERENCE)
def a_reference_without_its_residual(patch: Patch) -> None:
    _when_rebuilt(patch, lambda artifact, name, _: artifact.tensor(name))


@gate(_wide, REFERENCE)
def a_reference_3_permille_off(patch: Patch) -> None:
    _when_rebuilt(patch, lambda _artifact, _name, found: found * np.float32(1.003))


# --- golden samples and drift -----------------------------------------------------------------------------------------


@gate(_wide, "golden.safetensors: output 'y' differs from the reference's")
def golden_samples_that_differ_from_the_reference(patch: Patch) -> None:
    write = golden.save_golden

    def wrong(path: Path, feeds: Any, outputs: Mapping[str, Array], scales: Any) -> None:
        write(path, feeds, {name: array * np.float32(1.001) for name, array in outputs.items()}, scales)

    patch.setattr(certify, "save_golden", wrong)


@gate(
    _module, "profile torchscript, output 'output': relative_l2 is", "nothing published",
    flags=("--format", "torchscript"), code=1,
)  # fmt: skip
def a_torchscript_module_with_wrong_weights(patch: Patch) -> None:
    """Here the drift itself shows the fault."""
    patch.setattr(torchscript, "_rounded", lambda tensor: (tensor * 1.05).to(torch.bfloat16))
