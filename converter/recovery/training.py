"""The training of a recovery: Lightning's loop over lessons, with checkpoints from which it can be resumed."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bf16kit.errors import ConversionError, UsageError
from bf16kit.recovery import GradientEntry, LookEntry, TrainingEntry
from bf16kit.tensors import TensorSpec
from converter.model import TorchModel
from converter.process.progress import Progress
from converter.process.quiet import first_line, quiet
from converter.recovery import precision
from converter.recovery.batches import Loader
from converter.recovery.biases import corrected
from converter.recovery.lessons import Lesson, Teacher
from converter.recovery.place import Place
from converter.recovery.settings import FIRST_SCALE, Settings
from converter.recovery.weights import Trained
from converter.recovery.yardstick import BATCHES, State, Yardstick

if TYPE_CHECKING:
    from converter.recovery.trainee import Trainee


@dataclass(frozen=True, slots=True)
class Taught:
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
    trained: Sequence[Trained],
    loader: Loader,
    settings: Settings,
    seed: int,
    place: Place,
    progress: Progress,
) -> Taught:
    """Train a copy of ``model`` on the outputs of ``model`` itself, or on labels, as ``settings`` say.

    Resumes from the last checkpoint in ``place`` if there is one. Raises :class:`ConversionError` if the loss is not
    finite, if a gradient is not finite without loss scaling, or if every step was skipped. Raises :class:`UsageError`
    for batches that do not match the model.
    """
    from converter.recovery.trainee import Trainee

    where = precision.device(settings.device)
    student = replace(model, module=copy.deepcopy(model.module))
    teacher = Teacher(model, outputs, settings.loss, where)
    last = place.last
    begun = 0 if last is None else _begun(last, settings)
    scale = settings.scaling.factor if settings.scaling.kind != "none" else FIRST_SCALE
    with _full_fp32():
        lessons = [teacher.lesson(batch) for batch in loader.first(BATCHES)]  # the same ones at every start
        yardstick = Yardstick(teacher, trained, lessons, settings.precision)
        trainee = Trainee(student, trained, yardstick, settings, seed)
        trainee.student.to(where)
        start = trainee.state()
        if begun == 0:
            trainee.facts.scale_first = settings.scaling.factor
            with progress.step("measuring gradients"):
                trainee.take_survey(0, lessons[0], scale)
            with progress.step("correcting biases"):
                _correct(trainee, yardstick, start)
        stream = _Lessons(map(teacher.lesson, loader.endless(begun)), settings.steps - begun)
        if last is None or begun < settings.steps:
            scale_last = _fit(trainee, stream, settings, place, progress, where)
        else:
            scale_last = _load(trainee, last)
        trainee.student.float().to(where)
        with progress.step("measuring gradients"):
            trainee.take_survey(settings.steps, lessons[0], scale)
    model.module.cpu()
    facts, kept = trainee.facts, trainee.kept
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
        device=where.type,
        loss=settings.loss,
        loss_first=facts.loss_first,
        loss_last=facts.loss_last,
        learning_rate=settings.learning_rate,
        scaling=str(settings.scaling),
        scale_first=facts.scale_first,
        scale_last=scale_last,
        weights=sum(master.numel() for _, master in trainee.masters()),
        updates_lost=facts.updates_lost / max(1, facts.updates) if settings.precision == "bf16-true" else None,
        biases_corrected=facts.biases,
        yardstick=len(lessons),
        loss_before=facts.loss_before,
        looks=[LookEntry(step=step, loss=loss) for step, loss in facts.looks],
        kept=kept.step,
        rate_share=facts.slower,
    )
    return Taught(_on_cpu(start), _on_cpu(kept.state), kept.step, entry, trainee.gradients)


def _on_cpu(state: State) -> State:
    return {name: held.cpu() for name, held in state.items()}


def _correct(trainee: Trainee, yardstick: Yardstick, start: State) -> None:
    """Before the first step, give ``trainee`` biases that compensate rounding, if that lowers the loss."""
    from converter.recovery.trainee import Kept

    facts = trainee.facts
    facts.loss_before = yardstick.loss(start)
    trainee.kept = Kept(0, facts.loss_before if math.isfinite(facts.loss_before) else math.inf, dict(start))
    found, count = corrected(yardstick, start)
    loss = yardstick.loss(found) if count else math.nan
    if loss < trainee.kept.loss:
        facts.biases = count
        trainee.kept = Kept(0, loss, found)
        trainee.put(found)
    facts.looks.append((0, trainee.kept.loss))


class _full_fp32:  # noqa: N801 - reads as the context that it is
    """Compute fp32 products in fp32, without TF32, while active."""

    def __enter__(self) -> None:
        self._before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self._before[0])
        torch.backends.cudnn.allow_tf32 = self._before[1]


class _Lessons(torch.utils.data.IterableDataset[Lesson]):
    """The remaining lessons of a training, once."""

    def __init__(self, lessons: Iterator[Lesson], count: int) -> None:
        self._lessons, self._count = lessons, count

    def __iter__(self) -> Iterator[Lesson]:
        return itertools.islice(self._lessons, self._count)


def _fit(
    trainee: Trainee, lessons: _Lessons, settings: Settings, place: Place, progress: Progress, where: torch.device
) -> float:
    """Run Lightning's loop; return the loss scale at the end."""
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment

    keeper, deterministic = _keeper(settings, place, progress), torch.are_deterministic_algorithms_enabled()
    arithmetic = precision.plugin(settings.precision, settings.scaling, where)
    with quiet():
        trainer = lightning.Trainer(
            accelerator="cpu" if where.type == "cpu" else "cuda",
            devices=1 if where.type == "cpu" else [where.index or 0],
            max_steps=settings.steps,
            max_epochs=-1,
            # so that no environment variable makes it a cluster
            plugins=[arithmetic, LightningEnvironment(), _writer(place)],
            callbacks=[keeper],
            logger=False,
            enable_checkpointing=False,  # `keeper` writes them, and never leaves half a file
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            deterministic="warn",
            default_root_dir=place.path,
        )
        data = torch.utils.data.DataLoader(lessons, batch_size=None)
        try:
            trainer.fit(trainee, data, ckpt_path=None if place.last is None else str(place.last), weights_only=True)
        except SystemExit:  # Lightning raises it on Control-C
            raise KeyboardInterrupt from None
        finally:
            keeper.close()
            torch.use_deterministic_algorithms(deterministic)
    if trainer.global_step < settings.steps:
        raise ConversionError(f"recovery: Lightning stopped at step {trainer.global_step} of {settings.steps}")
    scaler = getattr(arithmetic, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0


def _keeper(settings: Settings, place: Place, progress: Progress) -> Any:
    """Return a callback that stores a checkpoint every ``settings.every`` steps and at the end; reports progress."""
    import lightning

    class Keeper(lightning.Callback):  # type: ignore[misc,unused-ignore]  # lightning may not be installed
        def __init__(self) -> None:
            self._step: Any = None
            self._said = -1

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if self._step is None:
                end = min(settings.steps, (trainer.global_step // settings.every + 1) * settings.every)
                self._step = progress.step(f"training, steps {trainer.global_step + 1} to {end} of {settings.steps}")
                self._step.__enter__()

        def on_train_batch_end(self, trainer: Any, trainee: Any, *_: Any) -> None:
            trainee.end_step()
            if trainer.global_step % settings.every == 0 or trainer.global_step == settings.steps:
                trainer.save_checkpoint(place.checkpoint)
                self.close()

        def close(self) -> None:
            if self._step is not None:
                self._step.__exit__(None, None, None)
                self._step = None

    return Keeper()


def _writer(place: Place) -> Any:
    """Return the writer of checkpoints into ``place``. Lightning's own would write to a file in /tmp and move it."""
    from lightning.pytorch.plugins import TorchCheckpointIO

    class Writer(TorchCheckpointIO):  # type: ignore[misc,unused-ignore]  # lightning may not be installed
        def save_checkpoint(self, checkpoint: dict[str, Any], *_: Any, **__: Any) -> None:
            place.keep(lambda file: torch.save(checkpoint, file))

    return Writer()


def _begun(last: Path, settings: Settings) -> int:
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


def _load(trainee: Trainee, last: Path) -> float:
    """Load the end state of a training that had finished; return its loss scale."""
    found = torch.load(last, weights_only=True, map_location="cpu")
    trainee.load_state_dict(found["state_dict"])
    trainee.on_load_checkpoint(found)
    return float(found.get("MixedPrecision", {}).get("scale", 1.0))
