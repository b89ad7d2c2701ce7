"""``bf16-convert explain EVIDENCE``: reruns a response that a server sent over budget, and locates the drift.

Two questions, in this order. Does the artifact give what was served? If not, the server had something else in memory,
and no layer of the artifact is to blame. If it does, which layer falls below its predicted SQNR on exactly this input?
"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.evidence import Evidence
from bf16kit.artifact.manifest import RESIDUAL
from bf16kit.converter.islands.explanation import Explanation, explain_profile, search_artifact
from bf16kit.converter.islands.layertrace import open_reference
from bf16kit.converter.process.progress import Progress
from bf16kit.converter.verify.running import open_profile
from bf16kit.drift.budget import Budget
from bf16kit.messages.errors import InvalidRequest, UsageError
from bf16kit.messages.wording import dumps, plain, table
from bf16kit.numerics.tensors import Array, check_feeds
from bf16kit.runtime.loading import load_reference

# The part of the served drift that may remain between the served output and the one computed here. At 1/4, the artifact
# accounts for 15/16 of the drift's power. It is not 0 because another CPU sums in another order, and so rounds some
# activations to the other side.
_EXPLAINED = 0.25
_NOT_REPRODUCED = "No remedy was looked for, because the artifact does not give what was served."


@dataclass(frozen=True, slots=True)
class Rerun:
    """One output, run again here. Distances are relative to the norm of the reference's output at the time of serving.

    ``served`` is the distance between the served output and the reference then. ``left`` is that between the served
    output and the artifact's output here; ``reproduced`` says whether it is small enough. ``reference`` is that between
    the reference here and then.
    """

    output: str
    served: float
    left: float
    reference: float
    reproduced: bool


def _is_small(distance: float, served: float) -> bool:
    return distance <= (_EXPLAINED * served if math.isfinite(served) else _EXPLAINED)


def explain_evidence(path: Path, artifact_path: Path, progress: Progress, *, as_json: bool = False) -> str:
    """Explain the evidence in the file ``path`` with the artifact in ``artifact_path``, as text or JSON.

    A remedy is searched for if the artifact gives what was served: fp32 islands cannot mend other outputs. Raises
    :class:`UsageError` for a file that is no evidence or belongs to another artifact, and :class:`ArtifactError` or a
    subclass if the artifact is damaged.
    """
    evidence = Evidence.read(path)
    artifact = Artifact.open(artifact_path)
    _check(evidence, artifact, path)
    profile, feeds = evidence.header.profile, (evidence.feeds,)
    reruns = _rerun(evidence, artifact)
    reproduced = all(each.reproduced for each in reruns)
    layers: list[Explanation] = []
    budget = Budget.from_dict(evidence.header.budget)
    if artifact.manifest.profiles[profile].format == "onnx":
        with open_reference(artifact) as graph:
            look = partial(search_artifact, graph, artifact, profile, feeds, budget, progress)
            found = explain_profile(graph, artifact, feeds, profile, budget, look if reproduced else None)
            layers.append(found if reproduced else replace(found, remarks=_NOT_REPRODUCED))
    if as_json:
        header = plain(evidence.header) | {"tensors": None}
        profiles = [each.as_dict() for each in layers]
        return dumps({"evidence": header, "again": reruns, "profiles": profiles})
    bound, title = budget.bounds.get("relative_l2"), "Distances on this input, relative to the reference's output"
    columns = ("output", "served – reference", "budget", "served – the artifact here", "reference here – there")
    distances = table(title, columns, [(e.output, e.served, bound, e.left, e.reference) for e in reruns])
    explained = [each.text(str(path)) for each in layers]
    explained = explained or ["The layers of a module that torch runs cannot be explained."]
    return "\n\n".join([_heading(evidence), distances, _conclusion(reruns), *explained])


def _check(evidence: Evidence, artifact: Artifact, path: Path) -> None:
    """Raise UsageError if the evidence is not of this artifact."""
    header, manifest = evidence.header, artifact.manifest
    if manifest.reference is None:
        raise UsageError(f"{artifact.path}: keeps no fp32 reference, so no server has measured its drift")
    entry = manifest.profiles.get(header.profile)
    if entry is None:
        raise UsageError(f"{path}: was served by profile {header.profile!r}, which {artifact.path} does not have")
    # these decide the outputs; reports and measurements do not
    files = {entry.graph, manifest.reference, *(tensor.file for tensor in manifest.tensors)}
    files |= {RESIDUAL} if any(tensor.residual is not None for tensor in manifest.tensors) else set()
    for name in sorted(files):
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


def _rerun(evidence: Evidence, artifact: Artifact) -> list[Rerun]:
    here: list[dict[str, Array]] = []
    for opened in (open_profile(artifact, evidence.header.profile)[0], load_reference(artifact)):
        with closing(opened) as runtime:
            here.append(runtime.run(evidence.feeds, list(evidence.served)))
    reruns = []
    for output, served in evidence.served.items():
        then = evidence.reference[output]
        from_reference, left = _distance(served, then, then), _distance(served, here[0][output], then)
        other = _distance(here[1][output], then, then)
        reruns.append(Rerun(output, from_reference, left, other, _is_small(left, from_reference)))
    return reruns


def _distance(one: Array, other: Array, scale: Array) -> float:
    """Return ‖one − other‖ ÷ ‖scale‖, in float64. Equal elements have no distance, NaN and infinities included."""
    if one.shape != other.shape:
        return math.inf
    if one.dtype == np.object_:
        return float(np.mean(one != other))
    a, b, size = (np.asarray(array, np.float64) for array in (one, other, scale))
    differ = (a != b) & ~(np.isnan(a) & np.isnan(b))
    distance, norm = np.linalg.norm(a[differ] - b[differ]), np.linalg.norm(size[np.isfinite(size)])
    if not differ.any():
        return 0.0
    return float(distance / norm) if norm and np.isfinite(distance) else math.inf


def _heading(evidence: Evidence) -> str:
    header, verdict = evidence.header, evidence.header.verdict
    rows = f"{header.rows} of the {header.of_rows} rows of a request" if header.batch_axis is not None else "a request"
    versions = ", ".join(f"{name} {version}" for name, version in header.versions.items())
    ratio = verdict.get("ratio")
    return (
        f"Evidence of model {header.model!r} version {header.version}, profile {header.profile}"
        f" ({header.precision}): {rows}, measured {header.at}.\nThe server's verdict: {verdict.get('state')}, cause"
        f" {verdict.get('cause')}, {verdict.get('metric')} of output {verdict.get('output')!r} at"
        f" {f'{ratio:.3g}' if isinstance(ratio, (int, float)) else ratio} × its budget.\nVersions there: {versions}."
    )


def _conclusion(reruns: list[Rerun]) -> str:
    other = max(reruns, key=lambda each: each.reference)
    worst = max(reruns, key=lambda each: each.left / each.served if each.served else 0.0)
    if not all(_is_small(each.reference, each.served) for each in reruns):
        return (
            f"The fp32 reference gives a different output {other.output!r} here than there ({other.reference:.3g}):"
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
