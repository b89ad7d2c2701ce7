"""Sides timed on pieces of work: fresh processes, in each of them turns, in an order drawn anew for every round."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bench.core.verdict import FEWEST_PROCESSES, Samples, typical
from bench.kernel.hosts import Feeds, Subject
from bench.kernel.sides import LIMIT, PEERS, PROFILES, Arithmetic, Side, path_of, side
from bench.kernel.workers import Workers

Caches = Literal["cold", "warm"]
_SLOW_S = 1.0  # all sides together: from there on a turn is one run
_NEAR = 1.3  # times as long as the best


@dataclass(frozen=True, slots=True)
class Effort:
    """Of one piece of work: ``processes``, in each of them ``rounds`` of turns of every side, in the first one
    ``first_rounds`` at least, which settle who contends. Contenders have rounds of their own after these, between the
    least and the most of them as many as ``seconds`` allow, and ``further`` processes."""

    processes: int
    rounds: int
    seconds: float = 0.0
    further: int = 0
    first_rounds: int = 0
    least_rounds: int = 0
    most_rounds: int = 12
    runs: int = 3  # of a turn

    @property
    def most_processes(self) -> int:
        """Those of contenders."""
        return self.processes + self.further

    def runs_of(self, seconds: float) -> int:
        """Runs of a turn, for sides that together take ``seconds`` a run."""
        return 1 if seconds > _SLOW_S else self.runs

    def rounds_of(self, seconds: float) -> int:
        """Rounds of contenders alone, one of which takes ``seconds``; none where nobody contends."""
        if not seconds:
            return 0
        return min(self.most_rounds, max(self.least_rounds, int(self.seconds / seconds)))


FULL = Effort(FEWEST_PROCESSES, rounds=1, seconds=1.5, further=2, first_rounds=3, least_rounds=2)
QUICK = Effort(1, rounds=1, runs=1)


@dataclass(frozen=True, slots=True)
class Piece:
    """Inputs, what they are called, and with which caches they are timed, the first of which are those that are judged:
    contenders have rounds of their own with these alone. Without ``operations`` the limit takes no part."""

    label: str
    feeds: Feeds
    operations: float = 0.0
    caches: Sequence[Caches] = ("cold",)
    against: Collection[Arithmetic] = ("fp32", "bf16")  # of the peers that goals are held against

    def timed(self, caches: Caches) -> str:
        return f"{self.label}, {caches}" if len(self.caches) > 1 else self.label


@dataclass(slots=True)
class Timed:
    """``samples``: by piece of work and side, every run's seconds by process and turn. ``errors``: the relative L2 of
    each side's first output from the first side's. ``absent``: why a side is absent."""

    samples: dict[str, dict[str, list[list[list[float]]]]] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def drop_incomplete(self, processes: int) -> None:
        """Leave out sides that not each of ``processes`` has times of: what is paired must be whole."""
        for sides in self.samples.values():
            for name in [name for name, samples in sides.items() if len(samples) < processes]:
                del sides[name]


def race(sides: Sequence[Side], subject: Subject, pieces: Sequence[Piece], effort: Effort, root: Path) -> Timed:
    """Time ``sides`` on ``pieces``. The first side is what the others' outputs are compared with."""
    timed = Timed()
    generator = np.random.default_rng(0)
    root.mkdir(parents=True, exist_ok=True)
    with copies(sides, subject, root / "copies") as subjects:
        plans: dict[str, Plan] = {}
        for process in range(effort.most_processes):
            print(f"{subject.name}: process {process + 1} of {effort.most_processes}", file=sys.stderr, flush=True)
            within = None if process < effort.processes else frozenset().union(*(p.names for p in plans.values()))
            taking = [side for side in sides if within is None or side.name in within]
            with Workers(taking, subjects, root / "workers.log", root / "compiled") as workers:
                heat = _Heat(workers, effort, plans, generator, root)
                for piece in pieces:
                    heat.measure(piece, timed, process)
                timed.absent |= workers.absent
    timed.drop_incomplete(effort.processes)
    return timed


@dataclass(frozen=True, slots=True)
class Plan:
    """What the first process tells of a piece of work, for those that follow: who contends for it, in how many rounds
    of their own."""

    runs: int
    names: frozenset[str] = frozenset()
    rounds: int = 0


def contenders(sides: Mapping[str, float], against: Collection[Arithmetic]) -> frozenset[str]:
    """Whom judged ratios may come to be of, given typical seconds: what users get of our profiles, the limit, and of
    ``against`` every peer that is near the best of its arithmetic. Whoever is slower is not out on a turn's word: it
    stays in the race, with the turns and processes that all have, and may be found the best at its end."""
    found = {path_of(profile, sides) for profile in PROFILES} | {LIMIT.name}
    for arithmetic in against:
        peers = [peer.name for peer in PEERS if peer.arithmetic == arithmetic and peer.name in sides]
        best = min((sides[name] for name in peers), default=0.0)
        found |= {name for name in peers if sides[name] <= _NEAR * best}
    return frozenset(sides) & found


@dataclass(frozen=True, slots=True)
class _Heat:
    """One set of processes."""

    workers: Workers
    effort: Effort
    plans: dict[str, Plan]  # by piece of work, made by the first process
    generator: np.random.Generator
    root: Path

    def measure(self, piece: Piece, timed: Timed, process: int) -> None:
        """Times of ``piece``; without further ones where all have taken their turns, of the contenders alone."""
        plan = self.plans.get(piece.label)
        further = process >= self.effort.processes
        names = [name for name in self.workers.present if piece.operations or not side(name).limit]
        if further and plan is not None:
            names = [name for name in names if name in plan.names]
        seconds = self._fed(piece, names, timed, first=process == 0)
        if plan is None:
            plan = Plan(self.effort.runs_of(sum(seconds.values())))
        for caches in piece.caches[:1] if further else piece.caches:
            found = timed.samples.setdefault(piece.timed(caches), {})
            # Whoever missed a process, whose times could be paired with none, takes no further part.
            taking = [name for name in seconds if len(found.setdefault(name, [])) == process]
            for name in taking:
                found[name].append([])
            rounds = self.effort.rounds if process else max(self.effort.rounds, self.effort.first_rounds)
            walls = self._turns(taking, caches, plan.runs, rounds, found)
            if caches != piece.caches[0]:
                continue
            if process == 0:
                plan = self._planned(plan, piece, found, walls)
            self._turns([name for name in taking if name in plan.names], caches, plan.runs, plan.rounds, found)
        self.plans[piece.label] = plan

    def _planned(self, plan: Plan, piece: Piece, found: Mapping[str, Samples], walls: Mapping[str, float]) -> Plan:
        names = contenders({name: typical(samples) for name, samples in found.items()}, piece.against)
        return Plan(plan.runs, names, self.effort.rounds_of(sum(walls[name] for name in names)))

    def _turns(
        self,
        names: Sequence[str],
        caches: Caches,
        runs: int,
        rounds: int,
        found: Mapping[str, list[list[list[float]]]],
    ) -> dict[str, float]:
        """Turns of ``names`` into what is ``found``; the seconds that each one's last took, all in all."""
        walls: dict[str, float] = {}
        for _ in range(rounds):
            for name in map(str, self.generator.permutation(list(names))):
                started = time.perf_counter()
                answer = self.workers.ask(name, {"do": "time", "runs": runs, "cold": caches == "cold"})
                walls[name] = time.perf_counter() - started
                found[name][-1].append([round(value, 9) for value in answer["seconds"]])
        return walls

    def _fed(self, piece: Piece, names: Sequence[str], timed: Timed, *, first: bool) -> dict[str, float]:
        """Seconds of a run of all of ``names`` that can do ``piece``. In the first process outputs are compared."""
        feeds = self.root / "feeds.npz"
        np.savez(feeds, **dict(piece.feeds))  # type: ignore[arg-type]  # no input is called allow_pickle
        outputs = {name: self.root / f"output{index}.npy" for index, name in enumerate(names)}
        asked = {"do": "feed", "feeds": str(feeds), "operations": piece.operations}
        answers = self.workers.ask_all(
            {name: asked | {"out": str(file) if first else ""} for name, file in outputs.items()}
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
            found[side.name] = _copied(side, subject, root / str(index))
        yield found
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _copied(side: Side, subject: Subject, root: Path) -> Subject:
    """Only what the side reads: torch makes its weights itself, and reads layers' into its own memory."""
    if side.limit or side.host == "torch":
        return subject
    if side.ours:
        return replace(subject, artifact=shutil.copytree(subject.artifact, root / "artifact" / "1"))
    file = subject.stored if side.reads_stored else subject.graph
    copy = shutil.copytree(file.parent, root / "graph") / file.name
    return replace(subject, stored=copy) if side.reads_stored else replace(subject, graph=copy)
