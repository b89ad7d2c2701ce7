"""``bf16-convert explain``: how each layer of an artifact fares beside the expected line, and what would mend it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bf16kit.artifact import Artifact
from bf16kit.budget import Budget
from bf16kit.errors import UsageError
from converter.graph.operators import WEIGHTED
from converter.model import Feeds
from converter.process.memory import release
from converter.proof import remedy, samples
from converter.proof.explain import LayerSqnr, layer, reference, trace
from converter.proof.probing import Graph
from converter.proof.remedy import MARGIN, Remedy
from converter.report.text import table


@dataclass(frozen=True, slots=True)
class Explanation:
    """One profile: its layers, the layer at which its worst output leaves the expected line, and what would mend it.

    ``ails`` says whether an output is off the line or over the budget. ``leaves`` is None when none is, or the way to
    it is on the line throughout; ``remedy`` is None then, and when nothing that was tried helps.
    """

    profile: str
    layers: tuple[LayerSqnr, ...]
    ails: bool
    leaves: LayerSqnr | None
    remedy: Remedy | None


def explain(path: Path, given: str | None, profiles: Sequence[str], *, as_json: bool = False) -> str:
    """What happens to the signal down the graph of ``profiles`` (all ONNX ones, for none named), as text or JSON.

    ``given`` are samples as for ``--samples``; for None the golden samples are run. Raises
    :class:`~bf16kit.errors.ArtifactError` or its kin when the artifact is damaged, has no such profile or no fp32
    reference, :class:`~bf16kit.errors.SamplesError` for bad samples.
    """
    artifact = Artifact.open(path)
    onnx = sorted(name for name, entry in artifact.manifest.profiles.items() if entry.format == "onnx")
    feeds, origin = _feeds(artifact, given)
    found = []
    with reference(artifact) as graph:
        for profile in dict.fromkeys(profiles or onnx or ("cpu",)):
            found.append(explained(graph, artifact, feeds, profile))
            release()
    if as_json:
        return json.dumps({"samples": origin, "profiles": [_as_dict(each) for each in found]}, indent=1)
    return "\n\n".join(_text(each, origin) for each in found)


def explained(reference: Graph, artifact: Artifact, feeds: Sequence[Feeds], profile: str) -> Explanation:
    """What ``feeds`` say of ``profile``. Errors: those of :func:`converter.proof.explain.layers`."""
    traced = trace(reference, artifact, feeds, profile)
    layers = tuple(traced.layers())
    found = remedy.departure(traced, Budget.from_dict(artifact.manifest.budget))
    if found is None or found.node is None:
        return Explanation(profile, layers, found is not None, None, None)
    mended = remedy.find(traced, artifact, profile, feeds, found)
    return Explanation(profile, layers, True, layer(traced, found.node), mended)


def _feeds(artifact: Artifact, given: str | None) -> tuple[tuple[Feeds, ...], str]:
    if given is not None:
        found = samples.load(given, [entry.spec() for entry in artifact.manifest.inputs])
        return found.feeds, found.origin
    if artifact.manifest.golden is None:
        raise UsageError(f"{artifact.path}: keeps no golden samples (a model with strings); give some with --samples")
    return (artifact.golden().inputs,), "the golden samples"


def _as_dict(explanation: Explanation) -> dict[str, object]:
    found = asdict(explanation)
    if explanation.remedy is not None:
        found["remedy"]["keep_fp32"] = explanation.remedy.pattern
    return found


def _text(explanation: Explanation, origin: str) -> str:
    shown = [each for each in explanation.layers if _is_shown(each)]
    rows = [
        (each.depth, each.name, each.op, each.weight, f"{each.sqnr_db:.1f}", f"{each.expected_db:.1f}", _mark(each))
        for each in shown
    ]
    title = (
        f"Profile {explanation.profile}: SQNR of {len(rows)} of {len(explanation.layers)} layers on {origin}, beside"
        " what rounding alone should leave"
    )
    columns = ("depth", "node", "op", "weight", "SQNR dB", "expected", "")
    return "\n".join([table(title, columns, rows), *_verdict(explanation)])


def _is_shown(each: LayerSqnr) -> bool:
    """Layers that have weights, products, and whatever is below the line; ``--json`` has all of them."""
    return bool(each.weight) or each.op in WEIGHTED or bool(_mark(each))


def _mark(each: LayerSqnr) -> str:
    return "below the line" if each.expected_db - each.sqnr_db > MARGIN else ""


def _verdict(explanation: Explanation) -> list[str]:
    leaves, mended = explanation.leaves, explanation.remedy
    if leaves is None and explanation.ails:
        return ["An output is over budget and no layer left the line: rounding adds up alike down a graph this deep."]
    if leaves is None:
        return ["Every output is on the expected line: what drift there is comes from rounding everywhere alike."]
    lines = [
        f"It leaves the expected line at {leaves.name} ({leaves.op}): {leaves.sqnr_db:.1f} dB where"
        f" {leaves.expected_db:.1f} are expected."
    ]
    if mended is None:
        return [*lines, "No few nodes before it would mend that when kept in fp32: look at its inputs, or its weights."]
    return [
        *lines,
        f"Kept in fp32, {_listed(mended.nodes)} would bring output {mended.output} from {mended.before_db:.1f} to"
        f" {mended.after_db:.1f} dB (tried on the CPU):",
        f"  --keep-fp32 '{mended.pattern}'",
    ]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
