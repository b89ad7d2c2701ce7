"""The model in training, as Lightning's trainer knows it: forward with rounded weights, backward straight through."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning
import torch

from bf16kit.errors import ConversionError, UsageError
from bf16kit.tensors import TensorSpec
from converter.model import TorchModel
from converter.recovery.batches import Batch, seed_all
from converter.recovery.gradients import survey
from converter.recovery.loss import cross_entropy, distillation, logits_of
from converter.recovery.settings import Settings
from converter.recovery.weights import Trained, straight_through

_SMALLEST_SIZE = 1e-3  # of a tensor, by which its steps are measured: one of zeros must be able to leave them
_FACTS = "bf16kit_recovery"


class Lesson:
    """A batch on its device with what fp32 answers to it. Lightning leaves it alone: neither moved nor cast."""

    __slots__ = ("inputs", "labels", "reference")

    def __init__(
        self, inputs: Sequence[torch.Tensor], reference: Mapping[str, torch.Tensor], labels: torch.Tensor | None
    ) -> None:
        self.inputs, self.reference, self.labels = tuple(inputs), dict(reference), labels


@dataclass
class Facts:
    """What is seen while training; it travels in the checkpoints."""

    skipped: int = 0
    loss_first: float = math.nan
    loss_last: float = math.nan
    scale_first: float = 1.0
    computed: str = ""
    updates: int = 0
    updates_lost: int = 0


class Teacher:
    """The fp32 module, which answers every batch before it is learnt from."""

    def __init__(self, model: TorchModel, where: torch.device) -> None:
        self._model, self._where = model, where
        if where.type != "cpu":
            model.module.to(where)

    def lesson(self, batch: Batch) -> Lesson:
        inputs = [torch.from_numpy(batch.feeds[spec.name].copy()).to(self._where) for spec in self._model.inputs]
        with torch.no_grad(), torch.autocast(self._where.type, enabled=False):
            answers = self._model.module(*(tensor.clone() for tensor in inputs))
        labels = None if batch.labels is None else torch.from_numpy(batch.labels).to(self._where)
        return Lesson(inputs, dict(zip(self._model.outputs, answers, strict=True)), labels)


class Trainee(lightning.LightningModule):  # type: ignore[misc,unused-ignore]  # lightning may not be installed
    """``student`` with its masters: parameters in fp32, or in bf16 for ``bf16-true``.

    Dropout is off and the statistics of BatchNorm stand still: what is trained is the model as it is served.
    """

    def __init__(
        self,
        student: TorchModel,
        trained: Sequence[Trained],
        outputs: Sequence[TensorSpec],
        settings: Settings,
        seed: int,
    ) -> None:
        super().__init__()
        self.student = student.module
        self._names = student.outputs
        self._trained = tuple(trained)
        self._settings = settings
        self._logits = logits_of(outputs)
        self._seed = seed
        self.facts = Facts()
        self.gradients: list[Any] = []
        parameters = dict(self.student.named_parameters(remove_duplicate=False))
        learnt = {entry.names[0] for entry in trained}
        for name, parameter in parameters.items():
            parameter.requires_grad_(any(name == other or parameters[other] is parameter for other in learnt))
        self._before: list[torch.Tensor] = []

    # --- the model ----------------------------------------------------------------------------------------------------

    @property
    def _true(self) -> bool:
        return self._settings.precision == "bf16-true"

    def masters(self) -> list[tuple[Trained, torch.Tensor]]:
        """What is trained, each with its parameter."""
        parameters = dict(self.student.named_parameters(remove_duplicate=False))
        return [(entry, parameters[entry.names[0]]) for entry in self._trained]

    def loss(self, lesson: Lesson, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The loss of the model as the artifact would hold it; ``dtype`` is that of floating inputs, None: as given."""
        found = {
            name: straight_through(master, None if entry.scale is None else entry.scale.to(master.device))
            for entry, master in self.masters()
            if entry.rounds
            for name in entry.names
        }
        inputs = [tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor for tensor in lesson.inputs]
        answers = dict(zip(self._names, torch.func.functional_call(self.student, found, tuple(inputs)), strict=True))
        if self._settings.loss == "distillation":
            return distillation(answers, lesson.reference, len(lesson.inputs[0]))
        return _labelled(answers, self._logits, lesson)

    def take_survey(self, step: int, lesson: Lesson, scale: float) -> None:
        """Look at the gradients of ``lesson`` in fp32, in which the student has to be."""
        weights = [master for _, master in self.masters()]
        where = weights[0].device.type
        with torch.autocast(where, enabled=False), torch.enable_grad():
            self.gradients += survey(step, scale, self.student, weights, lambda: self.loss(lesson))

    # --- what Lightning's trainer calls -------------------------------------------------------------------------------

    def training_step(self, lesson: Lesson, _index: int) -> torch.Tensor:
        step = self.global_step
        seed_all(self._seed + step)  # a model that draws random numbers draws these again when it is resumed
        watch = _Computed(self.student) if not self.facts.computed else None
        loss = self.loss(lesson, dtype=torch.bfloat16 if self._true else None)
        if watch is not None:
            self.facts.computed = watch.seen()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ConversionError(_not_finite(step, f"the loss is {value}", self._settings))
        if step == 0:
            self.facts.loss_first = value
        self.facts.loss_last = value
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW without decay. A step is a share of each tensor's own size (its root mean square), as in Adafactor
        (N. Shazeer and M. Stern 2018, section 8): a unit in the last place of bf16 is such a share, too."""
        groups = [
            {
                "params": [master],
                "lr": 0.0,
                "share": max(_SMALLEST_SIZE, float(master.detach().float().square().mean().sqrt())),
            }
            for _, master in self.masters()
        ]
        return torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0)

    def on_train_batch_start(self, _lesson: Lesson, _index: int) -> None:
        rate = self._settings.learning_rate * schedule(self.global_step, self._settings.steps)
        for group in self.optimizers(use_pl_optimizer=False).param_groups:
            group["lr"] = rate * group["share"]

    def on_before_optimizer_step(self, _optimizer: torch.optim.Optimizer) -> None:
        """Here gradients are divided by the scale already, and torch is about to leave the step out if one of them is
        not finite."""
        gradients = [master.grad for _, master in self.masters() if master.grad is not None]
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            self.facts.skipped += 1
            if self._settings.scaling.kind == "none":
                raise ConversionError(_not_finite(self.global_step, "a gradient is not finite", self._settings))
        elif self._true:
            self._before = [master.detach().clone() for _, master in self.masters()]

    def on_train_batch_end(self, *_ended: Any) -> None:
        for was, (_, master) in zip(self._before, self.masters(), strict=False):
            if master.grad is not None:
                moved = master.grad != 0
                self.facts.updates += int(moved.sum())
                self.facts.updates_lost += int((moved & (was == master)).sum())
        self._before = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[_FACTS] = {
            "facts": vars(self.facts),
            "gradients": [entry.model_dump(mode="json") for entry in self.gradients],
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        from bf16kit.recovery import GradientEntry

        self.facts = Facts(**checkpoint[_FACTS]["facts"])
        self.gradients = [GradientEntry(**entry) for entry in checkpoint[_FACTS]["gradients"]]


def schedule(step: int, steps: int) -> float:
    """The share of the learning rate at ``step`` of ``steps``: up over the first tenth, then down in a line to 0."""
    warm = max(1, steps // 10)
    return min((step + 1) / warm, (steps - step) / max(1, steps - warm))


class _Computed:
    """The dtype of what the first product of a forward pass gives."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._found = ""
        kinds = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
        self._handles = [part.register_forward_hook(self._hook) for part in module.modules() if isinstance(part, kinds)]

    def _hook(self, _module: torch.nn.Module, _given: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and not self._found:
            self._found = str(output.dtype).removeprefix("torch.")

    def seen(self) -> str:
        for handle in self._handles:
            handle.remove()
        return self._found or "unknown"


def _labelled(answers: Mapping[str, torch.Tensor], logits: str | None, lesson: Lesson) -> torch.Tensor:
    if logits is None:
        raise UsageError(
            f"--loss cross-entropy: needs one output of logits, and the model's are {', '.join(answers)}; say which it"
            " is with --output NAME:logits"
        )
    if lesson.labels is None:
        raise UsageError(
            "--loss cross-entropy: --data gives no labels; let it yield (inputs, labels), or use --loss distillation,"
            " which needs none"
        )
    if lesson.labels.shape != answers[logits].shape[:-1]:
        raise UsageError(
            f"--loss cross-entropy: labels have the shape {list(lesson.labels.shape)}, and output {logits!r} the shape"
            f" {list(answers[logits].shape)}: expected {list(answers[logits].shape[:-1])}"
        )
    return cross_entropy(answers[logits], lesson.labels)


def _not_finite(step: int, what: str, settings: Settings) -> str:
    remedies = [f"lower --learning-rate ({settings.learning_rate:g})"]
    if settings.precision == "16-mixed":
        remedies.insert(0, "train with --precision bf16-mixed, whose largest number is fp32's (fp16 ends at 65,504)")
        if settings.scaling.kind == "none" and "gradient" in what:
            remedies.insert(0, "let --loss-scaling dynamic leave such steps out")
    return f"recovery stopped at step {step + 1} of {settings.steps}: {what}; {', or '.join(remedies)}"
