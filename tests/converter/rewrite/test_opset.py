from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from lowered import lower, relative_l2
from onnx import ModelProto, helper

import graphs
from bf16kit.converter.graph.types import run
from bf16kit.converter.read.onnx_file import read_graph
from bf16kit.converter.rewrite.lowering import check_opset, kernel_table, raise_opset
from bf16kit.messages.errors import ConversionError
from bf16kit.runtime.ort.session import open_session


def _opset(proto: ModelProto) -> int:
    return int(proto.opset_import[0].version)


def _at(proto: ModelProto, opset: int, ir_version: int = 8) -> ModelProto:
    proto.opset_import[0].version = opset
    proto.ir_version = ir_version
    return proto


def _cnn(opset: int) -> ModelProto:
    """Return Conv → BatchNorm → Clip → MaxPool → GlobalAveragePool → Flatten → MatMul; Clip has ``opset``'s form."""
    old = opset < 11
    clip = "Clip <min = 0.0, max = 6.0> (n)" if old else "Clip (n, low, high)"
    proto = graphs.parsed(
        f"""(float[batch, 3, 8, 8] x) => (float[batch, 16] y) {{
            [conv] c = Conv (x, w) [norm] n = BatchNormalization (c, gamma, beta, mean, variance) [clip] k = {clip}
            [pool] p = MaxPool <kernel_shape = [2, 2]> (k) [mean] g = GlobalAveragePool (p)
            [flatten] f = Flatten (g) [fc] y = MatMul (f, fc)
        }}""",
        w=graphs.values(32, 3, 3, 3),
        **{
            name: np.abs(graphs.values(32, seed=i)) + 0.5
            for i, name in enumerate(("gamma", "beta", "mean", "variance"))
        },
        fc=graphs.values(32, 16),
        **({} if old else {"low": np.array(0, np.float32), "high": np.array(6, np.float32)}),
    )
    return _at(proto, opset, 3 if opset < 9 else 8)


@pytest.mark.parametrize("opset", [7, 11, 13, 18, 22, 23])
def test_a_cnn_of_any_opset_runs_in_bf16_around_its_max_pool(opset: int, tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", _cnn(opset))
    islands = [entry.op for entry in made.plan.nodes["cuda"] if entry.precision == "fp32"]
    has_mean = kernel_table().has_bf16_kernel("", "ReduceMean", 18)  # in ONNX Runtime 1.30 and later
    assert islands == (["MaxPool"] if has_mean else ["MaxPool", "ReduceMean", "Flatten"])
    assert [op for op in made.ops("cuda") if op != "Cast"] == [
        *("Conv", "Max", "Min", "MaxPool", "ReduceMean", "Flatten", "MatMul"),
    ]
    feeds = {"x": np.random.default_rng(3).standard_normal((4, 3, 8, 8)).astype(np.float32)}
    source = made.run_source(feeds)["y"]
    assert relative_l2(source, made.run_cpu(feeds)["y"]) < 6e-3
    assert relative_l2(source, made.run_emulated(feeds)["y"]) < 1.2e-2
    # the reference is the source's own graph, so a fault of the version converter shows as drift
    reference = onnx.load(made.artifact.file("reference.onnx"), load_external_data=False)
    assert _opset(reference) == opset


def test_a_model_that_gains_nothing_keeps_its_opset(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", _at(graphs.mlp((32, 32)), 17))
    for profile in ("cpu", "cuda"):
        assert _opset(onnx.load(made.artifact.file(f"{profile}.onnx"), load_external_data=False)) == 17


def test_bodies_are_converted_with_their_model(tmp_path: Path) -> None:
    """The axes of Squeeze are attributes at opset 11 and inputs at 22, also inside an If."""
    proto = graphs.parsed(
        """(float[batch, 16] x, bool flag) => (float[batch, 16] y) {
            y = If (flag) <
                then_branch = then_graph () => (float[batch, 16] t) {
                    m = MatMul (x, w) u = Unsqueeze <axes = [0]> (m) t = Squeeze <axes = [0]> (u)
                },
                else_branch = other_graph () => (float[batch, 16] o) { o = MatMul (x, v) }
            >
        }""",
        w=graphs.values(16, 16, seed=1),
        v=graphs.values(16, 16, seed=2),
    )
    made = lower(tmp_path / "m" / "1", _at(proto, 11, 6))
    for flag in (True, False):
        feeds = {"x": graphs.values(4, 16, seed=9), "flag": np.array(flag)}
        assert relative_l2(made.run_source(feeds)["y"], made.run_cpu(feeds)["y"]) < 4e-3


def test_weights_are_not_copied_through_the_converter() -> None:
    """onnx's version converter works on a serialised copy, which cannot exceed 2 GB."""
    model = ir.from_proto(_cnn(13))
    before = model.graph.initializers["fc"].const_value
    run([raise_opset], model)
    assert model.opset_imports[""] == 22
    assert model.graph.initializers["fc"].const_value is before


def test_an_opset_that_onnx_runtime_does_not_load_is_rejected_with_the_remedy(tmp_path: Path) -> None:
    """ONNX Runtime itself says only that it guarantees nothing."""
    newest = kernel_table().accepted_opset
    onnx.save(_at(graphs.mlp(), 28), tmp_path / "m.onnx")
    with pytest.raises(ConversionError, match=rf"opset 28 is newer than {newest}.*export the model with opset 22"):
        read_graph(tmp_path / "m.onnx")


@pytest.mark.parametrize(("found", "settled"), [(3, 8), (10, 10), (14, 11)])
def test_the_ir_version_is_one_that_onnx_runtime_reads(found: int, settled: int) -> None:
    model = run([check_opset], ir.from_proto(_at(graphs.mlp(), 22, found)))
    assert model.ir_version == settled


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize(
    ("op", "opset", "scales"),
    [("Upsample", 9, (1.3, 3.7)), ("Resize", 10, (1.3, 3.7)), ("Resize", 10, (2.0, 2.0)), ("Resize", 10, (0.4, 0.7))],
)
def test_a_resize_of_an_old_opset_keeps_its_coordinates(
    op: str, opset: int, scales: tuple[float, float], mode: str
) -> None:
    """They were asymmetric before opset 11, which onnx's converter does not say to the Resize that it makes."""
    nodes = [helper.make_node(op, ["x", "scales"], ["y"], mode=mode)]
    scale = graphs.initializer("scales", np.array([1, 1, *scales], np.float32))
    edges = [graphs.edge("x", [1, 2, 9, 11])], [graphs.edge("y", [1, 2, "height", "width"])]
    proto = _at(graphs.model(nodes, *edges, [scale]), opset)
    raised = ir.to_proto(run([raise_opset], ir.from_proto(proto)))
    assert _opset(raised) == 22
    feeds = {"x": graphs.values(1, 2, 9, 11, seed=3)}
    before, after = (open_session(each.SerializeToString()).run(None, feeds)[0] for each in (proto, raised))
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-6)
