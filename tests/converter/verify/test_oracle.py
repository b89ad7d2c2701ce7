"""The reference is certified against the source's own outputs, computed before the converter changes anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from architectures import seeded
from converting import MLP, ONNX_ONLY, Cli
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import nn

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.messages.errors import ConversionError, RuntimeFailure
from bf16kit.runtime import Runtime
from converter.read.torch import onnx_export
from converter.source import FP32_ROUNDOFF, Feeds, Oracle, Source, TorchModel
from converter.verify import oracle
from converter.verify.fp32noise import Noise
from converter.verify.oracle import FEEDS, FLOOR, OracleRun, certify, run_oracle

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


def test_the_figure_is_in_the_manifest_and_the_closing_lines(cli: Cli, mlp: Artifact) -> None:
    entry = mlp.manifest.oracle
    assert entry is not None
    assert entry.checked
    assert entry.feeds == FEEDS
    assert entry.how.startswith("the torch module")
    figure = entry.outputs["output"]
    assert 0 <= figure.relative_l2 < 1e-6
    assert figure.bound == FLOOR


@pytest.mark.parametrize("residual", [(), ("--no-residual",)])
def test_an_onnx_file_runs_before_the_converter_changes_it(
    cli: Cli, onnx_file: Path, target: Path, residual: tuple[str, ...]
) -> None:
    out = cli("checkpoint", onnx_file, "--out", target, *ONNX_ONLY, *residual).published().out
    entry = Artifact.open(target).manifest.oracle
    assert entry is not None
    assert entry.how.startswith("the untouched ONNX file")
    assert f"of {entry.how} ({FEEDS} samples; fp32 noise explains {FLOOR:.2g})" in out


class Ill(nn.Module):
    """Forty layers that each double a difference, so fp32 noise grows to 1e-5 and more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(2.5 * layer(x))
        return x


@pytest.mark.long
def test_a_model_that_amplifies_fp32_noise_gets_its_own_bound(cli: Cli, target: Path, tmp_path: Path) -> None:
    torch.save(seeded(Ill()).state_dict(), tmp_path / "ill.pt")
    arguments = ("--model", f"{__name__}:Ill", "--input", "x:float32:batch,64", "--allow-over-budget", *ONNX_ONLY)
    done = cli("checkpoint", tmp_path / "ill.pt", "--out", target, *arguments).published()
    entry = Artifact.open(target).manifest.oracle
    assert entry is not None
    figure = entry.outputs["output"]
    assert FLOOR < figure.relative_l2 <= figure.bound
    assert ("amplifies fp32 noise" in done.out) == (figure.bound > 1e-3)


def test_a_reference_that_differs_from_its_source_is_rejected_with_the_figures() -> None:
    with pytest.raises(ConversionError) as refused:
        certify(_answering(Y, Graph(Y, Y * np.float32(1 + 1e-6))), [{"y": np.abs(Y)}])
    for said in ("'y'", "relative_l2 is 1.07", "max_abs 4", "at most 3.8", "(a test)", "nothing published"):
        assert said in str(refused.value)


def test_fp32_noise_passes_without_measuring_the_models_own_noise() -> None:
    graph = Graph()
    entry = certify(_answering(Y, graph), [{"y": Y * np.float32(1 + 2e-7)}])
    assert entry.outputs["y"].bound == FLOOR
    assert 0 < entry.outputs["y"].relative_l2 < 1e-6
    assert not graph.opened


def test_a_difference_as_large_as_the_models_own_noise_passes() -> None:
    entry = certify(_answering(Y, Graph(Y, Y * np.float32(1.005))), [{"y": Y * np.float32(1.01)}])
    assert entry.outputs["y"].relative_l2 == pytest.approx(0.0099, rel=1e-2)
    assert 0.015 < entry.outputs["y"].bound < 0.03
    assert "proves little" in next(oracle.remarks(entry))


def test_noise_is_the_change_that_perturbing_causes_however_far_the_graph_is_from_the_source() -> None:
    """A graph that computes something else must not widen the bound by which it is judged."""
    wrong = np.abs(Y)
    with pytest.raises(ConversionError, match=r"at most 3\.8"):
        certify(_answering(Y, Graph(wrong, wrong * np.float32(1 + 1e-7))), [{"y": wrong}])


def test_the_perturbed_graph_is_closed_and_may_fail() -> None:
    graph = Graph(Y, None)
    with pytest.raises(ConversionError, match=r"at most 3\.8"):
        certify(_answering(Y, graph), [{"y": -Y}])
    assert graph.opened == graph.closed == 4


def test_indices_must_be_exact_except_where_noise_flips_them() -> None:
    own, tied, wrong = np.array([3, 5]), np.array([3, 6]), np.array([4, 5])
    entry = certify(_answering(own, Graph(tied, own)), [{"y": tied}])
    assert entry.outputs["y"].relative_l2 == 0
    for graph in (Graph(wrong), Graph(own), Graph(tied, own)):
        with pytest.raises(ConversionError, match=r"at most 0"):
            certify(_answering(own, graph), [{"y": wrong}])


def test_a_number_of_rows_must_be_exact_except_where_noise_changes_it() -> None:
    own, fewer = np.array([3, 5, 7]), np.array([3, 5])
    assert certify(_answering(own, Graph(own, fewer)), [{"y": fewer}]).outputs["y"].relative_l2 == 0
    with pytest.raises(ConversionError, match=r"at most 0"):
        certify(_answering(own, Graph(fewer)), [{"y": fewer}])


def test_an_output_that_the_source_does_not_have_is_rejected() -> None:
    with pytest.raises(ConversionError, match="has an output 'z', which the source lacks; the source has y"):
        certify(_answering(Y), [{"z": Y}])


def _source(answers: Any) -> Source:
    return Source(
        checkpoint=None,  # type: ignore[arg-type]  # nothing but the oracle is looked at
        graph=None,
        inputs=(),
        outputs=(),
        oracle=None if answers is None else Oracle(answers, "a test"),
        no_oracle_reason="it has no module",
    )


def test_a_source_that_cannot_run_is_recorded_as_not_checked(tmp_path: Path) -> None:
    entry = certify(run_oracle(_source(None), FEED, tmp_path), [{"y": Y}])
    assert not entry.checked
    assert next(oracle.remarks(entry)) == (
        "the fp32 reference was not checked against the source itself: it has no module"
    )


def test_a_source_that_fails_is_recorded_as_not_checked(tmp_path: Path) -> None:
    def failing(_feeds: Sequence[Feeds]) -> Iterator[Feeds]:
        if FEED:
            raise RuntimeFailure("it broke")
        yield {}

    assert run_oracle(_source(failing), FEED, tmp_path) == OracleRun((), "a test: it broke")


def test_a_source_that_draws_random_numbers_is_recorded_as_not_checked(tmp_path: Path) -> None:
    random = np.random.default_rng(0)

    def drawing(feeds: Sequence[Feeds]) -> Iterator[Feeds]:
        for _ in feeds:
            yield {"y": random.standard_normal(3)}

    assert "gives different outputs for the same input" in run_oracle(_source(drawing), FEED, tmp_path).how


def test_a_module_that_exporting_changes_is_rejected(
    cli: Cli, mlp_file: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = onnx_export.to_onnx

    def changing(model: TorchModel, tensors: Mapping[str, Any]) -> Any:
        graph = export(model, tensors)
        with torch.no_grad():
            model.module.get_parameter("module.up.weight").mul_(0.5)
        return graph

    monkeypatch.setattr(onnx_export, "to_onnx", changing)
    cli("checkpoint", mlp_file, "--out", target, *MLP).refused(3, "the model's own tensor 'module.up.weight'")
    assert not target.exists()


def test_a_file_in_half_precision_is_judged_by_its_own_noise(cli: Cli, target: Path, tmp_path: Path) -> None:
    """ONNX Runtime rounds its fp16 product; the reference does not."""
    weight = helper.make_tensor(
        "h", TensorProto.FLOAT16, (32, 32), graphs.values(32, 32).astype(np.float16).tobytes(), True
    )
    wide = graphs.initializer("w", graphs.values(32, 32, seed=1))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="a"),
        helper.make_node("Cast", ["a"], ["b"], name="b", to=TensorProto.FLOAT16),
        helper.make_node("MatMul", ["b", "h"], ["c"], name="c"),
        helper.make_node("Cast", ["c"], ["y"], name="d", to=TensorProto.FLOAT),
    ]
    model = graphs.model(nodes, [graphs.edge("x", ["batch", 32])], [graphs.edge("y", ["batch", 32])], [wide, weight])
    onnx.save(model, tmp_path / "half.onnx")
    cli("checkpoint", tmp_path / "half.onnx", "--out", target, *ONNX_ONLY, "--profile", "cpu").published()
    entry = Artifact.open(target).manifest.oracle
    assert entry is not None
    assert entry.outputs["y"].bound >= 8 * 2.0**-11
