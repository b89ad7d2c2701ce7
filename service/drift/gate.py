"""The golden gate: what a runtime answers to the artifact's golden samples, held against the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bf16kit.drift import Breach, Budget, DriftSummary, measure
from bf16kit.errors import ArtifactError
from bf16kit.tensors import TensorSpec
from service.contract import Array


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
