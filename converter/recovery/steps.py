"""The steps of a recovery: read → convert unchanged → train → round → convert → compare with the fp32 outputs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.entries import RecoveredDrift, RecoveryEntry
from bf16kit.artifact.manifest import Manifest
from bf16kit.artifact.publish import StagingArtifact, check_target
from bf16kit.converter import read_and_trace
from bf16kit.converter.convert import Result, convert
from bf16kit.converter.options import Options, Target
from bf16kit.converter.process.memory import release_memory
from bf16kit.converter.process.progress import Progress
from bf16kit.converter.process.quiet import prefix_errors
from bf16kit.converter.read.sources import exported_source
from bf16kit.converter.recovery import Settings
from bf16kit.converter.recovery.trainable import (
    Loader,
    State,
    Student,
    find_trainable,
    in_numpy,
    recovered_tensors,
)
from bf16kit.converter.recovery.training import open_checkpoints, train
from bf16kit.converter.report.page import check_installed
from bf16kit.converter.source import Checkpoint, Source, TorchModel, digest_tensors
from bf16kit.converter.verify import measure
from bf16kit.converter.verify.judging import describe_breaches, without_profiles
from bf16kit.converter.verify.samples import Samples, load
from bf16kit.drift.metrics import DriftSummary
from bf16kit.messages.errors import BudgetExceeded, ConversionError, UsageError
from bf16kit.runtime.loading import load_reference

_MOST_BATCHES = 1000  # that a recovery is judged on: as many as --samples takes
_MAY_CHANGE = ("allow_over_budget", "drop_failing_profiles", "evaluation", "every", "resume")  # when it is resumed


def recover(options: Options, settings: Settings, progress: Progress) -> Result:
    """Train the weights of ``options.source`` for bf16, and publish them as an artifact at ``options.target``.

    The artifact is published only if its bf16 outputs are within the budget twice: compared with the *original* fp32
    outputs, and with its own fp32 outputs. Raises what :func:`bf16kit.converter.convert.convert` and
    :func:`bf16kit.converter.recovery.training.train` raise, and :class:`BudgetExceeded` if recovery did not succeed.
    """
    check_target(options.target.path, options.force)  # this and the next before hours of training
    if options.report:
        check_installed()
    with prefix_errors(options.source), open_checkpoints(options.target.path, resume=settings.resume) as checkpoints:
        source = read_and_trace.read(options, progress)
        model, checkpoint = _trainable_model(options, source), source.checkpoint
        checkpoints.check(_fixed(options, settings, model.module))
        loader = Loader("--data", settings.data, model.inputs, options.seed)
        judges, origin = loader, f"{settings.data}, the training data"
        if settings.evaluation is not None:
            judges, origin = Loader("--eval", settings.evaluation, model.inputs, options.seed), settings.evaluation
        samples = batches = Samples(tuple(islice(judges.batches(0), _MOST_BATCHES)), origin)
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
        recorded = {name: getattr(settings, name) for name in ("steps", "precision", "loss_scaling", "learning_rate")}
        recorded |= {"recovered_from": checkpoint.sha256, "loss": training.loss}
        shaped = replace(options, search=False, recorded_extra={"recovery": recorded})

        def write(state: State, judge: Judge) -> Result:
            tensors = recovered_tensors(model.module, checkpoint.tensors, trained, state)
            recovered = Checkpoint(f"{checkpoint.format}, recovered", digest_tensors(tensors), tensors)
            changed = replace(source, checkpoint=recovered, module=model)
            return convert(shaped, progress, reader=lambda _: _exported(changed), samples=samples, judged_by=judge)

        entry = RecoveryEntry(
            recovered_from=checkpoint.sha256,
            judged_on=batches.origin,
            samples=len(batches.feeds),
            held_out=settings.evaluation is not None,
            training=training,
        )
        judge = Judge(options, before, batches, entry)
        try:
            result = write(state, judge)
        except MadeWorse as worse:
            result = write(start, replace(judge, worse=str(worse)))
    begun = [f"--resume: {checkpoints.path} held no checkpoint, so this recovery began at step 1"]
    return Result(result.artifact, (*begun[: settings.resume and checkpoints.saved is None], *result.notes))


def _trainable_model(options: Options, source: Source) -> TorchModel:
    """Return the module of ``source``; raise an error if there is none, or no ONNX graph of it."""
    if source.module is None:
        raise UsageError(
            f"{options.source}: is {source.checkpoint.format}, which torch cannot train; give the torch checkpoint that"
            " it was exported from, with --model pkg.mod:factory"
        )
    if source.graph is None:
        raise ConversionError(f"cannot be recovered, because it has no ONNX graph: {source.no_graph_reason}")
    return source.module


def _fixed(options: Options, settings: Settings, module: torch.nn.Module) -> dict[str, str]:
    """Return what determines the result, by its name for the user: no --resume may change it."""
    found = options.recorded() | asdict(settings)
    found |= {name: getattr(options, name) for name in ("model", "model_args", "inputs", "outputs", "seed")}
    weights = {name: in_numpy(value) for name, value in module.state_dict().items()}
    fixed = {name.replace("_", "-"): str(value) for name, value in found.items() if name not in _MAY_CHANGE}
    return fixed | {"the sha256 of the weights that it begins with": digest_tensors(weights)}


def _convert_original(options: Options, source: Source, path: Path, samples: Samples, progress: Progress) -> Artifact:
    """Return the artifact of the original weights, which tells what is rounded and what bf16 and fp32 gave before."""
    shutil.rmtree(path, ignore_errors=True)  # of an interrupted run
    target = Target(path, options.target.model, options.target.version)
    options = replace(options, target=target, allow_over_budget=True, drop_failing_profiles=False, residual=True)
    options = replace(options, search=False, report=False)
    # A copy of the source, because converting drops the module and the oracle, and changes the graph.
    return convert(options, progress, reader=lambda _: replace(source), samples=samples).artifact


def _exported(source: Source) -> Source:
    """Export ``source`` again: its graph still holds other weights."""
    assert source.module is not None  # noqa: S101 - it was trained
    found = exported_source(source.checkpoint, source.module, source.sampler)
    kinds = {spec.name: spec.kind for spec in source.outputs}
    outputs = tuple(replace(spec, kind=kinds.get(spec.name, spec.kind)) for spec in found.outputs)
    return replace(found, outputs=outputs, tools=source.tools, notes=source.notes, given=source.given)


# --- judging ----------------------------------------------------------------------------------------------------------


class MadeWorse(Exception):
    """The trained weights do worse in bf16 than the original ones; the text has the numbers."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Judges the artifact of a recovery by ``batches``; ``worse`` says why it has the original weights again.

    The user wants bf16 outputs as good as the fp32 ones were. So the measure is the outputs of the *original* weights
    in fp32. The artifact's own drift, from the recovered weights in fp32, only shows what rounding still costs.
    """

    options: Options
    before: Artifact
    batches: Samples
    entry: RecoveryEntry
    worse: str | None = None

    def __call__(
        self, stage: StagingArtifact, manifest: Manifest, progress: Progress
    ) -> tuple[Manifest, RecoveryEntry, list[str]]:
        """Raise :class:`MadeWorse` if the original weights did better in bf16, or :class:`BudgetExceeded`."""
        with progress.step("comparing with the original's fp32 answers"):
            # Whether a batch's rows depend on each other is the model's property, whatever its weights.
            rows, breaches = self._compare(stage.draft(manifest.amended(batch_axis=self.before.manifest.batch_axis)))
        judged = [row for row in rows if row.metric == "relative_l2" and row.before is not None]
        now, was = max(row.after for row in judged), max(row.before or 0.0 for row in judged)
        if now > was and self.worse is None and (self.entry.training.kept or self.entry.training.biases_corrected):
            raise MadeWorse(f"relative_l2 {now:.3g}, {was:.3g} before")
        optional = [name for name in self.options.optional_profiles if breaches.get(name)]
        notes = [f"no profile {name}: {breach}" for name in optional for breach in breaches.pop(name)]
        failed = "".join(f"\n  {breach}" for lines in breaches.values() for breach in lines)
        if failed and not self.options.allow_over_budget:
            raise BudgetExceeded(
                "not recovered, nothing published; drift from the fp32 outputs of the original weights, on"
                f" {self.batches.origin}:{failed}\nTry more --steps or another --learning-rate, keep nodes in fp32"
                " (--keep-fp32 REGEX), raise the --budget, or publish this with --resume --allow-over-budget"
            )
        if failed:
            notes.append(f"not recovered, published because of --allow-over-budget:{failed}")
        manifest = without_profiles(stage, manifest, optional) if optional else manifest
        entry = self.entry.model_copy(update={"drift": [row for row in rows if row.profile not in optional]})
        bound = self.options.budget.bound("relative_l2")
        return manifest, entry, [*notes, *self._remarks(within=bound is not None and was <= bound)]

    def _remarks(self, *, within: bool) -> Iterator[str]:
        if not self.entry.held_out:
            yield "recovery was judged on its training data; pass --eval PKG.MOD:LOADER to judge it on other data"
        if within:
            yield "bf16 was within budget before recovery, so none was needed: bf16-convert checkpoint"
        reason = self.worse and f"the trained weights did worse on {self.batches.origin}: {self.worse}"
        if not self.entry.training.kept and not self.entry.training.biases_corrected:
            reason = "training never reached a lower loss than theirs; try a lower --learning-rate, or more --steps"
        if reason:
            yield f"the original weights were published, rounded, because {reason}"

    def _compare(self, after: Artifact) -> tuple[list[RecoveredDrift], dict[str, list[str]]]:
        """Return the drift of both artifacts, and by profile where ``after`` is over the budget, one sentence each."""
        outputs, axis = [entry.spec() for entry in after.manifest.outputs], after.manifest.batch_axis
        feeds, reference = self.batches.feeds, measure.spool(load_reference(self.before).run, self.batches, after.path)
        expected = measure.Expected(feeds, reference, measure.slice_scales(reference, outputs, axis), len(feeds))

        def drift(artifact: Artifact, profile: str) -> dict[str, DriftSummary]:
            if profile not in artifact.manifest.profiles:
                return {}
            found = measure.summarise(measure.run_profile(artifact, profile, expected).drifts)
            release_memory()
            return found

        rows, breaches, budget = [], {}, self.options.budget
        for profile, measured in sorted(after.manifest.drift.items()):
            was, now = drift(self.before, profile), drift(after, profile)
            breaches[profile] = describe_breaches(profile, budget, now)
            for output, summary in sorted(now.items()):
                own, before = DriftSummary(measured.samples, measured.outputs[output]), was.get(output)
                for metric in dict.fromkeys(["relative_l2", *budget.as_dict()]):
                    found = {"before": before and before.judged(metric), "bound": budget.bound(metric)}
                    found |= {"after": summary.judged(metric), "own": own.judged(metric)}
                    if None not in (found["after"], found["own"]):
                        where = {"profile": profile, "output": output, "metric": metric}
                        rows.append(RecoveredDrift.model_validate(where | found))
        return rows, breaches
