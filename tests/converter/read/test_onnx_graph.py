"""An ONNX file's graph: its edges, the names of its dimensions, which are guesses, and its own outputs as an oracle."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from architectures import Mlp, seeded
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

import graphs
from bf16kit.converter.convert import Result, convert
from bf16kit.converter.options import Options, parse_target
from bf16kit.converter.read import onnx_file, oracles
from bf16kit.converter.read.onnx_export import adapt
from bf16kit.converter.read.sources import input_specs, output_specs
from bf16kit.converter.source import FP32_ROUNDOFF
from bf16kit.messages.errors import ConversionError, RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.loading import load


def _model(shape: Sequence[int | str | None] | None, dtype: int = TensorProto.FLOAT) -> ir.Model:
    edge = graphs.edge("x", shape, dtype)  # type: ignore[arg-type]  # None: a dimension without a name
    return ir.from_proto(graphs.model([], [edge], [edge]))


@pytest.mark.parametrize(
    ("shape", "dims"),
    [([None, 16], ("x_0", 16)), ([-1, 16], ("x_0", 16)), ([], ()), (["2*n + 1", 1], ("2*n + 1", 1))],
)
def test_free_dimensions_keep_their_names_or_get_generated_ones(
    shape: list[int | str | None], dims: tuple[int | str, ...]
) -> None:
    assert input_specs(_model(shape))[0].shape == dims
    assert output_specs(_model(shape))[0].shape == dims


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        ([2, 0], TensorProto.FLOAT, "'x' has size 0 in dimension 1"),
        (None, TensorProto.FLOAT, "'x' has no known rank"),
        (["n", 2**40, 2**40], TensorProto.FLOAT, r"'x' is declared as .*, which does not fit in any memory"),
        ([2], TensorProto.FLOAT8E4M3FN, "tensors of plain dtypes only"),
    ],
)
def test_edges_that_cannot_be_served_are_rejected(shape: list[int | str | None] | None, dtype: int, said: str) -> None:
    with pytest.raises(ConversionError, match=said):
        input_specs(_model(shape, dtype))


@pytest.mark.parametrize(
    ("nodes", "kind"),
    [
        ("best = ArgMax <axis = 1> (x) y = Cast <to = 6> (best)", "logits"),
        (
            "best, ids = TopK (x, two) first, second = Split <axis = 1> (ids) y = Concat <axis = 1> (second, first)",
            "logits",
        ),
        ("best = ArgMax <axis = 1> (x) y = Concat <axis = 1> (best, two)", "other"),
        ("y = Cast <to = 6> (x)", "other"),  # numbers, of which an error of one leaves most close
    ],
)
def test_integers_that_the_graph_chose_by_score_are_labels_whatever_their_name(nodes: str, kind: str) -> None:
    made = graphs.parsed(f"(float[4, 8] x) => (int64[4, n] y) {{ {nodes} }}", two=np.array([2]))
    assert [spec.kind for spec in output_specs(ir.from_proto(made))] == [kind]


@pytest.mark.parametrize("noise", ["[draw] z = RandomNormalLike (h)", "[draw] z = Dropout (h, ratio, trains)"])
def test_a_graph_that_draws_random_numbers_is_refused_if_they_reach_an_output(noise: str, tmp_path: Path) -> None:
    """As of a variational autoencoder, or of a model that was exported in training mode."""
    text = f"(float[n, 16] x) => (float[n, 16] y) {{ h = MatMul (x, w) {noise} y = Add (h, z) }}"
    told = {"ratio": np.array(0.5, np.float32), "trains": np.array(True)} if "trains" in noise else {}
    proto = graphs.parsed(text, w=graphs.values(16, 16), **told)
    proto.opset_import[0].version = 21  # the newest with the operator in ONNX Runtime
    said = r"node 'draw' \(\w+\) draws random numbers.*; export the model in evaluation mode, or make the noise or"
    with pytest.raises(ConversionError, match=said):
        _converted(tmp_path, proto)


def test_labels_that_are_cut_and_joined_many_times_are_found_at_once() -> None:
    """40 cuts in two are 2^40 paths from what chose them: one by one they would keep a converter busy for days."""
    moves = (
        f"a{i}, b{i} = Split <num_outputs = 2> (y{i}) y{i + 1} = Concat <axis = 0> (b{i}, a{i})" for i in range(40)
    )
    text = f"(float[4, 8] x) => (int64[4, 1] y40) {{ y0 = ArgMax <axis = 1> (x) {' '.join(moves)} }}"
    assert [spec.kind for spec in output_specs(ir.from_proto(graphs.parsed(text)))] == ["logits"]


WIDTH, HEADS, DEPTH = 32, 2, 16
_GRAPHS = ("cpu", "cuda", "reference")


def _bert(batch: str = "batch", seq: str = "seq") -> ModelProto:
    """Return an encoder layer as torch's exporter writes it: positions end where a Shape says, and are expanded.

    ONNX's inference knows neither size, so ``value_info`` alone tells that the sum has the input's dimensions.
    """
    weights = {name: graphs.values(WIDTH, WIDTH, seed=i) for i, name in enumerate(["wq", "wk", "wv", "wo"])}
    constants: dict[str, NDArray[Any]] = {
        "table": graphs.values(64, WIDTH, seed=8),
        "every": np.arange(64)[None],
        "zero": np.array([0]),
        "one": np.array([1]),
        "heads": np.array([HEADS]),
        "depth": np.array([DEPTH]),
        "width": np.array([WIDTH]),
        "scale": np.array(0.25, np.float32),
        "g": graphs.values(WIDTH, seed=9),
        "b": graphs.values(WIDTH, seed=10),
    }
    proto = graphs.parsed(
        f"""(float[batch, seq, {WIDTH}] x) => (float[batch, seq, {WIDTH}] y) {{
            batch_size = Shape <start = 0, end = 1> (x) seq_size = Shape <start = 1, end = 2> (x)
            positions = Slice (every, zero, seq_size, one, one) both = Concat <axis = 0> (batch_size, seq_size)
            ids = Expand (positions, both) embedded = Gather (table, ids) h = Add (x, embedded)
            split = Concat <axis = 0> (batch_size, seq_size, heads, depth)
            merge = Concat <axis = 0> (batch_size, seq_size, width)
            q_rows = MatMul (h, wq) q_heads = Reshape (q_rows, split) q = Transpose <perm = [0, 2, 1, 3]> (q_heads)
            k_rows = MatMul (h, wk) k_heads = Reshape (k_rows, split) k = Transpose <perm = [0, 2, 3, 1]> (k_heads)
            v_rows = MatMul (h, wv) v_heads = Reshape (v_rows, split) v = Transpose <perm = [0, 2, 1, 3]> (v_heads)
            products = MatMul (q, k) scores = Mul (products, scale) weights = Softmax <axis = -1> (scores)
            mixed = MatMul (weights, v) turned = Transpose <perm = [0, 2, 1, 3]> (mixed)
            merged = Reshape (turned, merge) projected = MatMul (merged, wo) sum = Add (projected, h)
            y = LayerNormalization <axis = -1> (sum, g, b)
        }}""",
        **weights,
        **constants,
    )
    rows = ("embedded", "h", "q_rows", "k_rows", "v_rows", "merged", "projected", "sum")
    proto.graph.value_info.extend(graphs.edge(name, [batch, seq, WIDTH]) for name in rows)
    proto.graph.value_info.extend(
        [graphs.edge(name, [batch, HEADS, seq, DEPTH]) for name in ("q", "v", "mixed")]
        + [graphs.edge(name, [batch, HEADS, seq, seq]) for name in ("products", "scores", "weights")]
    )
    return proto


def _converted(tmp_path: Path, proto: ModelProto) -> Result:
    onnx.save(proto, tmp_path / "bert.onnx")
    target = parse_target(tmp_path / "r" / "m" / "1")
    return convert(Options(source=tmp_path / "bert.onnx", target=target, formats=("onnx",), report=False))


@pytest.mark.long
def test_an_onnx_file_gets_the_fusions_of_the_same_model_from_torch(tmp_path: Path) -> None:
    """The names that show them are then withheld from ONNX Runtime."""
    made = _converted(tmp_path, _bert())
    assert not [note for note in made.notes if "CPU kernel does not compute" in note]
    files = {name: onnx.load(made.artifact.file(f"{name}.onnx"), load_external_data=False) for name in _GRAPHS}
    kernel = [node.op_type for node in files["cpu"].graph.node if node.domain == "bf16kit"]
    assert [op for op in kernel if not op.startswith("MatMul")] == ["Attention_rrr", "AddLayerNorm_bias"]
    for proto in files.values():
        inner = [dim.dim_param for value in proto.graph.value_info for dim in value.type.tensor_type.shape.dim]
        assert set(inner) == {""}
        assert not proto.metadata_props


@pytest.mark.long
def test_wrong_guesses_cost_fusions_and_change_no_result(tmp_path: Path) -> None:
    """Both free dimensions are called ``seq`` inside."""
    artifact = _converted(tmp_path, _bert(batch="seq")).artifact
    feeds = {"x": graphs.values(3, 5, WIDTH, seed=3)}
    session = onnxruntime.InferenceSession(tmp_path / "bert.onnx", providers=["CPUExecutionProvider"])
    expected = session.run(None, feeds)[0]
    found = load(artifact, "cpu").run(feeds)["y"]
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-2


def test_inner_names_follow_the_inputs_and_others_are_dropped(tmp_path: Path) -> None:
    proto = _bert()
    proto.graph.value_info[0].type.tensor_type.shape.dim[1].dim_param = "somewhere"
    onnx.save(proto, tmp_path / "bert.onnx")
    model, _ = onnx_file.read_graph(tmp_path / "bert.onnx")
    onnx_file.resolve_edges(model, [TensorSpec("x", "float32", ("b", "s", WIDTH))])
    shapes = {value.name: value.shape for node in model.graph for value in node.outputs}
    assert [getattr(dim, "value", dim) for dim in shapes["h"] or ()] == ["b", "s", WIDTH]
    assert [getattr(dim, "value", dim) for dim in shapes["embedded"] or ()] == ["b", None, WIDTH]


X = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
SPEC = (TensorSpec("x", "float32", ("batch", 16)),)


def test_running_a_module_changes_neither_its_feed_nor_torchs_settings() -> None:
    module = seeded(Mlp())
    oracle = oracles.of_module(adapt(module, SPEC))
    feed = X.copy()
    feed.flags.writeable = False
    torch.set_float32_matmul_precision("medium")
    try:
        (answer,) = oracle([{"x": feed}])
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        np.testing.assert_array_equal(answer["output"], module(torch.from_numpy(X)).numpy())


def test_a_module_that_fails_is_reported_in_one_line() -> None:
    class Picky(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 3:
                raise ValueError("three rows are too many")
            return super().forward(x)

    oracle = oracles.of_module(adapt(seeded(Picky()), SPEC))
    with pytest.raises(RuntimeFailure, match="the torch module failed on it: ValueError: three rows are too many"):
        oracle([{"x": X}])


def test_a_file_with_fp16_inputs_gets_feeds_in_fp16(tmp_path: Path) -> None:
    x, y = (graphs.edge(name, ["n", 16], TensorProto.FLOAT16) for name in "xy")
    onnx.save(graphs.model([helper.make_node("Add", ["x", "x"], ["y"])], [x], [y]), tmp_path / "m.onnx")
    oracle = oracles.of_onnx(tmp_path / "m.onnx", ir.load(tmp_path / "m.onnx"))
    (answer,) = oracle([{"x": X}])
    np.testing.assert_array_equal(answer["y"], X.astype(np.float16) * np.float16(2))
    assert oracle.roundoff == 2.0**-11


@pytest.mark.parametrize(
    ("cast", "roundoff"),
    [
        (helper.make_node("Cast", ["x"], ["c"], to=TensorProto.FLOAT16), 2.0**-11),
        (helper.make_node("Cast", ["x"], ["c"], to=99), FP32_ROUNDOFF),
        (helper.make_node("Cast", ["x"], ["c"], domain="own", to="half"), FP32_ROUNDOFF),
    ],
)
def test_only_onnxs_own_cast_to_fp16_raises_the_roundoff(tmp_path: Path, cast: onnx.NodeProto, roundoff: float) -> None:
    """The file is examined before ONNX Runtime decides whether it can run."""
    nodes = [cast, helper.make_node("Exp", ["c"], ["y"])]
    proto = graphs.model(nodes, [graphs.edge("x", [4])], [graphs.edge("y", [4])])
    assert oracles.of_onnx(tmp_path / "m.onnx", ir.from_proto(proto)).roundoff == roundoff
