"""Sides timed on pieces of work: fresh processes, in each of them turns, in an order drawn anew for every round."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bench.core.verdict import FEWEST_PROCESSES
from bench.kernel.hosts import Feeds, Subject, Work
from bench.kernel.sides import Side
from bench.kernel.workers import Workers

Caches = Literal["cold", "warm"]
_SLOW_S = 1.0  # all sides together: from there on a turn is one run


@dataclass(frozen=True, slots=True)
class Effort:
    """Of one piece of work: ``processes``, in each ``rounds`` of turns or as many more as ``seconds`` allow."""

    processes: int
    rounds: int
    seconds: float
    most_rounds: int = 12
    runs: int = 3  # of a turn

    def shape(self, seconds: float) -> tuple[int, int]:
        """Rounds, and runs of a turn, for sides that together take ``seconds`` a run."""
        runs = 1 if seconds > _SLOW_S else self.runs
        return max(self.rounds, min(self.most_rounds, int(self.seconds / (seconds * (runs + 1))))), runs


FULL = Effort(FEWEST_PROCESSES, rounds=3, seconds=1.5)
QUICK = Effort(1, rounds=1, seconds=0.0, runs=1)


@dataclass(frozen=True, slots=True)
class Piece:
    """Inputs, what they are called, and with which caches they are timed. Sides in ``without`` take no part."""

    label: str
    feeds: Feeds
    work: Work = field(default_factory=Work)
    caches: Sequence[Caches] = ("cold",)
    without: Collection[str] = ()

    def timed(self, caches: Caches) -> str:
        return f"{self.label}, {caches}" if len(self.caches) > 1 else self.label


@dataclass(slots=True)
class Timed:
    """``samples``: by piece of work and side, every run's seconds by process and turn. ``errors``: the relative L2 of
    each side's first output from the first side's. ``notes``: who is absent, and why."""

    samples: dict[str, dict[str, list[list[list[float]]]]] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def drop_incomplete(self) -> None:
        """Leave out sides that not every process has times of: what is paired must be whole."""
        for sides in self.samples.values():
            whole = max(map(len, sides.values()), default=0)
            for name in [name for name, samples in sides.items() if len(samples) < whole]:
                del sides[name]


def race(sides: Sequence[Side], subject: Subject, pieces: Sequence[Piece], effort: Effort, root: Path) -> Timed:
    """Time ``sides`` on ``pieces``. The first side is what the others' outputs are compared with."""
    timed = Timed()
    generator = np.random.default_rng(0)
    root.mkdir(parents=True, exist_ok=True)
    with copies(sides, subject, root / "copies") as subjects:
        shapes: dict[str, tuple[int, int]] = {}
        for process in range(effort.processes):
            print(f"{subject.name}: process {process + 1} of {effort.processes}", file=sys.stderr, flush=True)
            with Workers(sides, subjects, root / "workers.log", root / "compiled") as workers:
                heat = _Heat(workers, effort, shapes, generator, root)
                for piece in pieces:
                    heat.measure(piece, timed, process)
                timed.absent |= workers.absent
    timed.drop_incomplete()
    return timed


@dataclass(frozen=True, slots=True)
class _Heat:
    """One set of processes."""

    workers: Workers
    effort: Effort
    shapes: dict[str, tuple[int, int]]  # of the first process, for all
    generator: np.random.Generator
    root: Path

    def measure(self, piece: Piece, timed: Timed, process: int) -> None:
        seconds = self._fed(piece, timed, first=process == 0)
        if piece.label not in self.shapes:
            self.shapes[piece.label] = self.effort.shape(sum(seconds.values()))
        rounds, runs = self.shapes[piece.label]
        for caches in piece.caches:
            found = timed.samples.setdefault(piece.timed(caches), {})
            for name in seconds:
                found.setdefault(name, []).append([])
            for _ in range(rounds):
                for name in self.generator.permutation(list(seconds)):
                    answer = self.workers.ask(str(name), {"do": "time", "runs": runs, "cold": caches == "cold"})
                    found[str(name)][-1].append([round(value, 9) for value in answer["seconds"]])

    def _fed(self, piece: Piece, timed: Timed, *, first: bool) -> dict[str, float]:
        """Seconds of a run of every side that can do ``piece``. In the first process outputs are compared."""
        feeds = self.root / "feeds.npz"
        np.savez(feeds, **dict(piece.feeds))  # type: ignore[arg-type]  # no input is called allow_pickle
        work = {"operations": piece.work.operations, "bytes": piece.work.bytes}
        names = [name for name in self.workers.present if name not in piece.without]
        outputs = {name: self.root / f"output{index}.npy" for index, name in enumerate(names)}
        answers = self.workers.ask_all(
            {
                name: {
                    "do": "feed",
                    "side": name,
                    "feeds": str(feeds),
                    "work": work,
                    "out": str(file) if first else "",
                }
                for name, file in outputs.items()
            }
        )
        present = {name: float(answer["seconds"]) for name, answer in answers.items() if "seconds" in answer}
        if first:
            timed.errors[piece.label] = _errors({name: outputs[name] for name in present})
        return present


def _errors(files: Mapping[str, Path]) -> dict[str, float]:
    arrays: dict[str, NDArray[Any]] = {}
    for name, file in files.items():
        if file.exists():
            arrays[name] = np.load(file).astype(np.float64)
            file.unlink()
    expected = next(iter(arrays.values()), None)
    if expected is None:
        return {}
    return {name: _relative(array, expected) for name, array in arrays.items()}


def _relative(found: NDArray[Any], expected: NDArray[Any]) -> float:
    if found.shape != expected.shape:
        return math.inf
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@contextmanager
def copies(sides: Sequence[Side], subject: Subject, root: Path) -> Iterator[dict[str, Subject]]:
    """The model once for every side, in files of its own: no side finds in the caches what another has read."""
    found: dict[str, Subject] = {}
    shutil.rmtree(root, ignore_errors=True)  # of a benchmark that was killed
    try:
        for index, side in enumerate(sides):
            found[side.name] = subject if side.limit else _copied(side, subject, root / str(index))
        yield found
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _copied(side: Side, subject: Subject, root: Path) -> Subject:
    """Only what the side reads: torch makes its weights itself, and reads layers' into its own memory."""
    if side.host == "torch":
        return subject
    if side.ours:
        return Subject(subject.name, _tree(subject.artifact, root / "artifact" / "1"), subject.graph, subject.stored)
    if "PERFORMANCE_HINT" in side.options:
        stored = _tree(subject.stored.parent, root / "stored") / subject.stored.name
        return Subject(subject.name, subject.artifact, subject.graph, stored)
    graph = _tree(subject.graph.parent, root / "graph") / subject.graph.name
    return Subject(subject.name, subject.artifact, graph, subject.stored)


def _tree(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target
