"""Goals are judged against the best peer, on the path that users get. Absent sides give a reason."""

import pytest

from bench.core.verdict import Samples
from bench.kernel.compare import Goal, best, judged, result
from bench.kernel.turns import QUICK, Timed

TIMES = {
    "ONNX Runtime fp32": 4.0,
    "ONNX Runtime fp32, spinning off": 3.0,
    "OpenVINO bf16": 2.5,
    "cpu, avx512f": 2.0,
    "cpu, avx2": 1.0,
    "limit: bf16 arithmetic": 1.8,
}


def samples(seconds: float, processes: int = 5) -> Samples:
    return [[[seconds]] * 3] * processes


def timed(**absent: str) -> Timed:
    return Timed(
        samples={"work": {name: [[list(turn) for turn in p] for p in samples(s)] for name, s in TIMES.items()}},
        errors={"work": {"cpu, avx2": 0.03, "OpenVINO bf16": 0.03}},
        absent=absent,
    )


@pytest.mark.parametrize(
    ("against", "expected"),
    [
        ("best fp32 peer", "ONNX Runtime fp32, spinning off"),
        ("best bf16 peer", "OpenVINO bf16"),
        ("best peer", "OpenVINO bf16"),
    ],
)
def test_the_best_peer_is_the_fastest_of_its_arithmetic(against: str, expected: str) -> None:
    assert best(against, TIMES) == expected


def test_a_goal_is_judged_against_the_best_peer_or_a_limit_on_the_path_users_get() -> None:
    """Users get AVX-512F on processors that run it, even if AVX2 was faster this time."""
    goals = [
        Goal("work", "cpu", "best fp32 peer", 1.4),
        Goal("work", "cpu", "best peer", 1.3),
        Goal("work", "cpu", "bf16 arithmetic", 0.85),
    ]
    found = list(judged(timed(), goals))
    assert [each.value for each in found] == pytest.approx([1.5, 1.25, 0.9])
    assert [each.verdict for each in found] == ["met", "missed", "met"]
    assert found[0].detail == "cpu, avx512f against ONNX Runtime fp32, spinning off"


def test_absent_sides_give_the_reason() -> None:
    goals = [Goal("work", "cpu-bf16", "best bf16 peer", 1.0), Goal("work", "cpu", "bf16 arithmetic", 0.85)]
    of = timed(**{"cpu-bf16": "no such profile", "limit: bf16 arithmetic": "no dpbf16"})
    del of.samples["work"]["limit: bf16 arithmetic"]
    found = list(judged(of, goals))
    assert [one.absent for one in found] == ["no such profile", "no dpbf16"]
    assert [one.verdict for one in found] == [None, None]


def test_a_side_with_a_large_error_is_reported() -> None:
    found = result("b", timed(), [], title="t", effort=QUICK, settings={})
    assert [note for note in found.notes if "is off by" in note] == [
        "cpu, avx2 on work is off by 0.03 (relative L2), more than 0.02"
    ]
