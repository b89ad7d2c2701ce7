"""Answers against the fp32 reference's, held against the budget: once for golden samples, then live for the shadow."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from bf16kit.drift import Breach, Budget, DriftSummary, SampleDrift, measure
from bf16kit.errors import ArtifactError
from bf16kit.tensors import TensorSpec
from service.contract import Array

WINDOW = 256  # the newest samples of each output, which the budget ratio is taken over


class DriftObserver(Protocol):
    """Told the drift of every sample (row) of every output, and how recent drift compares to the budget."""

    def drift(self, output: str, sample: SampleDrift) -> None: ...
    def budget_ratio(self, output: str, metric: str, ratio: float) -> None: ...


class Comparison:
    """Live drift of one model: each sample as it comes, and the newest :data:`WINDOW` together. For one thread."""

    def __init__(self, outputs: Sequence[TensorSpec], batch_axis: int | None, budget: Budget) -> None:
        self._outputs = outputs
        self._batch_axis = batch_axis
        self._budget = budget
        self._recent: dict[str, deque[SampleDrift]] = {spec.name: deque(maxlen=WINDOW) for spec in outputs}

    def observe(self, expected: Mapping[str, Array], answered: Mapping[str, Array], observer: DriftObserver) -> None:
        """Compare one request's outputs; those that were not asked for are passed over.

        Raises ArtifactError for a reference that answers without rows.
        """
        for spec in self._outputs:
            if spec.name not in answered:
                continue
            samples = measure(expected[spec.name], answered[spec.name], spec, self._batch_axis)
            if not samples:
                raise ArtifactError(f"the fp32 reference's output {spec.name!r} has no rows")
            for sample in samples:
                observer.drift(spec.name, sample)
            recent = self._recent[spec.name]
            recent.extend(samples)
            self._tell_ratios(spec.name, DriftSummary.of(recent), observer)

    def _tell_ratios(self, output: str, summary: DriftSummary, observer: DriftObserver) -> None:
        for metric in self._budget.as_dict():
            measured = summary.judged(metric)
            if measured is not None:
                observer.budget_ratio(output, metric, self._budget.ratio(metric, measured))


def judge(
    expected: Mapping[str, Array],
    answered: Mapping[str, Array],
    specs: Sequence[TensorSpec],
    batch_axis: int | None,
    budget: Budget,
) -> tuple[list[Breach], str]:
    """Every breach of the budget, and the drift of each output in words.

    Raises ArtifactError for an output that is not expected, or not in that shape.
    """
    breaches: list[Breach] = []
    words: list[str] = []
    for spec in specs:
        if spec.name not in expected:
            raise ArtifactError(f"the golden samples hold no output {spec.name!r}; convert the checkpoint again")
        theirs, ours = expected[spec.name], answered[spec.name]
        if theirs.shape != ours.shape:
            raise ArtifactError(
                f"the golden samples' output {spec.name!r} has shape {list(theirs.shape)}, and the model gives"
                f" {list(ours.shape)}; convert the checkpoint again"
            )
        summary = DriftSummary.of(measure(theirs, ours, spec, batch_axis))
        breaches += budget.breaches(spec.name, summary)
        words.append(f"{spec.name} relative_l2 {summary.judged('relative_l2'):.2g}")
    return breaches, ", ".join(words)


def sample_of(arrays: Mapping[str, Array], rows: int, batch_axis: int | None) -> dict[str, Array]:
    """The first ``rows`` rows of each array, as views; all of it without a batch axis."""
    if batch_axis is None:
        return dict(arrays)
    window = (slice(None),) * batch_axis + (slice(0, rows),)
    return {name: array[window] for name, array in arrays.items()}


def size_of(arrays: Mapping[str, Array]) -> int:
    """The bytes that a copy of ``arrays`` holds; a string counts its characters."""
    return sum(
        array.nbytes + (sum(map(len, array.flat)) if array.dtype == np.object_ else 0) for array in arrays.values()
    )


def copies(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The same arrays, C-contiguous, in memory of their own: a view would keep the whole message or batch alive."""
    return {name: np.array(array, order="C") for name, array in arrays.items()}
