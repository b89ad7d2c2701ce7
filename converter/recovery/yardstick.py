"""The loss of weights as they would be published, on the same few batches whenever it is asked.

By it a recovery keeps the best weights that it has seen, those that it began with among them. Its batches are of
--data: what a recovery is judged on chooses nothing on the way, and at its end between the result and the beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from converter.recovery.lessons import Lesson, Teacher
from converter.recovery.precision import arithmetic
from converter.recovery.settings import Precision
from converter.recovery.weights import Trained, rounded

BATCHES = 8
State = Mapping[str, torch.Tensor]  # what is trained, fp32, by the first name of each


class Yardstick:
    """Measures on ``lessons``, in the arithmetic of ``precision``, with the fp32 module's own buffers."""

    def __init__(
        self, teacher: Teacher, trained: Sequence[Trained], lessons: Sequence[Lesson], precision: Precision
    ) -> None:
        self.teacher, self.trained, self.lessons = teacher, tuple(trained), tuple(lessons)
        self.precision = precision

    def loss(self, state: State) -> float:
        """The mean over the lessons; NaN or infinite where weights answer so."""
        held = published(self.trained, state)
        with torch.no_grad():
            losses = [float(self.teacher.loss(self.answers(held, lesson), lesson)) for lesson in self.lessons]
        return sum(losses) / len(losses)

    def answers(self, held: State, lesson: Lesson) -> dict[str, torch.Tensor]:
        """What the module answers with ``held`` in place of its own parameters, by output."""
        model = self.teacher.model
        inputs = tuple(tensor.clone() for tensor in lesson.inputs)
        with arithmetic(self.precision, inputs[0].device):
            found = torch.func.functional_call(model.module, dict(held), inputs)
        return dict(zip(model.outputs, found, strict=True))


def published(trained: Sequence[Trained], state: State) -> dict[str, torch.Tensor]:
    """``state`` as the artifact would hold it, in fp32, under every name of each parameter."""
    found: dict[str, torch.Tensor] = {}
    for entry in trained:
        value = state[entry.names[0]].float()
        if entry.rounds:
            value = rounded(value, None if entry.scale is None else entry.scale.to(value.device))
        found |= dict.fromkeys(entry.names, value)
    return found
