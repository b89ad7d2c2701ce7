"""What the command line says once an artifact is published: one line if all is well, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.disk import disk_size
from bf16kit.artifact.manifest import Manifest
from bf16kit.converter.report.figures import Figures
from bf16kit.converter.report.inspect import FILES, share
from bf16kit.converter.report.page import NAME
from bf16kit.drift.table import Drift
from bf16kit.drift.verdicts import Verdict, tightest_of
from bf16kit.messages.wording import first_few, plain, size

VERSION = 1  # of the format that `checkpoint --json` writes


def closing(artifact: Artifact, notes: Sequence[str], seconds: float, *, verbose: bool = False) -> str:
    """Return the text; ``seconds`` is how long the conversion took.

    Rows of drift are shown if they are over budget; all of them if ``verbose``.
    """
    manifest = artifact.manifest
    found = Figures(manifest, manifest.files)
    lines = [_headline(artifact, found, seconds)]
    lines += [f"{label:<11} {said}" for label, said in _said(artifact, found, verbose)]
    lines += [f"note: {note}" for note in notes]
    has_report = NAME in manifest.files
    lines.append(f"report      {artifact.path / NAME}" if has_report else f"artifact    {artifact.path}")
    if manifest.profiles:
        lines.append(f"next        bf16-serve check --repository {artifact.path.parents[1]} {manifest.model}")
    drift = Drift(found.drift)
    shown = drift if verbose else Drift(drift.over)
    return "\n".join([*lines, *([f"\n{shown}"] if shown.rows else [])])


def record(artifact: Artifact, notes: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return the outcome for programs, see docs/json.md."""
    manifest, disk = artifact.manifest, disk_size(artifact)
    found = Figures(manifest, manifest.files)
    fields: dict[str, Any] = {name: getattr(found, name) for name in ("within", "headline", "verdicts", "top1")}
    fields |= {"version": VERSION, "published": True, "error": "", "notes": list(notes), "seconds": seconds}
    fields |= {"path": artifact.path, "model": manifest.model, "model_version": int(artifact.path.name)}
    fields |= {"report": artifact.path / NAME if NAME in manifest.files else None, "worst": tightest_of(found.drift)}
    fields |= {"islands": found.count, "on_cpu": found.on_cpu, "exports": sorted(manifest.exports)}
    fields |= {"total_bytes": disk.total, "checkpoint_bytes": disk.checkpoint, "total_ratio": disk.total_ratio}
    return dict(plain(fields))


def _headline(artifact: Artifact, found: Figures, seconds: float) -> str:
    disk, worst = disk_size(artifact), tightest_of(found.drift)
    name = f"{found.manifest.model}/{artifact.path.name}"
    judged = "drift was not measured"
    if worst is not None:
        over, emulated = "within budget" if found.within else "OVER BUDGET", ", emulated" if worst.emulated else ""
        judged = f"{over}, {worst.metric} at {share(worst.used)} of its bound ({worst.profile}{emulated})"
    return f"{name}: {judged}; {size(disk.total)} on disk, {disk.total_ratio:.3f} × the checkpoint; {seconds:.0f} s"


def _said(artifact: Artifact, found: Figures, verbose: bool) -> Iterator[tuple[str, str]]:
    """Yield lines of a label and what it is about."""
    manifest = found.manifest
    if found.verdicts:
        used = (f"{v.profile} {share(v.tightest.used if v.tightest else None)}" for v in found.verdicts)
        yield "budget used", ", ".join(used)
    for said in _samples(manifest, found.verdicts):
        yield "samples", said
    if found.on_cpu is not None:
        yield "on a CPU", str(found.on_cpu)
    if found.searched or (verbose and found.islands):
        yield "islands", f"{found.count} {found.islands_counted}"
    for name, entry in sorted(manifest.exports.items()):
        yield "export", f"{name}: {first_few(entry.files, FILES)}"
    if verbose:
        yield "source", f"{manifest.source.format}, {manifest.source.tensors} tensors, {size(manifest.source.bytes)}"
        yield "reference", found.reference.sentence
        yield "disk", ", ".join(f"{name} {size(count)}" for name, count in disk_size(artifact).parts.items())
        for output, said in found.top1.items():
            yield "top1", f"{output}: {said}"


def _samples(manifest: Manifest, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Say which samples each profile was measured on, together for those with the same; a sample is a row."""
    groups: dict[tuple[int, str], list[str]] = {}
    for each in verdicts:
        groups.setdefault((each.samples, each.source), []).append(each.profile)
    most = max((count for count, _ in groups), default=0)
    for (count, source), names in groups.items():
        who = "" if len(groups) == 1 else f"{', '.join(names)}: "
        why = _note(manifest, names[0]) if count < most else ""
        yield f"{who}{count} of {source}{f' ({why})' if why else ''}"


def _note(manifest: Manifest, name: str) -> str:
    entries: Mapping[str, Any] = {**manifest.profiles, **manifest.exports}
    return str(entries[name].note)
