"""Which of several profiles ``auto`` serves: by the budget in force and the processor, without a clock."""

from __future__ import annotations

import math

import pytest

from bf16kit.artifact.manifest import DriftEntry, Manifest, Source
from bf16kit.drift.metrics import Budget
from service.models.profilechoice import in_order, skip_reason

BOTH = ("cpu", "cpu-bf16")


def manifest(relative_l2: float | None) -> Manifest:
    drift = {} if relative_l2 is None else {"y": {"relative_l2": {"mean": relative_l2}}}
    entry = DriftEntry(samples=16, source="random", outputs=drift)
    source = Source(format="onnx", sha256="", bytes=0, tensors=0)
    return Manifest(model="m", inputs=[], outputs=[], profiles={}, drift={"cpu-bf16": entry}, source=source)


def test_the_profile_with_fewer_bits_serves_where_it_is_within_budget_and_native() -> None:
    order, why = in_order(manifest(6e-3), BOTH, Budget(), native=True)
    assert (order, why) == (
        ("cpu-bf16", "cpu"),
        "auto: cpu-bf16 is within budget, and this processor multiplies bf16",
    )


@pytest.mark.parametrize(("drift", "native"), [(6e-3, False), (None, True), (0.5, True)])
def test_a_profile_that_is_ruled_out_is_not_loaded(drift: float | None, native: bool) -> None:
    order, why = in_order(manifest(drift), BOTH, Budget(), native=native)
    assert order == ("cpu",)
    assert why == f"auto: cpu-bf16 was skipped, {skip_reason(manifest(drift), 'cpu-bf16', Budget(), native=native)}"


def test_a_single_profile_needs_no_reason() -> None:
    assert in_order(manifest(None), ("cpu-bf16",), Budget(), native=False) == (("cpu-bf16",), "")


def test_a_profile_within_budget_is_tried_where_the_processor_has_the_instructions() -> None:
    assert skip_reason(manifest(6e-3), "cpu-bf16", Budget(), native=True) == ""
    assert skip_reason(manifest(6e-3), "cpu-bf16", Budget(), native=False) == "this processor emulates it"


def test_a_profile_over_the_budget_in_force_is_not_tried() -> None:
    """``serving.yaml`` may set a stricter budget than the artifact's."""
    why = skip_reason(manifest(6e-3), "cpu-bf16", Budget().override({"relative_l2": 5e-3}), native=True)
    assert why == "its drift is over budget: output 'y': relative_l2 is 0.006, the budget allows at most 0.005"
    assert "over budget" in skip_reason(manifest(math.nan), "cpu-bf16", Budget(), native=True)


def test_a_profile_whose_drift_was_never_measured_is_not_tried() -> None:
    assert skip_reason(manifest(None), "cpu-bf16", Budget(), native=True) == "its drift was never measured"
    assert skip_reason(manifest(None), "torchscript", Budget(), native=True) == "its drift was never measured"
