"""Corrects biases before training: subtracts the mean of what rounding adds to each layer's outputs.

If the mean of a layer's inputs is far from 0, rounding its weights costs almost only one constant per channel,
(Q − W)·E[x]. Biases stay fp32 and can hold it exactly. The constant is measured, not computed from weights, so that it
includes what earlier layers and the arithmetic add (M. Nagel et al., "Data-Free Quantization Through Weight
Equalization and Bias Correction", ICCV 2019, section 4.2 and appendix D).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from converter.recovery.lessons import Lesson
from converter.recovery.yardstick import State, Yardstick, published

# By the operation's name in torch and aten: the position of the bias among the arguments, unless it is passed by
# keyword, and the axis of the output along which it is added. Operations, not modules: programs of torch.export and
# TorchScript have no modules.
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
    """Return ``state`` with biases that give each layer's rounded outputs fp32's mean, and how many were corrected.

    Layers are corrected in the order in which they run, each after those before it. This takes one pass over the
    yardstick's lessons; a bias moves by the mean of the lessons' corrections. Only biases of one dimension that stay
    fp32 are moved.
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
    """Move the biases in ``state`` by their share of the correction from ``lesson``, the ``count``-th."""
    calls = {name: len(means) for name, means in wanted.items()}

    def mend(name: str, output: torch.Tensor, axis: int) -> torch.Tensor | None:
        if not wanted[name]:  # rounded, the module may run a layer more often than in fp32
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
    """Return the fp32 means, in fp64, of the channels to which each bias is added: one tensor per addition."""
    found: dict[str, list[torch.Tensor]] = {}
    module = yardstick.teacher.model.module
    biases = {name: module.get_parameter(name) for name in names}

    def see(name: str, output: torch.Tensor, axis: int) -> None:
        found.setdefault(name, []).append(_mean(output, axis))

    with torch.no_grad(), torch.autocast(lesson.inputs[0].device.type, enabled=False), _Layers(biases, see):
        module(*(tensor.clone() for tensor in lesson.inputs))
    return found


def _mean(output: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the mean per channel, [channels] of [..., channels, ...], in fp64."""
    return output.detach().double().movedim(axis, -1).flatten(0, -2).mean(0)


class _Layers(TorchFunctionMode):
    """While active, passes the output of each operation that adds one of ``biases`` to ``see``, which may replace
    it."""

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
        if name is None or output.shape[axis] != self._sizes[name]:  # a bias shared by all channels has another size
            return output
        mended = self._see(name, output, axis)
        return output if mended is None else mended
