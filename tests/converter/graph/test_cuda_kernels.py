"""A cuda graph has a kernel for every bf16 node in every release its manifest allows; the manifest names the oldest."""

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from converting import ONNX_ONLY, Cli
from onnx import TensorProto, helper
from sessions import recorded_sessions

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.graph.cuda_kernels import KernelTable, missing_kernels, releases, required
from bf16kit.converter.rewrite.lowering import kernel_table
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.loading import load
from bf16kit.system import is_older

NEWEST = "1.31.1"


@pytest.fixture(autouse=True)
def forget_installed() -> Iterator[None]:
    yield
    kernel_table.cache_clear()


def _install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def found(name: str) -> SimpleNamespace:
        if version is None or name != "onnxruntime":
            raise metadata.PackageNotFoundError(name)
        return SimpleNamespace(version=version)

    monkeypatch.setattr(metadata.Distribution, "from_name", found)
    monkeypatch.setattr(onnxruntime, "__version__", version or onnxruntime.__version__)
    kernel_table.cache_clear()


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [("1.25.0", "1.25.0"), ("1.25.1", "1.25.0"), ("1.24.0", "1.24.1"), ("1.40.0", NEWEST), (None, NEWEST)],
)
def test_the_table_is_that_of_the_installed_version_or_of_the_newest_before_it(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, chosen: str
) -> None:
    _install(monkeypatch, installed)
    assert KernelTable.load().onnxruntime == chosen


def test_the_tables_show_in_which_release_a_kernel_appeared() -> None:
    """The releases' registries show this. One release earlier, each would fail at load or run on the CPU."""
    gained = {
        ("ReduceMean", 18): "1.30.0",
        ("Sin", 22): "1.27.0",
        ("Attention", 23): "1.25.0",
        ("Flatten", 21): "1.25.0",
        ("MatMul", 13): "1.24.1",
    }
    for (op, since), release in gained.items():
        having = [each for each in releases() if KernelTable.load(each).has_bf16_kernel("", op, since)]
        assert having == list(releases())[releases().index(release) :], op


def test_a_kernel_takes_a_node_only_if_all_its_dtypes_match() -> None:
    table = KernelTable.load(NEWEST)
    assert table.accepts_dtypes("", "Where", 16, {"B": "bool", "T": "bfloat16"})
    assert not table.accepts_dtypes("", "Where", 16, {"B": "bfloat16", "T": "bfloat16"})
    assert table.accepts_dtypes("", "LayerNormalization", 17, {"T": "bfloat16", "U": "float"})
    assert not table.accepts_dtypes("", "LayerNormalization", 17, {"T": "bfloat16", "U": "bfloat16"})
    assert table.accepts_dtypes("", "Cast", 13, {"T1": "bfloat16", "T2": "float"})
    # int64 is under no constraint of the kernel
    assert table.accepts_dtypes("", "Gather", 13, {"T": "bfloat16", "tensor(int64)": "int64"})


LATE = {"ReduceMean": "1.30.0", "Sin": "1.27.0"}  # the first release with a bf16 kernel on CUDA; pooling becomes a mean


@pytest.mark.long
@pytest.mark.parametrize(("release", "least"), [("1.24.1", "1.24.1"), ("1.28.0", "1.27.0"), ("1.31.1", "1.30.0")])
def test_a_graph_planned_for_a_release_has_kernels_in_it_and_in_all_later_ones(
    release: str, least: str, tmp_path: Path, target: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest names the first release with all kernels. The operators got theirs in different releases."""
    proto = graphs.parsed(
        """(float[batch, 3, 8, 8] x) => (float[batch, 8] y) {
            [conv] conv = Conv <pads = [1, 1, 1, 1]> (x, k) [relu] relu = Relu (conv)
            [pooled] pooled = GlobalAveragePool (relu) [flat] flat = Flatten (pooled) [hidden] hidden = MatMul (flat, w)
            [waves] waves = Sin (hidden) [shares] shares = Softmax (waves)
            [both] both = Concat <axis = 1> (shares, hidden) [y] y = MatMul (both, v)
        }""",
        k=graphs.values(8, 3, 3, 3, seed=1, scale=0.3),
        w=graphs.values(8, 32, seed=2),
        v=graphs.values(64, 8, seed=3, scale=0.1),
    )
    onnx.save(proto, source := tmp_path / "source.onnx")
    _install(monkeypatch, release)
    cli("checkpoint", source, "--out", target, "--profile", "cuda", *ONNX_ONLY, "--allow-over-budget").published()
    artifact = Artifact.open(target)
    assert artifact.manifest.profiles["cuda"].requires == {"onnxruntime": least}
    model = onnx.load(artifact.file("cuda.onnx"), load_external_data=False)
    having = [each for each in releases() if missing_kernels(ir.from_proto(model), KernelTable.load(each)) == []]
    assert having == [each for each in releases() if not is_older(each, least)]
    narrow = {
        value.name for value in model.graph.value_info if value.type.tensor_type.elem_type == TensorProto.BFLOAT16
    }
    ops = {node.op_type for node in model.graph.node if narrow & set(node.output)}
    assert ops & LATE.keys() == {op for op, since in LATE.items() if not is_older(release, since)}
    assert ops >= {"Conv", "Relu", "MatMul", "Softmax", "Concat"}


def test_a_node_without_a_kernel_is_found_if_it_has_bf16(tmp_path: Path) -> None:
    """The graph is made by hand: no plan puts bf16 where CUDA has no kernel."""
    narrow = TensorProto.BFLOAT16
    nodes = [helper.make_node("MaxPool", ["x"], ["y"], name="pool", kernel_shape=[2, 2])]
    proto = graphs.model(nodes, [graphs.edge("x", [1, 1, 4, 4], narrow)], [graphs.edge("y", [1, 1, 3, 3], narrow)])
    proto.opset_import[0].version = 22
    assert missing_kernels(ir.from_proto(proto), KernelTable.load()) == ["pool: MaxPool-22 of T bfloat16"]
    in_fp32 = graphs.model([helper.make_node("Elu", ["x"], ["y"])], [graphs.edge("x")], [graphs.edge("y")])
    assert missing_kernels(ir.from_proto(in_fp32), KernelTable.load()) == []
    onnx.save(proto, tmp_path / "a.onnx")  # no release has a kernel
    assert required("cuda", [tmp_path / "a.onnx"]) == {"onnxruntime": releases()[-1]}


OLDEST = "1.24.1"  # of the releases with a kernel table


def _graph(path: Path, opset: int, ir_version: int = 10) -> Path:
    proto = graphs.mlp((4, 4))
    proto.opset_import[0].version, proto.ir_version = opset, ir_version
    onnx.save(proto, path)
    return path


@pytest.mark.parametrize(
    ("opset", "ir_version", "least"),
    [(13, 8, "1.24"), (25, 13, "1.24"), (26, 13, "1.25"), (22, 14, "1.40.0"), (27, 13, "1.40.0")],
)
def test_it_is_the_oldest_release_that_loads_the_graphs_or_the_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opset: int, ir_version: int, least: str
) -> None:
    _install(monkeypatch, "1.40.0")
    older, graph = _graph(tmp_path / "a.onnx", 13, 8), _graph(tmp_path / "b.onnx", opset, ir_version)
    assert required("cpu", [older, graph]) == {"onnxruntime": least}
    assert required("cpu", [graph, older]) == {"onnxruntime": least}


def test_cuda_needs_the_first_release_with_its_kernels_or_an_older_one_that_ran_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everywhere = _graph(tmp_path / "a.onnx", 22)
    assert required("cuda", [everywhere]) == {"onnxruntime": OLDEST}
    late = tmp_path / "b.onnx"
    nodes = [helper.make_node("Sin", ["x"], ["y"], name="sin")]
    x, y = (graphs.edge(name, [4], TensorProto.BFLOAT16) for name in "xy")
    onnx.save(graphs.model(nodes, [x], [y]), late)
    assert required("cuda", [everywhere, late]) == {"onnxruntime": "1.27.0"}
    _install(monkeypatch, "1.26.0")
    assert required("cuda", [late]) == {"onnxruntime": "1.27.0"}
    assert required("cuda", [late], on_device=True) == {"onnxruntime": "1.26.0"}
    _install(monkeypatch, "1.40.0.dev20270101")
    assert required("cuda", [late], on_device=True) == {"onnxruntime": "1.27.0"}
    _install(monkeypatch, None)
    assert required("cuda", [late]) == {"onnxruntime": "1.27.0"}


def test_an_older_release_is_rejected_before_it_loads_anything(
    small: Artifact, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(small, "cpu").close()
    recorded_sessions(monkeypatch, lambda: pytest.fail("it is opened"))
    monkeypatch.setattr(onnxruntime, "__version__", "1.23.2")
    with pytest.raises(RuntimeFailure, match=r"profile cpu needs ONNX Runtime 1\.24 or later, but 1\.23\.2 is"):
        load(small, "cpu")
    cli("verify", small.path, "--profile", "cpu").refused(3, "profile cpu needs ONNX Runtime 1.24 or later", "upgrade")
