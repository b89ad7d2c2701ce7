"""The loss of weights as they would be published, always measured on the same few batches.

A recovery uses it to keep the best weights so far, including the original ones. Its batches come from --data. The
batches that judge the recovery choose nothing during training; at its end they only choose between result and start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from converter.recovery.precision import arithmetic
from converter.recovery.settings import Precision
from converter.recovery.teacherbatches import Teacher, TeacherBatch
from converter.recovery.weights import TrainedParameter, rounded

BATCHES = 8
State = Mapping[str, torch.Tensor]  # what is trained, in fp32, by each parameter's first name


class ValidationLoss:
    """Measures the loss on ``batches``, in the arithmetic of ``precision``, with the fp32 module's own buffers."""

    def __init__(
        self,
        teacher: Teacher,
        trained: Sequence[TrainedParameter],
        batches: Sequence[TeacherBatch],
        precision: Precision,
    ) -> None:
        self.teacher, self.trained, self.batches = teacher, tuple(trained), tuple(batches)
        self.precision = precision

    def loss(self, state: State) -> float:
        """Return the mean loss over the batches; NaN or infinite if the outputs are."""
        published = as_published(self.trained, state)
        with torch.no_grad():
            losses = [float(self.teacher.loss(self.outputs(published, batch), batch)) for batch in self.batches]
        return sum(losses) / len(losses)

    def outputs(self, published: State, batch: TeacherBatch) -> dict[str, torch.Tensor]:
        """Return the module's outputs, by name, with ``published`` in place of its own parameters."""
        model = self.teacher.model
        inputs = tuple(tensor.clone() for tensor in batch.inputs)
        with arithmetic(self.precision, inputs[0].device):
            found = torch.func.functional_call(model.module, dict(published), inputs)
        return dict(zip(model.outputs, found, strict=True))


def as_published(trained: Sequence[TrainedParameter], state: State) -> dict[str, torch.Tensor]:
    """Return ``state`` as the artifact would hold it, in fp32, under every name of each parameter."""
    found: dict[str, torch.Tensor] = {}
    for entry in trained:
        value = state[entry.names[0]].float()
        if entry.rounds:
            value = rounded(value, None if entry.scale is None else entry.scale.to(value.device))
        found |= dict.fromkeys(entry.names, value)
    return found
