"""Tries a plan without writing it: runs the switched graph in one session, and measures drift from the reference."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from bf16kit.artifact.manifest import Manifest
from bf16kit.drift.metrics import DriftSummary
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Runtime
from converter.graph.operators import bf16_form
from converter.graph.step import run
from converter.islands.switches import Bf16, Switch, positions
from converter.source import Array, Feeds
from converter.verify import measure
from converter.verify.measure import Drifts, Expected, Spool
from converter.verify.running import open_fp32_graph

MAX_SAMPLES = 16  # samples on which a set of islands is tried


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


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a model, and which axis of both is the batch."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batch_axis: int | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> Signature:
        """Return the signature of the model that ``manifest`` describes."""
        inputs, outputs = (tuple(each.spec() for each in entries) for entries in (manifest.inputs, manifest.outputs))
        return cls(inputs, outputs, manifest.batch_axis)


class Trials:
    """The graph ``base`` in one session, with the roundings of ``bf16`` switched, tried on the feeds of ``expected``.

    Drift is measured from the fp32 reference's outputs in ``expected``, as certification does:
    measured from the graph's own outputs, it would leave out fp32 noise. Weights are kept in a file in ``scratch``, or
    where :func:`~scratch.on_disk` says. :meth:`drifts` and :meth:`error` raise :class:`OutOfTime` once ``deadline`` has
    passed.
    """

    def __init__(
        self,
        base: ir.Model,
        bf16: Bf16,
        signature: Signature,
        expected: Expected,
        deadline: Deadline,
        scratch: Path | None = None,
    ) -> None:
        self.deadline = deadline
        self._signature = signature
        self._expected = expected
        opset = base.opset_imports[""]
        forms = {n.name or "": form for n in base.graph if n.name in bf16.nodes and (form := bf16_form(n, opset))}
        self._switch = switch = Switch(forms, bf16.weights)
        model = run([switch], base.clone())
        inputs, outputs = (*signature.inputs, switch.spec), (*signature.outputs, *switch.shape_specs)
        self._runtime: Runtime = open_fp32_graph(model, inputs, outputs, scratch, arena=True)
        self._names = [spec.name for spec in signature.outputs]
        self._unrounded: dict[int, Feeds] = {}

    def drifts(self, bf16: Bf16, samples: Sequence[int] | None = None) -> list[Drifts]:
        """Return the drift of each sample, of all or of those numbered, from the reference if ``bf16`` is rounded."""
        switched = positions(self._switch.sites, bf16)
        chosen = range(len(self._expected.feeds)) if samples is None else samples
        answers = self._expected.outputs
        return [self._measure(i, answers[i], self._run(i, switched), self._signature.outputs) for i in chosen]

    def error(self, bf16: Bf16, sample: int, outputs: Collection[str]) -> float:
        """Return the largest error of ``outputs`` on one sample, as these roundings alone cause it.

        It is measured from the graph's own outputs, so that fp32 noise is not attributed to a rounding. Nodes read
        weights as they are stored, so that the error of rounding a weight is attributed to the weight.
        """
        switched = positions(self._switch.sites, bf16, reading_weights=False)
        # Top-1 agreement would be measured too, and cost more than the rest.
        specs = [replace(spec, kind="other") for spec in self._signature.outputs if spec.name in outputs]
        if sample not in self._unrounded:
            self._unrounded[sample] = self._run(sample, np.zeros_like(switched))
        return largest_error(self._measure(sample, self._unrounded[sample], self._run(sample, switched), specs))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each node's result when the first sample is run, by node name."""
        names = list(self._switch.shapes.values())
        switched = np.zeros(len(self._switch.sites), np.bool_)
        found = self._runtime.run({**self._expected.feeds[0], self._switch.input: switched}, names)
        return {node: tuple(int(n) for n in found[name]) for node, name in self._switch.shapes.items()}

    def close(self) -> None:
        self._runtime.close()

    def _measure(self, index: int, expected: Feeds, actual: Feeds, outputs: Sequence[TensorSpec]) -> Drifts:
        given = 1 if index < self._expected.given else 0
        axis, scales = self._signature.batch_axis, self._expected.scales
        (found,) = measure.drifts([expected], [actual], outputs, axis, scales, given)
        return found

    def _run(self, index: int, switched: Array) -> Feeds:
        if self.deadline.expired():
            raise OutOfTime
        return self._runtime.run({**self._expected.feeds[index], self._switch.input: switched}, self._names)


def reference_outputs(model: ir.Model, signature: Signature, feeds: Sequence[Feeds], scratch: Path | None) -> Spool:
    """Return the outputs of the fp32 graph ``model`` for ``feeds``, kept in an unnamed file in ``scratch``."""
    runtime = open_fp32_graph(model, signature.inputs, signature.outputs, scratch)
    outputs = Spool(scratch, measure.run_all(runtime, feeds))
    runtime.close()
    return outputs


def largest_error(one: Drifts, outputs: Collection[str] | None = None) -> float:
    """Return the largest :func:`~converter.verify.measure.error_of` an output of one feed, of all or of ``outputs``."""
    chosen = one.keys() if outputs is None else outputs
    return max(measure.error_of(DriftSummary.joined([one[name]])) for name in chosen)


def typical(drifts: Sequence[Drifts]) -> tuple[int, ...]:
    """Return the numbers of up to :data:`MAX_SAMPLES` samples, evenly spaced from the smallest drift to the largest."""
    if len(drifts) <= MAX_SAMPLES:
        return tuple(range(len(drifts)))
    errors = [largest_error(one) for one in drifts]
    order = sorted(range(len(errors)), key=lambda i: (errors[i], i))
    return tuple(sorted(order[round(step * (len(order) - 1) / (MAX_SAMPLES - 1))] for step in range(MAX_SAMPLES)))
