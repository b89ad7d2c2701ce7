"""The steps of a recovery: read → convert unchanged → train → round → convert → compare with the fp32 outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from bf16kit.artifact.artifact import Artifact
from bf16kit.messages.errors import ConversionError, UsageError
from bf16kit.numerics.tensors import TensorSpec
from converter import read_and_trace
from converter.convert import ProvidedInputs, Result, convert
from converter.options import Options, Target
from converter.process.memory import release_memory
from converter.process.naming import prefix_errors
from converter.process.progress import Progress
from converter.recovery import precision
from converter.recovery.batches import Loader, check_labels
from converter.recovery.directory import ORIGINAL, RecoveryDirectory, open_directory
from converter.recovery.judging import EvaluationData, Judge, MadeWorse
from converter.recovery.loss import logits_of
from converter.recovery.settings import Settings
from converter.recovery.training import check_installed, train
from converter.recovery.validation import State
from converter.recovery.weights import copy_to_module, digest, find_trainable, recovered_tensors
from converter.source import Checkpoint, Source, TorchModel
from converter.verify.samples import Samples, load

MAX_BATCHES = 1000  # batches that a recovery is judged on, at most: as many as --samples takes


def recover(options: Options, settings: Settings, progress: Progress) -> Result:
    """Train the weights of ``options.source`` for bf16, and publish them as an artifact at ``options.target``.

    The artifact is published only if its bf16 outputs are within the budget twice: compared with the *original* fp32
    outputs, and with its own fp32 outputs. For ``cross-entropy``, the first comparison counts the rows with the right
    label. Raises what :func:`converter.convert.convert` and :func:`converter.recovery.training.train` raise, and
    :class:`BudgetExceeded` if recovery did not succeed.
    """
    check_installed()
    device = precision.device(settings.device)
    check_target(options)
    with prefix_errors(options.source), open_directory(options.target, resume=settings.resume) as directory:
        resuming = _resume_notes(settings, directory)
        source = read_and_trace.read(options, progress)
        model = source.module
        if model is None:
            raise UsageError(
                f"{options.source}: is {source.checkpoint.format}, which torch cannot train; give the torch checkpoint"
                " that it was exported from, with --model pkg.mod:factory"
            )
        if source.graph is None:
            raise ConversionError(
                f"{options.source}: cannot be recovered, because it has no ONNX graph: {source.no_graph_reason}"
            )
        loader = Loader("--data", settings.data, model.inputs, options.seed)
        evaluation_data = _evaluation_data(settings, loader, model, options)
        checkpoint, outputs = source.checkpoint, source.outputs
        _check_labels(outputs, evaluation_data)
        directory.check_options(_options_to_check(options, settings, checkpoint, device.type))
        samples = _samples(options, source, evaluation_data)
        before = _convert_original(options, source, directory, samples, progress)
        trained = find_trainable(model.module, checkpoint.tensors, before)
        training_result = train(model, outputs, trained, loader, settings, options.seed, directory, progress)
        release_memory()
        shaped = replace(options, search=False, recorded_extra={"recovery": settings.recorded(checkpoint.sha256)})

        def write(state: State, judge: Judge) -> Result:
            tensors = recovered_tensors(checkpoint.tensors, trained, state)
            copy_to_module(model.module, trained, tensors)
            recovered_checkpoint = Checkpoint(f"{checkpoint.format}, recovered", digest(tensors), tensors)
            rewritten = replace(source, checkpoint=recovered_checkpoint, module=model)
            given = ProvidedInputs(read=lambda _: _exported(rewritten), samples=samples, judge=judge)
            return convert(shaped, progress, given)

        judge = Judge(options, settings, before, evaluation_data, training_result, checkpoint.sha256, directory.path)
        try:
            result = write(training_result.state, judge)
        except MadeWorse as worse:
            result = write(training_result.start, replace(judge, rejection=worse))
        directory.finished = True
    notes = precision.notes(settings.precision, settings.scaling, device)
    return Result(result.artifact, (*resuming, *notes, *result.notes))


def _resume_notes(settings: Settings, directory: RecoveryDirectory) -> list[str]:
    """Return a note if --resume found no checkpoint. That is no error: jobs that may be killed always pass --resume."""
    if settings.resume and directory.last is None:
        return [f"--resume: {directory.path} held no checkpoint, so this recovery began at step 1"]
    return []


def check_target(options: Options) -> None:
    """Reject a target that is in the way before hours of training, as publishing would do after them."""
    from bf16kit.artifact.publish import check_target as check

    check(options.target.path, options.force)


def _evaluation_data(settings: Settings, loader: Loader, model: TorchModel, options: Options) -> EvaluationData:
    if settings.evaluation is None:
        return EvaluationData(loader.first(MAX_BATCHES), f"{settings.data}, the training data", held_out=False)
    evaluation = Loader("--eval", settings.evaluation, model.inputs, options.seed)
    return EvaluationData(evaluation.first(MAX_BATCHES), settings.evaluation, held_out=True)


def _check_labels(outputs: Sequence[TensorSpec], evaluation_data: EvaluationData) -> None:
    """Reject labels out of range before hours of training, as counting right rows would do after them."""
    name = logits_of(outputs)
    *dims, classes = next((spec.shape for spec in outputs if spec.name == name and spec.shape), ("unknown",))
    for batch in evaluation_data.batches:
        if isinstance(classes, int) and name is not None and batch.labels is not None:
            sizes = batch.labels.shape[: len(dims)]
            known = [size if isinstance(dim, str) else dim for dim, size in zip(dims, sizes, strict=False)]
            check_labels(batch, name, (*known, *(dim for dim in dims[len(known) :] if isinstance(dim, int)), classes))


def _samples(options: Options, source: Source, evaluation_data: EvaluationData) -> Samples:
    """Return the samples to measure drift on: the given ones, else the batches that recovery is judged on.

    Outputs that came with them are left out, because they are the original's.
    """
    if options.samples is not None:
        given = load(options.samples, source.inputs, outputs=[spec.name for spec in source.outputs])
        return Samples(given.feeds, given.origin)
    return Samples(tuple(batch.feeds for batch in evaluation_data.batches), evaluation_data.origin)


def _options_to_check(options: Options, settings: Settings, checkpoint: Checkpoint, device: str) -> dict[str, Any]:
    """Return all options that determine the result, or the artifact of the original weights, to be checked at a resume.

    A file may hold several kinds of weights, and its digest does not say which were chosen.
    """
    recorded = {f"--{name.replace('_', '-')}": value for name, value in settings.recorded(checkpoint.sha256).items()}
    recorded["the source's sha256"] = recorded.pop("--recovered-from")
    return recorded | {
        "--data": settings.data,
        "--device": device,
        "--seed": options.seed,
        "--model": options.model,
        "--model-args": dict(options.model_args),
        "--keep-fp32": list(options.keep_fp32),
        "--bf16": list(options.bf16),
        "--subnormals": options.subnormals,
        "--saturate": options.saturate,
        "--weights": options.weights,
        "--map": None if options.map is None else f"sha256 {sha256(options.map.read_bytes()).hexdigest()}",
        "--step": options.step,
        "--item": options.item,
        "--input": [f"{spec.name}:{spec.dtype}:{','.join(map(str, spec.shape))}" for spec in options.inputs],
        "--output": dict(options.outputs),
        "--with-past": options.with_past,
        "--format": list(options.formats),
        "--profile": list(options.profiles),
        "the sha256 of the weights that it begins with": digest(checkpoint.tensors),
    }


def _convert_original(
    options: Options, source: Source, directory: RecoveryDirectory, samples: Samples, progress: Progress
) -> Artifact:
    """Return the artifact of the original weights, which tells what is rounded and what bf16 and fp32 gave before."""
    target = Target(directory.path / ORIGINAL, options.target.model, options.target.version)
    if not target.path.exists():
        original_options = replace(
            options,
            target=target,
            allow_over_budget=True,
            drop_failing_profiles=False,
            search=False,
            residual=True,
            report=False,
        )
        # A copy of the value, because converting drops the module and the oracle, and changes the graph.
        given_samples = None if options.samples is not None else samples
        given = ProvidedInputs(read=lambda _: replace(source), samples=given_samples)
        convert(original_options, progress, given)
    return Artifact.open(target.path)


def _exported(source: Source) -> Source:
    """Export ``source`` again: its graph still holds other weights."""
    from converter.read.sources import exported_source

    assert source.module is not None  # noqa: S101 - it was trained
    found = exported_source(source.checkpoint, source.module, source.sampler)
    kinds = {spec.name: spec.kind for spec in source.outputs}
    outputs = tuple(replace(spec, kind=kinds.get(spec.name, spec.kind)) for spec in found.outputs)
    return replace(found, outputs=outputs, tools=(*source.tools, "lightning"), notes=source.notes, given=source.given)
