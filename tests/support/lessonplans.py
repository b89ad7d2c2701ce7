"""Torch modules prepared for the steps of a recovery before and beside its training, without Lightning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bf16kit.numerics.tensors import TensorSpec
from converter.recovery.batches import Batch
from converter.recovery.settings import Loss, Precision
from converter.recovery.teacherbatches import Teacher
from converter.recovery.validation import ValidationLoss
from converter.recovery.weights import TrainedParameter
from converter.source import TorchModel


class Outputs(nn.Module):
    """``inner`` with its outputs as a tuple, like the converter's models."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.inner(*inputs)
        return tuple(found.values()) if isinstance(found, dict) else (found,)


def trained(module: nn.Module) -> tuple[TrainedParameter, ...]:
    """Return all parameters of ``module``; those of two or more dimensions are rounded."""
    names: dict[int, list[str]] = {}
    parameters = dict(Outputs(module).named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    return tuple(
        TrainedParameter(tuple(found), tuple(found), parameters[found[0]].ndim > 1) for found in names.values()
    )


def teacher(module: nn.Module, names: Sequence[str] = ("y",), loss: Loss = "distillation", rank: int = 2) -> Teacher:
    """Return a teacher of ``module``. The inputs are called a, b, …, and the last output is logits."""
    inputs = tuple(TensorSpec(name, "float32", ("batch",) + ("n",) * (rank - 1)) for name in "abc"[: _arity(module)])
    outputs = [
        TensorSpec(name, "float32", ("batch", "n"), "logits" if name == names[-1] else "other") for name in names
    ]
    model = TorchModel(Outputs(module).eval(), inputs, tuple(names), ())
    return Teacher(model, outputs, loss, torch.device("cpu"))


def _arity(module: nn.Module) -> int:
    return module.forward.__code__.co_argcount - 1


def yardstick(
    of: Teacher,
    batches: Sequence[Sequence[torch.Tensor]],
    held: Sequence[TrainedParameter],
    precision: Precision = "32-true",
) -> ValidationLoss:
    """Return a yardstick whose lessons are ``batches``, each with one tensor per input."""
    lessons = [
        of.compute(Batch({spec.name: t.numpy() for spec, t in zip(of.model.inputs, batch, strict=True)}))
        for batch in batches
    ]
    return ValidationLoss(of, held, lessons, precision)


def state(of: Teacher, held: Sequence[TrainedParameter]) -> dict[str, torch.Tensor]:
    """Return copies of the module's parameters for ``held``, by first name."""
    parameters = dict(of.model.module.named_parameters(remove_duplicate=False))
    return {entry.names[0]: parameters[entry.names[0]].detach().clone() for entry in held}
