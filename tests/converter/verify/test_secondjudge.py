"""Each fault of the judge that only one place could see is found by the second judge, which the tests run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from converting import ONNX_ONLY, Cli
from failing import cancellation
from secondjudge import figures

import graphs
from bf16kit.drift import budget
from bf16kit.drift import metrics as drift
from bf16kit.drift.metrics import OutputDrift, SampleDrift
from bf16kit.numerics.tensors import TensorSpec
from converter.verify import judging

Patch = pytest.MonkeyPatch

MEASURE, COMPARE, DISTRIBUTION, WITHIN = drift.measure, drift.compare, drift._distribution, budget._within
FIND, JUDGE = judging.find_breaches, judging.judge


def _refused(cli: Cli, proto: onnx.ModelProto, target: Path, what: str, *flags: str) -> None:
    """Assert that the faulty judge published a conversion of ``proto``, and the second judge refused it."""
    source = target.parents[2] / "m.onnx"
    onnx.save(proto, source)
    cli("checkpoint", source, "--out", target, *ONNX_ONLY, "--no-search", *flags).refused(3, "the second judge: ", what)
    assert target.exists()


@pytest.mark.parametrize(
    ("metric", "wrong"),
    [
        ("relative_l2", lambda sample: sample.relative_l2 / 10),
        ("cosine_distance", lambda _: 0.0),
        ("max_abs", lambda sample: sample.max_abs / 2),
        ("nonfinite", lambda _: 1),
    ],
)
def test_a_metric_that_is_not_what_it_should_be_is_found(
    cli: Cli, target: Path, monkeypatch: Patch, metric: str, wrong: Callable[[SampleDrift], float]
) -> None:
    def changed(*given: Any) -> OutputDrift:
        found = COMPARE(*given)
        return replace(found, rows=[replace(row, **{metric: wrong(row)}) for row in found.rows])  # type: ignore[arg-type]

    monkeypatch.setattr(drift, "compare", changed)
    _refused(cli, graphs.mlp(), target, " is stated as ", "--profile", "cpu", "--budget", "nonfinite=none")


def test_a_comparison_of_the_reference_with_itself_is_found(cli: Cli, target: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(drift, "compare", lambda reference, _candidate, *given: COMPARE(reference, reference, *given))
    _refused(cli, graphs.mlp(), target, "relative_l2 is stated as 0.0", "--profile", "cpu")


def test_a_quantile_that_is_another_one_is_found(cli: Cli, target: Path, monkeypatch: Patch) -> None:
    def wrong(metric: str, values: list[float]) -> dict[str, float]:
        found = DISTRIBUTION(metric, values)
        return found | {"p99": found["p50"]}

    monkeypatch.setattr(drift, "_distribution", wrong)
    _refused(cli, graphs.mlp(), target, ".p99 is stated as", "--profile", "cpu")


def test_decibels_that_are_too_many_are_found(cli: Cli, target: Path, monkeypatch: Patch) -> None:
    decibels = drift._decibels
    monkeypatch.setattr(drift, "_decibels", lambda relative_l2: decibels(relative_l2) + 60)
    _refused(cli, graphs.mlp(), target, "sqnr_db.mean is stated as", "--profile", "cpu")


def test_a_bound_that_is_doubled_is_found(cli: Cli, target: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(budget, "_within", lambda name, measured, bound: WITHIN(name, measured, 2 * bound))
    flags = ("--profile", "cpu", "--budget", "relative_l2=1.2e-3")
    _refused(cli, graphs.mlp((64, 96, 40)), target, "over the budget of 0.0012", *flags)


def test_an_output_that_is_not_judged_is_found(cli: Cli, target: Path, monkeypatch: Patch) -> None:
    def first_only(allowed: Any, drifts: Sequence[Mapping[str, OutputDrift]]) -> Any:
        return FIND(allowed, [{"h": sample["h"]} for sample in drifts])

    for module in ("certify", "judging"):
        monkeypatch.setattr(f"converter.verify.{module}.find_breaches", first_only)
    proto = cancellation().proto
    proto.graph.output.append(graphs.edge("h", ["batch", 64]))
    _refused(cli, proto, target, ", over the budget of ", "--profile", "cpu")


def test_a_profile_that_is_not_judged_is_found(cli: Cli, target: Path, monkeypatch: Patch) -> None:
    def without_cuda(breaches: Mapping[str, Sequence[str]], *given: Any) -> Any:
        return JUDGE({name: found for name, found in breaches.items() if name != "cuda"}, *given)

    monkeypatch.setattr("converter.convert.judge", without_cuda)
    flags = ("--profile", "cpu", "--profile", "cuda", "--budget", "relative_l2=3e-3")
    _refused(cli, graphs.mlp((64, 96, 40)), target, "cuda, 'y': relative_l2 is", *flags)


def test_a_profile_that_does_not_say_what_it_requires_is_found(cli: Cli, target: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("converter.verify.certify.required", lambda *_, **__: {})
    _refused(cli, graphs.mlp(), target, "cpu does not say which ONNX Runtime it needs", "--profile", "cpu")


def test_the_formulas_give_what_their_definitions_say() -> None:
    r, c = np.array([3.0, 4.0, np.inf, 0.0]), np.array([3.0, 3.0, np.inf, 0.0])
    found = figures(r, c, logits=False)
    assert found == pytest.approx(
        {"nonfinite": 0, "relative_l2": 0.2, "cosine_distance": 1 - 21 / 450**0.5, "max_abs": 1}
    )
    lost = figures(np.array([1.0, 2.0]), np.array([1.0, np.nan]), logits=True)
    assert lost["nonfinite"] == lost["top1_rows"] == lost["cosine_distance"] == 1
    assert lost["relative_l2"] == np.inf
    spec = TensorSpec("y", "float32", (2, 50), "logits")
    random = np.random.default_rng(0).standard_normal((2, 2, 50))
    (own,) = MEASURE(random[0], random[0] + 1e-3 * random[1], spec, None)
    for name, value in figures(random[0], random[0] + 1e-3 * random[1], logits=True).items():
        assert getattr(own, name) == pytest.approx(value, rel=1e-9)
