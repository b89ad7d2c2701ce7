"""Which of several profiles serves: by its speed, on a clock that the test sets, and by the budget."""

from __future__ import annotations

import math

import pytest

from bf16kit.drift import Budget
from bf16kit.manifest import DriftEntry, Manifest, Source
from service.models.profilechoice import ROUNDS, SECONDS, fastest, medians, skip_reason


class Clock:
    """A clock that advances only during runs; ``calls`` holds the names of the runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def taking(self, name: str, *seconds: float) -> tuple[str, object]:
        """Return ``name`` and a run that takes each of ``seconds`` in turn, and then always the last."""
        left = list(seconds)

        def run() -> None:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return name, run


def measured(clock: Clock, *runs: tuple[str, object], seconds: float = SECONDS) -> tuple[dict[str, float], int]:
    return medians(dict(runs), seconds=seconds, clock=clock)  # type: ignore[arg-type]  # objects that are called


def manifest(relative_l2: float | None) -> Manifest:
    drift = {} if relative_l2 is None else {"y": {"relative_l2": {"mean": relative_l2}}}
    entry = DriftEntry(samples=16, source="random", outputs=drift)
    source = Source(format="onnx", sha256="", bytes=0, tensors=0)
    return Manifest(model="m", inputs=[], outputs=[], profiles={}, drift={"cpu-bf16": entry}, source=source)


def test_runs_take_turns_and_every_other_round_is_in_reverse_order() -> None:
    clock = Clock()
    _, rounds = measured(clock, clock.taking("a", 0.01), clock.taking("b", 0.01), seconds=0.065)
    assert (clock.calls, rounds) == (["a", "b", "b", "a", "a", "b"], 3)


def test_measuring_ends_when_another_round_would_take_too_long() -> None:
    clock = Clock()
    found, rounds = measured(clock, clock.taking("a", 0.08), clock.taking("b", 0.04))
    assert found == pytest.approx({"a": 0.08, "b": 0.04})
    assert rounds == 2
    assert clock.now <= SECONDS


def test_a_run_longer_than_the_time_limit_is_measured_once() -> None:
    clock = Clock()
    assert measured(clock, clock.taking("a", 5.0), clock.taking("b", 3.0)) == ({"a": 5.0, "b": 3.0}, 1)


def test_fast_runs_are_measured_a_limited_number_of_times() -> None:
    clock = Clock()
    _, rounds = measured(clock, clock.taking("a", 1e-6), clock.taking("b", 1e-6))
    assert rounds == ROUNDS


def test_an_occasional_delay_does_not_change_the_measured_time() -> None:
    clock = Clock()
    found, _ = measured(clock, clock.taking("a", 0.01), clock.taking("b", 0.1, 0.005, 0.005))
    assert found["b"] == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("bf16", "chosen"), [(2.1e-3, "cpu"), (2e-3, "cpu"), (1.9e-3, "cpu"), (1.7e-3, "cpu-bf16"), (1e-3, "cpu-bf16")]
)
def test_the_fastest_profile_is_chosen_or_the_most_accurate_if_the_gain_is_small(bf16: float, chosen: str) -> None:
    profile, why = fastest({"cpu": 2e-3, "cpu-bf16": bf16}, 31)
    assert profile == chosen
    assert why.startswith(f"auto: {2 if chosen == 'cpu' else bf16 * 1e3:.3g} ms a run, ")
    assert "(medians of 31 on the golden samples)" in why
    assert ("less than a tenth faster" in why) == (bf16 == 1.9e-3)


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
