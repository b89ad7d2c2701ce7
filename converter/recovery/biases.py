"""What rounding adds to a layer's outputs on average, taken off its bias before anything is trained.

Where a layer's inputs lie around a value that is far from 0, nearly all that rounding its weights costs is one constant
for each of its channels: (Q − W)·E[x]. Biases stay fp32 and can hold it exactly. The constant is measured, not
computed from weights, so that what earlier layers and the arithmetic add to it is in it as well (M. Nagel et al.,
"Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, section 4.2 and appendix D).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from converter.recovery.lessons import Lesson
from converter.recovery.weights import Trained
from converter.recovery.yardstick import State, Yardstick, published

_LAST = (torch.nn.Linear, torch.nn.LayerNorm)  # channels are the last axis of what they give
_SECOND = (
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.ConvTranspose1d,
    torch.nn.ConvTranspose2d,
    torch.nn.ConvTranspose3d,
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.GroupNorm,
)
_See = Callable[[str, torch.Tensor], torch.Tensor | None]


def corrected(yardstick: Yardstick, state: State) -> tuple[dict[str, torch.Tensor], int]:
    """``state`` with biases by which each layer's rounded outputs have fp32's mean, and how many biases these are.

    Layers in the order in which they run, each with those before it corrected. One pass over the yardstick's lessons;
    a bias takes the mean of what each of them calls for.
    """
    module, found = yardstick.teacher.model.module, dict(state)
    axes = dict(_layers(module, yardstick.trained))
    for count, lesson in enumerate(yardstick.lessons, 1):
        _correct(yardstick, axes, found, lesson, count)
    return found, len(axes)


def _correct(
    yardstick: Yardstick, axes: Mapping[str, int], state: dict[str, torch.Tensor], lesson: Lesson, count: int
) -> None:
    """Move the biases in ``state`` by their share of what ``lesson``, the ``count``-th, calls for."""
    wanted = _means(yardstick, axes, lesson)
    calls = {name: len(means) for name, means in wanted.items()}

    def mend(name: str, output: torch.Tensor) -> torch.Tensor | None:
        if not wanted.get(name):  # rounded, the module runs a layer more often than in fp32
            return None
        axis = axes[name]
        missing = wanted[name].pop(0) - _mean(output, axis)
        missing = torch.where(torch.isfinite(missing), missing, 0.0)
        bias = f"{name}.bias"
        state[bias] = (state[bias].double() + missing / (count * calls[name])).float()
        shape = [1] * output.ndim
        shape[axis] = -1
        return output + missing.reshape(shape).to(output.dtype)

    held = published(yardstick.trained, state)
    with torch.no_grad(), _watched(yardstick.teacher.model.module, axes, mend):
        yardstick.answers(held, lesson)


def _means(yardstick: Yardstick, axes: Mapping[str, int], lesson: Lesson) -> dict[str, list[torch.Tensor]]:
    """What fp32 gives on average in each layer's channels, fp64, at each of the layer's calls."""
    found: dict[str, list[torch.Tensor]] = {}
    module = yardstick.teacher.model.module

    def see(name: str, output: torch.Tensor) -> None:
        found.setdefault(name, []).append(_mean(output, axes[name]))

    with torch.no_grad(), _watched(module, axes, see), torch.autocast(lesson.inputs[0].device.type, enabled=False):
        module(*(tensor.clone() for tensor in lesson.inputs))
    return found


def _mean(output: torch.Tensor, axis: int) -> torch.Tensor:
    """[channels] of [..., channels, ...], fp64."""
    return output.detach().double().movedim(axis, -1).flatten(0, -2).mean(0)


def _layers(module: torch.nn.Module, trained: Sequence[Trained]) -> Iterator[tuple[str, int]]:
    """The layers whose bias is trained, is theirs alone and stays fp32; each with the axis of its channels."""
    own = {entry.names[0] for entry in trained if not entry.rounds and len(entry.names) == 1}
    for name, part in module.named_modules():
        if f"{name}.bias" in own and part.get_parameter("bias").ndim == 1:
            if isinstance(part, _LAST):
                yield name, -1
            elif isinstance(part, _SECOND):
                yield name, 1


@contextmanager
def _watched(module: torch.nn.Module, names: Mapping[str, int], see: _See) -> Iterator[None]:
    """Within it, ``see`` is given each output of the layers ``names``, and may give another in its place."""

    def hook(name: str) -> Callable[[object, object, object], torch.Tensor | None]:
        def seen(_part: object, _given: object, output: object) -> torch.Tensor | None:
            return see(name, output) if isinstance(output, torch.Tensor) and output.ndim > 1 else None

        return seen

    handles = [part.register_forward_hook(hook(name)) for name, part in module.named_modules() if name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
