"""Fp32 ONNX files: their weights are converted wherever they are stored, and restored bit for bit."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from converting import ONNX_ONLY, Cli, process, tree
from onnx import ModelProto, helper
from restored import Array, assert_restored

import graphs
from bf16kit.artifact.artifact import Artifact


@pytest.mark.parametrize("as_node", [True, False])
def test_a_sparse_constant_is_rejected_with_the_remedy(cli: Cli, tmp_path: Path, target: Path, as_node: bool) -> None:
    proto = graphs.mlp()
    values, indices = (graphs.initializer(name, np.arange(3)) for name in ("sparse", "indices"))
    sparse = helper.make_sparse_tensor(values, indices, [9])
    if as_node:
        proto.graph.node.append(helper.make_node("Constant", [], ["sparse"], sparse_value=sparse))
    else:
        proto.graph.sparse_initializer.append(sparse)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    cli("checkpoint", tmp_path / "m.onnx", "--out", target).refused(3, "constant 'sparse' is sparse; make it dense")


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """Return the path of a model whose weights are in a file beside it."""
    path = tmp_path / "source" / "m.onnx"
    path.parent.mkdir()
    onnx.save(graphs.mlp(), path, save_as_external_data=True, location="m.data", size_threshold=0)
    return path


@pytest.mark.long
def test_external_data_is_read_from_beside_the_model(
    cli: Cli, tmp_path: Path, target: Path, external: Path, onnx_file: Path
) -> None:
    cli("checkpoint", external, "--out", target, *ONNX_ONLY).published()
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    assert_restored(tmp_path / "fp32.safetensors", graphs.weights_of(graphs.mlp()))
    inline = tmp_path / "repository" / "m" / "2"
    cli("checkpoint", onnx_file, "--out", inline, *ONNX_ONLY).published()
    assert (target / "weights.bf16").read_bytes() == (inline / "weights.bf16").read_bytes()


def _relocate(path: Path, value: str, key: str = "location") -> None:
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == key:
                entry.value = value
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("/etc/hostname", "outside the model's directory"),
        ("sub/../../secret", "outside the model's directory"),
        ("link", "outside the model's directory"),
        ("w" * 400, "m.onnx: the data of 'w0' cannot be read"),
        ("loop", "m.onnx: the data of 'w0' cannot be read"),
        ("absent", "its external data absent is missing"),
        ("source", "its external data source is missing"),
        ("m.short", "m.short: truncated: 10 bytes, m.onnx needs"),
    ],
)
def test_external_data_that_is_not_beside_the_model_is_rejected(
    cli: Cli, tmp_path: Path, target: Path, external: Path, location: str, said: str
) -> None:
    (tmp_path / "secret").write_bytes(bytes(10_000))
    (external.parent / "loop").symlink_to("loop")
    (external.parent / "link").symlink_to(tmp_path / "secret")
    (external.parent / "source").mkdir()
    (external.parent / "m.short").write_bytes(bytes(10))
    _relocate(external, location)
    cli("checkpoint", external, "--out", target).refused(2, said)
    assert "repository" not in tree(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("offset", "-8"), ("length", "many"), ("offset", "99999999999999")])
def test_external_data_at_an_impossible_place_is_rejected(
    cli: Cli, target: Path, external: Path, key: str, value: str
) -> None:
    _relocate(external, value, key)
    cli("checkpoint", external, "--out", target).refused(2, "m.")


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_a_truncated_file_is_rejected(cli: Cli, tmp_path: Path, target: Path, onnx_file: Path, share: float) -> None:
    whole = onnx_file.read_bytes()
    (tmp_path / "cut.onnx").write_bytes(whole[: max(2, int(share * len(whole)))])
    cli("checkpoint", tmp_path / "cut.onnx", "--out", target).refused(2, "cut.onnx: truncated or damaged")
    assert tree(tmp_path) == ["cut.onnx"]


def _one_node(op: str, *, domain: str = "", weight: Array | None = None) -> ModelProto:
    text = f"(float[batch, 16] x) => (float[batch, 16] y) {{ [node] y = {domain and f'{domain}.'}{op} (x, w) }}"
    made = graphs.parsed(text, w=graphs.values(16, 16) if weight is None else weight)
    if domain:
        made.opset_import.append(helper.make_opsetid(domain, 1))
    return made


@pytest.mark.parametrize(
    ("proto", "code", "said"),
    [
        (_one_node("Frobnicate"), 2, "No Op registered for Frobnicate"),
        (_one_node("Spell", domain="com.example.magic"), 3, "com.example.magic"),
        (_one_node("MatMul", weight=graphs.values(8, 16)), 2, "Incompatible dimensions for matrix multiplication"),
    ],
)
def test_models_that_cannot_be_converted_or_run_are_rejected(
    cli: Cli, tmp_path: Path, target: Path, proto: ModelProto, code: int, said: str
) -> None:
    onnx.save(proto, tmp_path / "m.onnx")
    cli("checkpoint", tmp_path / "m.onnx", "--out", target).refused(code, said)
    assert tree(tmp_path) == ["m.onnx"]


@pytest.mark.long
def test_nodes_in_a_cycle_are_rejected_but_nodes_out_of_order_are_not(cli: Cli, tmp_path: Path, target: Path) -> None:
    def proto(source: str) -> ModelProto:
        nodes = f"y = Relu (h) h = MatMul ({source}, w)"
        return graphs.parsed(f"(float[n, 16] x) => (float[n, 16] y) {{ {nodes} }}", w=graphs.values(16, 16))

    onnx.save(proto("y"), tmp_path / "circle.onnx")
    cli("checkpoint", tmp_path / "circle.onnx", "--out", target).refused(2, "contains a cycle")
    onnx.save(proto("x"), tmp_path / "order.onnx")
    cli("checkpoint", tmp_path / "order.onnx", "--out", target, *ONNX_ONLY).published()


def test_an_invalid_model_is_reported_without_messages_of_libraries(tmp_path: Path, target: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    proto = graphs.model([node, node], [graphs.edge("x", ["n", 16])], [graphs.edge("y", ["n", 16])])
    onnx.save(proto, tmp_path / "m.onnx")
    done = process("checkpoint", tmp_path / "m.onnx", "--out", target).refused(2, "'y' is redeclared")
    assert all(line.startswith("bf16-convert: ") for line in done.err.splitlines())


@pytest.mark.long
def test_a_conversion_in_which_no_weight_becomes_bf16_says_so(cli: Cli, onnx_file: Path, target: Path) -> None:
    done = cli("checkpoint", onnx_file, "--out", target, "--keep-fp32", ".*", *ONNX_ONLY).published()
    assert "note: no weight became bf16" in done.out


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "shape"),
    [("x:float32:n,16", ["n", 16]), ("x:float32:4,16", [4, 16])],
)
def test_free_dimensions_may_be_named_and_fixed(
    cli: Cli, onnx_file: Path, target: Path, given: str, shape: list[int | str]
) -> None:
    cli("checkpoint", onnx_file, "--out", target, "--input", given, *ONNX_ONLY, "--profile", "cpu").published()
    manifest = Artifact.open(target).manifest
    assert manifest.inputs[0].shape == shape
    assert manifest.batch_axis == (0 if isinstance(shape[0], str) else None)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("--input x:float32:batch", 2, "--input x: the model's own input is float32"),
        ("--signature serving_default", 2, "--signature: is for TensorFlow models"),
        ("--weights ema", 2, "--weights: is for checkpoints that"),
        ("--with-past", 2, "--with-past: is for Hugging Face directories"),
        ("--map rules.yaml", 2, "--map: is for weights without a graph"),
        ("--format torchscript", 3, "--format torchscript: this format is made from a torch module, and the source is"),
    ],
)
def test_options_that_do_not_fit_the_graph_are_rejected(
    cli: Cli, tmp_path: Path, onnx_file: Path, target: Path, arguments: str, code: int, said: str
) -> None:
    cli("checkpoint", onnx_file, "--out", target, *arguments.split()).refused(code, said)
    assert tree(tmp_path) == []
