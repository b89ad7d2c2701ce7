"""``bf16-convert explain``: compares each layer with its predicted SQNR, and searches for what would mend a profile."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx_ir as ir

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import PlanEntry
from bf16kit.converter.graph.operators import WEIGHTED
from bf16kit.converter.islands.candidates import SearchResult
from bf16kit.converter.islands.layertrace import open_reference, trace
from bf16kit.converter.islands.search import search
from bf16kit.converter.islands.trials import Deadline, Task, reference_outputs
from bf16kit.converter.plan.decisions import Islands
from bf16kit.converter.plan.profiles import PROFILES
from bf16kit.converter.process.memory import release_memory
from bf16kit.converter.process.progress import Progress
from bf16kit.converter.report.figures import series
from bf16kit.converter.rewrite import prepare
from bf16kit.converter.source import Feeds
from bf16kit.converter.verify import samples
from bf16kit.converter.verify.layernoise import Graph
from bf16kit.converter.verify.measure import Expected
from bf16kit.drift.budget import Budget
from bf16kit.drift.measurements import (
    MARGIN_DB,
    MOST_LAYERS,
    DiagnosisEntry,
    LayerEntry,
    Layers,
    RemedyEntry,
    downsample,
)
from bf16kit.drift.verdicts import drift_rows
from bf16kit.messages.errors import ConversionError, RuntimeFailure, UsageError
from bf16kit.messages.wording import table
from bf16kit.numerics.residual import is_half
from bf16kit.runtime.memory.weights import Weights

_FEEDS = 2  # samples on which a conversion measures its layers: results vary little between samples
_MINUTES = 5.0  # of a search, as by default in a conversion
_BUDGET_MET = "No remedy is needed, because the budget is met on these samples."
_BUDGET_MET_HERE = "The budget is met on these samples; for a remedy, pass --samples on which it is not."


@dataclass(frozen=True, slots=True)
class Explanation:
    """All layers of one profile with the diagnosis drawn from them. ``remarks`` are sentences on the remedy."""

    profile: str
    rows: Sequence[LayerEntry]
    diagnosis: DiagnosisEntry
    remarks: str = ""

    def as_dict(self) -> dict[str, object]:
        """Return the explanation with every layer, for JSON."""
        layers = [row.model_dump(mode="json") for row in self.rows]
        return {"profile": self.profile, "layers": layers, **self.diagnosis.model_dump(mode="json")}

    def text(self, origin: str) -> str:
        """Return the explanation as text: a table of the layers that matter, and the diagnosis.

        These have weights, are products, or are below their prediction. ``origin`` says which samples were run.
        """
        marked = [(e, "below prediction" if e.expected_db - e.sqnr_db > MARGIN_DB else "") for e in self.rows]
        rows = [
            (e.depth, e.name, e.op, e.weight, f"{e.sqnr_db:.1f}", f"{e.expected_db:.1f}", mark)
            for e, mark in marked
            if e.weight or e.op in WEIGHTED or mark
        ]
        counted = f"{len(rows)} of {len(self.rows)} layers on {origin}"
        title = f"Profile {self.profile}: SQNR of {counted}, and the SQNR predicted for rounding alone"
        layers = Layers(measured=len(self.rows), rows=list(self.rows), diagnosis=self.diagnosis)
        said = series(self.profile, layers, remarks=self.remarks)
        columns = ("depth", "node", "op", "weight", "SQNR dB", "predicted", "")
        return "\n".join([table(title, columns, rows), said.summary, *([f"  {said.option}"] if said.option else [])])


def explain(
    path: Path, argument: str | None, profiles: Sequence[str], progress: Progress, *, as_json: bool = False
) -> str:
    """Explain the layers of ``profiles`` (of all ONNX profiles if none is named), as text or JSON.

    ``argument`` are samples as for ``--samples``; if None, the golden samples are run. Raises
    :class:`ArtifactError` or a subclass if the artifact is damaged, or has no such profile or no fp32
    reference, and :class:`SamplesError` for bad samples.
    """
    artifact = Artifact.open(path)
    onnx = _onnx_profiles(artifact)
    if not onnx and artifact.manifest.exports:
        raise UsageError(
            f"{path}: is an export without ONNX profiles, so it has no layers to explain; convert the checkpoint"
            " again with --format onnx"
        )
    feeds, origin = _feeds(artifact, argument)
    budget, found = Budget.from_dict(artifact.manifest.budget), []
    with open_reference(artifact) as graph:
        for profile in dict.fromkeys(profiles or onnx or ("cpu",)):
            look = partial(search_artifact, graph, artifact, profile, feeds, budget, progress)
            found.append(explain_profile(graph, artifact, feeds, profile, budget, look))
            release_memory()
    if as_json:
        return json.dumps({"samples": origin, "profiles": [each.as_dict() for each in found]}, indent=1)
    return "\n\n".join(each.text(origin) for each in found)


def measure_layers(
    artifact: Artifact,
    feeds: Sequence[Feeds],
    scratch: Path,
    progress: Progress,
    notes: list[str],
    *,
    remedies_for: Collection[str] = (),
    minutes: float = _MINUTES,
    without: Collection[str] = (),
    rebuilt: Weights | None = None,
) -> dict[str, Layers]:
    """Measure the layers of all ONNX profiles, except those in ``without``, on the first of ``feeds``; by profile.

    For the profiles in ``remedies_for``, also search for a remedy, on all ``feeds`` and for up to ``minutes`` of
    processor time in all. No verdict needs these tables. So a graph that does not run becomes a note in ``notes``, and
    an artifact without a reference has no tables. ``rebuilt`` are the reference's weights, if they are there already.
    """
    profiles = [name for name in _onnx_profiles(artifact) if name not in without]
    if artifact.manifest.reference is None or not profiles:
        return {}
    budget, deadline = Budget.from_dict(artifact.manifest.budget), Deadline.after(minutes)
    found: dict[str, Layers] = {}
    try:
        with progress.step("measuring each layer's SQNR"), open_reference(artifact, scratch, rebuilt) as graph:
            for profile in profiles:
                look = partial(search_artifact, graph, artifact, profile, feeds, budget, progress, deadline, scratch)
                wanted = look if profile in remedies_for else None
                each = explain_profile(graph, artifact, feeds[:_FEEDS], profile, budget, wanted)
                rows = list(downsample(each.rows, MOST_LAYERS // len(profiles)))
                found[profile] = Layers(measured=len(each.rows), rows=rows, diagnosis=each.diagnosis)
    except (RuntimeFailure, ConversionError) as error:
        notes.append(f"the SQNR of layers was not measured: {error}")
    return found


def explain_profile(
    reference: Graph,
    artifact: Artifact,
    feeds: Sequence[Feeds],
    profile: str,
    budget: Budget,
    look: Callable[[], SearchResult] | None,
) -> Explanation:
    """Measure ``profile`` on ``feeds``; ``look`` for a remedy if an output is noisy, or the profile over its budget.

    Errors: those of :func:`bf16kit.converter.islands.layertrace.trace`, and of preparing and running the graph.
    """
    traced = trace(reference, artifact, feeds, profile)
    layers = traced.layers()
    noisy = traced.noisy_output(budget)
    within = all(row.within for row in drift_rows(artifact.manifest) if row.profile == profile)
    if noisy is None and within:
        return Explanation(profile, layers, DiagnosisEntry(ails=False))
    node = None if noisy is None else traced.noise_source(noisy)
    diagnosis = DiagnosisEntry(ails=True, leaves=None if node is None else traced.layer(node))
    if look is None or not PROFILES[profile].searched:
        return Explanation(profile, layers, diagnosis, f"No remedy was looked for on profile {profile}.")
    del traced
    result = look()
    if not result.islands and not result.error:
        return Explanation(profile, layers, diagnosis, _BUDGET_MET if within else _BUDGET_MET_HERE)
    remedy = _remedy(result, None if noisy is None else noisy.name)
    update = {"tried": result.complete or bool(result.islands), "remedy": remedy}
    return Explanation(profile, layers, diagnosis.model_copy(update=update), " ".join(result.notes) or result.error)


def search_artifact(
    reference: Graph,
    artifact: Artifact,
    profile: str,
    feeds: Sequence[Feeds],
    budget: Budget,
    progress: Progress,
    deadline: Deadline | None = None,
    scratch: Path | None = None,
) -> SearchResult:
    """Search for further islands of ``profile``, whose graph is prepared again as the conversion did."""
    manifest = artifact.manifest
    model = reference.model.clone()
    for name, array in reference.external.items():
        model.graph.initializers[name].const_value = ir.tensor(array, name=name)
    prepared = prepare(model, half_precision={each.tensor for each in manifest.checkpoint if is_half(each.dtype)})
    outputs = reference_outputs(prepared.reference, manifest, feeds, scratch)
    scales = {} if manifest.golden is None else artifact.golden().scales
    task = Task(
        prepared=prepared,
        profile=PROFILES[profile],
        manifest=manifest,
        expected=Expected(feeds, outputs, scales, len(feeds)),
        budget=budget,
        deadline=deadline or Deadline.after(_MINUTES),
        islands=Islands(_searched(manifest.plan.nodes[profile]), _searched(manifest.plan.tensors)),
        scratch=scratch,
    )
    return search(task, progress)


def _onnx_profiles(artifact: Artifact) -> list[str]:
    return sorted(name for name, entry in artifact.manifest.profiles.items() if entry.format == "onnx")


def _remedy(result: SearchResult, output: str | None) -> RemedyEntry | None:
    """Return what the search keeps in fp32, with one regular expression for ``--keep-fp32``.

    ``output`` is the one whose SQNR it gives; None takes the one that gains most.
    """
    names = result.keep_fp32
    if not names:
        return None
    one_of = "|".join(map(re.escape, names))
    pattern = f"^{one_of}$" if len(names) == 1 else f"^({one_of})$"
    if output is None:
        output = max(result.sqnr_now, key=lambda each: result.sqnr_now[each] - result.sqnr_before[each])
    before, after = result.sqnr_before[output], result.sqnr_now[output]
    return RemedyEntry(keep_fp32=pattern, nodes=names, output=output, before_db=before, after_db=after)


def _searched(entries: Iterable[PlanEntry]) -> dict[str, str]:
    """Return the entries that a search keeps in fp32 already, each with its reason."""
    return {entry.name: entry.reason for entry in entries if entry.code == "budget"}


def _feeds(artifact: Artifact, argument: str | None) -> tuple[tuple[Feeds, ...], str]:
    if argument is not None:
        found = samples.of_artifact(argument, artifact.manifest)
        return found.feeds, found.origin
    if artifact.manifest.golden is None:
        raise UsageError(f"{artifact.path}: keeps no golden samples (a model with strings); give some with --samples")
    return (artifact.golden().inputs,), "the golden samples"
