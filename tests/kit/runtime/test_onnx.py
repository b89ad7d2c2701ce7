"""ONNX Runtime on the CPU, as the server and the converter use it."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from artifacts import write_endless, write_mlp
from mapped import mapped_kb
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper
from peaks import measured_alone
from waiting import until

import graphs
from bf16kit.messages.errors import InputRefused, RuntimeFailure
from bf16kit.numerics.tensors import BY_ONNX, TensorSpec
from bf16kit.runtime.loading import load
from bf16kit.runtime.ort.onnx import OnnxRuntime
from bf16kit.runtime.ort.session import Session, open_session

STORED: dict[int, str] = {TensorProto.BFLOAT16: "weights.bf16", TensorProto.FLOAT: "weights.fp32"}


def specs(model: ModelProto) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    def spec(edge: Any) -> TensorSpec:
        tensor = edge.type.tensor_type
        return TensorSpec(
            edge.name, BY_ONNX[tensor.elem_type].name, tuple(d.dim_param or d.dim_value for d in tensor.shape.dim)
        )

    return tuple(map(spec, model.graph.input)), tuple(map(spec, model.graph.output))


def runtime(model: ModelProto, source: Path | bytes = b"", **options: Any) -> OnnxRuntime:
    return OnnxRuntime(source or model.SerializeToString(), *specs(model), **options)


def test_only_the_requested_outputs_are_given_in_the_requested_order() -> None:
    text = "(float[2] x) => (float[2] negative, float[2] absolute) { negative = Neg (x) absolute = Abs (x) }"
    loaded = runtime(graphs.parsed(text))
    x = np.array([1, -2], np.float32)
    assert list(loaded.run({"x": x})) == ["negative", "absolute"]
    assert list(loaded.run({"x": x}, ["absolute"])) == ["absolute"]
    assert list(loaded.run({"x": x}, ["absolute", "negative"])) == ["absolute", "negative"]


def test_bf16_weights_are_widened_exactly_and_multiplied_in_fp32(tmp_path: Path) -> None:
    narrowed = graphs.narrow(graphs.mlp())
    path = graphs.save_external(narrowed, tmp_path / "cpu.onnx", STORED)
    x = graphs.values(3, 16, seed=9)
    weights = {name: a.astype(np.float64) for name, a in graphs.weights_of(narrowed).items()}
    hidden = np.maximum(x.astype(np.float64) @ weights["w0"] + weights["b0"], 0)
    for loaded in (runtime(narrowed, path), runtime(narrowed, path.read_bytes(), base_dir=tmp_path)):
        found = loaded.run({"x": x})
        assert list(found) == ["y"]
        np.testing.assert_allclose(found["y"], hidden @ weights["w1"] + weights["b1"], rtol=1e-4, atol=1e-6)
        assert loaded.info.precision == "bf16-weights"
        assert loaded.info.accumulation == "fp32"
        assert (loaded.info.backend, loaded.info.device, loaded.info.profile) == ("onnxruntime", "cpu", "cpu")


def test_activations_are_not_quantised_because_weights_are() -> None:
    text = """(float[4, 32] x) => (float[4, 48] y) {
        wide = DequantizeLinear <axis = 1> (w, scale, zero) y = MatMul (x, wide)
    }"""
    stored = np.random.default_rng(0).integers(-127, 128, (32, 48)).astype(np.int8)
    scale, x = np.full(48, 0.01, np.float32), graphs.values(4, 32)
    found = runtime(graphs.parsed(text, w=stored, scale=scale, zero=np.zeros(48, np.int8))).run({"x": x})["y"]
    np.testing.assert_allclose(found, x.astype(np.float64) @ (stored * 0.01), rtol=1e-4, atol=1e-5)


def test_an_embedding_table_is_read_from_the_mapped_file_and_never_copied(tmp_path: Path) -> None:
    """Gather runs before Cast, so the pages of weights.bf16 remain the file's, shared by all processes that map it."""
    rows, width = 16384, 128  # 4 MiB of bf16
    narrowed = graphs.narrow(graphs.embedding(rows, width))
    path = graphs.save_external(narrowed, tmp_path / "cpu.onnx", STORED)
    loaded = runtime(narrowed, path)
    ids = np.arange(rows, dtype=np.int64).reshape(1, -1)
    found = loaded.run({"ids": ids})["y"][0]
    table = graphs.weights_of(graphs.embedding(rows, width))["table"].astype(ml_dtypes.bfloat16)
    assert np.array_equal(found, table.astype(np.float32))
    mapped = mapped_kb("weights.bf16")
    assert mapped["Rss"] >= 4096 - 8  # every row was read
    assert mapped["Anonymous"] == 0  # no page of it was copied


@pytest.mark.parametrize(
    ("model", "feeds"),
    [
        (graphs.embedding(), {"ids": np.array([[0, 63, 7]], np.int64)}),
        (graphs.if_branches(), {"x": graphs.values(2, 16), "flag": np.array(True)}),
        (graphs.conv_bn(), {"x": graphs.values(2, 3, 8, 8)}),
    ],
    ids=["gather", "if", "conv"],
)
def test_weights_from_memory_are_copied_at_load(model: ModelProto, feeds: dict[str, NDArray[Any]]) -> None:
    """The tensors of a graph without data are given as arrays, which may be changed or freed after the load."""
    expected = runtime(model).run(feeds)["y"]
    external = {name: array.copy() for name, array in graphs.weights_of(model).items()}
    loaded = runtime(graphs.without_data(model, "residual.rebuilt"), external=external, precision="fp32")
    for array in external.values():
        array.fill(np.nan)
    assert np.array_equal(loaded.run(feeds)["y"], expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "int64", "bool", "string", "uint8", "float64"])
def test_every_dtype_passes_through_unchanged_and_a_batch_may_be_empty(dtype: str) -> None:
    entry = next(d for d in BY_ONNX.values() if d.name == dtype)
    edges = [graphs.edge("x", ["n", 2], entry.onnx)], [graphs.edge("y", ["n", 2], entry.onnx)]
    loaded = runtime(graphs.model([helper.make_node("Identity", ["x"], ["y"])], *edges))
    x = np.array([["a", "bé"]], object) if dtype == "string" else np.array([[1, 0]]).astype(entry.numpy)
    if dtype == "bfloat16":
        x = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(-1, 2)
    for given in (x, x[:0]):
        found = loaded.run({"x": given})["y"]
        assert found.dtype == entry.numpy
        assert found.shape == given.shape
        same = np.array_equal(found, given) if dtype == "string" else found.tobytes() == given.tobytes()
        assert same


def test_one_runtime_serves_many_threads() -> None:
    loaded = runtime(graphs.mlp(), threads=1)
    inputs = [graphs.values(2, 16, seed=i) for i in range(8)]
    inputs[0].flags.writeable = False
    expected = [loaded.run({"x": x})["y"] for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        runs = (loaded.run({"x": inputs[index]})["y"] for _ in range(100))
        wrong.extend(index for found in runs if not np.array_equal(found, expected[index]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_cannot_be_loaded_is_a_runtime_failure(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = "(float[2] x) => (float[2] y) { n = Cast <to = 16> (x) s = Softmax (n) y = Cast <to = 1> (s) }"
    with pytest.raises(RuntimeFailure, match="NOT_IMPLEMENTED"):
        runtime(graphs.parsed(text))
    (tmp_path / "cpu.onnx").write_bytes(b"not a graph")
    with pytest.raises(RuntimeFailure, match=r"cannot load cpu\.onnx on cpu"):
        runtime(graphs.mlp(), tmp_path / "cpu.onnx")
    assert capfd.readouterr() == ("", "")


def test_an_index_beyond_a_table_and_a_size_that_does_not_fit_are_bad_input_and_print_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The second happens to a sequence longer than the table of positions: the two cannot be broadcast together. The
    third happens to no rows where the graph joins them by a sequence, as torch writes an EmbeddingBag."""
    joined = graphs.parsed(
        "(float[n, 2] x) => (float[m, 2] y) { s = SplitToSequence (x) y = ConcatFromSequence <axis = 0> (s) }"
    )
    added = graphs.parsed("(float[n] x) => (float[n] y) { y = Add (x, positions) }", positions=graphs.values(4))
    for model, feeds, words in (
        (graphs.embedding(rows=4), {"ids": np.array([[9]], np.int64)}, "^indices element out of data bounds, idx=9"),
        (added, {"x": graphs.values(7)}, "broadcast"),
        (joined, {"x": np.zeros((0, 2), np.float32)}, "1 or more inputs"),
    ):
        with pytest.raises(InputRefused, match="ONNX Runtime failed") as refused:
            runtime(model).run(feeds)
        assert re.search(words, refused.value.reason)
        assert "/" not in refused.value.reason
    assert capfd.readouterr() == ("", "")


def test_a_lack_of_memory_is_not_reported_as_bad_input() -> None:
    """A result of 2**50 elements does not fit into this machine's memory."""
    model = graphs.parsed("(float[1] x) => (float[n, m] y) { y = Expand (x, shape) }", shape=np.array([2**25, 2**25]))
    with pytest.raises(RuntimeFailure) as failed:
        runtime(model).run({"x": graphs.values(1)})
    assert not isinstance(failed.value, InputRefused)


@pytest.mark.parametrize(("x", "y"), [("z float32", "y float32"), ("x int64", "y float32"), ("x float32", "y int64")])
def test_declared_inputs_and_outputs_have_the_graphs_names_and_dtypes(x: str, y: str) -> None:
    """Without a warm-up and golden samples, nothing else shows it before a client's request."""
    specs = [TensorSpec(name, dtype, ("n", 16)) for name, dtype in map(str.split, (x, y))]
    with pytest.raises(RuntimeFailure, match=r"^the graph: declared are .*, the graph has . tensor\(float\); convert"):
        OnnxRuntime(graphs.mlp().SerializeToString(), specs[:1], specs[1:])


_LARGE_RUN = """
import graphs
import numpy as np
from peaks import anonymous, peak_anonymous
from bf16kit.runtime.ort.onnx import OnnxRuntime
from bf16kit.numerics.tensors import TensorSpec
text = "(float[n] x) => (float y) { e = Exp (x) y = ReduceSum <keepdims = 0> (e) }"
model = graphs.parsed(text).SerializeToString()
x, y = TensorSpec("x", "float32", ("n",)), TensorSpec("y", "float32", ())
runtime = OnnxRuntime(model, [x], [y], precision="fp32")
one, many = np.ones(1, np.float32), np.ones(16 << 20, np.float32)
runtime.run({"x": one})
before = anonymous()
with peak_anonymous() as peak:
    runtime.run({"x": many})
runtime.run({"x": one})
print(peak.bytes - before >> 20, anonymous() - before >> 20)
"""


def test_the_memory_of_a_large_run_is_given_back() -> None:
    """The run takes 64 MiB, which ONNX Runtime's arena would keep by default."""
    peak, left = map(int, measured_alone(_LARGE_RUN).split())
    assert peak >= 60
    assert left < 8


def test_a_run_that_takes_too_long_is_stopped_and_the_next_one_runs(tmp_path: Path) -> None:
    endless = write_endless(tmp_path / "endless" / "1")
    specs = [[entry.spec() for entry in entries] for entries in (endless.manifest.inputs, endless.manifest.outputs)]
    loaded = OnnxRuntime(endless.file("cpu.onnx"), *specs, threads=1)
    for _ in range(2):
        with pytest.raises(RuntimeFailure, match=r"^ONNX Runtime was not done after 0\.1 s, and was stopped$"):
            loaded.run({"x": graphs.values(1, 16)}, seconds=0.1)


def test_a_run_within_its_time_limit_gives_the_same_outputs_and_errors(tmp_path: Path) -> None:
    artifact = write_mlp(tmp_path / "mlp" / "1")
    loaded = load(artifact, "cpu", threads=1)
    x = {"x": graphs.values(2, 16)}
    np.testing.assert_array_equal(loaded.run(x, seconds=60)["y"], loaded.run(x)["y"])
    with pytest.raises(RuntimeFailure, match="ONNX Runtime failed"):
        loaded.run({"x": graphs.values(2, 17)}, seconds=60)
    until(lambda: not [each for each in threading.enumerate() if isinstance(each, threading.Timer)], what="no timer")
    loaded.close()
    with pytest.raises(RuntimeFailure, match="closed"):
        loaded.run(x)


# --- what sessions cost: an idle one, and the import ------------------------------------------------------------------

_QUIET, _TRIES = 0.1, 20  # seconds


def idle_cost(session: Session) -> float:
    """Return the processor time (seconds) used in the ``_QUIET`` seconds after a run: the least of some tries."""
    feeds = {"x": graphs.values(64, 256)}
    costs = []
    for _ in range(_TRIES):
        session.run(None, feeds)
        before = time.process_time()
        time.sleep(_QUIET)  # what the idle session uses in it is what is measured
        costs.append(time.process_time() - before)
        if costs[-1] < _QUIET / 100:
            break
    return min(costs)


@pytest.mark.alone  # spinning threads show in the processor time only if cores are free for them
@pytest.mark.parametrize("threads", [2, 4])
def test_an_idle_session_takes_no_processor_time(threads: int) -> None:
    """The pool's threads sleep between runs; they do not spin."""
    model = graphs.mlp((256, 256, 256)).SerializeToString()
    assert idle_cost(open_session(model, threads=threads)) < _QUIET / 100


def test_nothing_is_written_to_the_home_directory(tmp_path: Path) -> None:
    """With its default settings, ONNX Runtime's telemetry writes a device id to ~/.cache at import."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ORT_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", "import bf16kit.runtime.ort.onnx"],
        env=environment | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.rglob("*")) == []
