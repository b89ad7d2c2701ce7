from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from lowered import assert_same_tensors, lower, relative_l2
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper
from peaks import measured_alone

import graphs
from bf16kit.messages.errors import RangeError
from bf16kit.numerics.panels import pack
from bf16kit.numerics.rounding import to_bf16

WRITE = """
import sys
from pathlib import Path
import numpy as np
import onnx_ir as ir
from bf16kit.numerics.panels import strips
from bf16kit.numerics.residual import Scale
from bf16kit.artifact.weightfile import WeightWriter
from bf16kit.converter.write.weights import Rounding, round_weight
from bf16kit.converter.graph.initializers import ComputedTensor
from peaks import anonymous, peak_anonymous

def write(path, rows, kind):
    mapped = np.memmap(path / "source", np.float32, mode="r", shape=(rows, 4096)).view(np.ndarray)
    tensor = ir.Tensor(mapped)
    factor = np.float32(1.5)
    folded = ComputedTensor(lambda chosen: mapped[chosen] * factor, tensor)
    scale = Scale(1, np.full(4096, factor))
    weight, scale = (tensor, None) if kind == "plain" else (folded, scale)
    with WeightWriter(path / f"{rows}.residual") as residual, WeightWriter(path / f"{rows}.bf16") as file:
        bf16, *_ = round_weight(weight, Rounding(), lambda _: None, residual, original=tensor, scale=scale)
        file.append_chunks(strips(bf16, 1))

path, kind = Path(sys.argv[1]), sys.argv[2]
write(path, 16, kind)
before = anonymous()
with peak_anonymous() as peak:
    write(path, 8192, kind)
print(peak.bytes - before, 8192 * 4096 * 4)
"""


def _with(name: str, array: NDArray[np.float32]) -> ModelProto:
    proto = graphs.mlp((32, 64, 32))
    for tensor in proto.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(graphs.initializer(name, array))
    return proto


def test_one_copy_of_the_weights_serves_every_graph(tmp_path: Path) -> None:
    made = lower(tmp_path / "m" / "1", graphs.mlp((256, 256, 256)))
    source = sum(array.nbytes for array in made.checkpoint.values())
    stored = made.size("weights.bf16", "weights.fp32", "cpu.onnx", "cuda.onnx", "reference.onnx")
    assert stored <= 0.52 * source
    assert stored + made.size("residual.bin") <= 1.03 * source
    assert {entry.offset % 64 for entry in made.stored.tensors.values()} == {0}
    assert_same_tensors(made.artifact, made.checkpoint)


def test_a_matrix_that_is_only_multiplied_is_stored_as_panels_and_the_rest_in_c_order(tmp_path: Path) -> None:
    proto = graphs.parsed(
        """(int64[batch] ids) => (float[batch, 36] y) {
            h = Gather (table, ids) m = MatMul (h, w) y = Gemm <transB = 1> (m, v)
        }""",
        table=graphs.values(64, 16),
        w=graphs.values(16, 70),
        v=graphs.values(36, 70),
    )
    made = lower(tmp_path / "m" / "1", proto)
    assert {name: entry.panels for name, entry in made.stored.tensors.items()} == {"table": None, "v": 0, "w": 1}
    file = made.artifact.file("weights.bf16").read_bytes()
    for name, entry in made.stored.tensors.items():
        matrix = to_bf16(made.checkpoint[name])
        written = matrix if entry.panels is None else pack(matrix, entry.panels)
        assert file[entry.offset : entry.offset + entry.bytes] == written.tobytes()
        assert made.artifact.tensor(name).tobytes() == matrix.tobytes()
    assert_same_tensors(made.artifact, made.checkpoint)


@pytest.mark.parametrize("axis", [0, 1])
def test_panels_hold_a_weight_with_batchnorm_folded_in(axis: int, tmp_path: Path) -> None:
    """The residual restores the unfolded matrix from panels and scale, whichever axis the panels are along."""
    weight = graphs.values(16, 40) if axis == 1 else np.ascontiguousarray(graphs.values(16, 40).T)
    statistics = {name: np.abs(graphs.values(40, seed=i)) + 0.5 for i, name in enumerate(("g", "b", "m", "v"))}
    proto = graphs.parsed(
        f"""(float[batch, 16] x) => (float[batch, 40] y) {{
            h = Gemm <transB = {1 - axis}> (x, w) y = BatchNormalization (h, g, b, m, v)
        }}""",
        w=weight,
        **statistics,
    )
    made, feeds = lower(tmp_path / "m" / "1", proto), {"x": graphs.values(4, 16)}
    entry = made.stored.tensors["w"]
    assert (entry.panels, entry.scale_axis) == (axis, axis)
    assert_same_tensors(made.artifact, made.checkpoint)
    np.testing.assert_array_equal(made.run_reference(feeds)["y"], made.run_source(feeds)["y"])
    assert relative_l2(made.run_source(feeds)["y"], made.run_cpu(feeds)["y"]) < 4e-3
    assert relative_l2(made.run_source(feeds)["y"], made.run_emulated(feeds)["y"]) < 8e-3


def test_tensors_that_no_graph_uses_are_stored_unchanged_and_equal_ones_once(tmp_path: Path) -> None:
    head = np.random.default_rng(1).standard_normal((50, 3))
    checkpoint: dict[str, NDArray[Any]] = {
        "w0": graphs.values(16, 32),
        "head": head,
        "head.tied": head.copy(),
        "steps": np.array(7),
        "half": np.ones(5, np.float16),
        "brain": np.ones(5, ml_dtypes.bfloat16),
    }
    made = lower(tmp_path / "m" / "1", graphs.mlp(), checkpoint=checkpoint)
    assert {entry.name: entry.tensor for entry in made.stored.checkpoint}["head.tied"] == "head"
    assert_same_tensors(made.artifact, checkpoint)


@pytest.mark.parametrize(
    ("tensor", "shape", "value", "said"),
    [
        ("w0", (32, 64), np.nan, "1 of 2048 values are NaN"),
        ("w0", (32, 64), np.inf, "1 of 2048 values are infinite"),
    ],
)
def test_nan_and_infinity_in_weights_are_errors_that_saturating_does_not_hide(
    tensor: str, shape: tuple[int, ...], value: float, said: str, tmp_path: Path
) -> None:
    weight = graphs.values(*shape)
    weight.flat[0] = value
    with pytest.raises(RangeError, match=f"tensor '{tensor}': {said}"):
        lower(tmp_path / "m" / "1", _with(tensor, weight), saturate=True)


def test_a_number_that_is_nan_marks_what_a_mean_leaves_out(tmp_path: Path) -> None:
    """As of ``torch.nanmean``, which a NaN reaches from ``masked_fill``."""
    made = lower(
        tmp_path / "m" / "1",
        graphs.parsed(
            """(float[n, 32] x) => (float[n, 32] y) {
                h = MatMul (x, w) shown = Greater (h, zero) marked = Where (shown, h, nan)
                hidden = IsNaN (marked) y = Where (hidden, zero, marked)
            }""",
            w=graphs.values(32, 32),
            zero=np.zeros((), np.float32),
            nan=np.array(np.nan, np.float32),
        ),
    )
    feeds = {"x": graphs.values(4, 32, seed=1)}
    assert relative_l2(made.run_source(feeds)["y"], made.run_cpu(feeds)["y"]) < 4e-3


def test_an_overflowing_weight_kept_in_fp32_is_not_an_error(tmp_path: Path) -> None:
    weight = graphs.values(32, 64)
    weight[0, 0] = 3.4e38
    made = lower(tmp_path / "m" / "1", _with("w0", weight), keep_fp32=["w0"])
    np.testing.assert_array_equal(made.artifact.tensor("w0"), weight)


def test_a_weight_that_overflows_only_after_folding_is_reported_as_folded(tmp_path: Path) -> None:
    proto = graphs.conv_bn(channels=16)
    changed = {"kernel": np.ones((16, 3, 3, 3)), "gamma": np.full(16, 3.4e38), "mean": np.zeros(16)}
    changed["variance"] = np.full(16, 1 - 1e-5)
    for tensor in proto.graph.initializer:
        if tensor.name in changed:
            tensor.CopyFrom(graphs.initializer(tensor.name, changed[tensor.name].astype(np.float32)))
    with pytest.raises(RangeError, match=r"tensor 'kernel' \(with BatchNorm folded in\): 432 of 432 values overflow"):
        lower(tmp_path / "m" / "1", proto)


def test_a_weight_that_was_bf16_is_not_rounded_and_not_rebuilt(tmp_path: Path) -> None:
    """One such weight is read by a graph, one by none. The fp32 weight is there because a conversion needs one."""
    brain = graphs.values(32, 32, seed=5).astype(ml_dtypes.bfloat16)
    proto = graphs.mlp((32, 32))
    proto.graph.initializer.append(graphs.initializer("brain", brain))
    proto.graph.initializer.append(graphs.initializer("stray", brain[::2]))
    proto.graph.node.append(helper.make_node("Cast", ["brain"], ["wide"], to=TensorProto.FLOAT))
    proto.graph.node.append(helper.make_node("MatMul", ["y", "wide"], ["z"]))
    proto.graph.output[0].name = "z"
    made, feeds = lower(tmp_path / "m" / "1", proto), {"x": graphs.values(4, 32)}
    np.testing.assert_array_equal(made.run_reference(feeds)["z"], made.run_source(feeds)["z"])
    assert relative_l2(made.run_source(feeds)["z"], made.run_cpu(feeds)["z"]) < 4e-3
    assert_same_tensors(made.artifact, made.checkpoint)


def test_subnormals_are_kept_or_flushed_and_restored_either_way(tmp_path: Path) -> None:
    weight = graphs.values(32, 64)
    weight[0, :2] = 1e-39, -1e-40
    kept = lower(tmp_path / "m" / "1", _with("w0", weight))
    flushed = lower(tmp_path / "m" / "2", _with("w0", weight), subnormals="flush")
    assert np.count_nonzero(kept.artifact.tensor("w0")[0, :2]) == 2
    assert np.count_nonzero(flushed.artifact.tensor("w0")[0, :2]) == 0
    assert kept.stored.census["w0"].subnormal == 2
    for made in (kept, flushed):
        assert_same_tensors(made.artifact, made.checkpoint)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "share"), [("plain", 0.5), ("folded", 1.0)])
def test_only_the_bf16_values_of_a_weight_are_all_in_memory_at_once(tmp_path: Path, kind: str, share: float) -> None:
    """The weight of 134 MB is mapped. With a folded scale, marks for the residual are in memory as well."""
    graphs.values(8192, 4096).tofile(tmp_path / "source")
    peak, size = map(int, measured_alone(WRITE, str(tmp_path), kind).split())
    assert peak < share * size + 40e6, f"{peak / 1e6:.0f} MB for a weight of {size / 1e6:.0f} MB"
