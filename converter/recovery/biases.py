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

from converter.recovery.teacherbatches import TeacherBatch
from converter.recovery.validation import State, ValidationLoss, as_published

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
_OnOutput = Callable[[str, torch.Tensor, int], torch.Tensor | None]


def correct_biases(validation_loss: ValidationLoss, state: State) -> tuple[dict[str, torch.Tensor], int]:
    """Return ``state`` with biases that give each layer's rounded outputs fp32's mean, and how many were corrected.

    Layers are corrected in the order in which they run, each after those before it. This takes one pass over the
    batches of ``validation_loss``; a bias moves by the mean of the batches' corrections. Only biases of one dimension
    that stay fp32 are moved.
    """
    own = [entry.names[0] for entry in validation_loss.trained if not entry.rounds and state[entry.names[0]].ndim == 1]
    found, seen = dict(state), set[str]()
    for count, batch in enumerate(validation_loss.batches, 1):
        target_means = _means(validation_loss, own, batch)
        seen |= target_means.keys()
        _correct(validation_loss, found, batch, target_means, count)
    return found, len(seen)


def _correct(
    validation_loss: ValidationLoss,
    state: dict[str, torch.Tensor],
    batch: TeacherBatch,
    target_means: dict[str, list[torch.Tensor]],
    count: int,
) -> None:
    """Move the biases in ``state`` by their share of the correction from ``batch``, the ``count``-th."""
    calls = {name: len(means) for name, means in target_means.items()}

    def correct_bias(name: str, output: torch.Tensor, axis: int) -> torch.Tensor | None:
        if not target_means[name]:  # rounded, the module may run a layer more often than in fp32
            return None
        missing = target_means[name].pop(0) - _mean(output, axis)
        missing = torch.where(torch.isfinite(missing), missing, 0.0)
        state[name] = (state[name].double() + missing / (count * calls[name])).float()
        shape = [1] * output.ndim
        shape[axis] = -1
        return output + missing.reshape(shape).to(output.dtype)

    published = as_published(validation_loss.trained, state)
    with torch.no_grad(), _BiasOutputs({name: published[name] for name in target_means}, correct_bias):
        validation_loss.outputs(published, batch)


def _means(validation_loss: ValidationLoss, names: Sequence[str], batch: TeacherBatch) -> dict[str, list[torch.Tensor]]:
    """Return the fp32 means, in fp64, of the channels to which each bias is added: one tensor per addition."""
    found: dict[str, list[torch.Tensor]] = {}
    module = validation_loss.teacher.model.module
    biases = {name: module.get_parameter(name) for name in names}

    def record_mean(name: str, output: torch.Tensor, axis: int) -> None:
        found.setdefault(name, []).append(_mean(output, axis))

    with torch.no_grad(), torch.autocast(batch.inputs[0].device.type, enabled=False), _BiasOutputs(biases, record_mean):
        module(*(tensor.clone() for tensor in batch.inputs))
    return found


def _mean(output: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the mean per channel, [channels] of [..., channels, ...], in fp64."""
    return output.detach().double().movedim(axis, -1).flatten(0, -2).mean(0)


class _BiasOutputs(TorchFunctionMode):
    """While active, passes the output of each operation that adds one of ``biases`` to ``on_output``, which may replace
    it."""

    def __init__(self, biases: Mapping[str, torch.Tensor], on_output: _OnOutput) -> None:
        super().__init__()
        self._names = {id(bias): name for name, bias in biases.items()}
        self._sizes = {name: len(bias) for name, bias in biases.items()}
        self._on_output = on_output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        index, axis = _ADDED.get(getattr(func, "__name__", "").partition(".")[0], (None, 0))  # aten's: linear.default
        if index is None or not isinstance(output, torch.Tensor) or output.ndim < 2:
            return output
        bias = (kwargs or {}).get("bias", args[index] if index < len(args) else None)
        name = self._names.get(id(bias))
        if name is None or output.shape[axis] != self._sizes[name]:  # a bias shared by all channels has another size
            return output
        replaced = self._on_output(name, output, axis)
        return output if replaced is None else replaced
