"""``bf16-convert explain``: compares each layer of an artifact with the expected line, and looks for a remedy."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from bf16kit.artifact.artifact import Artifact
from bf16kit.drift.budget import Budget
from bf16kit.drift.measurements import MARGIN_DB, MOST_LAYERS, DiagnosisEntry, LayerEntry, Layers, downsample
from bf16kit.messages.document import plain
from bf16kit.messages.errors import ConversionError, RuntimeFailure, UsageError
from bf16kit.messages.text import table
from converter.graph.operators import WEIGHTED
from converter.islands import remedy
from converter.islands.explain import layer_entry, open_reference, trace
from converter.islands.remedytrials import Expired, never
from converter.plan.profiles import PROFILES
from converter.process.memory import release_memory
from converter.process.progress import Progress
from converter.report.layers import series
from converter.source import Feeds
from converter.verify import samples
from converter.verify.probing import Graph

_FEEDS = 2  # samples on which a conversion measures its layers: results vary little between samples


@dataclass(frozen=True, slots=True)
class Explanation:
    """All layers of one profile, and the diagnosis drawn from them."""

    profile: str
    layers: tuple[LayerEntry, ...]
    diagnosis: DiagnosisEntry

    def entry(self, max_layers: int) -> Layers:
        """Return this with at most ``max_layers`` layers, as ``measurements.json`` stores it."""
        return Layers(
            measured=len(self.layers), rows=list(downsample(self.layers, max_layers)), diagnosis=self.diagnosis
        )


def explain(path: Path, argument: str | None, profiles: Sequence[str], *, as_json: bool = False) -> str:
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
            found.append(explain_profile(graph, artifact, feeds, profile))
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
    expired: Expired = never,
    without: Collection[str] = (),
) -> dict[str, Layers]:
    """Measure the layers of all ONNX profiles, except those in ``without``, on the first of ``feeds``; by profile.

    For the profiles in ``remedies_for``, also look for a remedy. No verdict needs these tables. So a graph that does
    not run becomes a note in ``notes``, and an artifact without a reference has no tables.
    """
    found_onnx = (name for name, entry in artifact.manifest.profiles.items() if entry.format == "onnx")
    profiles = sorted(set(found_onnx) - set(without))
    if artifact.manifest.reference is None or not profiles:
        return {}
    found: dict[str, Layers] = {}
    try:
        with progress.step("measuring each layer's SQNR"), open_reference(artifact, scratch) as graph:
            for profile in profiles:
                explanation = explain_profile(
                    graph,
                    artifact,
                    feeds[:_FEEDS],
                    profile,
                    find_remedy=profile in remedies_for,
                    expired=expired,
                    scratch=scratch,
                )
                found[profile] = explanation.entry(MOST_LAYERS // len(profiles))
    except (RuntimeFailure, ConversionError) as error:
        notes.append(f"the SQNR of layers was not measured: {error}")
    return found


def explain_profile(
    reference: Graph,
    artifact: Artifact,
    feeds: Sequence[Feeds],
    profile: str,
    *,
    find_remedy: bool = True,
    expired: Expired = never,
    scratch: Path | None = None,
) -> Explanation:
    """Measure ``profile`` on ``feeds``; with ``find_remedy``, also look for a remedy until ``expired`` returns true.

    Errors: those of :func:`converter.islands.explain.trace`.
    """
    traced = trace(reference, artifact, feeds, profile)
    found = remedy.find_noisy_output(traced, Budget.from_dict(artifact.manifest.budget))
    if found is None or found.node is None:
        return Explanation(profile, tuple(traced.layers()), DiagnosisEntry(ails=found is not None))
    find_remedy = find_remedy and PROFILES[profile].searched
    best = remedy.find_remedy(traced, artifact, profile, feeds, found, expired, scratch) if find_remedy else None
    tried = find_remedy and (best is not None or not expired())
    diagnosis = DiagnosisEntry(ails=True, leaves=layer_entry(traced, found.node), remedy=best, tried=tried)
    return Explanation(profile, tuple(traced.layers()), diagnosis)


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


def text(explanation: Explanation, origin: str, no_remedy_reason: str = "") -> str:
    """Return the explanation as text: a table of the layers that matter, and the diagnosis.

    ``origin`` says which samples were run. ``no_remedy_reason`` says why no remedy was looked for; the default names
    this profile.
    """
    no_remedy_reason = no_remedy_reason or f"No remedy was looked for on profile {explanation.profile}."
    shown = [each for each in explanation.layers if _is_notable(each)]
    rows = [
        (each.depth, each.name, each.op, each.weight, f"{each.sqnr_db:.1f}", f"{each.expected_db:.1f}", _mark(each))
        for each in shown
    ]
    title = (
        f"Profile {explanation.profile}: SQNR of {len(rows)} of {len(explanation.layers)} layers on {origin}, and"
        " the SQNR expected of rounding alone"
    )
    columns = ("depth", "node", "op", "weight", "SQNR dB", "expected", "")
    shown_series = series(
        explanation.profile, explanation.entry(len(explanation.layers)), no_remedy_reason=no_remedy_reason
    )
    return "\n".join(
        [
            table(title, columns, rows),
            shown_series.summary,
            *([f"  {shown_series.option}"] if shown_series.option else []),
        ]
    )


def _is_notable(each: LayerEntry) -> bool:
    """Whether a layer has weights, is a product, or is below the line; ``--json`` has all layers."""
    return bool(each.weight) or each.op in WEIGHTED or bool(_mark(each))


def _mark(each: LayerEntry) -> str:
    return "below the line" if each.expected_db - each.sqnr_db > MARGIN_DB else ""
