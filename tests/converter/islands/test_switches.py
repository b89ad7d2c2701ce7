"""A graph with a switch for each rounding: off, the graph equals the original; on, that node or weight is rounded.

With the switches of a plan, it agrees with the written graphs, on a model of the shape of an OCR detector.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from converting import ONNX_ONLY, Cli
from lowered import Lowered, lower, specs
from onnx import shape_inference

import graphs
from bf16kit.converter.islands.candidates import bf16_alone, candidates
from bf16kit.converter.islands.switches import Bf16, Switched
from bf16kit.converter.islands.trials import Task, Trials
from bf16kit.converter.plan import make_plan
from bf16kit.converter.plan.decisions import Islands
from bf16kit.converter.plan.profiles import PROFILES
from bf16kit.converter.rewrite import prepare
from bf16kit.converter.source import Array
from bf16kit.converter.verify import measure
from bf16kit.converter.verify.measure import Expected
from bf16kit.converter.verify.running import emulation, open_fp32_graph
from bf16kit.drift.budget import Budget
from bf16kit.runtime.loading import load, load_reference
from bf16kit.runtime.ort.onnx import OnnxRuntime

X = graphs.values(4, 16)


def rounded(array: Array) -> Array:
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


def run(model: ir.Model, on: Bf16, switched: Bf16) -> Array:
    """Return the output of ``model`` for X, with all roundings of ``switched`` switched and those of ``on`` on."""
    made = Switched(model, switched)
    inputs, outputs = specs(model.graph.inputs), specs(model.graph.outputs)
    runtime = open_fp32_graph(made.model, (*inputs, made.spec), (*outputs, *made.shape_specs))
    return runtime.run({"x": X, made.spec.name: made.positions(on)}, ["y"])["y"]


def answer(nodes: frozenset[str], weights: frozenset[str]) -> Array:
    """Return the output of the switched MLP with ``nodes`` and ``weights`` on."""
    model = ir.from_proto(graphs.mlp())
    every = Bf16(frozenset(node.name or "" for node in model.graph), frozenset({"w0", "w1"}))
    return run(model, Bf16(nodes, weights), every)


def expected(w0: Array, w1: Array) -> Array:
    b0, b1 = (graphs.values(n, seed=seed, scale=0.1) for n, seed in ((32, 1), (16, 3)))
    return np.asarray(np.maximum(X @ w0 + b0, 0) @ w1 + b1)


W0, W1 = graphs.values(16, 32, seed=0), graphs.values(32, 16, seed=2)
NONE: frozenset[str] = frozenset()


def test_with_all_switches_off_the_graph_equals_the_original() -> None:
    np.testing.assert_allclose(answer(NONE, NONE), expected(W0, W1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", [{"w0"}, {"w1"}, {"w0", "w1"}])
def test_each_weight_has_a_switch_of_its_own(weights: set[str]) -> None:
    w0, w1 = (rounded(w) if name in weights else w for name, w in (("w0", W0), ("w1", W1)))
    np.testing.assert_allclose(answer(NONE, frozenset(weights)), expected(w0, w1), rtol=1e-5, atol=1e-6)


def test_a_node_that_is_switched_on_rounds_its_result() -> None:
    found = answer(frozenset({"add1"}), NONE)
    assert np.array_equal(found, rounded(found))
    assert not np.array_equal(found, answer(NONE, NONE))


def test_a_sequence_of_tensors_has_no_switch() -> None:
    """It has the dtype of its tensors, and cannot be cast as they are."""
    proto = graphs.parsed(
        """(float[n, 16] x) => (float[n, 1] y) {
            [product] m = MatMul (x, w0) [split] parts = SplitToSequence <axis = 1> (m)
            [first_part] part = SequenceAt (parts, first) [square] y = Mul (part, part)
        }""",
        w0=W0,
        first=np.array(0),
    )
    model = ir.from_proto(shape_inference.infer_shapes(proto))
    every = Bf16(frozenset(node.name or "" for node in model.graph), frozenset({"w0"}))
    np.testing.assert_allclose(run(model, Bf16(), every), (X @ W0)[:, :1] ** 2, rtol=1e-5, atol=1e-6)


FEEDS = [{"x": graphs.values(1, 3, 32, 32, seed=seed)} for seed in range(4)]
NOISE = -16.0  # there, ONNX Runtime's Sigmoid resolves only a few bits


def text_detector(logit: float = 0.0) -> onnx.ModelProto:
    """Return x [batch, 3, 32, 32] → a map of text y in (0, 1), with the operators of an OCR detector.

    ``logit`` is added before the sigmoid.
    """
    kernels = {"stem": (16, 3, 3, 3), "depthwise": (16, 1, 3, 3), "squeeze": (8, 16, 1, 1), "excite": (16, 8, 1, 1)}
    kernels |= {"wider": (16, 16, 1, 1), "up": (32, 1, 2, 2)}
    weights = {name: graphs.values(*shape, seed=seed) for seed, (name, shape) in enumerate(kernels.items())}
    return graphs.parsed(
        """(float[batch, 3, 32, 32] x) => (float[batch, 1, 32, 32] y) {
            [stem] a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]> (x, stem)
            [norm] n = BatchNormalization (a, gamma, beta, mean, variance)
            [plus] p = Add (n, three) [gate] g = Clip (p, zero, six) [times] t = Mul (n, g) [swish] h = Div (t, six)
            [small] s = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2], group = 16> (h, depthwise)
            [pool] q = GlobalAveragePool (s) [squeeze] r = Conv (q, squeeze) [relu] u = Relu (r)
            [excite] e = Conv (u, excite) [hard] v = HardSigmoid (e) [scaled] w = Mul (s, v) [wider] c = Conv (w, wider)
            [resize] l = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric"> (c, , scales)
            [both] b = Concat <axis = 1> (h, l) [up] o = ConvTranspose <kernel_shape = [2, 2], strides = [2, 2]> (b, up)
            [logit] z = Add (o, logit) [map] y = Sigmoid (z)
        }""",
        **weights,
        gamma=graphs.values(16, seed=10),
        beta=graphs.values(16, seed=11),
        mean=graphs.values(16, seed=12),
        variance=np.abs(graphs.values(16, seed=13)) + np.float32(0.5),
        scales=np.array([1, 1, 2, 2], np.float32),
        zero=np.array(0, np.float32),
        three=np.array(3, np.float32),
        six=np.array(6, np.float32),
        logit=np.array(logit, np.float32),
    )


class Simulated:
    """The drift that the search simulates for a ``share`` of the candidates as islands, and what is written for it."""

    def __init__(self, directory: Path, profile: str, share: float, logit: float = 0.0) -> None:
        proto, how = text_detector(logit), PROFILES[profile]
        prepared = prepare(ir.from_proto(proto))
        base, plan = how.base(prepared), make_plan(prepared).plan
        drawn = np.random.default_rng(0)
        units = frozenset(unit for unit in candidates(base, plan, how, {}, {}) if drawn.random() < share)
        alone = bf16_alone(units)
        islands = Islands(dict.fromkeys(alone.nodes, ""), dict.fromkeys(alone.weights, ""))
        written = lower(directory / "1", proto, islands=islands)
        manifest = written.artifact.manifest.model_copy(update={"batch_axis": 0})
        expected = list(map(load_reference(written.artifact).run, FEEDS))
        runtime = load(written.artifact, "cpu") if profile == "cpu" else _emulated(written)
        self.written = measure.drifts(expected, map(runtime.run, FEEDS), written.outputs, 0, {})
        compared = Expected(FEEDS, expected, {}, len(FEEDS))
        task = Task(prepared=prepared, profile=how, manifest=manifest, expected=compared, budget=Budget())
        self.simulated = Trials(task).drifts(task.rounded(units))

    @property
    def errors(self) -> tuple[Sequence[float], Sequence[float]]:
        """The relative L2 of each sample, simulated and written."""
        both = self.simulated, self.written
        simulated, written = ([one["y"].rows[0].relative_l2 for one in found] for found in both)
        return simulated, written


def _emulated(written: Lowered) -> OnnxRuntime:
    path = written.artifact.file("cuda.onnx")
    return OnnxRuntime(emulation(path), written.inputs, written.outputs, base_dir=path.parent)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
class TestAgreement:
    @pytest.mark.long
    def test_emulated_cuda_has_the_same_drift_to_the_bit_if_sums_are_in_the_same_order(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
    ) -> None:
        """Without ONNX Runtime's optimisations both run the same kernels."""
        options = onnxruntime.SessionOptions

        def unoptimised() -> Any:
            made = options()
            made.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            return made

        monkeypatch.setattr(onnxruntime, "SessionOptions", unoptimised)
        found = Simulated(tmp_path, "cuda", share)
        assert [one["y"].rows for one in found.simulated] == [one["y"].rows for one in found.written]
        assert (found.errors[0][0] > 1e-4) == (share < 1)

    def test_cpu_has_the_same_drift_but_for_fp32_noise(self, tmp_path: Path, share: float) -> None:
        simulated, written = Simulated(tmp_path, "cpu", share).errors
        np.testing.assert_allclose(simulated, written, rtol=1e-2, atol=1e-6)
        assert (written[0] > 1e-4) == (share < 1)


@pytest.mark.long
@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_the_simulation_has_the_fp32_noise_that_certification_sees(tmp_path: Path, profile: str) -> None:
    """Measured from its own fp32 outputs, the search would see none and look for islands in vain."""
    simulated, written = Simulated(tmp_path, profile, 1.0, NOISE).errors
    assert min(written) > 0.015
    np.testing.assert_allclose(np.mean(simulated), np.mean(written), rtol=0.5)


@pytest.mark.long
def test_a_model_that_fp32_noise_alone_puts_over_budget_is_rejected_at_once_with_the_reason(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    source = tmp_path / "detector.onnx"
    onnx.save(text_detector(NOISE), source)
    (tmp_path / "samples").mkdir()
    for number, feed in enumerate(FEEDS):
        np.savez(tmp_path / "samples" / f"{number}.npz", **feed)  # type: ignore[arg-type]  # numpy takes arrays by keyword
    command = ("checkpoint", source, "--out", target, "--samples", tmp_path / "samples", *ONNX_ONLY)
    refused = cli(*command).refused(1, "no fp32 islands can help", "pass --samples with inputs like those")
    assert "where the error comes from" not in refused.err
