"""``bf16-convert explain``: compares each layer with its predicted SQNR, and searches for what would mend a profile."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import PlanEntry
from bf16kit.drift import measurements
from bf16kit.drift.budget import Budget
from bf16kit.drift.measurements import MARGIN_DB, DiagnosisEntry, LayerEntry, Layers, RemedyEntry
from bf16kit.messages.document import plain
from bf16kit.messages.errors import ConversionError, RuntimeFailure, UsageError
from bf16kit.messages.wording import table
from bf16kit.numerics.residual import is_half
from bf16kit.runtime.memory.weights import Weights
from converter.graph.operators import WEIGHTED
from converter.islands.layertrace import find_noisy_output, open_reference, trace
from converter.islands.result import SearchResult
from converter.islands.search import Task, search
from converter.islands.trials import Deadline, Signature, reference_outputs
from converter.plan.decisions import Islands
from converter.plan.profiles import PROFILES
from converter.process.memory import release_memory
from converter.process.progress import Progress
from converter.report.layers import series
from converter.rewrite import prepare
from converter.source import Feeds
from converter.verify import samples
from converter.verify.layernoise import Graph
from converter.verify.measure import Expected

_FEEDS = 2  # samples on which a conversion measures its layers: results vary little between samples
_MINUTES = 5.0  # of a search, as by default in a conversion
_BUDGET_MET = "No remedy is needed, because the budget is met on these samples."


@dataclass(frozen=True, slots=True)
class Remedies:
    """What a search for a remedy needs beside the artifact: see :class:`~converter.islands.search.Task`."""

    feeds: Sequence[Feeds]
    budget: Budget
    progress: Progress
    deadline: Deadline = field(default_factory=lambda: Deadline.after(_MINUTES))
    scratch: Path | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """All layers of one profile, and the diagnosis drawn from them. ``remarks`` are sentences on the remedy."""

    profile: str
    layers: tuple[LayerEntry, ...]
    diagnosis: DiagnosisEntry
    remarks: str = ""

    def entry(self, max_layers: int) -> Layers:
        """Return this with at most ``max_layers`` layers, as ``measurements.json`` stores it."""
        rows = list(measurements.downsample(self.layers, max_layers))
        return Layers(measured=len(self.layers), rows=rows, diagnosis=self.diagnosis)


def explain(
    path: Path, argument: str | None, profiles: Sequence[str], progress: Progress, *, as_json: bool = False
) -> str:
    """Explain the layers of ``profiles`` (of all ONNX profiles if none is named), as text or JSON.

    ``argument`` are samples as for ``--samples``; if None, the golden samples are run. Raises
    :class:`ArtifactError` or a subclass if the artifact is damaged, or has no such profile or no fp32
    reference, and :class:`SamplesError` for bad samples.
    """
    artifact = Artifact.open(path)
    onnx = sorted(name for name, entry in artifact.manifest.profiles.items() if entry.format == "onnx")
    if not onnx and artifact.manifest.exports:
        raise UsageError(
            f"{path}: is an export without ONNX profiles, so it has no layers to explain; convert the checkpoint"
            " again with --format onnx"
        )
    feeds, origin = _feeds(artifact, argument)
    found = []
    with open_reference(artifact) as graph:
        for profile in dict.fromkeys(profiles or onnx or ("cpu",)):
            remedies = Remedies(feeds, Budget.from_dict(artifact.manifest.budget), progress)
            found.append(explain_profile(graph, artifact, feeds, profile, remedies))
            release_memory()
    if as_json:
        return json.dumps({"samples": origin, "profiles": [as_dict(each) for each in found]}, indent=1)
    return "\n\n".join(text(each, origin) for each in found)


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
    found_onnx = (name for name, entry in artifact.manifest.profiles.items() if entry.format == "onnx")
    profiles = sorted(set(found_onnx) - set(without))
    if artifact.manifest.reference is None or not profiles:
        return {}
    budget = Budget.from_dict(artifact.manifest.budget)
    remedies = Remedies(feeds, budget, progress, Deadline.after(minutes), scratch)
    found: dict[str, Layers] = {}
    try:
        with progress.step("measuring each layer's SQNR"), open_reference(artifact, scratch, rebuilt) as graph:
            for profile in profiles:
                wanted = remedies if profile in remedies_for else None
                explanation = explain_profile(graph, artifact, feeds[:_FEEDS], profile, wanted)
                found[profile] = explanation.entry(measurements.MOST_LAYERS // len(profiles))
    except (RuntimeFailure, ConversionError) as error:
        notes.append(f"the SQNR of layers was not measured: {error}")
    return found


def explain_profile(
    reference: Graph, artifact: Artifact, feeds: Sequence[Feeds], profile: str, remedies: Remedies | None
) -> Explanation:
    """Measure ``profile`` on ``feeds``; with ``remedies``, also search for a remedy if an output is noisy.

    Errors: those of :func:`converter.islands.layertrace.trace`, and of preparing and running the graph.
    """
    traced = trace(reference, artifact, feeds, profile)
    layers = tuple(traced.layers())
    budget = Budget.from_dict(artifact.manifest.budget) if remedies is None else remedies.budget
    noisy = find_noisy_output(traced, budget)
    if noisy is None:
        return Explanation(profile, layers, DiagnosisEntry(ails=False))
    diagnosis = DiagnosisEntry(ails=True, leaves=None if noisy.node is None else traced.layer(noisy.node))
    if remedies is None or not PROFILES[profile].searched:
        return Explanation(profile, layers, diagnosis, f"No remedy was looked for on profile {profile}.")
    del traced
    result = search_artifact(reference, artifact, profile, remedies)
    if not result.islands and not result.error:
        return Explanation(profile, layers, diagnosis, _BUDGET_MET)
    update = {"tried": result.complete or bool(result.islands), "remedy": _remedy(result, noisy.output.name or "")}
    return Explanation(profile, layers, diagnosis.model_copy(update=update), " ".join(result.notes) or result.error)


def search_artifact(reference: Graph, artifact: Artifact, profile: str, remedies: Remedies) -> SearchResult:
    """Search for further islands of ``profile``, whose graph is prepared again as the conversion did."""
    manifest, feeds = artifact.manifest, remedies.feeds
    model = reference.model.clone()
    for name, array in reference.external.items():
        model.graph.initializers[name].const_value = ir.tensor(array, name=name)
    prepared = prepare(model, half_precision={each.tensor for each in manifest.checkpoint if is_half(each.dtype)})
    signature = Signature.of(manifest)
    outputs = reference_outputs(prepared.reference, signature, feeds, remedies.scratch)
    scales = {} if manifest.golden is None else artifact.golden().scales
    task = Task(
        prepared=prepared,
        profile=PROFILES[profile],
        signature=signature,
        expected=Expected(feeds, outputs, scales, len(feeds)),
        budget=remedies.budget,
        deadline=remedies.deadline,
        islands=Islands(_searched(manifest.plan.nodes[profile]), _searched(manifest.plan.tensors)),
        keep_fp32=_patterns(artifact, "keep_fp32"),
        bf16=_patterns(artifact, "bf16"),
        scratch=remedies.scratch,
    )
    return search(task, remedies.progress)


def _remedy(result: SearchResult, output: str) -> RemedyEntry | None:
    names = result.keep_fp32
    if not names:
        return None
    before, after = result.sqnr_before[output], result.sqnr_now[output]
    return RemedyEntry(keep_fp32=pattern(names), nodes=names, output=output, before_db=before, after_db=after)


def pattern(names: Sequence[str]) -> str:
    """Return ``names`` as one regular expression for ``--keep-fp32``."""
    one_of = "|".join(re.escape(name) for name in names)
    return f"^{one_of}$" if len(names) == 1 else f"^({one_of})$"


def _searched(entries: Iterable[PlanEntry]) -> dict[str, str]:
    """Return the entries that a search keeps in fp32 already, each with its reason."""
    return {entry.name: entry.reason for entry in entries if entry.code == "budget"}


def _patterns(artifact: Artifact, option: str) -> list[str]:
    given = artifact.manifest.options.get(option)
    return [str(each) for each in given] if isinstance(given, list) else []


def _feeds(artifact: Artifact, argument: str | None) -> tuple[tuple[Feeds, ...], str]:
    if argument is not None:
        found = samples.of_artifact(argument, artifact.manifest)
        return found.feeds, found.origin
    if artifact.manifest.golden is None:
        raise UsageError(f"{artifact.path}: keeps no golden samples (a model with strings); give some with --samples")
    return (artifact.golden().inputs,), "the golden samples"


def as_dict(explanation: Explanation) -> dict[str, object]:
    """Return the explanation with every layer, for JSON."""
    found: dict[str, object] = {"profile": explanation.profile, "layers": plain(explanation.layers)}
    return found | explanation.diagnosis.model_dump(mode="json")


def text(explanation: Explanation, origin: str, remarks: str = "") -> str:
    """Return the explanation as text: a table of the layers that matter, and the diagnosis.

    ``origin`` says which samples were run. ``remarks`` replace the explanation's own.
    """
    shown = [each for each in explanation.layers if _is_notable(each)]
    rows = [(e.depth, e.name, e.op, e.weight, f"{e.sqnr_db:.1f}", f"{e.expected_db:.1f}", _mark(e)) for e in shown]
    title = (
        f"Profile {explanation.profile}: SQNR of {len(rows)} of {len(explanation.layers)} layers on {origin}, and"
        " the SQNR predicted for rounding alone"
    )
    columns = ("depth", "node", "op", "weight", "SQNR dB", "predicted", "")
    said = series(
        explanation.profile, explanation.entry(len(explanation.layers)), remarks=remarks or explanation.remarks
    )
    return "\n".join([table(title, columns, rows), said.summary, *([f"  {said.option}"] if said.option else [])])


def _is_notable(each: LayerEntry) -> bool:
    """Whether a layer has weights, is a product, or is below its prediction; ``--json`` has all layers."""
    return bool(each.weight) or each.op in WEIGHTED or bool(_mark(each))


def _mark(each: LayerEntry) -> str:
    return "below prediction" if each.expected_db - each.sqnr_db > MARGIN_DB else ""
