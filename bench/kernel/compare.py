"""Goals held against what was timed: which peer is the best, how much faster than it we are, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bench.core.results import Grid, Measurement, Result
from bench.core.verdict import ratio, typical
from bench.kernel.sides import LIMIT, OURS, PEERS, SETTINGS, path_of, side
from bench.kernel.turns import Effort, Timed

Against = Literal["best fp32 peer", "best bf16 peer", "best peer", "bf16 arithmetic"]
_MS = 1e3
_TOLERANCE = {"fp32": 0.02, "bf16": 0.05}  # of the relative L2, by arithmetic


@dataclass(frozen=True, slots=True)
class Goal:
    """On ``work``, the time of ``against`` ÷ that of ``profile`` on its fastest path; without ``at_least`` it is shown,
    not judged. Of the limit the ratio is the share that is reached."""

    work: str
    profile: Literal["cpu", "cpu-bf16"]
    against: Against
    at_least: float | None = None

    @property
    def name(self) -> str:
        return f"{self.work}: {self.against} ÷ {self.profile}"

    @property
    def limit(self) -> str:
        """The side that is the limit; empty where peers are meant."""
        return LIMIT.name if self.against == "bf16 arithmetic" else ""


def judged(timed: Timed, goals: Sequence[Goal]) -> Iterator[Measurement]:
    """Every goal; one whose sides are absent says why instead of a value."""
    for goal in goals:
        samples = timed.samples.get(goal.work, {})
        ours = path_of(goal.profile, samples)
        peer = goal.limit or best(goal.against, {name: typical(of) for name, of in samples.items()})
        if ours is None or peer not in samples:
            absent = _why(timed, goal)
            yield Measurement(goal.name, float("nan"), at_least=goal.at_least, absent=absent)
            continue
        assert peer is not None
        estimate = ratio(samples[peer], samples[ours])
        detail = f"{ours} against {peer}"
        yield Measurement.of(goal.name, estimate, at_least=goal.at_least, detail=detail)


def best(against: str, times: Mapping[str, float]) -> str | None:
    """The peer that is fastest on this work, of those whose arithmetic counts."""
    names = [p.name for p in PEERS if p.name in times and against in ("best peer", f"best {p.arithmetic} peer")]
    return min(names, key=lambda name: times[name], default=None)


def _why(timed: Timed, goal: Goal) -> str:
    """Why a goal has no value."""
    missing = [ours.name for ours in OURS if ours.options["profile"] == goal.profile]
    for name in (*missing, goal.limit):
        if name in timed.absent:
            return timed.absent[name]
    return f"no {goal.against} ran"


def result(
    benchmark: str,
    timed: Timed,
    goals: Sequence[Goal],
    *,
    title: str,
    effort: Effort,
    settings: Mapping[str, Any],
) -> Result:
    """What was found, as a result. Without a path of ours there is none, and the reason."""
    ours = [one for one in OURS if any(one.name in sides for sides in timed.samples.values())]
    if not ours:
        return Result(benchmark, skipped="; ".join(f"{one.name}: {timed.absent.get(one.name, '')}" for one in OURS))
    absent = [f"{name}: {reason}" for name, reason in timed.absent.items()]
    return Result(
        benchmark,
        list(judged(timed, goals)),
        settings={**settings, "processes": effort.processes, "processes_of_contenders": effort.most_processes}
        | SETTINGS,
        notes=[*absent, *_disagreements(timed)],
        grids=[grid(timed, title)],
        samples=timed.samples,
    )


def grid(timed: Timed, title: str) -> Grid:
    """Milliseconds of every side, medians of processes."""
    names = list(dict.fromkeys(name for sides in timed.samples.values() for name in sides))
    rows = {
        label: [typical(sides[name]) * _MS if name in sides else None for name in names]
        for label, sides in timed.samples.items()
    }
    return Grid(title, "ms", names, rows)


def _disagreements(timed: Timed) -> Iterator[str]:
    """Who computed something else."""
    for label, errors in timed.errors.items():
        for name, error in errors.items():
            allowed = _TOLERANCE[side(name).arithmetic]
            if not error <= allowed:
                yield f"{name} on {label} is off by {error:.2g} (relative L2), more than {allowed:g}"
