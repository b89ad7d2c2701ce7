"""Forms of ONNX files from other tools: old opsets, recurrent layers, half precision, other domains."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from converting import ONNX_ONLY, Cli
from onnx import ModelProto, TensorProto, helper
from onnx.helper import make_node as node
from restored import Array, assert_restored

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.read.onnx_file import read_graph
from bf16kit.numerics.rounding import BF16
from bf16kit.runtime.loading import load, load_reference
from bf16kit.runtime.ort.onnx import OnnxRuntime

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def _opset(proto: ModelProto, opset: int, ir: int | None = None) -> ModelProto:
    proto.opset_import[0].version = opset
    if ir is not None:
        proto.ir_version = ir
    return proto


def _listed_as_inputs(proto: ModelProto) -> ModelProto:
    """List the weights as inputs too, as IR versions up to 3 require."""
    proto.graph.input.extend(graphs.edge(tensor.name, list(tensor.dims)) for tensor in proto.graph.initializer)
    return proto


def recurrent(op: str) -> ModelProto:
    """x [seq, batch, 16], h [2, batch, 16] → one layer in both directions → y, last state."""
    rows = GATES[op] * 16
    return graphs.parsed(
        f"""(float[seq, batch, 16] x, float[2, batch, 16] h)
            => (float[seq, 2, batch, 16] y, float[2, batch, 16] last) {{
            [layer] y, last = {op} <hidden_size = 16, direction = "bidirectional"> (x, w, r, b, , h)
        }}""",
        w=graphs.values(2, rows, 16, scale=0.3),
        r=graphs.values(2, rows, 16, seed=1, scale=0.3),
        b=graphs.values(2, 2 * rows, seed=2, scale=0.1),
    )


def half_inside() -> ModelProto:
    """x·``half`` in fp16 between two Casts, then ·``full`` in fp32."""
    return graphs.parsed(
        """(float[batch, 16] x) => (float[batch, 16] y) {
            x16 = Cast <to = 10> (x) h16 = MatMul (x16, half) h = Cast <to = 1> (h16) y = MatMul (h, full)
        }""",
        half=graphs.values(16, 32).astype(np.float16),
        full=graphs.values(32, 16, seed=1),
    )


def half_stored() -> ModelProto:
    """A weight stored in fp16 and widened before use, as in files that were halved in size."""
    return graphs.parsed(
        """(float[batch, 16] x) => (float[batch, 16] y) {
            wide = Cast <to = 1> (half) h = MatMul (x, wide) y = MatMul (h, full)
        }""",
        half=graphs.values(16, 32).astype(np.float16),
        full=graphs.values(32, 16, seed=1),
    )


def half_edges() -> ModelProto:
    """fp16 in, fp32 inside, fp16 out."""
    return graphs.parsed(
        """(float16[batch, 16] x) => (float16[batch, 16] y) {
            h = Cast <to = 1> (x) m = MatMul (h, w) y = Cast <to = 10> (m)
        }""",
        w=graphs.values(16, 16),
    )


def contrib() -> ModelProto:
    """Operators of the domain com.microsoft, as ONNX Runtime's optimiser writes them into files."""
    made = graphs.parsed(
        """(float[batch, 3, 16] x) => (float[batch, 3, 16] y) {
            [scaled] m = com.microsoft.FusedMatMul <alpha = 2.0> (x, w) [gelu] g = com.microsoft.BiasGelu (m, b)
            [norm] n = com.microsoft.SkipLayerNormalization (g, m, gamma, beta) [matmul] y = MatMul (n, v)
        }""",
        w=graphs.values(16, 32),
        b=graphs.values(32, seed=1),
        gamma=graphs.values(32, seed=2) + 1,
        beta=graphs.values(32, seed=3),
        v=graphs.values(32, 16, seed=4),
    )
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return made


def words() -> ModelProto:
    """Strings → their numbers (ai.onnx.ml) → rows of a table; the strings are an output as well."""
    made = graphs.parsed(
        """(string[batch] s) => (float[batch, 128] y, string[batch] same) {
            [encode] i = ai.onnx.ml.LabelEncoder <
                keys_strings = ["a", "sample"], values_int64s = [0, 1], default_int64 = 2> (s)
            [look_up] y = Gather (table, i) [echo] same = Identity (s)
        }""",
        table=graphs.values(3, 128),
    )
    made.opset_import.append(helper.make_opsetid("ai.onnx.ml", 2))
    return made


def convert(cli: Cli, proto: ModelProto, target: Path) -> Artifact:
    path = target.parents[2] / "m.onnx"
    onnx.save(proto, path)
    cli("checkpoint", path, "--out", target, *ONNX_ONLY).published()
    return Artifact.open(target)


def assert_same(artifact: Artifact, proto: ModelProto, feeds: dict[str, Array], tolerance: float = 0.02) -> None:
    """Assert that the reference equals ``proto`` in ONNX Runtime, and that profile cpu does within ``tolerance``."""
    runtime = load(artifact, "cpu")
    expected = OnnxRuntime(proto.SerializeToString(), runtime.inputs, runtime.outputs).run(feeds)
    reference, narrowed = load_reference(artifact).run(feeds), runtime.run(feeds)
    for name, array in expected.items():
        np.testing.assert_allclose(reference[name], array, atol=1e-5)
        np.testing.assert_allclose(narrowed[name], array, atol=tolerance)


@pytest.mark.long
@pytest.mark.parametrize("opset", [7, 12])
def test_opsets_from_7_and_ir_3_on_are_read(cli: Cli, target: Path, opset: int) -> None:
    """A weight that IR version 3 declares as an input with free dimensions keeps its own, as in ONNX Runtime."""
    proto = _opset(_listed_as_inputs(graphs.mlp()), opset, ir=3)
    next(edge for edge in proto.graph.input if edge.name == "w0").CopyFrom(graphs.edge("w0", ["a", "b"]))
    artifact = convert(cli, proto, target)
    assert [entry.name for entry in artifact.manifest.inputs] == ["x"]
    assert [16, 32] in [list(entry.shape) for entry in artifact.manifest.tensors]
    assert_same(artifact, _opset(graphs.mlp(), opset, ir=4), {"x": graphs.values(4, 16, seed=9)})


@pytest.mark.long
@pytest.mark.parametrize(("op", "opset"), [("LSTM", 7), ("GRU", 14), ("RNN", 22)])
def test_recurrent_layers_keep_their_outputs_and_halve_their_weights(
    cli: Cli, target: Path, op: str, opset: int
) -> None:
    proto = _opset(recurrent(op), opset)
    artifact = convert(cli, proto, target)
    stored = {tensor.name: tensor.dtype for tensor in artifact.manifest.tensors}
    assert stored["w"] == stored["r"] == "bfloat16"
    feeds = {"x": graphs.values(6, 3, 16, seed=8, scale=2.0), "h": graphs.values(2, 3, 16, seed=7, scale=0.5)}
    assert_same(artifact, proto, feeds)


@pytest.mark.long
@pytest.mark.parametrize("build", [half_inside, half_stored, half_edges])
def test_fp16_parts_stay_unchanged_and_are_restored(
    cli: Cli, tmp_path: Path, target: Path, build: Callable[[], ModelProto]
) -> None:
    proto = build()
    artifact = convert(cli, proto, target)
    feeds = {"x": graphs.values(4, 16, seed=9).astype(np.float16 if build is half_edges else np.float32)}
    assert_same(artifact, proto, feeds)
    cli("restore", target, "--out", tmp_path / "back.safetensors").published()
    assert_restored(tmp_path / "back.safetensors", graphs.weights_of(proto))


@pytest.mark.long
@pytest.mark.parametrize("opset", [12, 22])
def test_com_microsofts_operators_are_converted(cli: Cli, target: Path, opset: int) -> None:
    proto = _opset(contrib(), opset)
    artifact = convert(cli, proto, target)
    assert_same(artifact, proto, {"x": graphs.values(2, 3, 16, seed=9)}, tolerance=0.1)
    precision = {entry.name: entry.precision for entry in artifact.manifest.plan.nodes["cuda"]}
    assert precision["scaled"] == precision["matmul"] == "bf16"
    assert precision["norm"] == "fp32"


@pytest.mark.long
def test_string_inputs_and_outputs_are_supported(cli: Cli, target: Path) -> None:
    artifact = convert(cli, _opset(words(), 17), target)
    assert [entry.dtype for entry in artifact.manifest.inputs] == ["string"]
    answer = load(artifact, "cpu").run({"s": np.array(["a", "b"], object)})
    table = graphs.values(3, 128)
    np.testing.assert_allclose(answer["y"], table[[0, 2]], rtol=2**-8)
    assert answer["same"].tolist() == ["a", "b"]


@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        "(bfloat16[n, 64] x) => (bfloat16[n, 48] y) { a = Cast <to = 1> (x) b = MatMul (a, w) y = Cast <to = 16> (b) }",
        """(bfloat16[64, n] x) => (bfloat16[48, n] y, bfloat16[64, n] x) {
            moved = Transpose (x) a = Cast <to = 1> (moved) b = MatMul (a, w) c = Cast <to = 16> (b) y = Transpose (c)
        }""",
    ],
)
def test_bf16_inputs_and_outputs_are_supported(cli: Cli, target: Path, text: str) -> None:
    artifact = convert(cli, graphs.parsed(text, w=graphs.values(64, 48)), target)
    golden = artifact.golden()
    assert golden.inputs["x"].dtype == golden.outputs["y"].dtype == BF16
    answer = load(artifact, "cpu").run(golden.inputs)["y"]
    np.testing.assert_allclose(answer.astype(np.float32), golden.outputs["y"].astype(np.float32), atol=0.02)


def zip_map() -> ModelProto:
    """Probabilities by class, as scikit-learn's classifiers give them by default."""
    proto = graphs.mlp()
    proto.graph.node.append(
        node("ZipMap", ["y"], ["p"], "zip", domain="ai.onnx.ml", classlabels_int64s=list(range(16)))
    )
    maps = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    proto.graph.output[0].CopyFrom(helper.make_value_info("p", helper.make_sequence_type_proto(maps)))
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    return proto


def whole_numbers() -> ModelProto:
    return graphs.parsed("(int64[n] x) => (int64[n] y) { [add] y = Add (x, one) }", one=np.array([1]))


def scan_of_opset_8() -> ModelProto:
    """Return a Scan with a batch, which onnx's version converter gives another meaning."""
    proto = graphs.parsed(
        """(float[n, 4, 32] x, float[n, 32] h) => (float[n, 4, 32] y) {
            m = MatMul (x, w) last, y = Scan <num_scan_inputs: int = 1, body = body (float[32] s, float[32] e)
                                              => (float[32] next, float[32] o) {
                next = Add (s, e) o = Identity (next)
            }> (, h, m)
        }""",
        w=graphs.values(32, 32),
    )
    proto.opset_import[0].version = 8
    return proto


def half() -> ModelProto:
    weight = graphs.values(64, 64).astype(np.float16)
    return graphs.parsed("(float16[n, 64] x) => (float16[n, 64] y) { y = MatMul (x, w) }", w=weight)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (zip_map, "'p' is of type sequence, and bf16kit serves tensors only; a classifier of scikit-learn is exported"),
        (whole_numbers, "holds no fp32 weights, so there is nothing to convert\n"),
        (half, "so there is nothing to convert: they are float16; export the model in fp32\n"),
        (scan_of_opset_8, "the prepared graph, before rounding, does not run: ONNX Runtime failed"),
    ],
)
def test_files_that_cannot_be_converted_are_rejected_with_the_remedy(
    cli: Cli, tmp_path: Path, target: Path, build: Callable[[], ModelProto], said: str
) -> None:
    onnx.save(build(), tmp_path / "m.onnx")
    cli("checkpoint", tmp_path / "m.onnx", "--out", target).refused(3, said)


def test_weights_of_functions_are_read_from_the_models_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not read from the working directory."""
    tensor = graphs.initializer("c", graphs.values(4))
    graphs.refer(tensor, "w.bin", 0, 16)
    opsets = [helper.make_opsetid("", graphs.OPSET)]
    nodes = [node("Constant", [], ["c"], value=tensor), node("Add", ["a", "c"], ["b"])]
    function = helper.make_function("own", "F", ["a"], ["b"], nodes, opsets)
    model = graphs.parsed("(float[4] x) => (float[4] y) { y = own.F (x) }")
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("own", 1))
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    for directory, content in ((source, graphs.values(4).tobytes()), (elsewhere, bytes(16))):
        directory.mkdir()
        (directory / "w.bin").write_bytes(content)
    (source / "m.onnx").write_bytes(model.SerializeToString())
    monkeypatch.chdir(elsewhere)
    read, _ = read_graph(source / "m.onnx")
    (found,) = (node for f in read.functions.values() for node in f if node.op_type == "Constant")
    assert found.attributes["value"].as_tensor().numpy().tobytes() == graphs.values(4).tobytes()
