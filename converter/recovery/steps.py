"""The steps of a recovery: read → convert unchanged → train → round → convert → compare with the fp32 outputs."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path

import torch

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.publish import check_target
from bf16kit.artifact.recoveryentries import RecoveryEntry
from bf16kit.messages.errors import ConversionError, UsageError
from converter import read_and_trace
from converter.convert import ProvidedInputs, Result, convert
from converter.options import Options, Target
from converter.process.memory import release_memory
from converter.process.progress import Progress
from converter.process.quiet import prefix_errors
from converter.read.sources import exported_source
from converter.recovery.batches import Loader
from converter.recovery.checkpoints import open_checkpoints
from converter.recovery.comparison import Judge, MadeWorse
from converter.recovery.settings import Settings
from converter.recovery.trainable import State, digest, find_trainable, in_numpy, recovered_tensors
from converter.recovery.training import Student, train
from converter.report.page import check_installed
from converter.source import Checkpoint, Source
from converter.verify.samples import Samples, load

_MOST_BATCHES = 1000  # that a recovery is judged on: as many as --samples takes
_MAY_CHANGE = ("allow_over_budget", "drop_failing_profiles", "evaluation", "every", "resume")  # when it is resumed


def recover(options: Options, settings: Settings, progress: Progress) -> Result:
    """Train the weights of ``options.source`` for bf16, and publish them as an artifact at ``options.target``.

    The artifact is published only if its bf16 outputs are within the budget twice: compared with the *original* fp32
    outputs, and with its own fp32 outputs. Raises what :func:`converter.convert.convert` and
    :func:`converter.recovery.training.train` raise, and :class:`BudgetExceeded` if recovery did not succeed.
    """
    check_target(options.target.path, options.force)  # this and the next before hours of training
    if options.report:
        check_installed()
    with prefix_errors(options.source), open_checkpoints(options.target.path, resume=settings.resume) as checkpoints:
        source = read_and_trace.read(options, progress)
        model, checkpoint = source.module, source.checkpoint
        if model is None:
            raise UsageError(
                f"{options.source}: is {checkpoint.format}, which torch cannot train; give the torch checkpoint that it"
                " was exported from, with --model pkg.mod:factory"
            )
        if source.graph is None:
            raise ConversionError(f"cannot be recovered, because it has no ONNX graph: {source.no_graph_reason}")
        checkpoints.check(_fixed(options, settings, model.module))
        loader = Loader("--data", settings.data, model.inputs, options.seed)
        judges, origin = loader, f"{settings.data}, the training data"
        if settings.evaluation is not None:
            judges, origin = Loader("--eval", settings.evaluation, model.inputs, options.seed), settings.evaluation
        samples = batches = Samples(tuple(judges.first(_MOST_BATCHES)), origin)
        if options.samples is not None:
            samples = load(options.samples, source.inputs, outputs=[spec.name for spec in source.outputs])
            samples = replace(samples, expected=())  # the outputs that came with them are the original's
        before = _convert_original(options, source, checkpoints.path / "original", samples, progress)
        trained = tuple(find_trainable(model.module, checkpoint.tensors, before))
        if not any(entry.rounds for entry in trained):
            raise ConversionError(
                "recovery has nothing to train: no parameter of the module is a tensor of the checkpoint that is stored"
                " in bf16; --bf16 REGEX makes more of them bf16"
            )
        student = Student(model, trained, settings)
        start = student.own_weights()
        state, training = train(student, loader, settings, checkpoints, progress)
        model.module.cpu()
        release_memory()
        entry = RecoveryEntry(
            recovered_from=checkpoint.sha256,
            judged_on=batches.origin,
            samples=len(batches.feeds),
            held_out=settings.evaluation is not None,
            training=training,
        )
        recorded = {name: getattr(settings, name) for name in ("steps", "precision", "loss_scaling", "learning_rate")}
        recorded |= {"recovered_from": checkpoint.sha256, "loss": training.loss}
        shaped = replace(options, search=False, recorded_extra={"recovery": recorded})

        def write(state: State, judge: Judge) -> Result:
            tensors = recovered_tensors(model.module, checkpoint.tensors, trained, state)
            recovered = Checkpoint(f"{checkpoint.format}, recovered", digest(tensors), tensors)
            rewritten = replace(source, checkpoint=recovered, module=model)
            return convert(
                shaped, progress, ProvidedInputs(read=lambda _: _exported(rewritten), samples=samples, judge=judge)
            )

        judge = Judge(options, before, batches, entry)
        try:
            result = write(state, judge)
        except MadeWorse as worse:
            result = write(start, replace(judge, worse=str(worse)))
        checkpoints.finished = True
    begun = [f"--resume: {checkpoints.path} held no checkpoint, so this recovery began at step 1"]
    return Result(result.artifact, (*begun[: settings.resume and checkpoints.saved is None], *result.notes))


def _fixed(options: Options, settings: Settings, module: torch.nn.Module) -> dict[str, str]:
    """Return what determines the result, by its name for the user: no --resume may change it."""
    found = options.recorded() | asdict(settings)
    found |= {name: getattr(options, name) for name in ("model", "model_args", "inputs", "outputs", "seed")}
    weights = {name: in_numpy(value) for name, value in module.state_dict().items()}
    fixed = {name.replace("_", "-"): str(value) for name, value in found.items() if name not in _MAY_CHANGE}
    return fixed | {"the sha256 of the weights that it begins with": digest(weights)}


def _convert_original(options: Options, source: Source, path: Path, samples: Samples, progress: Progress) -> Artifact:
    """Return the artifact of the original weights, which tells what is rounded and what bf16 and fp32 gave before."""
    shutil.rmtree(path, ignore_errors=True)  # of an interrupted run
    target = Target(path, options.target.model, options.target.version)
    options = replace(options, target=target, allow_over_budget=True, drop_failing_profiles=False, residual=True)
    # A copy of the source, because converting drops the module and the oracle, and changes the graph.
    provided = ProvidedInputs(read=lambda _: replace(source), samples=samples)
    return convert(replace(options, search=False, report=False), progress, provided).artifact


def _exported(source: Source) -> Source:
    """Export ``source`` again: its graph still holds other weights."""
    assert source.module is not None  # noqa: S101 - it was trained
    found = exported_source(source.checkpoint, source.module, source.sampler)
    kinds = {spec.name: spec.kind for spec in source.outputs}
    outputs = tuple(replace(spec, kind=kinds.get(spec.name, spec.kind)) for spec in found.outputs)
    return replace(found, outputs=outputs, tools=source.tools, notes=source.notes, given=source.given)
