"""What rounding adds to a layer's outputs on average, taken off its bias before anything is trained.

Where a layer's inputs lie around a value that is far from 0, nearly all that rounding its weights costs is one constant
for each of its channels: (Q − W)·E[x]. Biases stay fp32 and can hold it exactly. The constant is measured, not
computed from weights, so that what earlier layers and the arithmetic add to it is in it as well (M. Nagel et al.,
"Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, section 4.2 and appendix D).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from converter.recovery.lessons import Lesson
from converter.recovery.yardstick import State, Yardstick, published

# By the operation's name, in torch and in aten: which argument its bias is, where it is not called so, and the axis of
# the output that the bias is added along. Operations, not modules: programs of torch.export and TorchScript have none.
_ADDED = {
    "linear": (2, -1),
    "layer_norm": (3, -1),
    "addmm": (0, -1),
    "add": (1, -1),
    "__add__": (1, -1),
    "group_norm": (3, 1),
    "batch_norm": (2, 1),
    "convolution": (2, 1),
} | {f"conv{transposed}{rank}d": (2, 1) for transposed in ("", "_transpose") for rank in (1, 2, 3)}
_See = Callable[[str, torch.Tensor, int], torch.Tensor | None]


def corrected(yardstick: Yardstick, state: State) -> tuple[dict[str, torch.Tensor], int]:
    """``state`` with biases by which each layer's rounded outputs have fp32's mean, and how many biases these are.

    Layers in the order in which they run, each with those before it corrected. One pass over the yardstick's lessons;
    a bias takes the mean of what each of them calls for. Moved are biases of one dimension that stay fp32.
    """
    own = [entry.names[0] for entry in yardstick.trained if not entry.rounds and state[entry.names[0]].ndim == 1]
    found, seen = dict(state), set[str]()
    for count, lesson in enumerate(yardstick.lessons, 1):
        wanted = _means(yardstick, own, lesson)
        seen |= wanted.keys()
        _correct(yardstick, found, lesson, wanted, count)
    return found, len(seen)


def _correct(
    yardstick: Yardstick,
    state: dict[str, torch.Tensor],
    lesson: Lesson,
    wanted: dict[str, list[torch.Tensor]],
    count: int,
) -> None:
    """Move the biases in ``state`` by their share of what ``lesson``, the ``count``-th, calls for."""
    calls = {name: len(means) for name, means in wanted.items()}

    def mend(name: str, output: torch.Tensor, axis: int) -> torch.Tensor | None:
        if not wanted[name]:  # rounded, the module runs a layer more often than in fp32
            return None
        missing = wanted[name].pop(0) - _mean(output, axis)
        missing = torch.where(torch.isfinite(missing), missing, 0.0)
        state[name] = (state[name].double() + missing / (count * calls[name])).float()
        shape = [1] * output.ndim
        shape[axis] = -1
        return output + missing.reshape(shape).to(output.dtype)

    held = published(yardstick.trained, state)
    with torch.no_grad(), _Layers({name: held[name] for name in wanted}, mend):
        yardstick.answers(held, lesson)


def _means(yardstick: Yardstick, names: Sequence[str], lesson: Lesson) -> dict[str, list[torch.Tensor]]:
    """What fp32 gives on average in the channels behind each bias, fp64, every time that it is added."""
    found: dict[str, list[torch.Tensor]] = {}
    module = yardstick.teacher.model.module
    biases = {name: module.get_parameter(name) for name in names}

    def see(name: str, output: torch.Tensor, axis: int) -> None:
        found.setdefault(name, []).append(_mean(output, axis))

    with torch.no_grad(), torch.autocast(lesson.inputs[0].device.type, enabled=False), _Layers(biases, see):
        module(*(tensor.clone() for tensor in lesson.inputs))
    return found


def _mean(output: torch.Tensor, axis: int) -> torch.Tensor:
    """[channels] of [..., channels, ...], fp64."""
    return output.detach().double().movedim(axis, -1).flatten(0, -2).mean(0)


class _Layers(TorchFunctionMode):
    """Within it, ``see`` is given what every operation gives that adds one of ``biases``, and may give another."""

    def __init__(self, biases: Mapping[str, torch.Tensor], see: _See) -> None:
        super().__init__()
        self._names = {id(bias): name for name, bias in biases.items()}
        self._sizes = {name: len(bias) for name, bias in biases.items()}
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        place, axis = _ADDED.get(getattr(func, "__name__", "").partition(".")[0], (None, 0))  # aten's: linear.default
        if place is None or not isinstance(output, torch.Tensor) or output.ndim < 2:
            return output
        bias = (kwargs or {}).get("bias", args[place] if place < len(args) else None)
        name = self._names.get(id(bias))
        if name is None or output.shape[axis] != self._sizes[name]:  # one number for all channels is no channel's own
            return output
        mended = self._see(name, output, axis)
        return output if mended is None else mended
