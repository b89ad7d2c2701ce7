"""The training of a recovery: Lightning's loop over batches, with checkpoints from which it can be resumed."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bf16kit.artifact.recoveryentries import GradientEntry, LookEntry, TrainingEntry
from bf16kit.messages.errors import ConversionError, UsageError
from bf16kit.numerics.tensors import TensorSpec
from converter.process.progress import Progress
from converter.process.quiet import first_line, quiet
from converter.recovery import precision
from converter.recovery.batches import Loader
from converter.recovery.biases import correct_biases
from converter.recovery.directory import RecoveryDirectory
from converter.recovery.settings import FIRST_SCALE, Settings
from converter.recovery.teacherbatches import Teacher, TeacherBatch
from converter.recovery.validation import BATCHES, State, ValidationLoss
from converter.recovery.weights import TrainedParameter
from converter.source import TorchModel

if TYPE_CHECKING:
    from converter.recovery.student import StudentModule


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of training: the weights that it kept, in fp32 on the CPU, by first name, and what was recorded.

    ``step`` is the step after which they were kept; 0 means before any, perhaps with corrected biases. ``start`` are
    the original weights.
    """

    start: State
    state: State
    step: int
    training: TrainingEntry
    gradients: Sequence[GradientEntry]

    @property
    def unchanged(self) -> bool:
        """Whether the kept weights are those that training started with."""
        return self.step == 0 and self.training.biases_corrected == 0


def check_installed() -> None:
    """Raise :class:`UsageError` if Lightning, which does the training, is not installed."""
    try:
        import lightning  # noqa: F401
    except ImportError:
        raise UsageError("bf16-convert recover trains with Lightning: pip install 'bf16kit[lightning]'") from None


def train(
    model: TorchModel,
    outputs: Sequence[TensorSpec],
    trained: Sequence[TrainedParameter],
    loader: Loader,
    settings: Settings,
    seed: int,
    directory: RecoveryDirectory,
    progress: Progress,
) -> TrainingResult:
    """Train a copy of ``model`` on the outputs of ``model`` itself, or on labels, as ``settings`` say.

    Resumes from the last checkpoint in ``directory`` if there is one. Raises :class:`ConversionError` if the loss is
    not finite, if a gradient is not finite without loss scaling, or if every step was skipped. Raises
    :class:`UsageError` for batches that do not match the model.
    """
    from converter.recovery.student import StudentModule

    device = precision.device(settings.device)
    student = replace(model, module=copy.deepcopy(model.module))
    teacher = Teacher(model, outputs, settings.loss, device)
    last = directory.last
    start_step = 0 if last is None else _last_step(last, settings)
    scale = settings.scaling.factor if settings.scaling.kind != "none" else FIRST_SCALE
    with _full_fp32():
        batches = [teacher.compute(batch) for batch in loader.first(BATCHES)]  # the same ones at every start
        validation_loss = ValidationLoss(teacher, trained, batches, settings.precision)
        student_module = StudentModule(student, trained, validation_loss, settings, seed)
        student_module.student.to(device)
        start = student_module.state()
        if start_step == 0:
            student_module.facts.scale_first = settings.scaling.factor
            with progress.step("measuring gradients"):
                student_module.record_gradients(0, batches[0], scale)
            with progress.step("correcting biases"):
                _correct_biases(student_module, validation_loss, start)
        stream = _RemainingBatches(map(teacher.compute, loader.endless(start_step)), settings.steps - start_step)
        if last is None or start_step < settings.steps:
            scale_last = _fit(student_module, stream, settings, directory, progress, device)
        else:
            scale_last = _load_finished(student_module, last)
        student_module.student.float().to(device)
        with progress.step("measuring gradients"):
            student_module.record_gradients(settings.steps, batches[0], scale)
    model.module.cpu()
    facts, best = student_module.facts, student_module.best
    if facts.skipped >= settings.steps:
        raise ConversionError(
            f"recovery: all {settings.steps} steps were skipped, because their gradients were not finite in fp16"
            f" times the scale {settings.scaling}; use a smaller --loss-scaling static=K, dynamic, or --precision"
            " bf16-mixed"
        )
    entry = TrainingEntry(
        steps=settings.steps,
        skipped=facts.skipped,
        precision=settings.precision,
        computed=facts.computed,
        device=device.type,
        loss=settings.loss,
        loss_first=facts.loss_first,
        loss_last=facts.loss_last,
        learning_rate=settings.learning_rate,
        scaling=str(settings.scaling),
        scale_first=facts.scale_first,
        scale_last=scale_last,
        weights=sum(master.numel() for _, master in student_module.masters()),
        updates_lost=facts.updates_lost / max(1, facts.updates) if settings.precision == "bf16-true" else None,
        biases_corrected=facts.biases,
        yardstick=len(batches),
        loss_before=facts.loss_before,
        looks=[LookEntry(step=step, loss=loss) for step, loss in facts.looks],
        kept=best.step,
        rate_share=facts.slower,
    )
    return TrainingResult(_on_cpu(start), _on_cpu(best.state), best.step, entry, student_module.gradients)


def _on_cpu(state: State) -> State:
    return {name: held.cpu() for name, held in state.items()}


def _correct_biases(student_module: StudentModule, validation_loss: ValidationLoss, start: State) -> None:
    """Before the first step, give ``student_module`` biases that compensate rounding, if that lowers the loss."""
    from converter.recovery.student import BestWeights

    facts = student_module.facts
    facts.loss_before = validation_loss.loss(start)
    student_module.best = BestWeights(
        0, facts.loss_before if math.isfinite(facts.loss_before) else math.inf, dict(start)
    )
    found, count = correct_biases(validation_loss, start)
    loss = validation_loss.loss(found) if count else math.nan
    if loss < student_module.best.loss:
        facts.biases = count
        student_module.best = BestWeights(0, loss, found)
        student_module.load_weights(found)
    facts.looks.append((0, student_module.best.loss))


class _full_fp32:  # noqa: N801 - reads as the context that it is
    """Compute fp32 products in fp32, without TF32, while active."""

    def __enter__(self) -> None:
        self._before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self._before[0])
        torch.backends.cudnn.allow_tf32 = self._before[1]


class _RemainingBatches(torch.utils.data.IterableDataset[TeacherBatch]):
    """The remaining batches of a training, once."""

    def __init__(self, batches: Iterator[TeacherBatch], count: int) -> None:
        self._batches, self._count = batches, count

    def __iter__(self) -> Iterator[TeacherBatch]:
        return itertools.islice(self._batches, self._count)


def _fit(
    student_module: StudentModule,
    batches: _RemainingBatches,
    settings: Settings,
    directory: RecoveryDirectory,
    progress: Progress,
    device: torch.device,
) -> float:
    """Run Lightning's loop; return the loss scale at the end."""
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment

    keeper, deterministic = _keeper(settings, directory, progress), torch.are_deterministic_algorithms_enabled()
    arithmetic = precision.plugin(settings.precision, settings.scaling, device)
    with quiet():
        trainer = lightning.Trainer(
            accelerator="cpu" if device.type == "cpu" else "cuda",
            devices=1 if device.type == "cpu" else [device.index or 0],
            max_steps=settings.steps,
            max_epochs=-1,
            # so that no environment variable makes it a cluster
            plugins=[arithmetic, LightningEnvironment(), _writer(directory)],
            callbacks=[keeper],
            logger=False,
            enable_checkpointing=False,  # `keeper` writes them, and never leaves half a file
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            deterministic="warn",
            default_root_dir=directory.path,
        )
        data = torch.utils.data.DataLoader(batches, batch_size=None)
        try:
            trainer.fit(
                student_module,
                data,
                ckpt_path=None if directory.last is None else str(directory.last),
                weights_only=True,
            )
        except SystemExit:  # Lightning raises it on Control-C
            raise KeyboardInterrupt from None
        finally:
            keeper.close()
            torch.use_deterministic_algorithms(deterministic)
    if trainer.global_step < settings.steps:
        raise ConversionError(f"recovery: Lightning stopped at step {trainer.global_step} of {settings.steps}")
    scaler = getattr(arithmetic, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0


def _keeper(settings: Settings, directory: RecoveryDirectory, progress: Progress) -> Any:
    """Return a callback that reports progress, and stores a checkpoint every few steps and at the end."""
    import lightning

    class Keeper(lightning.Callback):  # type: ignore[misc,unused-ignore]  # lightning may not be installed
        def __init__(self) -> None:
            self._step: Any = None

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if self._step is None:
                end = min(
                    settings.steps, (trainer.global_step // settings.checkpoint_every + 1) * settings.checkpoint_every
                )
                self._step = progress.step(f"training, steps {trainer.global_step + 1} to {end} of {settings.steps}")
                self._step.__enter__()

        def on_train_batch_end(self, trainer: Any, student_module: Any, *_: Any) -> None:
            student_module.end_step()
            if trainer.global_step % settings.checkpoint_every == 0 or trainer.global_step == settings.steps:
                trainer.save_checkpoint(directory.checkpoint)
                self.close()

        def close(self) -> None:
            if self._step is not None:
                self._step.__exit__(None, None, None)
                self._step = None

    return Keeper()


def _writer(directory: RecoveryDirectory) -> Any:
    """Return the writer of checkpoints into ``directory``. Lightning's own would write a file in /tmp and move it."""
    from lightning.pytorch.plugins import TorchCheckpointIO

    class Writer(TorchCheckpointIO):  # type: ignore[misc,unused-ignore]  # lightning may not be installed
        def save_checkpoint(self, checkpoint: dict[str, Any], *_: Any, **__: Any) -> None:
            directory.write_checkpoint(lambda file: torch.save(checkpoint, file))

    return Writer()


def _last_step(last: Path, settings: Settings) -> int:
    """Return the step that the last checkpoint was written after."""
    try:
        found = torch.load(last, weights_only=True, map_location="cpu")["global_step"]
    except Exception as error:
        message = f"{last}: cannot be read: {first_line(error)}; remove {last.parent} to start again"
        raise UsageError(message) from error
    if type(found) is not int or not 0 < found <= settings.steps:
        raise UsageError(
            f"{last}: is of step {found!r}, expected 1 to {settings.steps}; remove {last.parent} to start again"
        )
    return found


def _load_finished(student_module: StudentModule, last: Path) -> float:
    """Load the end state of a training that had finished; return its loss scale."""
    found = torch.load(last, weights_only=True, map_location="cpu")
    student_module.load_state_dict(found["state_dict"])
    student_module.on_load_checkpoint(found)
    return float(found.get("MixedPrecision", {}).get("scale", 1.0))
