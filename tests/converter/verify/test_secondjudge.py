"""Each fault of the judge that only one place could see is found by the second judge, which the tests run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from converting import ONNX_ONLY, Cli
from failing import cancellation
from secondjudge import figures

import graphs
from bf16kit.converter.verify import certify, judging
from bf16kit.drift import budget
from bf16kit.drift import metrics as drift
from bf16kit.drift.metrics import OutputDrift, SampleDrift
from bf16kit.numerics.tensors import TensorSpec

Patch = pytest.MonkeyPatch

FIND, JUDGE, COMPARE = judging.find_breaches, judging.judge, drift.compare
Wrong = Callable[[Any], Any]  # the function → one that is wrong


def _refused(cli: Cli, proto: onnx.ModelProto, target: Path, what: str, *flags: str) -> None:
    """Assert that the faulty judge published a conversion of ``proto``, and the second judge refused it."""
    source = target.parents[2] / "m.onnx"
    onnx.save(proto, source)
    cli("checkpoint", source, "--out", target, *ONNX_ONLY, "--no-search", *flags).refused(3, "the second judge: ", what)
    assert target.exists()


def _metric(name: str, wrong: Callable[[SampleDrift], float]) -> Wrong:
    """Return a fault of ``compare``: another value of one metric."""

    def changed(compare: Callable[..., OutputDrift], *given: Any) -> OutputDrift:
        found = compare(*given)
        return replace(found, rows=[replace(row, **{name: wrong(row)}) for row in found.rows])  # type: ignore[arg-type]

    return lambda compare: partial(changed, compare)


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "name", "wrong", "bound", "said"),
    [
        (drift, "compare", _metric("relative_l2", lambda sample: sample.relative_l2 / 10), "", " is stated as "),
        (drift, "compare", _metric("cosine_distance", lambda _: 0.0), "", " is stated as "),
        (drift, "compare", _metric("max_abs", lambda sample: sample.max_abs / 2), "", " is stated as "),
        (drift, "compare", _metric("nonfinite", lambda _: 1), "nonfinite=none", " is stated as "),
        (drift, "compare", lambda f: lambda r, _c, *given: f(r, r, *given), "", "relative_l2 is stated as 0.0"),
        (drift, "_distribution", lambda f: lambda *g: f(*g) | {"p99": f(*g)["p50"]}, "", ".p99 is stated as"),
        (drift, "_decibels", lambda f: lambda relative_l2: f(relative_l2) + 60, "", "sqnr_db.mean is stated as"),
        (budget, "_within", lambda f: lambda n, m, b: f(n, m, 2 * b), "relative_l2=1.2e-3", ", over the budget of "),
        (certify, "required", lambda _: lambda *_, **__: {}, "", "cpu does not say which ONNX Runtime it needs"),
    ],
)  # fmt: skip
def test_a_faulty_judge_is_found(
    cli: Cli, target: Path, monkeypatch: Patch, module: ModuleType, name: str, wrong: Wrong, bound: str, said: str
) -> None:
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    flags = ("--profile", "cpu", *(("--budget", bound) if bound else ()))
    _refused(cli, graphs.mlp((64, 96, 40)), target, said, *flags)


@pytest.mark.long
def test_an_output_that_is_not_judged_is_found(cli: Cli, target: Path, monkeypatch: Patch) -> None:
    def first_only(allowed: Any, drifts: Sequence[Mapping[str, OutputDrift]]) -> Any:
        return FIND(allowed, [{"h": sample["h"]} for sample in drifts])

    for module in ("certify", "judging"):
        monkeypatch.setattr(f"bf16kit.converter.verify.{module}.find_breaches", first_only)
    proto = cancellation().proto
    proto.graph.output.append(graphs.edge("h", ["batch", 64]))
    _refused(cli, proto, target, ", over the budget of ", "--profile", "cpu")


@pytest.mark.long
def test_a_profile_that_is_not_judged_is_found(cli: Cli, target: Path, monkeypatch: Patch) -> None:
    def without_cuda(breaches: Mapping[str, Sequence[str]], *given: Any) -> Any:
        return JUDGE({name: found for name, found in breaches.items() if name != "cuda"}, *given)

    monkeypatch.setattr("bf16kit.converter.convert.judge", without_cuda)
    flags = ("--profile", "cpu", "--profile", "cuda", "--budget", "relative_l2=3e-3")
    _refused(cli, graphs.mlp((64, 96, 40)), target, "cuda, 'y': relative_l2 is", *flags)


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
    (own,) = COMPARE(random[0], random[0] + 1e-3 * random[1], spec, None).rows
    for name, value in figures(random[0], random[0] + 1e-3 * random[1], logits=True).items():
        assert getattr(own, name) == pytest.approx(value, rel=1e-9)
