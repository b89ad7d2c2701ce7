"""The loss of weights as they would be published, always measured on the same few batches.

A recovery uses it to keep the best weights so far, including the original ones. Its batches come from --data. The
batches that judge the recovery choose nothing during training; at its end they only choose between result and start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from converter.recovery.lessons import Lesson, Teacher
from converter.recovery.precision import arithmetic
from converter.recovery.settings import Precision
from converter.recovery.weights import Trained, rounded

BATCHES = 8
State = Mapping[str, torch.Tensor]  # what is trained, in fp32, by each parameter's first name


class Yardstick:
    """Measures the loss on ``lessons``, in the arithmetic of ``precision``, with the fp32 module's own buffers."""

    def __init__(
        self, teacher: Teacher, trained: Sequence[Trained], lessons: Sequence[Lesson], precision: Precision
    ) -> None:
        self.teacher, self.trained, self.lessons = teacher, tuple(trained), tuple(lessons)
        self.precision = precision

    def loss(self, state: State) -> float:
        """Return the mean loss over the lessons; NaN or infinite if the outputs are."""
        held = published(self.trained, state)
        with torch.no_grad():
            losses = [float(self.teacher.loss(self.answers(held, lesson), lesson)) for lesson in self.lessons]
        return sum(losses) / len(losses)

    def answers(self, held: State, lesson: Lesson) -> dict[str, torch.Tensor]:
        """Return the module's outputs, by name, with ``held`` in place of its own parameters."""
        model = self.teacher.model
        inputs = tuple(tensor.clone() for tensor in lesson.inputs)
        with arithmetic(self.precision, inputs[0].device):
            found = torch.func.functional_call(model.module, dict(held), inputs)
        return dict(zip(model.outputs, found, strict=True))


def published(trained: Sequence[Trained], state: State) -> dict[str, torch.Tensor]:
    """Return ``state`` as the artifact would hold it, in fp32, under every name of each parameter."""
    found: dict[str, torch.Tensor] = {}
    for entry in trained:
        value = state[entry.names[0]].float()
        if entry.rounds:
            value = rounded(value, None if entry.scale is None else entry.scale.to(value.device))
        found |= dict.fromkeys(entry.names, value)
    return found
