"""The model in training, as Lightning's trainer uses it: forward with rounded weights, backward straight through."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning
import torch

from bf16kit.messages.errors import ConversionError
from converter.recovery.batches import seed_all
from converter.recovery.gradients import count_gradients
from converter.recovery.settings import Settings
from converter.recovery.teacherbatches import TeacherBatch
from converter.recovery.validation import ValidationLoss
from converter.recovery.weights import TrainedParameter, straight_through
from converter.source import TorchModel

_SMALLEST_SIZE = 1e-3  # the least size of a tensor that scales its steps, so that a tensor of zeros can move
_STATE_KEY = "bf16kit_recovery"


@dataclass
class TrainingFacts:
    """The facts recorded while training; they are stored in the checkpoints.

    ``looks`` are the validation losses by step, from 0 on. ``slower`` is the factor by which the learning rate was
    reduced.
    """

    skipped: int = 0
    loss_first: float = math.nan
    loss_last: float = math.nan
    scale_first: float = 1.0
    computed: str = ""
    updates: int = 0
    updates_lost: int = 0
    biases: int = 0
    loss_before: float = math.nan
    looks: list[tuple[int, float]] = field(default_factory=list)
    slower: float = 1.0


@dataclass
class BestWeights:
    """The best weights so far, in fp32 by first name: those after ``step``, with their validation ``loss``."""

    step: int
    loss: float
    state: dict[str, torch.Tensor]


class StudentModule(lightning.LightningModule):  # type: ignore[misc,unused-ignore]  # lightning may not be installed
    """The module of ``student``, whose parameters are the masters: in fp32, or in bf16 for ``bf16-true``.

    Dropout is off and the statistics of BatchNorm are fixed, because the model is trained as it is served.
    """

    def __init__(
        self,
        student: TorchModel,
        trained: Sequence[TrainedParameter],
        validation_loss: ValidationLoss,
        settings: Settings,
        seed: int,
    ) -> None:
        super().__init__()
        self.student = student.module
        self._names = student.outputs
        self._trained = tuple(trained)
        self._validation_loss = validation_loss
        self._settings = settings
        self._seed = seed
        self.facts = TrainingFacts()
        self.best = BestWeights(0, math.inf, {})
        self.gradients: list[Any] = []
        parameters = dict(self.student.named_parameters(remove_duplicate=False))
        trainable = {entry.names[0] for entry in trained}
        for name, parameter in parameters.items():
            parameter.requires_grad_(any(name == other or parameters[other] is parameter for other in trainable))
        self._before: list[torch.Tensor] = []

    # --- the model ----------------------------------------------------------------------------------------------------

    @property
    def _is_bf16_true(self) -> bool:
        return self._settings.precision == "bf16-true"

    def masters(self) -> list[tuple[TrainedParameter, torch.Tensor]]:
        """Return what is trained, each with its parameter."""
        parameters = dict(self.student.named_parameters(remove_duplicate=False))
        return [(entry, parameters[entry.names[0]]) for entry in self._trained]

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of what is trained, in fp32, by first name."""
        return {entry.names[0]: master.detach().float().clone() for entry, master in self.masters()}

    def load_weights(self, state: dict[str, torch.Tensor]) -> None:
        """Set the parameters to ``state``."""
        with torch.no_grad():
            for entry, master in self.masters():
                master.copy_(state[entry.names[0]])

    def loss(self, batch: TeacherBatch, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the loss of the model as the artifact would hold it; float inputs are cast to ``dtype``, if given."""
        found = {
            name: straight_through(master, None if entry.scale is None else entry.scale.to(master.device))
            for entry, master in self.masters()
            if entry.rounds
            for name in entry.names
        }
        inputs = [tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor for tensor in batch.inputs]
        outputs = dict(zip(self._names, torch.func.functional_call(self.student, found, tuple(inputs)), strict=True))
        return self._validation_loss.teacher.loss(outputs, batch)

    def record_gradients(self, step: int, batch: TeacherBatch, scale: float) -> None:
        """Count the gradients of ``batch`` in fp32; the student must be in fp32."""
        weights = [master for _, master in self.masters()]
        device = weights[0].device.type
        with torch.autocast(device, enabled=False), torch.enable_grad():
            self.gradients += count_gradients(step, scale, self.student, weights, lambda: self.loss(batch))

    # --- what Lightning's trainer calls -------------------------------------------------------------------------------

    def training_step(self, batch: TeacherBatch, _index: int) -> torch.Tensor:
        step = self.global_step
        seed_all(self._seed + step)  # random numbers that a model draws are the same after a resume
        recorder = _DtypeRecorder(self.student) if not self.facts.computed else None
        loss = self.loss(batch, dtype=torch.bfloat16 if self._is_bf16_true else None)
        if recorder is not None:
            self.facts.computed = recorder.finish()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ConversionError(_not_finite(step, f"the loss is {value}", self._settings))
        if step == 0:
            self.facts.loss_first = value
        self.facts.loss_last = value
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW without decay.

        A step is a share of each tensor's own size (its root mean square), as in Adafactor (N. Shazeer and M. Stern
        2018, section 8), because a unit in the last place of bf16 is such a share too.
        """
        groups = [
            {
                "params": [master],
                "lr": 0.0,
                "share": max(_SMALLEST_SIZE, float(master.detach().float().square().mean().sqrt())),
            }
            for _, master in self.masters()
        ]
        return torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0)

    def on_train_batch_start(self, _batch: TeacherBatch, _index: int) -> None:
        rate = self._settings.learning_rate * self.facts.slower * schedule(self.global_step, self._settings.steps)
        for group in self.optimizers(use_pl_optimizer=False).param_groups:
            group["lr"] = rate * group["share"]

    def on_before_optimizer_step(self, _optimizer: torch.optim.Optimizer) -> None:
        """Count the step as skipped if a gradient is not finite; gradients are unscaled here, and torch is about to
        skip it. Without loss scaling, raise ConversionError."""
        gradients = [master.grad for _, master in self.masters() if master.grad is not None]
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            self.facts.skipped += 1
            if self._settings.scaling.kind == "none":
                raise ConversionError(_not_finite(self.global_step, "a gradient is not finite", self._settings))
        elif self._is_bf16_true:
            self._before = [master.detach().clone() for _, master in self.masters()]

    # --- after a step -------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Count what the step changed, and check whether it helped.

        Lightning's hook for a batch's end would be too late: it runs after the callback that stores the checkpoint,
        which must contain all this.
        """
        for was, (_, master) in zip(self._before, self.masters(), strict=False):
            if master.grad is not None:
                moved = master.grad != 0
                self.facts.updates += int(moved.sum())
                self.facts.updates_lost += int((moved & (was == master)).sum())
        self._before = []
        steps, step = self._settings.steps, self.global_step
        if step == steps or step % validation_interval(steps) == 0:
            self._validate(step)

    def _validate(self, step: int) -> None:
        """Keep the weights if they are the best so far; else restore the best ones and halve the learning rate."""
        state = self.state()
        loss = self._validation_loss.loss(state)
        self.facts.looks.append((step, loss))
        if loss < self.best.loss:
            self.best = BestWeights(step, loss, state)
            return
        self.load_weights(self.best.state)
        self.optimizers(use_pl_optimizer=False).state.clear()  # its momentum belongs to the abandoned weights
        self.facts.slower /= 2

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[_STATE_KEY] = {
            "facts": vars(self.facts),
            "kept": vars(self.best),
            "gradients": [entry.model_dump(mode="json") for entry in self.gradients],
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        from bf16kit.artifact.recoveryentries import GradientEntry

        found = checkpoint[_STATE_KEY]
        self.facts = TrainingFacts(**found["facts"])
        device = next(iter(self.student.parameters())).device
        state = {name: tensor.to(device) for name, tensor in found["kept"]["state"].items()}
        self.best = BestWeights(found["kept"]["step"], found["kept"]["loss"], state)
        self.gradients = [GradientEntry(**entry) for entry in found["gradients"]]


def validation_interval(steps: int) -> int:
    """Return the steps between looks. Not those between checkpoints, which may change when training is resumed."""
    return max(1, steps // 10)


def schedule(step: int, steps: int) -> float:
    """Return the share of the learning rate at ``step`` of ``steps``: rising over the first tenth, then linear to 0."""
    warm = max(1, steps // 10)
    return min((step + 1) / warm, (steps - step) / max(1, steps - warm))


class _DtypeRecorder:
    """Records the dtype of the first product's output in a forward pass."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._found = ""
        kinds = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
        self._handles = [part.register_forward_hook(self._hook) for part in module.modules() if isinstance(part, kinds)]

    def _hook(self, _module: torch.nn.Module, _given: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and not self._found:
            self._found = str(output.dtype).removeprefix("torch.")

    def finish(self) -> str:
        for handle in self._handles:
            handle.remove()
        return self._found or "unknown"


def _not_finite(step: int, what: str, settings: Settings) -> str:
    remedies = [f"lower --learning-rate ({settings.learning_rate:g})"]
    if settings.precision == "16-mixed":
        remedies.insert(0, "train with --precision bf16-mixed, whose largest number is that of fp32 (fp16's is 65,504)")
        if settings.scaling.kind == "none" and "gradient" in what:
            remedies.insert(0, "use --loss-scaling dynamic, which skips such steps")
    return f"recovery stopped at step {step + 1} of {settings.steps}: {what}; {', or '.join(remedies)}"
