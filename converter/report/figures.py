"""Computes all figures shown of an artifact in one place; text, JSON, page and charts only display them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bf16kit.artifact.manifest import RESIDUAL, FileEntry, Manifest, OracleEntry, Plan, PlanEntry
from bf16kit.drift.measurements import Measurements, SearchEntry
from bf16kit.drift.verdicts import drift_rows, sample_series, verdicts, worst_slices
from bf16kit.messages.wording import listed
from bf16kit.numerics.panels import WIDTH
from bf16kit.numerics.rounding import Census
from converter.report.layers import layer_series

SEARCHED = "budget"  # the plan's code for what a search keeps in fp32
_EXAMPLES = 3  # wordings of a reason
_LOST = {"nan": "NaN", "inf": "infinite", "overflow": "overflow", "flushed_to_zero": "flushed to zero"}
_LOST["subnormal"] = "subnormal"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the source's tensors, of weights and graphs, and of the residual."""

    checkpoint: int
    graphs_and_weights: int
    residual: int

    @property
    def ratio(self) -> float:
        """Weights and graphs ÷ checkpoint."""
        return self.graphs_and_weights / max(1, self.checkpoint)

    @property
    def ratio_with_residual(self) -> float:
        return (self.graphs_and_weights + self.residual) / max(1, self.checkpoint)


@dataclass(frozen=True, slots=True)
class ReferenceCheck:
    """The distance of the fp32 reference from the source's outputs: the worst relative_l2, and its bound."""

    checked: bool
    relative_l2: float | None
    bound: float | None
    sentence: str


@dataclass(frozen=True, slots=True)
class Span:
    """One tensor in bf16, and what it lost: values that bf16 does not hold exactly; "" if there are none."""

    name: str
    remark: str
    census: Census


@dataclass(frozen=True, slots=True)
class PlanGroup:
    """The entries of a plan that have one precision for one reason; ``of`` is "tensors" or "PROFILE nodes".

    ``reasons`` are the most frequent wordings, each with its count, and ``more`` counts the others.
    """

    of: str
    precision: str
    code: str
    reasons: Sequence[Mapping[str, object]]
    more: int
    count: int

    @property
    def summary(self) -> str:
        """The reasons in one line."""
        if self.code == SEARCHED:
            return "kept in fp32 to meet the budget; the table of islands has the reasons"
        alone = len(self.reasons) == 1
        joined = "; ".join(f"{r['reason']}" if alone else f"{r['reason']} ({r['count']:,})" for r in self.reasons)
        return f"{joined}; and {self.more:,} more reasons" if self.more else joined


@dataclass(frozen=True, slots=True)
class Island:
    """A node of a bf16 profile that computes in fp32, or a weight kept in fp32 to meet the budget.

    A weight's ``profile`` is "tensors". ``worth`` is drift ÷ budget with it in bf16, if a search measured that;
    ``remedy`` is what the search did.
    """

    profile: str
    name: str
    op: str
    code: str
    reason: str
    remedy: str = ""
    worth: float | None = None


@dataclass(frozen=True, slots=True)
class SearchSummary:
    """The result of the search for fp32 islands in one profile, in numbers and in a sentence."""

    profile: str
    found: SearchEntry
    sentence: str


class Figures:
    """All figures shown of an artifact, beside its ``manifest``; ``files`` are those that the manifest will list.

    What measurements tell is empty if the artifact keeps none. ``spans`` are the bf16 tensors, the worst first.
    """

    def __init__(
        self,
        manifest: Manifest,
        files: Mapping[str, FileEntry],
        measurements: Measurements | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.manifest, self.files, self.notes = manifest, dict(sorted(files.items())), notes
        self.measured = measured = measurements or Measurements()
        self.drift = list(drift_rows(manifest))
        self.verdicts = list(verdicts(manifest, self.drift))
        self.within = all(verdict.within for verdict in self.verdicts)
        self.sizes = sizes(manifest, files)
        self.layout = layout(manifest)
        self.reference = reference(manifest.oracle)
        self.samples = list(sample_series(manifest, measured))
        self.slices = list(worst_slices(manifest, measured))
        self.layers = list(layer_series(measured, [each.profile for each in self.verdicts if not each.within]))
        worst = sorted(measured.ranges.tensors.items(), key=lambda item: (item[1].severity, item[0]))
        self.spans = [Span(name, _remark(entry), entry) for name, entry in worst]
        self.islands = sorted(islands(manifest, measured), key=lambda island: island.code != SEARCHED)
        self.searches = [
            SearchSummary(profile, entry.search, _describe_search(profile, entry.search))
            for profile, entry in sorted(measured.profiles.items())
            if entry.search is not None
        ]
        self.plan = list(plan_groups(manifest.plan))

    @property
    def headline(self) -> str:
        """The verdict on all profiles, in one sentence."""
        over = [verdict.profile for verdict in self.verdicts if not verdict.within]
        if not self.verdicts:
            return "No drift was measured."
        if over:
            return f"{listed(over)} {'is' if len(over) == 1 else 'are'} over the drift budget."
        names = listed([verdict.profile for verdict in self.verdicts])
        return f"{names} {'keeps' if len(self.verdicts) == 1 else 'keep'} within the drift budget."


def sizes(manifest: Manifest, files: Mapping[str, FileEntry]) -> Sizes:
    """Return the sizes of the ONNX side of an artifact.

    Torch modules, another format of the same model, are not counted. Nor is an export that is a copy; an export that
    holds the artifact's weights is.
    """
    stored = {"weights.bf16", "weights.fp32", *(tensor.file for tensor in manifest.tensors)} - {RESIDUAL}
    counted = sum(entry.bytes for name, entry in files.items() if name in stored or name.endswith(".onnx"))
    return Sizes(manifest.source.bytes, counted, files[RESIDUAL].bytes if RESIDUAL in files else 0)


def layout(manifest: Manifest) -> str:
    """Describe how the bf16 tensors are stored in their file."""
    narrow = [entry for entry in manifest.tensors if entry.dtype == "bfloat16"]
    panels = [entry for entry in narrow if entry.panels is not None]
    if not panels:
        return "C order"
    share = sum(entry.bytes for entry in panels) / sum(entry.bytes for entry in narrow)
    return f"{len(panels)} of {len(narrow)} bf16 tensors, {share:.0%} of their bytes, in panels of {WIDTH} columns"


def reference(oracle: OracleEntry | None) -> ReferenceCheck:
    """Return the oracle's result for the fp32 reference."""
    if oracle is None:
        return ReferenceCheck(
            False, None, None, "not checked against the source, because the artifact is older than that check"
        )
    worst = max(oracle.outputs.values(), key=lambda figure: figure.relative_l2, default=None)
    if not oracle.checked or worst is None:
        return ReferenceCheck(False, None, None, f"not checked against the source: {oracle.how}")
    count = f"{oracle.feeds} sample{'' if oracle.feeds == 1 else 's'}"
    sentence = f"within {worst.relative_l2:.2g} of {oracle.how} ({count}; fp32 noise explains {worst.bound:.2g})"
    return ReferenceCheck(True, worst.relative_l2, worst.bound, sentence)


def plan_groups(plan: Plan) -> Iterator[PlanGroup]:
    """Yield the plan by reason: the tensors first, then each profile's nodes; within each, the largest group first."""
    parts = [("tensors", plan.tensors), *((f"{name} nodes", rows) for name, rows in sorted(plan.nodes.items()))]
    for of, entries in parts:
        found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for entry in entries:
            found[entry.precision, entry.code][entry.reason] += 1
        for (precision, code), counts in sorted(found.items(), key=lambda group: -group[1].total()):
            reasons = [{"reason": reason, "count": count} for reason, count in counts.most_common(_EXAMPLES)]
            yield PlanGroup(of, precision, code, reasons, len(counts) - len(reasons), counts.total())


def islands(manifest: Manifest, measured: Measurements) -> Iterator[Island]:
    """Yield the fp32 islands.

    In the cpu profile, which computes in fp32, and among the tensors, only what a search kept is an island. In
    cpu-bf16, only products that were kept are islands, because all other nodes compute in fp32 there.
    """
    plan: Iterable[tuple[str, list[PlanEntry]]] = (
        *sorted(manifest.plan.nodes.items()),
        ("tensors", manifest.plan.tensors),
    )
    for profile, entries in plan:
        bf16 = profile in manifest.profiles and manifest.profiles[profile].precision == "bf16"
        searches = [entry.search for name, entry in measured.profiles.items() if profile in (name, "tensors")]
        worth = {island.name: island for search in searches if search is not None for island in search.islands}
        for e in entries:
            if e.code == SEARCHED or (bf16 and e.precision == "fp32" and e.code not in ("profile", "no_floats")):
                found = worth.get(e.name)
                known = found is not None and not math.isnan(found.worth)
                remedy, ratio = (found.remedy if found else ""), (found.worth if found and known else None)
                yield Island(profile, e.name, e.op, e.code, e.reason, remedy, ratio)


def _describe_search(profile: str, found: SearchEntry) -> str:
    arithmetic = f" and {found.bf16_flops:.0%} of its arithmetic" if found.bf16_flops else ""
    before, after = (f"{r:,.0f} ×" if 1000 <= r < math.inf else f"{r:.3g} ×" for r in (found.before, found.after))
    return (
        f"A search of {found.candidates:,} candidates reduced the drift of {profile} from {before} to {after} its"
        f" budget: {found.bf16_bytes:.0%} of the bytes of its weights{arithmetic} are bf16."
    )


def _remark(entry: Census) -> str:
    """Describe the values of a tensor that bf16 does not hold exactly; "" if there are none."""
    counts = ((getattr(entry, name), what) for name, what in _LOST.items())
    return ", ".join(f"{count:,} {what}" for count, what in counts if count)
