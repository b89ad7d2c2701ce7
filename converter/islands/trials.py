"""Tries a plan without writing it: runs the switched graph in one session, and measures drift from the reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from bf16kit.drift.metrics import DriftSummary
from bf16kit.numerics.rounding import census
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Runtime
from converter.graph.operators import bf16_form
from converter.graph.step import run
from converter.islands.switches import Switch, positions
from converter.source import Array, Feeds
from converter.verify import measure
from converter.verify.measure import Drifts, Expected
from converter.verify.running import open_fp32_graph

MAX_WORST_SAMPLES = 1  # samples on which a single rounding is measured
MAX_SAMPLES = 16  # samples on which a set of islands is tried


class OutOfTime(Exception):
    """The time of a search has run out."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of a search's time; ``clock`` counts seconds.

    The default is this process's processor time, of all threads together. A busy machine must not change the result.
    """

    seconds: float
    clock: Callable[[], float] = time.process_time
    start: float = 0.0

    @classmethod
    def after(cls, minutes: float, clock: Callable[[], float] = time.process_time) -> Deadline:
        return cls(60 * minutes, clock, clock())

    def expired(self) -> bool:
        """Whether the time has run out."""
        return self.clock() - self.start > self.seconds

    def part(self, share: float) -> Deadline:
        """Return the deadline at which ``share`` of the remaining time will have passed."""
        now = self.clock()
        return Deadline(share * (self.start + self.seconds - now), self.clock, now)

    def check(self) -> None:
        """Raise :class:`OutOfTime` if the time has run out."""
        if self.expired():
            raise OutOfTime


@dataclass(frozen=True, slots=True)
class Edges:
    """The inputs and outputs of a model, and which axis of both is the batch."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batch_axis: int | None


@dataclass(frozen=True, slots=True)
class Bf16:
    """The bf16 parts of a profile: the nodes that compute in bf16, and the weights stored in it."""

    nodes: frozenset[str] = frozenset()
    weights: frozenset[str] = frozenset()


class Trials:
    """The graph ``base`` in one session, with the roundings of ``bf16`` switched, tried on the feeds of ``expected``.

    Drift is measured from the fp32 reference's outputs in ``expected``, as certification does:
    measured from the graph's own outputs, it would leave out fp32 noise. Weights are kept in a file in ``scratch``, or
    where :func:`~scratch.on_disk` says. Every method that runs the model raises :class:`OutOfTime` once
    ``deadline`` has passed, except :meth:`shapes`.
    """

    def __init__(
        self,
        base: ir.Model,
        bf16: Bf16,
        edges: Edges,
        expected: Expected,
        deadline: Deadline,
        *,
        saturate: bool = False,
        scratch: Path | None = None,
    ) -> None:
        self._edges = edges
        self._expected = expected
        self._deadline = deadline
        opset = base.opset_imports[""]
        forms = {n.name or "": form for n in base.graph if n.name in bf16.nodes and (form := bf16_form(n, opset))}
        saturated = _overflowing(base, bf16.weights) if saturate else ()
        self._switch = switch = Switch(forms, bf16.weights, saturated)
        model = run([switch], base.clone())
        inputs, outputs = (*edges.inputs, switch.spec), (*edges.outputs, *switch.shape_specs)
        self._runtime: Runtime = open_fp32_graph(model, inputs, outputs, scratch, arena=True)
        self._names = [spec.name for spec in edges.outputs]
        self._unrounded: dict[int, Feeds] = {}

    def drifts(self, bf16: Bf16, samples: Sequence[int] | None = None) -> list[Drifts]:
        """Return the drift of each sample, of all or of those numbered, from the reference if ``bf16`` is rounded."""
        switched = positions(self._switch.sites, bf16.nodes, bf16.weights)
        chosen = range(len(self._expected.feeds)) if samples is None else samples
        answers = self._expected.outputs
        return [self._measure(i, answers[i], self._run(i, switched), self._edges.outputs) for i in chosen]

    def error(self, bf16: Bf16, scope: ErrorScope) -> float:
        """Return :func:`~converter.verify.measure.error_of` the worst output, as these roundings alone cause it.

        It is measured from the graph's own outputs, so that fp32 noise is not attributed to a rounding. Nodes read
        weights as they are stored, so that the error of rounding a weight is attributed to the weight.
        """
        switched = positions(self._switch.sites, bf16.nodes, bf16.weights, reading_weights=False)
        # Top-1 agreement would be measured too, and cost more than the rest.
        outputs = [replace(spec, kind="other") for spec in self._edges.outputs if spec.name in scope.outputs]
        for index in scope.samples:
            if index not in self._unrounded:
                self._unrounded[index] = self._run(index, np.zeros_like(switched))
        found = [self._measure(i, self._unrounded[i], self._run(i, switched), outputs) for i in scope.samples]
        return max(measure.error_of(summary) for summary in measure.summarise(found).values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each node's result when the first sample is run, by node name."""
        names = list(self._switch.shapes.values())
        switched = np.zeros(len(self._switch.sites), np.bool_)
        found = self._runtime.run({**self._expected.feeds[0], self._switch.input: switched}, names)
        return {node: tuple(int(n) for n in found[name]) for node, name in self._switch.shapes.items()}

    def set_deadline(self, deadline: Deadline) -> None:
        """Replace the deadline: raise :class:`OutOfTime` once ``deadline`` has passed."""
        self._deadline = deadline

    def close(self) -> None:
        self._runtime.close()

    def _measure(self, index: int, expected: Feeds, actual: Feeds, outputs: Sequence[TensorSpec]) -> Drifts:
        given = 1 if index < self._expected.given else 0
        (found,) = measure.drifts([expected], [actual], outputs, self._edges.batch_axis, self._expected.scales, given)
        return found

    def _run(self, index: int, switched: Array) -> Feeds:
        self._deadline.check()
        return self._runtime.run({**self._expected.feeds[index], self._switch.input: switched}, self._names)


def typical(drifts: Sequence[Drifts]) -> tuple[int, ...]:
    """Return the numbers of up to :data:`MAX_SAMPLES` samples, evenly spaced from the smallest drift to the largest."""
    if len(drifts) <= MAX_SAMPLES:
        return tuple(range(len(drifts)))
    errors = [max(measure.error_of(DriftSummary.joined([found])) for found in one.values()) for one in drifts]
    order = sorted(range(len(errors)), key=lambda i: (errors[i], i))
    return tuple(sorted(order[round(step * (len(order) - 1) / (MAX_SAMPLES - 1))] for step in range(MAX_SAMPLES)))


@dataclass(frozen=True, slots=True)
class ErrorScope:
    """The samples and the outputs in which an error is measured."""

    samples: tuple[int, ...]
    outputs: frozenset[str]

    @classmethod
    def worst(cls, drifts: Sequence[Drifts], outputs: Collection[str]) -> ErrorScope:
        """Choose the samples where ``outputs`` are farthest from the reference, up to :data:`MAX_WORST_SAMPLES`."""
        errors = [max(measure.error_of(DriftSummary.joined([one[output]])) for output in outputs) for one in drifts]
        order = sorted(range(len(errors)), key=lambda i: (-errors[i], i))
        return cls(tuple(sorted(order[:MAX_WORST_SAMPLES])), frozenset(outputs))

    def error(self, drifts: Sequence[Drifts]) -> float:
        """Return the error in ``drifts``, known for all samples, as :meth:`Trials.error` would measure it."""
        measured = [drifts[i] for i in self.samples]
        return max(measure.error_of(s) for output, s in measure.summarise(measured).items() if output in self.outputs)


def _overflowing(base: ir.Model, weights: Collection[str]) -> frozenset[str]:
    found = []
    for name in sorted(weights):
        tensor = base.graph.initializers[name].const_value if name in base.graph.initializers else None
        if tensor is not None and census(tensor.numpy()).overflow:
            found.append(name)
    return frozenset(found)
