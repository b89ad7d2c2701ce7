"""The training of a recovery. Teacher and student are the same module: with its own weights in fp32, and with trained
weights that are rounded as the artifact rounds them."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bf16kit.artifact.entries import LookEntry, TrainingEntry
from bf16kit.messages.errors import ConversionError, UsageError
from converter.process.progress import Progress
from converter.process.quiet import first_line
from converter.read.statedict import to_torch
from converter.recovery.batches import Loader
from converter.recovery.checkpoints import Checkpoints
from converter.recovery.settings import Settings
from converter.recovery.trainable import State, TrainedParameter
from converter.source import Feeds, TorchModel

_VALIDATION_BATCHES = 8
_FITTING = 100  # iterations of L-BFGS, at most, and at most half as many as steps of training
_SMALLEST_NORM = 1e-12  # squared: an output of zeros has no relative distance
_SMALLEST_SIZE = 1e-3  # the least size of a tensor that scales its steps, so that a tensor of zeros can move

Outputs = Mapping[str, torch.Tensor]
_Lesson = tuple[Sequence[torch.Tensor], Outputs]  # inputs, and the fp32 outputs for them


class Student:
    """The module of ``model`` with weights for ``trained`` in place of its own.

    Dropout is off and the statistics of BatchNorm are fixed, because the model is trained as it is served.
    """

    def __init__(self, model: TorchModel, trained: Sequence[TrainedParameter], settings: Settings) -> None:
        try:
            self.device = torch.device(settings.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu"))
            self._module = model.module.requires_grad_(requires_grad=False).to(self.device)
        except (RuntimeError, AssertionError) as error:
            raise UsageError(f"--device {settings.device}: {first_line(error)}; pass auto, cpu or cuda:N") from None
        self._model, self.trained = model, tuple(trained)
        self.dtype = {"16-mixed": torch.float16, "32-true": torch.float32}.get(settings.precision, torch.bfloat16)

    def own_weights(self) -> State:
        """Return copies of the module's own values of what is trained."""
        own = dict(self._module.named_parameters(remove_duplicate=False))
        return {entry.names[0]: own[entry.names[0]].float().clone() for entry in self.trained}

    def lesson(self, feeds: Feeds, number: int) -> _Lesson:
        """Return the inputs of batch ``number`` and its fp32 outputs, from which something can be learned."""
        inputs = [to_torch(feeds[spec.name].copy()).to(self.device) for spec in self._model.inputs]
        with torch.no_grad():
            outputs = self._run({}, inputs)
        for name, output in outputs.items():  # some may be infinite: masked logits
            if output.isnan().any() or not output.isfinite().any():
                wrong = "NaN" if output.isnan().any() else "no finite value"
                raise UsageError(
                    f"--data: batch {number}: the fp32 model gives {wrong} in output {name!r}, so there is nothing to"
                    " learn; leave out the batch, or check its values"
                )
        return inputs, outputs

    def loss(self, weights: State, lesson: _Lesson) -> torch.Tensor:
        """Return the loss with ``weights`` as the artifact would hold them."""
        inputs, reference = lesson
        held: dict[str, torch.Tensor] = {}
        for entry in self.trained:
            held |= dict.fromkeys(entry.names, entry.rounded(weights[entry.names[0]].float()))
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return distillation(self._run(held, inputs), reference, len(inputs[0]))

    def _run(self, weights: State, inputs: Sequence[torch.Tensor]) -> Outputs:
        found = torch.func.functional_call(self._module, weights, tuple(tensor.clone() for tensor in inputs))
        return dict(zip(self._model.outputs, found, strict=True))


def distillation(outputs: Outputs, reference: Outputs, rows: int) -> torch.Tensor:
    """Return the mean over outputs and samples of ‖c − r‖² ÷ ‖r‖², the square of the budget's ``relative_l2``.

    A sample is a row of the first axis if every output has ``rows`` of them, else a whole output. Elements that are
    infinite in r, such as masked logits, and integer outputs are left out; UsageError if no output holds floats.
    """
    batched = all(tensor.ndim > 0 and tensor.shape[0] == rows for tensor in reference.values())
    distances = []
    for name, r in reference.items():
        if r.is_floating_point():
            r, c = (tensor.float().reshape(rows if batched else 1, -1) for tensor in (r, outputs[name]))
            r, c = torch.where(r.isfinite(), r, 0.0), torch.where(r.isfinite(), c, 0.0)
            distances.append(((c - r).square().sum(1) / r.square().sum(1).clamp_min(_SMALLEST_NORM)).mean())
    if not distances:
        raise UsageError(f"no output of the model holds floats, from which a recovery learns: {', '.join(reference)}")
    return torch.stack(distances).mean()


def train(
    student: Student, loader: Loader, settings: Settings, checkpoints: Checkpoints, progress: Progress
) -> tuple[State, TrainingEntry]:
    """Return the best weights, in fp32, and how they were trained, from the start or from the last checkpoint on.

    Raises :class:`ConversionError` if the loss is not finite, if a gradient is not finite without loss scaling, or if
    every step was skipped; :class:`UsageError` for batches that do not match the model.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(True, warn_only=True)
        stack.enter_context(torch.backends.cudnn.flags(deterministic=True, allow_tf32=False))
        validation = map(student.lesson, loader.first(_VALIDATION_BATCHES), itertools.count())
        training = _Training(student, list(validation), settings)
        if checkpoints.saved is not None:
            training.load(checkpoints.saved)
        else:
            with progress.step("fitting biases"):
                training.fit_biases()
        lessons = map(student.lesson, loader.endless(training.step), itertools.count(training.step))
        while (done := training.step) < settings.steps:
            end = min(settings.steps, (done // settings.every + 1) * settings.every)
            with progress.step(f"training, steps {done + 1} to {end} of {settings.steps}"):
                while training.step < end:
                    training.train(next(lessons))
            checkpoints.save(training.saved())
    if training.entry.skipped >= settings.steps:
        raise ConversionError(
            f"recovery: all {settings.steps} steps were skipped, because their gradients were not finite in fp16 with"
            f" --loss-scaling {settings.loss_scaling}; use a smaller static=K, dynamic, or --precision bf16-mixed"
        )
    return training.best, training.entry


class _Training:
    """The weights in training, the best so far, and how they came about."""

    def __init__(self, student: Student, validation: Sequence[_Lesson], settings: Settings) -> None:
        self._student, self._validation, self._settings = student, validation, settings
        self.step, self.best = 0, student.own_weights()
        dtype = torch.bfloat16 if settings.precision == "bf16-true" else torch.float32
        self._masters = {name: own.to(dtype, copy=True).requires_grad_() for name, own in self.best.items()}
        # A step is a share of each tensor's own size (its root mean square), as in Adafactor (N. Shazeer and M. Stern
        # 2018, section 8), because a unit in the last place of bf16 is such a share too.
        sizes = {name: max(_SMALLEST_SIZE, float(own.square().mean().sqrt())) for name, own in self.best.items()}
        groups = [{"params": [master], "size": sizes[name]} for name, master in self._masters.items()]
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.99), weight_decay=0.0)
        self._scaler = _scaler(settings.loss_scaling, student.device.type)
        self.entry = TrainingEntry(
            steps=settings.steps,
            precision=settings.precision,
            computed=str(student.dtype).removeprefix("torch."),
            device=student.device.type,
            learning_rate=settings.learning_rate,
            scaling=settings.loss_scaling,
            scale_first=self._scaler.get_scale(),
            weights=sum(own.numel() for own in self.best.values()),
            yardstick=len(validation),
            kept=0,
        )

    def fit_biases(self) -> None:
        """Fit the vectors that stay fp32 to the rounded weights, and keep them if that lowers the loss.

        If a layer's inputs lie around a level far from 0, rounding its weights costs mostly one constant per channel,
        which a bias holds exactly. With the weights fixed this is a smooth problem, for a quasi-Newton method.
        """
        before = self._validation_loss(self.best)
        exact = [entry.names[0] for entry in self._student.trained if not entry.rounds]
        fitted = {name: self.best[name].clone().requires_grad_() for name in exact if self.best[name].ndim == 1}
        found, iterations = self.best | fitted, min(_FITTING, self._settings.steps // 2)
        if fitted and iterations and 0 < before < math.inf:
            solver = torch.optim.LBFGS(list(fitted.values()), max_iter=iterations, line_search_fn="strong_wolfe")

            def relative_loss() -> float:
                solver.zero_grad()
                total = 0.0
                for lesson in self._validation:
                    share = self._student.loss(found, lesson) / before
                    torch.autograd.backward(share)
                    total += float(share.detach())
                return total

            solver.step(relative_loss)
        loss = self._validation_loss(found)
        self._record(loss_before=before, looks=[LookEntry(step=0, loss=min(loss, before))])
        if loss < before:
            self.best = {name: value.detach() for name, value in found.items()}
            self._record(biases_corrected=len(fitted))
            self._return_to_best()

    def train(self, lesson: _Lesson) -> None:
        """Train one step; after each tenth of all steps, check whether they helped."""
        steps = self._settings.steps
        warm = max(1, steps // 10)  # the rate rises over the first tenth, then falls linearly to 0
        share = min((self.step + 1) / warm, (steps - self.step) / max(1, steps - warm)) * self.entry.rate_share
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * share * group["size"]
        loss = self._student.loss(self._masters, lesson)
        self._check_finite("loss", loss)
        value = float(loss.detach())
        self._record(loss_last=value, **({} if self.step else {"loss_first": value}))
        torch.autograd.backward(self._scaler.scale(loss))
        self._scaler.unscale_(self._optimizer)
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        if not self._scaler.is_enabled():
            self._check_finite("gradient", *gradients)
        elif not all(gradient.isfinite().all() for gradient in gradients):
            self._record(skipped=self.entry.skipped + 1)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        self._record(scale_last=self._scaler.get_scale())
        self.step += 1
        if self.step == steps or self.step % warm == 0:
            self._validate()

    def _validate(self) -> None:
        """Keep the weights if they are the best so far; else return to the best ones and halve the learning rate."""
        state = {name: master.detach().float().clone() for name, master in self._masters.items()}
        loss = self._validation_loss(state)
        if loss < min(look.loss for look in self.entry.looks):
            self.best = state
            self._record(kept=self.step)
        else:
            self._return_to_best()
            self._optimizer.state.clear()  # its momentum belongs to the abandoned weights
            self._record(rate_share=self.entry.rate_share / 2)
        self._record(looks=[*self.entry.looks, LookEntry(step=self.step, loss=loss)])

    def _validation_loss(self, weights: State) -> float:
        """Return the mean loss of ``weights``, as they would be published, on the same batches; infinite, never NaN."""
        with torch.no_grad():
            losses = torch.stack([self._student.loss(weights, lesson) for lesson in self._validation])
        return float(losses.mean().nan_to_num(math.inf))

    def _return_to_best(self) -> None:
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(self.best[name])

    def _record(self, **changes: Any) -> None:
        self.entry = self.entry.model_copy(update=changes)

    def _check_finite(self, what: str, *values: torch.Tensor) -> None:
        if not all(tensor.isfinite().all() for tensor in values):
            other = ", or train with --precision bf16-mixed" if self._student.dtype == torch.float16 else ""
            raise ConversionError(
                f"recovery stopped at step {self.step + 1} of {self._settings.steps}: the {what} is not finite; lower"
                f" --learning-rate ({self._settings.learning_rate:g}){other}"
            )

    def saved(self) -> dict[str, Any]:
        """Return all that resuming needs."""
        return {
            "step": self.step,
            "masters": {name: master.detach() for name, master in self._masters.items()},
            "best": self.best,
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "entry": self.entry.model_dump(),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from what :meth:`saved` returned."""
        self.step, self.best, self.entry = saved["step"], saved["masters"], TrainingEntry(**saved["entry"])
        self._return_to_best()
        self.best = {name: value.to(self._student.device) for name, value in saved["best"].items()}
        self._optimizer.load_state_dict(saved["optimizer"])
        self._scaler.load_state_dict(saved["scaler"])


def _scaler(text: str, device: str) -> torch.amp.GradScaler:
    """Return the scaler of the loss, which also skips steps with gradients that are not finite."""
    kind, _, number = text.partition("=")
    if kind == "static":  # torch rejects a factor of 1; this is 1 in the scale's fp32
        return torch.amp.GradScaler(device, float(number), backoff_factor=1 - 1e-12, growth_interval=2**31 - 1)
    return torch.amp.GradScaler(device, growth_interval=int(number or 2000), enabled=kind != "none")
