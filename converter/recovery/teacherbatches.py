"""Batches with their fp32 outputs, and the loss of other outputs for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bf16kit.messages.errors import UsageError
from bf16kit.numerics.tensors import TensorSpec
from converter.recovery.batches import Batch, check_labels
from converter.recovery.loss import cross_entropy, distillation, logits_of
from converter.recovery.settings import Loss
from converter.source import TorchModel


class TeacherBatch:
    """A batch on its device with its fp32 outputs. Lightning leaves an object of this class alone: no move, no cast."""

    __slots__ = ("inputs", "labels", "reference")

    def __init__(
        self, inputs: Sequence[torch.Tensor], reference: Mapping[str, torch.Tensor], labels: torch.Tensor | None
    ) -> None:
        self.inputs, self.reference, self.labels = tuple(inputs), dict(reference), labels


class Teacher:
    """The fp32 module, which computes the reference outputs of every batch before training uses it."""

    def __init__(self, model: TorchModel, outputs: Sequence[TensorSpec], loss: Loss, device: torch.device) -> None:
        self.model = model
        self._loss, self._device = loss, device
        self._logits = logits_of(outputs)
        if device.type != "cpu":
            model.module.to(device)

    def compute(self, batch: Batch) -> TeacherBatch:
        """Return ``batch`` with its fp32 outputs; raise :class:`UsageError` if nothing can be learnt from them."""
        inputs = [torch.from_numpy(batch.feeds[spec.name].copy()).to(self._device) for spec in self.model.inputs]
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            computed = self.model.module(*(tensor.clone() for tensor in inputs))
        reference = dict(zip(self.model.outputs, computed, strict=True))
        if self._loss == "distillation":
            _check_outputs(batch, reference)
            labels = None
        else:
            labels = self._labels(batch, reference).to(self._device)
        return TeacherBatch(inputs, reference, labels)

    def _labels(self, batch: Batch, reference: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if self._logits is None:
            raise UsageError(
                f"--loss cross-entropy: needs one output of logits, and the model's are {', '.join(reference)}; say"
                " which it is with --output NAME:logits"
            )
        if batch.labels is None:
            raise UsageError(
                "--loss cross-entropy: --data gives no labels; let it yield (inputs, labels), or use --loss"
                " distillation, which needs none"
            )
        check_labels(batch, self._logits, reference[self._logits].shape)
        return torch.from_numpy(batch.labels)

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: TeacherBatch) -> torch.Tensor:
        """Return the loss of ``outputs`` for ``batch``."""
        if batch.labels is None:
            return distillation(outputs, batch.reference, len(batch.inputs[0]))
        assert self._logits is not None  # noqa: S101 - without logits it would have no labels
        return cross_entropy(outputs[self._logits], batch.labels)


def _check_outputs(batch: Batch, reference: Mapping[str, torch.Tensor]) -> None:
    """Reject outputs with NaN or without a finite value. Some infinite values may be intended: masked logits."""
    for name, output in reference.items():
        if not output.is_floating_point():
            continue
        nans = int(torch.isnan(output).sum())
        if nans:
            raise UsageError(
                f"{batch.location}: the fp32 model gives NaN in {nans} of {output.numel()} elements of output {name!r},"
                " so there is nothing to learn; leave out the batch, or check its values"
            )
        if not bool(torch.isfinite(output).any()):
            raise UsageError(
                f"{batch.location}: the fp32 model gives no finite value in output {name!r}; leave out the batch, or"
                " check its values"
            )
