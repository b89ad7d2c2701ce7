"""The reference is certified against the source's own outputs, computed before the converter changes anything."""

import math
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from converting import ONNX_ONLY, Cli
from numpy.typing import NDArray

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.source import FP32_ROUNDOFF, Feeds, Oracle, Source
from bf16kit.converter.verify import oracle
from bf16kit.converter.verify.fp32noise import ULPS, Noise, measure_distance, perturb
from bf16kit.converter.verify.measure import slice_scales
from bf16kit.converter.verify.oracle import FEEDS, FLOOR, OracleRun, certify, resolved, run_oracle
from bf16kit.converter.verify.running import open_fp32_graph
from bf16kit.drift.slices import Values
from bf16kit.messages.errors import ConversionError, RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Runtime

Y = np.array([1.0, -2.0, 3.0], np.float32)
FEED: list[Feeds] = [{"x": np.ones(3, np.float32)}]


class Graph:
    """A stand-in for the source's graph: ``outputs`` are those of its runs in order, None for one that fails."""

    inputs = outputs = ()
    info: Any = None

    def __init__(self, *outputs: NDArray[Any] | None) -> None:
        self.outputs_by_run = outputs
        self.opened = self.closed = 0

    def open(self, _read: Any) -> Runtime:
        self.opened += 1
        return self

    def run(self, feeds: Any, outputs: Sequence[str] | None = None, *, seconds: float | None = None) -> Feeds:
        output = self.outputs_by_run[min(self.opened, len(self.outputs_by_run)) - 1]
        if output is None:
            raise RuntimeFailure("a size came out another")
        return {"y": output}

    def close(self) -> None:
        self.closed += 1


def _answering(output: NDArray[Any], graph: Graph | None = None) -> OracleRun:
    noise = None if graph is None else Noise(graph.open, FEED, FP32_ROUNDOFF, None)
    return OracleRun(({"y": output},), "a test", noise=noise)


@pytest.mark.long
@pytest.mark.parametrize("residual", [(), ("--no-residual",)])
def test_the_figure_is_in_the_manifest_and_the_closing_lines(
    cli: Cli, mlp: Artifact, onnx_file: Path, target: Path, residual: tuple[str, ...]
) -> None:
    """An ONNX file runs before the converter changes it."""
    out = cli("checkpoint", onnx_file, "--out", target, *ONNX_ONLY, "--verbose", *residual).published().out
    entry, of_module = Artifact.open(target).manifest.oracle, mlp.manifest.oracle
    assert entry is not None
    assert of_module is not None
    assert entry.how.startswith("the untouched ONNX file")
    assert f"reference   equal to {entry.how} ({FEEDS} runs)" in out
    assert of_module.how.startswith("the torch module")
    assert (of_module.checked, of_module.feeds, of_module.outputs["output"].bound) == (True, FEEDS, FLOOR)
    assert 0 <= of_module.outputs["output"].relative_l2 < 1e-6


def test_a_reference_that_differs_from_its_source_is_rejected_with_the_figures() -> None:
    with pytest.raises(ConversionError) as refused:
        certify(_answering(Y, Graph(Y, Y * np.float32(1 + 1e-6))), [{"y": np.abs(Y)}])
    for said in ("'y'", "relative_l2 is 1.07", "max_abs 4", "at most 3.8", "(a test)", "nothing published"):
        assert said in str(refused.value)


def test_fp32_noise_passes_without_measuring_the_models_own_noise_and_more_passes_if_the_model_amplifies_it() -> None:
    graph = Graph()
    figure = certify(_answering(Y, graph), [{"y": Y * np.float32(1 + 2e-7)}]).outputs["y"]
    assert (figure.bound, graph.opened) == (FLOOR, 0)
    assert 0 < figure.relative_l2 < 1e-6
    entry = certify(_answering(Y, Graph(Y, Y * np.float32(1.005))), [{"y": Y * np.float32(1.01)}])
    assert entry.outputs["y"].relative_l2 == pytest.approx(0.0099, rel=1e-2)
    assert 0.015 < entry.outputs["y"].bound < 0.03
    assert "proves little" in next(oracle.remarks(entry))


def test_noise_is_the_change_that_perturbing_causes_however_far_the_graph_is_from_the_source() -> None:
    """A graph that computes something else must not widen the bound by which it is judged; nor one that fails."""
    wrong, failing = np.abs(Y), Graph(Y, None)
    with pytest.raises(ConversionError, match=r"at most 3\.8"):
        certify(_answering(Y, Graph(wrong, wrong * np.float32(1 + 1e-7))), [{"y": wrong}])
    with pytest.raises(ConversionError, match=r"at most 3\.8"):
        certify(_answering(Y, failing), [{"y": -Y}])
    assert failing.opened == failing.closed == 4


def test_indices_and_numbers_of_rows_must_be_exact_except_where_noise_flips_them() -> None:
    own, tied, wrong, fewer = np.array([3, 5]), np.array([3, 6]), np.array([4, 5]), np.array([3])
    assert certify(_answering(own, Graph(tied, own)), [{"y": tied}]).outputs["y"].relative_l2 == 0
    assert certify(_answering(own, Graph(own, fewer)), [{"y": fewer}]).outputs["y"].relative_l2 == 0
    refused = [(wrong, Graph(wrong)), (wrong, Graph(own)), (wrong, Graph(tied, own)), (fewer, Graph(fewer))]
    for reference, graph in refused:
        with pytest.raises(ConversionError, match=r"at most 0"):
            certify(_answering(own, graph), [{"y": reference}])


def test_an_output_that_the_source_does_not_have_is_rejected() -> None:
    with pytest.raises(ConversionError, match="has an output 'z', which the source lacks; the source has y"):
        certify(_answering(Y), [{"z": Y}])


def _failing(_feeds: Sequence[Feeds]) -> Iterator[Feeds]:
    if FEED:
        raise RuntimeFailure("it broke")
    yield {}


def _drawing(feeds: Sequence[Feeds]) -> Iterator[Feeds]:
    random = np.random.default_rng(0)
    return ({"y": random.standard_normal(3)} for _ in feeds)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (None, "it has no module"),
        (_failing, "a test: it broke"),
        (_drawing, "a test gives different outputs for the same input (output 'y')"),
    ],
)
def test_a_source_that_cannot_be_compared_with_is_recorded_as_not_checked(
    tmp_path: Path, answers: Any, said: str
) -> None:
    source = Source(
        checkpoint=None,  # type: ignore[arg-type]  # nothing but the oracle is looked at
        graph=None,
        inputs=(),
        outputs=(),
        oracle=None if answers is None else Oracle(answers, "a test"),
        no_oracle_reason="it has no module",
    )
    entry = certify(run_oracle(source, FEED, tmp_path), [{"y": Y}])
    assert not entry.checked
    assert next(oracle.remarks(entry)) == f"the fp32 reference was not checked against the source itself: {said}"


@pytest.mark.parametrize("factor", [1, 1.001])
def test_a_transform_of_a_length_that_is_no_power_of_two_may_differ_as_onnx_runtimes_does(
    tmp_path: Path, factor: float
) -> None:
    """One of 400 samples, as torchaudio's and Whisper's spectrograms have, is 3e-5 from the exact one."""
    text = "(float[n, 400, 1] x) => (float[n, 201, 2] y) { y = DFT <onesided = 1> (x, , axis) }"
    graph = ir.from_proto(graphs.parsed(text, axis=np.array(1)))
    specs = (TensorSpec("x", "float32", ("n", 400, 1)),), (TensorSpec("y", "float32", ("n", 201, 2)),)

    def exact(feeds: Sequence[Feeds]) -> Iterator[Feeds]:
        for feed in feeds:
            found = np.fft.rfft(feed["x"].astype(np.float64), axis=1)
            yield {"y": np.concatenate([found.real, found.imag], 2).astype(np.float32)}

    feeds: list[Feeds] = [{"x": graphs.values(2, 400, 1)}]
    source = Source(None, graph, *specs, oracle=Oracle(exact, "numpy"))  # type: ignore[arg-type]  # no checkpoint needed
    runtime = open_fp32_graph(graph, *specs, tmp_path)
    with pytest.raises(ConversionError, match="not give the outputs") if factor != 1 else nullcontext():
        certify(run_oracle(source, feeds, tmp_path), [{"y": runtime.run(feeds[0])["y"] * np.float32(factor)}])


@pytest.mark.long
def test_a_file_in_half_precision_is_judged_by_its_own_noise(cli: Cli, target: Path, tmp_path: Path) -> None:
    """ONNX Runtime rounds its fp16 product; the reference does not."""
    model = graphs.parsed(
        """(float[batch, 32] x) => (float[batch, 32] y) {
            [a] a = MatMul (x, w) [b] b = Cast <to = 10> (a) [c] c = MatMul (b, h) [d] y = Cast <to = 1> (c)
        }""",
        h=graphs.values(32, 32).astype(np.float16),
        w=graphs.values(32, 32, seed=1),
    )
    onnx.save(model, tmp_path / "half.onnx")
    cli("checkpoint", tmp_path / "half.onnx", "--out", target, *ONNX_ONLY, "--profile", "cpu").published()
    entry = Artifact.open(target).manifest.oracle
    assert entry is not None
    assert entry.outputs["y"].bound >= 8 * 2.0**-11


SPEC = (TensorSpec("y", "float32", ("n", 4)),)


class Perturbed(Noise):
    """A source whose outputs change by ``change`` of each value's column when its weights are perturbed."""

    def __init__(self, outputs: list[Feeds], change: list[float]) -> None:
        self._outputs, self._change = outputs, np.array(change, np.float32)

    def pairs(self, name: str) -> list[list[tuple[NDArray[Any], NDArray[Any]]]]:
        return [[(each[name], each[name] + self._change) for each in self._outputs]]


def judge(difference: list[float], noise: list[float] | None) -> list[Values]:
    """Return the scales if the reference differs from the source by ``difference`` in each column."""
    own: list[Feeds] = [{"y": np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)}]
    reference: list[Feeds] = [{"y": own[0]["y"] + np.array(difference, np.float32)}]
    run = OracleRun(own, "a test", noise=None if noise is None else Perturbed(own, noise))
    return resolved(run, reference, SPEC, 0, slice_scales(reference, SPEC, 0))["y"]


@pytest.mark.parametrize(
    ("difference", "noise", "excused"),
    [
        ([0, 1e-6, 1e-3, 0.01], [1, 1, 1, 1], []),
        ([0, 0.5, 0, 0], [0, 0.2, 0, 0], [1]),
        ([0, 0.5, 0.01, 0.03], [0.2] * 4, [1, 3]),  # noise alone excuses nothing: it is larger than two programs'
        ([0, 0.5, 0, 0], None, [1]),  # without a graph to perturb, the difference itself is the noise
    ],
)
def test_slices_at_fp32_noise_are_excused_and_the_others_keep_their_scale(
    difference: list[float], noise: list[float] | None, excused: list[int]
) -> None:
    (scale,) = judge(difference, noise)
    assert list(np.flatnonzero(np.isinf(scale))) == excused
    np.testing.assert_allclose(np.delete(scale, excused), 1, atol=0.6)


def test_a_slice_of_the_reference_that_noise_does_not_explain_is_an_error() -> None:
    with pytest.raises(ConversionError, match=r"output 'y' differs in index 2 along its axis 0"):
        judge([0, 0, 0.5, 0], [0, 0, 0.01, 0])


# --- the distance between outputs that should differ only by fp32 noise ----------------------------------------------

X = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)
WORDS = np.array([b"a", b"b"], object)


def _masked(array: NDArray[Any], fill: float) -> NDArray[Any]:
    return np.where(np.arange(100) % 2, array, np.float32(fill))


def _with(value: float) -> NDArray[Any]:
    return np.where(np.arange(400).reshape(4, 100) == 102, np.float32(value), X)


@pytest.mark.parametrize(
    ("own", "other", "relative_l2"),
    [
        (X, X.copy(), 0),
        (X, 2 * X, 0.5),  # relative to the larger norm
        (np.zeros(3), np.array([0, 1e-9, 0]), 1),
        (X.astype(np.float16), X, 2e-4),
        (X, X[:2], math.inf),
        (WORDS, WORDS.copy(), 0),
        (WORDS, WORDS[::-1], math.inf),
        *((X, _with(value), math.inf) for value in (math.nan, math.inf, -math.inf)),
        *((_with(value), X, math.inf) for value in (math.nan, math.inf, -math.inf)),
        *((_with(value), _with(value), 0) for value in (math.nan, math.inf, -math.inf)),
        (_masked(X, -1e9), _masked(1.01 * X, -1e9), 0.01),  # the mask hides no difference of the others
        (_masked(X, -3.4028235e38), _masked(X, -3.3895314e38), 0),  # clamped to bf16's range
    ],
)
def test_the_distance_between_outputs(own: NDArray[Any], other: NDArray[Any], relative_l2: float) -> None:
    assert measure_distance(own, other).relative_l2 == pytest.approx(relative_l2, rel=0.2)


def test_the_distance_takes_memory_for_a_block_of_samples() -> None:
    """Logits of a batch are gigabytes, and float64 with its masks takes sixteen times the memory of fp32."""
    own = np.ones((16, 1 << 18), np.float32)
    tracemalloc.start()
    try:
        assert measure_distance(own, 2 * own).relative_l2 == 0.5
        assert tracemalloc.get_traced_memory()[1] < 7 * own.nbytes
    finally:
        tracemalloc.stop()


def test_perturbing_moves_values_by_ulps_and_leaves_extreme_values_unchanged() -> None:
    edges = np.array([0, -0.0, 1e-45, np.finfo(np.float32).max, np.inf, np.nan], np.float32)
    values = np.concatenate([X.reshape(-1), edges])
    moved = perturb(values, np.random.default_rng(1))
    distance = np.abs(moved.view(np.int32).astype(np.int64) - values.view(np.int32))
    assert distance[:400].max() == ULPS
    assert distance[400:].max() == 0
    assert (moved[:400] != values[:400]).mean() > 0.9
    coarse = perturb(X, np.random.default_rng(1), 2.0**-11)
    assert 1e-3 < np.abs(coarse / X - 1).max() < 2e-2
    integers = np.arange(3)
    assert perturb(integers, np.random.default_rng(1)) is integers
