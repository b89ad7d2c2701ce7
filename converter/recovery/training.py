"""The training of a recovery, and the checkpoints from which an interrupted one continues."""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bf16kit.artifact.entries import TrainingEntry
from bf16kit.artifact.publish import created_parents
from bf16kit.converter.process.progress import Progress
from bf16kit.converter.process.quiet import first_line
from bf16kit.converter.recovery import Settings
from bf16kit.converter.recovery.trainable import Lesson, Loader, State, Student
from bf16kit.messages.errors import ConversionError, UsageError

_VALIDATION_BATCHES = 8
_FITTING = 100  # iterations of L-BFGS, at most, and at most half as many as steps of training
_SMALLEST_SIZE = 1e-3  # the least size of a tensor that scales its steps, so that a tensor of zeros can move


class Checkpoints:
    """What a recovery ``saved`` last (None: nothing), in the directory ``path`` beside the target."""

    def __init__(self, path: Path) -> None:
        self.path, self.last = path, path / "last.ckpt"
        self.saved: dict[str, Any] | None = None
        self._fixed: dict[str, str] = {}

    def check(self, fixed: dict[str, str]) -> None:
        """Read what was saved last; UsageError if that fails, or if the options ``fixed`` have changed since."""
        self._fixed = fixed
        if not self.last.exists():
            return
        try:
            self.saved = torch.load(self.last, weights_only=True, map_location="cpu")
            before, _ = self.saved["fixed"], self.saved["done"]
        except Exception as error:  # it is damaged, or of another version
            problem = f"cannot be read: {first_line(error)}"
            raise UsageError(f"{self.last}: {problem}; remove {self.path} to start again") from error
        for name, value in fixed.items():
            if before.get(name) != value:
                raise UsageError(
                    f"--resume: {name} is {value} now, and was {before.get(name)} when this recovery began; pass the"
                    f" same options, or remove {self.path} to start again"
                )

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint at once: a run that is killed meanwhile leaves the one before it.

        Raises :class:`UsageError` if it cannot be written, for example because the disk is full.
        """
        partial = self.last.with_suffix(".tmp")
        try:
            with partial.open("wb") as file:
                torch.save({"fixed": self._fixed, **state}, file)
            partial.replace(self.last)
        except (OSError, RuntimeError) as error:  # RuntimeError: torch's, if the disk is full
            partial.unlink(missing_ok=True)
            raise UsageError(
                f"{self.last}: cannot be written ({shutil.disk_usage(self.path).free >> 20} MiB free):"
                f" {first_line(error)}; free some space and pass --resume, or choose an --out on another disk"
            ) from error


@contextlib.contextmanager
def open_checkpoints(target: Path, *, resume: bool) -> Iterator[Checkpoints]:
    """Yield the checkpoints of a recovery to ``target``; remove their directory if all succeeds, or if it is empty.

    Raises :class:`UsageError` if there is one and ``resume`` is false.
    """
    found = Checkpoints(target.with_name(f".{target.name}.recovery"))
    if found.last.exists() and not resume:
        raise UsageError(f"{found.path}: holds an unfinished recovery; pass --resume, or remove it to start again")
    with created_parents(found.path):
        found.path.mkdir(exist_ok=True)
        finished = False
        try:
            yield found
            finished = True
        finally:
            if finished or not found.last.exists():
                shutil.rmtree(found.path, ignore_errors=True)


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
        validation = map(student.lesson, itertools.islice(loader.batches(0), _VALIDATION_BATCHES), itertools.count())
        training = _Training(student, list(validation), settings)
        if checkpoints.saved is not None:
            training.load(checkpoints.saved)
        else:
            with progress.step("fitting biases"):
                training.fit_biases()
        endless = itertools.chain.from_iterable(map(loader.batches, itertools.count()))
        lessons = map(student.lesson, itertools.islice(endless, training.step, None), itertools.count(training.step))
        while (done := training.step) < settings.steps:
            end = min(settings.steps, (done // settings.every + 1) * settings.every)
            with progress.step(f"training, steps {done + 1} to {end} of {settings.steps}"):
                while training.step < end:
                    training.train(next(lessons))
            checkpoints.save(training.saved())
    entry = training.entry()
    if entry.skipped >= settings.steps:
        raise ConversionError(
            f"recovery: all {settings.steps} steps were skipped, because their gradients were not finite in fp16 with"
            f" --loss-scaling {settings.loss_scaling}; use a smaller static=K, dynamic, or --precision bf16-mixed"
        )
    return training.best, entry


class _Training:
    """The weights in training, the best so far, and in ``done`` how they came about: fields of a TrainingEntry."""

    def __init__(self, student: Student, validation: Sequence[Lesson], settings: Settings) -> None:
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
        scale = self._scaler.get_scale()
        self.done: dict[str, Any] = {"skipped": 0, "kept": 0, "rate_share": 1.0, "looks": [], "scale_first": scale}

    def entry(self) -> TrainingEntry:
        return TrainingEntry(
            steps=self._settings.steps,
            precision=self._settings.precision,
            computed=str(self._student.dtype).removeprefix("torch."),
            device=self._student.device.type,
            learning_rate=self._settings.learning_rate,
            scaling=self._settings.loss_scaling,
            scale_last=self._scaler.get_scale(),
            weights=sum(own.numel() for own in self.best.values()),
            yardstick=len(self._validation),
            **self.done,
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
        self.done |= {"loss_before": before, "looks": [{"step": 0, "loss": min(loss, before)}]}
        if loss < before:
            self.best = {name: value.detach() for name, value in found.items()}
            self.done["biases_corrected"] = len(fitted)
            self._set_masters(self.best)

    def train(self, lesson: Lesson) -> None:
        """Train one step; after each tenth of all steps, check whether they helped."""
        steps = self._settings.steps
        warm = max(1, steps // 10)  # the rate rises over the first tenth, then falls linearly to 0
        share = min((self.step + 1) / warm, (steps - self.step) / max(1, steps - warm)) * self.done["rate_share"]
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * share * group["size"]
        loss = self._student.loss(self._masters, lesson)
        self._check_finite("loss", loss)
        self.done["loss_last"] = float(loss.detach())
        self.done.setdefault("loss_first", self.done["loss_last"])
        torch.autograd.backward(self._scaler.scale(loss))
        self._scaler.unscale_(self._optimizer)
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        if not self._scaler.is_enabled():
            self._check_finite("gradient", *gradients)
        elif not all(gradient.isfinite().all() for gradient in gradients):
            self.done["skipped"] += 1
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        self.step += 1
        if self.step == steps or self.step % warm == 0:
            self._validate()

    def _validate(self) -> None:
        """Keep the weights if they are the best so far; else return to the best ones and halve the learning rate."""
        state = {name: master.detach().float().clone() for name, master in self._masters.items()}
        loss = self._validation_loss(state)
        if loss < min(look["loss"] for look in self.done["looks"]):
            self.best, self.done["kept"] = state, self.step
        else:
            self._set_masters(self.best)
            self._optimizer.state.clear()  # its momentum belongs to the abandoned weights
            self.done["rate_share"] /= 2
        self.done["looks"].append({"step": self.step, "loss": loss})

    def _validation_loss(self, weights: State) -> float:
        """Return the mean loss of ``weights``, as they would be published, on the same batches; infinite, never NaN."""
        with torch.no_grad():
            losses = torch.stack([self._student.loss(weights, lesson) for lesson in self._validation])
        return float(losses.mean().nan_to_num(math.inf))

    def _set_masters(self, values: State) -> None:
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(values[name])

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
            "done": self.done,
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from what :meth:`saved` returned."""
        self.step, self.done = saved["step"], saved["done"]
        self._set_masters(saved["masters"])
        self.best = {name: value.to(self._student.device) for name, value in saved["best"].items()}
        self._optimizer.load_state_dict(saved["optimizer"])
        self._scaler.load_state_dict(saved["scaler"])


def _scaler(text: str, device: str) -> torch.amp.GradScaler:
    """Return the scaler of the loss, which also skips steps with gradients that are not finite."""
    kind, _, number = text.partition("=")
    if kind == "static":  # torch rejects a factor of 1; this is 1 in the scale's fp32
        return torch.amp.GradScaler(device, float(number), backoff_factor=1 - 1e-12, growth_interval=2**31 - 1)
    return torch.amp.GradScaler(device, growth_interval=int(number or 2000), enabled=kind != "none")
