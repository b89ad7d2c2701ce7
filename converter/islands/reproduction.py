"""``bf16-convert explain EVIDENCE``: reruns a response that a server sent over budget, and locates the drift.

Two questions, in this order. Does the artifact give what was served? If not, the server had something else in memory,
and no layer of the artifact is to blame. If it does, which layer falls below its predicted SQNR on exactly this input?
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.evidence import Evidence
from bf16kit.artifact.manifest import Manifest
from bf16kit.drift.budget import Budget
from bf16kit.messages import document
from bf16kit.messages.errors import InvalidRequest, UsageError
from bf16kit.messages.wording import table
from bf16kit.numerics.tensors import Array, check_feeds
from bf16kit.runtime.loading import load_reference
from converter.islands import explanation
from converter.islands.explanation import Remedies
from converter.islands.layertrace import open_reference
from converter.process.progress import Progress
from converter.verify.running import open_profile

#: The part of the served drift that may remain between the served output and the one computed here. At 1/4, the
#: artifact accounts for 15/16 of the drift's power. It is not 0 because another CPU sums in another order, and so
#: rounds some activations to the other side.
EXPLAINED = 0.25
_NOT_REPRODUCED = "No remedy was looked for, because the artifact does not give what was served."


@dataclass(frozen=True, slots=True)
class Rerun:
    """One output, run again here. Distances are relative to the norm of the reference's output at the time of serving.

    ``served`` is the distance between the served output and the reference then. ``left`` is that between the served
    output and the artifact's output here. ``reference`` is that between the reference here and then.
    """

    output: str
    served: float
    left: float
    reference: float

    @property
    def reproduced(self) -> bool:
        """Whether the artifact gives the served output here."""
        return self.left <= _allowed(self.served)

    @property
    def same_reference(self) -> bool:
        """Whether the reference gives the same output here as when served."""
        return self.reference <= _allowed(self.served)


def _allowed(served: float) -> float:
    return EXPLAINED * served if math.isfinite(served) else EXPLAINED


def explain_evidence(path: Path, artifact_path: Path, progress: Progress, *, as_json: bool = False) -> str:
    """Explain the evidence in the file ``path`` with the artifact in ``artifact_path``, as text or JSON.

    A remedy is searched for if the artifact gives what was served: fp32 islands cannot mend other outputs. Raises
    :class:`UsageError` for a file that is no evidence or belongs to another artifact, and :class:`ArtifactError` or a
    subclass if the artifact is damaged.
    """
    evidence = Evidence.read(path)
    artifact = Artifact.open(artifact_path)
    profile = _check(evidence, artifact, path)
    reruns, feeds = _rerun(evidence, artifact, profile), (evidence.feeds,)
    reproduced = all(each.reproduced for each in reruns)
    layers = None
    if artifact.manifest.profiles[profile].format == "onnx":
        remedies = Remedies(feeds, Budget.from_dict(evidence.header.budget), progress) if reproduced else None
        with open_reference(artifact) as graph:
            layers = explanation.explain_profile(graph, artifact, feeds, profile, remedies)
    if as_json:
        header = document.plain(evidence.header) | {"tensors": None}
        rows = [{**document.plain(each), "reproduced": each.reproduced} for each in reruns]
        profiles = [] if layers is None else [explanation.as_dict(layers)]
        return document.dumps({"evidence": header, "again": rows, "profiles": profiles})
    parts = [_heading(evidence), _table(evidence, reruns), _conclusion(reruns)]
    if layers is None:
        parts.append("The layers of a module that torch runs cannot be explained.")
    else:
        parts.append(explanation.text(layers, str(path), "" if reproduced else _NOT_REPRODUCED))
    return "\n\n".join(parts)


def _check(evidence: Evidence, artifact: Artifact, path: Path) -> str:
    """Return the profile that served the response; raise UsageError if the evidence is not of this artifact."""
    header, manifest = evidence.header, artifact.manifest
    if manifest.reference is None:
        raise UsageError(f"{artifact.path}: keeps no fp32 reference, so no server has measured its drift")
    entry = manifest.profiles.get(header.profile)
    if entry is None:
        raise UsageError(f"{path}: was served by profile {header.profile!r}, which {artifact.path} does not have")
    for name in _relevant_files(manifest, entry.graph):
        served_sha256, sha256 = header.files.get(name), manifest.files[name].sha256
        if served_sha256 != sha256:
            raise UsageError(
                f"{path}: is evidence of another artifact than {artifact.path}: {name} has the digest"
                f" {(served_sha256 or 'none')[:12]} there and {sha256[:12]} here; pass the artifact that was served"
            )
    try:
        check_feeds([each.spec() for each in manifest.inputs], evidence.feeds)
    except InvalidRequest as error:
        raise UsageError(f"{path}: {error}") from None
    return header.profile


def _relevant_files(manifest: Manifest, graph: str) -> list[str]:
    """Return the files that decide the outputs of a profile and the reference; reports and measurements do not."""
    names = {graph, manifest.reference, *(tensor.file for tensor in manifest.tensors)}
    names |= {"residual.bin"} if any(tensor.residual is not None for tensor in manifest.tensors) else set()
    return sorted(name for name in names if name is not None)


def _rerun(evidence: Evidence, artifact: Artifact, profile: str) -> list[Rerun]:
    found: list[dict[str, Array]] = []
    for runtime in (open_profile(artifact, profile)[0], load_reference(artifact)):
        found.append(runtime.run(evidence.feeds, list(evidence.served)))
        runtime.close()
    served, then = evidence.served, evidence.reference
    return [
        Rerun(
            name,
            served=_distance(served[name], then[name], then[name]),
            left=_distance(served[name], found[0][name], then[name]),
            reference=_distance(found[1][name], then[name], then[name]),
        )
        for name in served
    ]


def _distance(one: Array, other: Array, scale: Array) -> float:
    """Return ‖one − other‖ ÷ ‖scale‖, in float64. Equal elements have no distance, NaN and infinities included."""
    if one.shape != other.shape:
        return math.inf
    if one.dtype == np.object_:
        return float(np.mean(one != other))
    a, b = (np.asarray(array, np.float64) for array in (one, other))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore"):
        difference = float(np.linalg.norm(np.where(same, 0.0, a - b)))
        size = np.asarray(scale, np.float64)
        norm = float(np.linalg.norm(np.where(np.isfinite(size), size, 0.0)))
    if difference == 0:
        return 0.0
    return difference / norm if norm and math.isfinite(difference) else math.inf


def _heading(evidence: Evidence) -> str:
    header, verdict = evidence.header, evidence.header.verdict
    rows = f"{header.rows} of the {header.of_rows} rows of a request" if header.batch_axis is not None else "a request"
    versions = ", ".join(f"{name} {version}" for name, version in header.versions.items())
    return (
        f"Evidence of model {header.model!r} version {header.version}, profile {header.profile}"
        f" ({header.precision}): {rows}, measured {header.at}.\nThe server's verdict: {verdict.get('state')}, cause"
        f" {verdict.get('cause')}, {verdict.get('metric')} of output {verdict.get('output')!r} at"
        f" {_number(verdict.get('ratio'))} × its budget.\nVersions there: {versions}."
    )


def _number(value: object) -> str:
    try:
        return f"{float(str(value)):.3g}"
    except ValueError:
        return "?"


def _table(evidence: Evidence, reruns: list[Rerun]) -> str:
    bound = Budget.from_dict(evidence.header.budget).bounds.get("relative_l2")
    rows = [(each.output, each.served, bound, each.left, each.reference) for each in reruns]
    columns = ("output", "served – reference", "budget", "served – the artifact here", "reference here – there")
    return table("Distances on this input, relative to the reference's output", columns, rows)


def _conclusion(reruns: list[Rerun]) -> str:
    worst = max(reruns, key=lambda each: each.left / each.served if each.served else 0.0)
    if not all(each.same_reference for each in reruns):
        each = max(reruns, key=lambda each: each.reference)
        return (
            f"The fp32 reference gives a different output {each.output!r} here than there ({each.reference:.3g}):"
            " the process that measured drift was damaged, or computes differently. What follows was measured on"
            " this machine."
        )
    if all(each.reproduced for each in reruns):
        return "The artifact gives here what was served: the model itself has this drift on this input."
    return (
        f"The artifact does not give what was served: output {worst.output!r} is {worst.left:.3g} away from it here,"
        f" and was {worst.served:.3g} away from the reference there. The server did not compute what this artifact"
        " contains: damaged memory, a faulty device, or another program. Load the model again, and check the machine"
        " if it happens again. The layers below are those of this artifact on this input."
    )
