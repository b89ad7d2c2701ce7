"""The walk of a recovery: read → convert as it is → train → round → convert → compare with what fp32 answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from bf16kit.artifact import Artifact
from bf16kit.errors import BudgetExceeded, UsageError
from bf16kit.manifest import Manifest
from bf16kit.publish import StagingArtifact
from bf16kit.recovery import RecoveryEntry
from converter import intake
from converter.model import Checkpoint, Source, TorchModel
from converter.options import Options, Target
from converter.pipeline import Given, Judged, Result, convert
from converter.process.memory import release
from converter.process.naming import naming
from converter.process.progress import Progress
from converter.proof.judging import without
from converter.proof.samples import Samples, load
from converter.recovery import precision
from converter.recovery.batches import Batch, Loader
from converter.recovery.comparison import Comparison, compare, worse_answers
from converter.recovery.place import ORIGINAL, Place, workplace
from converter.recovery.settings import Settings
from converter.recovery.training import Taught, check_installed, train
from converter.recovery.weights import digest, find, put, recovered

JUDGED = 1000  # batches, at most, that a recovery is judged on: as many as --samples takes


@dataclass(frozen=True, slots=True)
class _Judging:
    """What the recovered artifact is judged by: batches, what they are called, and whether they were held out."""

    batches: Sequence[Batch]
    origin: str
    held_out: bool


def recover(options: Options, settings: Settings, progress: Progress) -> Result:
    """Train the weights of ``options.source`` for bf16, and publish them as an artifact at ``options.target``.

    Nothing is published unless the bf16 artifact answers within the budget as the *original* fp32 weights did (for
    ``cross-entropy``: answers as many labels), and within it as its own fp32 does. Raises what
    :func:`converter.pipeline.convert` and :func:`converter.recovery.training.train` raise, and
    :class:`BudgetExceeded` where recovery did not succeed.
    """
    check_installed()
    where = precision.device(settings.device)
    check_target(options)
    with naming(options.source), workplace(options.target, resume=settings.resume) as place:
        source = intake.read(options, progress)
        model = source.module
        if model is None:
            raise UsageError(
                f"{options.source}: is {source.checkpoint.format}, which torch cannot train; give the torch checkpoint"
                " that it was exported from, with --model pkg.mod:factory"
            )
        loader = Loader("--data", settings.data, model.inputs, options.seed)
        judging = _judging(settings, loader, model, options)
        checkpoint, outputs = source.checkpoint, source.outputs
        place.agree(_asked(options, settings, checkpoint, where.type))
        samples = _samples(options, source, judging)
        before = _as_it_is(options, source, place, samples, progress)
        trained = find(model.module, checkpoint.tensors, before)
        taught = train(model, outputs, trained, loader, settings, options.seed, place, progress)
        tensors = recovered(checkpoint.tensors, trained, taught.state)
        put(taught.student.module, trained, tensors)
        again = Checkpoint(f"{checkpoint.format}, recovered", digest(tensors), tensors)
        rewritten = replace(source, checkpoint=again, module=taught.student)
        del source, model
        release()
        judge = _Judge(options, settings, before, judging, taught, checkpoint.sha256, place)
        given = Given(read=lambda _: _exported(rewritten), samples=samples, judge=judge)
        shaped = replace(options, search=False, shaped={"recovery": settings.recorded(checkpoint.sha256)})
        result = convert(shaped, progress, given)
        place.finished = True
    return Result(result.artifact, (*precision.notes(settings.precision, settings.scaling, where), *result.notes))


def check_target(options: Options) -> None:
    """Refuse a target that is in the way before hours of training, as publishing would after them."""
    from bf16kit.publish import check_target as check

    check(options.target.path, options.force)


def _judging(settings: Settings, loader: Loader, model: TorchModel, options: Options) -> _Judging:
    if settings.evaluation is None:
        return _Judging(loader.first(JUDGED), f"{settings.data}, on which it was trained", held_out=False)
    evaluation = Loader("--eval", settings.evaluation, model.inputs, options.seed)
    return _Judging(evaluation.first(JUDGED), settings.evaluation, held_out=True)


def _samples(options: Options, source: Source, judging: _Judging) -> Samples:
    """What drift is measured on: the samples that were given, else the batches that recovery is judged on.

    Without the outputs that came with them: those are the original's.
    """
    if options.samples is not None:
        given = load(options.samples, source.inputs, outputs=[spec.name for spec in source.outputs])
        return Samples(given.feeds, given.origin)
    return Samples(tuple(batch.feeds for batch in judging.batches), judging.origin)


def _asked(options: Options, settings: Settings, checkpoint: Checkpoint, where: str) -> dict[str, Any]:
    """What the end state follows from, and what the artifact of the weights as they were was made with, for whoever
    resumes. A file may hold weights of several kinds: its digest does not say which were chosen."""
    recorded = {f"--{name.replace('_', '-')}": value for name, value in settings.recorded(checkpoint.sha256).items()}
    recorded["the source's sha256"] = recorded.pop("--recovered-from")
    return recorded | {
        "--data": settings.data,
        "--device": where,
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


def _as_it_is(options: Options, source: Source, place: Place, samples: Samples, progress: Progress) -> Artifact:
    """The artifact of the weights as they are: what is rounded, what bf16 answers before, and the fp32 answers."""
    target = Target(place.path / ORIGINAL, options.target.model, options.target.version)
    if not target.path.exists():
        plain = replace(
            options,
            target=target,
            allow_over_budget=True,
            drop_failing_profiles=False,
            search=False,
            residual=True,
            report=False,
        )
        # A copy of the value: converting lets go of the module and of the oracle, and changes the graph.
        own = None if options.samples is not None else samples
        given = Given(read=lambda _: replace(source), samples=own)
        convert(plain, progress, given)
    return Artifact.open(target.path)


def _exported(source: Source) -> Source:
    """``source`` exported again: its graph is that of other weights."""
    from converter.sources.readers.common import exported

    assert source.module is not None  # noqa: S101 - it was trained
    found = exported(source.checkpoint, source.module, source.sampler)
    kinds = {spec.name: spec.kind for spec in source.outputs}
    outputs = tuple(replace(spec, kind=kinds.get(spec.name, spec.kind)) for spec in found.outputs)
    return replace(found, outputs=outputs, tools=(*source.tools, "lightning"), notes=source.notes)


@dataclass(frozen=True, slots=True)
class _Judge:
    """Holds what was written against what the original weights answer in fp32."""

    options: Options
    settings: Settings
    before: Artifact
    judging: _Judging
    taught: Taught
    recovered_from: str
    place: Place

    def __call__(self, stage: StagingArtifact, manifest: Manifest, progress: Progress) -> Judged:
        budget = self.options.budget
        with progress.step("comparing with the original's fp32 answers"):
            draft = stage.draft(manifest)
            found = compare(self.before, draft, self.judging.batches, budget, stage.path)
        over = worse_answers(found, budget) if self.settings.loss == "cross-entropy" else found.over
        manifest, notes = self._kept(stage, manifest, {profile: words for profile, words in over.items() if words})
        notes += self._remarks(found)
        entry = RecoveryEntry(
            recovered_from=self.recovered_from,
            judged_on=self.judging.origin,
            samples=len(self.judging.batches),
            held_out=self.judging.held_out,
            training=self.taught.training,
            gradients=list(self.taught.gradients),
            drift=[row for row in found.drift if row.profile in manifest.profiles],
            accuracy=found.accuracy,
        )
        return Judged(manifest, entry, tuple(notes))

    def _kept(
        self, stage: StagingArtifact, manifest: Manifest, over: dict[str, list[str]]
    ) -> tuple[Manifest, list[str]]:
        """``manifest`` without optional profiles that did not recover; :class:`BudgetExceeded` for any other."""
        unasked = [profile for profile in over if profile in self.options.optional_profiles]
        notes = [f"no profile {profile}: {words}" for profile in unasked for words in over[profile]]
        if unasked:
            manifest = without(stage, manifest, unasked)
        failed = "".join(f"\n  {word}" for profile in sorted(over) if profile not in unasked for word in over[profile])
        if not failed:
            return manifest, notes
        if self.options.allow_over_budget:
            return manifest, [*notes, f"not recovered, published because that was allowed:{failed}"]
        raise BudgetExceeded(
            f"not recovered, nothing published; from the original's fp32 answers, on {self.judging.origin}:"
            f"{failed}\nTry more --steps or another --learning-rate (remove {self.place.path} first), keep the nodes"
            " that cause it in fp32 (--keep-fp32 REGEX), raise the --budget, or publish this with --resume"
            " --allow-over-budget"
        )

    def _remarks(self, found: Comparison) -> list[str]:
        notes = []
        if not self.judging.held_out:
            notes.append("recovery was judged on the data it was trained on; --eval PKG.MOD:LOADER judges it on other")
        bound = self.options.budget.bound("relative_l2")
        judged = [row for row in found.drift if row.metric == "relative_l2" and row.before is not None]
        if bound is not None and judged and all((row.before or 0.0) <= bound for row in judged):
            notes.append(
                "bf16 kept to the budget before recovery, so none was needed: bf16-convert checkpoint gives that"
                " artifact, with its weights as they were"
            )
        worse = [row for row in judged if row.before is not None and row.after > row.before]
        notes += [
            f"profile {row.profile}, output {row.output!r}: recovery made bf16 worse: relative_l2 from the original's"
            f" fp32 answers was {row.before:.3g}, and is {row.after:.3g}"
            for row in worse
        ]
        return notes
