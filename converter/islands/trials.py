"""Tries sets of islands without writing them: runs the switched graph in one session, and judges the drift."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import onnx_ir as ir

from bf16kit.artifact.manifest import Manifest, Plan
from bf16kit.converter.islands.candidates import Island, Unit, Units, bf16_alone, bf16_of
from bf16kit.converter.islands.switches import Bf16, Switched
from bf16kit.converter.plan import make_plan
from bf16kit.converter.plan.decisions import Islands
from bf16kit.converter.plan.profiles import Profile
from bf16kit.converter.rewrite import Prepared
from bf16kit.converter.source import Array, Feeds
from bf16kit.converter.verify import measure
from bf16kit.converter.verify.judging import choose_golden, find_breaches
from bf16kit.converter.verify.measure import Drifts, Expected, Place, Spool
from bf16kit.converter.verify.running import open_fp32_graph, signature
from bf16kit.drift.budget import Breach, Budget
from bf16kit.drift.metrics import DriftSummary
from bf16kit.numerics.tensors import TensorSpec

MAX_SAMPLES = 16  # samples on which a set of islands is tried
_FIRST = 4  # every fourth of them is run first
_CLEARLY = 1.1  # the first samples exceed the budget clearly at this many times what they may have
_NEAR = 0.5  # drift ÷ budget; a set with less does not show how the samples differ near the budget


class OutOfTime(Exception):
    """The time of a search has run out."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The ``end`` of a search's time, in seconds by ``clock``.

    The default clock is this process's processor time, of all threads together: a busy machine must not change the
    result.
    """

    end: float = math.inf
    clock: Callable[[], float] = time.process_time

    @classmethod
    def after(cls, minutes: float) -> Deadline:
        """Return the deadline that passes in ``minutes``."""
        return cls(time.process_time() + 60 * minutes)

    def expired(self) -> bool:
        """Whether the time has run out."""
        return self.clock() > self.end

    def part(self, share: float) -> Deadline:
        """Return the deadline at which ``share`` of the remaining time will have passed."""
        now = self.clock()
        return Deadline(now + share * (self.end - now), self.clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The goal of a search: islands for ``profile`` with which the outputs use at most ``share`` of ``budget``.

    ``manifest`` has the signature of the model, and the user's ``--keep-fp32`` and ``--bf16``. ``expected`` are the
    feeds to try, with the fp32 reference's outputs. ``islands`` exist already and stay. ``written`` is the drift of the
    written graph, by feed, if that is over budget: then sets are wanted even if the graph tried here is not. Temporary
    files go to ``scratch``, or where :func:`~scratch.on_disk` says.
    """

    prepared: Prepared
    profile: Profile
    manifest: Manifest
    expected: Expected
    budget: Budget
    share: float = 1.0
    deadline: Deadline = field(default_factory=Deadline)
    islands: Islands = field(default_factory=Islands)
    scratch: Path | None = None
    written: Sequence[Drifts] = ()

    def plan(self, units: Units = frozenset()) -> Plan:
        """Return the profile's plan with ``units`` as further islands."""
        alone = bf16_alone(units)
        nodes = {**self.islands.nodes, **dict.fromkeys(sorted(alone.nodes), "")}
        tensors = {**self.islands.tensors, **dict.fromkeys(sorted(alone.weights), "")}
        options = cast("Mapping[str, list[str]]", self.manifest.options)
        return make_plan(
            self.prepared,
            keep_fp32=options.get("keep_fp32", ()),
            bf16=options.get("bf16", ()),
            islands=Islands(nodes, tensors),
            profiles=[self.profile.name] if self.profile.rounds else [],
        ).plan

    def rounded(self, units: Units = frozenset()) -> Bf16:
        """Return what is bf16 with ``units`` as islands, by the plan, so that it equals what will be written."""
        return bf16_of(self.plan(units), self.profile)


class Trials:
    """The base graph of ``task`` in one session, with its roundings switched, tried on the task's feeds.

    Drift is measured from the fp32 reference's outputs, as certification does: measured from the graph's own outputs,
    it would leave out fp32 noise. :meth:`drifts` and :meth:`error` raise :class:`OutOfTime` once ``deadline`` has
    passed.
    """

    def __init__(self, task: Task) -> None:
        self.deadline = task.deadline
        self._expected, self._batch_axis = task.expected, task.manifest.batch_axis
        self._switched = made = Switched(task.profile.base(task.prepared), task.rounded())
        inputs, self._outputs = signature(task.manifest)
        inputs, outputs = (*inputs, made.spec), (*self._outputs, *made.shape_specs)
        self.runtime = open_fp32_graph(made.model, inputs, outputs, task.scratch, arena=True)
        self._unrounded: dict[int, Feeds] = {}

    def drifts(self, bf16: Bf16, samples: Sequence[int] | None = None) -> list[Drifts]:
        """Return the drift of each sample, of all or of those numbered, from the reference if ``bf16`` is rounded."""
        switched = self._switched.positions(bf16)
        chosen = range(len(self._expected.feeds)) if samples is None else samples
        answers = self._expected.outputs
        return [self._measure(i, answers[i], self._run(i, switched), self._outputs) for i in chosen]

    def error(self, bf16: Bf16, sample: int, outputs: Collection[str]) -> float:
        """Return the largest error of ``outputs`` on one sample, as these roundings alone cause it.

        It is measured from the graph's own outputs, so that fp32 noise is not attributed to a rounding. Nodes read
        weights as they are stored, so that the error of rounding a weight is attributed to the weight.
        """
        switched = self._switched.positions(bf16, reading_weights=False)
        # Top-1 agreement would be measured too, and cost more than the rest.
        specs = [replace(spec, kind="other") for spec in self._outputs if spec.name in outputs]
        if sample not in self._unrounded:
            self._unrounded[sample] = self._run(sample, np.zeros_like(switched))
        return largest_error(self._measure(sample, self._unrounded[sample], self._run(sample, switched), specs))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each node's result when the first sample is run, by node name."""
        feeds = {**self._expected.feeds[0], self._switched.spec.name: self._switched.positions(Bf16())}
        found = self.runtime.run(feeds, list(self._switched.shapes.values()))
        return {node: tuple(int(n) for n in found[name]) for node, name in self._switched.shapes.items()}

    def _measure(self, index: int, expected: Feeds, actual: Feeds, outputs: Sequence[TensorSpec]) -> Drifts:
        given = 1 if index < self._expected.given else 0
        return measure.drifts(
            [expected], [actual], outputs, self._batch_axis, self._expected.scales, given, self._expected.golden_rows
        )[0]

    def _run(self, index: int, switched: Array) -> Feeds:
        if self.deadline.expired():
            raise OutOfTime
        feeds = {**self._expected.feeds[index], self._switched.spec.name: switched}
        return self.runtime.run(feeds, [spec.name for spec in self._outputs])


class Judge:
    """Judges sets of islands by ``share`` of ``budget`` on ``samples``; ``drifts`` tries a set on some samples.

    ``found`` is the last set that was within it. A set is tried on a few of the samples first, spread over them. If
    these exceed the budget clearly, compared with what they did when the last set was within it, the others are not
    run. Such a set may be within budget all the same; then the search finds more islands than necessary.
    """

    def __init__(
        self,
        budget: Budget,
        share: float,
        samples: Sequence[int],
        drifts: Callable[[Units, Sequence[int]], list[Drifts]],
    ) -> None:
        self.found: Units | None = None
        self._stated, self._budget = budget, budget.tightened(share)
        self._first = samples[::_FIRST]
        self._rest = [index for index in samples if index not in self._first]
        self._drifts = drifts
        self._veto = math.inf  # drift ÷ budget on the first samples
        self._breaches: dict[Units, list[Breach]] = {}
        self._now: Mapping[str, DriftSummary] = {}

    def suffices(self, units: Units) -> bool:
        """Whether a profile with the islands ``units`` is within the budget; each set is tried once."""
        if units in self._breaches:
            return not self._breaches[units]
        drifts = self._drifts(units, self._first)
        on_first = ratio(self._budget, drifts)
        if on_first <= self._veto:
            drifts += self._drifts(units, self._rest)
        breaches = self._breaches[units] = breaches_of(self._budget, drifts)
        if not breaches:
            self.found, self._now = units, measure.summarise(drifts)
            if (on_all := ratio(self._budget, drifts)) > _NEAR:
                self._veto = max(1.0, _CLEARLY * on_first / on_all)
        return not breaches

    def worth(self) -> dict[Unit, Island]:
        """Return what each unit of the set found is worth, of those without which it was tried."""
        worth, found = {}, self.found or frozenset()
        for unit in found:
            for breach in self._breaches.get(found - {unit}, [])[:1]:
                now = self._now[breach.output].judged(breach.metric)
                over = self._stated.ratio(breach.metric, breach.measured)
                worth[unit] = Island(unit, breach, math.nan if now is None else now, over)
        return worth


def reference_outputs(model: ir.Model, manifest: Manifest, feeds: Sequence[Feeds], scratch: Path | None) -> Spool:
    """Return the outputs of the fp32 graph ``model`` for ``feeds``, kept in an unnamed file in ``scratch``."""
    with closing(open_fp32_graph(model, *signature(manifest), scratch)) as runtime:
        return Spool(scratch, map(runtime.run, feeds))


def breaches_of(budget: Budget, drifts: Sequence[Drifts]) -> list[Breach]:
    """Return where ``drifts``, one entry per sample, exceed ``budget``.

    If all samples together do not, but each one alone does, this returns the breaches of the first: a server judges
    each start by one sample, or a few rows of it. That is a sample that was given, if there are any among them.
    """
    if breaches := find_breaches(budget, drifts):
        return breaches
    given = {number: one for number, one in enumerate(drifts) if not measure.is_made(one)} or dict(enumerate(drifts))
    place = choose_golden(budget, [given]) or Place(min(given))
    return find_breaches(budget, [measure.golden_part(given, place)])


def ratio(budget: Budget, drifts: Sequence[Drifts]) -> float:
    """Return the largest drift ÷ budget."""
    summaries = measure.summarise(drifts).values()
    judged = [(name, summary.judged(name)) for summary in summaries for name in budget.as_dict()]
    return max((budget.ratio(name, measured) for name, measured in judged if measured is not None), default=0.0)


def largest_error(one: Drifts, outputs: Collection[str] | None = None) -> float:
    """Return the largest error of an output of one feed, of all or of ``outputs`` (:func:`.measure.error_of`)."""
    chosen = one.keys() if outputs is None else outputs
    return max(measure.error_of(DriftSummary.joined([one[name]])) for name in chosen)


def typical(drifts: Sequence[Drifts]) -> tuple[int, ...]:
    """Return the numbers of up to :data:`MAX_SAMPLES` samples, evenly spaced from the smallest drift to the largest."""
    if len(drifts) <= MAX_SAMPLES:
        return tuple(range(len(drifts)))
    order = sorted(range(len(drifts)), key=lambda i: (largest_error(drifts[i]), i))
    return tuple(sorted(order[round(step * (len(order) - 1) / (MAX_SAMPLES - 1))] for step in range(MAX_SAMPLES)))
