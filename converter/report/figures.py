"""Computes all figures shown of an artifact in one place; text, JSON, page and charts only display them."""

from __future__ import annotations

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bf16kit.artifact.manifest import FileEntry, Manifest, OracleEntry, Plan, PlanEntry, SpecEntry
from bf16kit.converter.report.oncpu import on_cpu
from bf16kit.drift.budget import Budget
from bf16kit.drift.measurements import MARGIN_DB, MOST_DB, DiagnosisEntry, LayerEntry, Layers, Measurements, SearchEntry
from bf16kit.drift.verdicts import drift_rows, sample_series, verdicts, worst_slices
from bf16kit.messages.wording import listed
from bf16kit.numerics.panels import WIDTH
from bf16kit.numerics.rounding import Census

SEARCHED = "budget"  # the plan's code for what a search keeps in fp32
_EXAMPLES = 3  # wordings of a reason
_NAMED = 12  # nodes and weights of a remedy that a sentence names
_LOST = ("nan", "inf", "overflow", "flushed_to_zero", "subnormal")  # the census' counts of values not held exactly


@dataclass(frozen=True, slots=True)
class ReferenceCheck:
    """The distance of the fp32 reference from the source's outputs: the worst relative_l2, and its bound."""

    sentence: str
    checked: bool = False
    relative_l2: float | None = None
    bound: float | None = None


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
        return f"{joined}; and {self.more:,} more reason{'s' * (self.more > 1)}" if self.more else joined


@dataclass(frozen=True, slots=True)
class Island:
    """A node of a bf16 profile that computes in fp32, or a weight kept in fp32 to meet the budget.

    A weight's ``profile`` is "tensors". ``worth`` is drift ÷ budget with it in bf16, as a search measured it;
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
        self, manifest: Manifest, files: Mapping[str, FileEntry], measured: Measurements | None = None
    ) -> None:
        self.manifest, self.files = manifest, dict(sorted(files.items()))
        self.measured = measured = measured or Measurements()
        self.drift = list(drift_rows(manifest))
        self.verdicts = list(verdicts(manifest, self.drift))
        self.within = all(verdict.within for verdict in self.verdicts)
        self.layout = layout(manifest)
        self.reference = reference(manifest.oracle)
        self.samples = list(sample_series(manifest, measured))
        self.slices = list(worst_slices(manifest, measured))
        over = [verdict.profile for verdict in self.verdicts if not verdict.within]
        self.layers = [
            series(profile, entry.layers, within=profile not in over)
            for profile, entry in sorted(measured.profiles.items())
            if entry.layers is not None and entry.layers.rows
        ]
        worst = sorted(measured.ranges.tensors.items(), key=lambda item: (item[1].severity, item[0]))
        self.spans = [Span(name, _remark(census), census) for name, census in worst]
        self.islands = sorted(islands(manifest, measured), key=lambda island: island.code != SEARCHED)
        self.count = len({island.name for island in self.islands})  # the same node in two profiles is one island
        self.searches = [
            SearchSummary(profile, entry.search, _describe_search(profile, entry.search))
            for profile, entry in sorted(measured.profiles.items())
            if entry.search is not None
        ]
        self.plan = list(plan_groups(manifest.plan))
        self.on_cpu = on_cpu(manifest)
        self.top1 = {each.name: top1(each, manifest) for each in manifest.outputs}

    @property
    def headline(self) -> str:
        """The verdict on all profiles, in one sentence."""
        names = [verdict.profile for verdict in self.verdicts if verdict.within == self.within]
        if not names:
            return "No drift was measured."
        one, many = ("keeps within", "keep within") if self.within else ("is over", "are over")
        return f"{listed(names)} {one if len(names) == 1 else many} the drift budget."

    @property
    def searched(self) -> int:
        """How many of the islands a search keeps in fp32 to meet the budget."""
        return len({island.name for island in self.islands if island.code == SEARCHED})

    @property
    def islands_counted(self) -> str:
        """What the islands are, in words that follow their count."""
        of_search = f"; {self.searched} of them to meet the budget" if self.searched else ""
        return f"nodes and weights stay fp32 among bf16 ones{of_search}"


def top1(output: SpecEntry, manifest: Manifest) -> str:
    """Say whether ``output`` is judged by top1_agreement, and if not, why."""
    if Budget.from_dict(manifest.budget).bound("top1_agreement") is None:
        return "not judged: the budget does not bound it"
    return "judged" if output.kind == "logits" else f"not judged: its kind is {output.kind}, not logits"


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
        return ReferenceCheck("not checked against the source, because the artifact is older than that check")
    worst = max(oracle.outputs.values(), key=lambda figure: figure.relative_l2, default=None)
    if not oracle.checked or worst is None:
        return ReferenceCheck(f"not checked against the source: {oracle.how}")
    count = f"{oracle.feeds} run{'' if oracle.feeds == 1 else 's'}"
    if worst.relative_l2 == 0:
        return ReferenceCheck(f"equal to {oracle.how} ({count})", True, 0.0, worst.bound)
    sentence = f"within {worst.relative_l2:.2g} of {oracle.how} ({count}; fp32 noise explains {worst.bound:.2g})"
    return ReferenceCheck(sentence, True, worst.relative_l2, worst.bound)


def plan_parts(plan: Plan) -> list[tuple[str, list[PlanEntry]]]:
    """Return the entries of a plan by :attr:`PlanGroup.of`."""
    return [("tensors", plan.tensors), *((f"{name} nodes", rows) for name, rows in sorted(plan.nodes.items()))]


def plan_groups(plan: Plan) -> Iterator[PlanGroup]:
    """Yield the plan by reason: the tensors first, then each profile's nodes; within each, the largest group first."""
    for of, entries in plan_parts(plan):
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
    for profile, entries in [*sorted(manifest.plan.nodes.items()), ("tensors", manifest.plan.tensors)]:
        bf16 = profile in manifest.profiles and manifest.profiles[profile].precision == "bf16"
        searches = [entry.search for name, entry in measured.profiles.items() if profile in (name, "tensors")]
        worth = {island.name: island for search in searches if search is not None for island in search.islands}
        for e in entries:
            if e.code == SEARCHED or (bf16 and e.precision == "fp32" and e.code not in ("profile", "no_floats")):
                found = worth.get(e.name)
                ratio = None if found is None or math.isnan(found.worth) else found.worth
                yield Island(profile, e.name, e.op, e.code, e.reason, found.remedy if found else "", ratio)


def _describe_search(profile: str, found: SearchEntry) -> str:
    arithmetic = f" and {found.bf16_flops:.0%} of its arithmetic" if found.bf16_flops else ""
    before, after = (f"{r:,.0f} ×" if 1000 <= r < math.inf else f"{r:.3g} ×" for r in (found.before, found.after))
    return (
        f"A search of {found.candidates:,} candidates reduced the drift of {profile} from {before} to {after} its"
        f" budget: {found.bf16_bytes:.0%} of the bytes of its weights{arithmetic} are bf16."
    )


def _remark(entry: Census) -> str:
    """Describe the values of a tensor that bf16 does not hold exactly; "" if there are none."""
    words = {"nan": "NaN", "inf": "infinite", "flushed_to_zero": "flushed to zero"}
    counts = ((getattr(entry, name), words.get(name, name)) for name in _LOST)
    return ", ".join(f"{count:,} {what}" for count, what in counts if count)


@dataclass(frozen=True, slots=True)
class LayerSeries:
    """The SQNR of a profile's layers: how much of the reference's signal each keeps, and where it is below prediction.

    ``rows`` are sorted by depth; ``measured`` is their number before some were left out. ``first_off`` is the first
    whose SQNR is :data:`MARGIN_DB` below the predicted one; None if there is none. ``diagnosis`` is what the layers say
    about the outputs; None in older artifacts. ``summary`` says it in sentences, and ``option`` is what to convert with
    to mend the worst output; "" if none is needed or known.
    """

    profile: str
    measured: int
    rows: tuple[LayerEntry, ...]
    first_off: LayerEntry | None
    diagnosis: DiagnosisEntry | None
    summary: str
    option: str

    def worst(self) -> list[LayerEntry]:
        """Return the rows, those farthest below their predicted SQNR first."""
        return sorted(self.rows, key=shortfall, reverse=True)


def shortfall(row: LayerEntry) -> float:
    """Return how many dB ``row`` is below its predicted SQNR; −inf for an exact layer."""
    return -math.inf if row.sqnr_db >= MOST_DB else row.expected_db - row.sqnr_db


def layer_name(row: LayerEntry) -> str:
    """Return the user's name for the layer: its weight if it has one, because exporters make up names of nodes."""
    return row.weight or row.name


def series(profile: str, layers: Layers, *, within: bool = True, remarks: str = "") -> LayerSeries:
    """Sort the layers of one profile by depth, and say what they mean.

    ``within`` says whether the profile is within the budget. ``remarks`` are sentences on the remedy, or on why there
    is none.
    """
    rows, found = tuple(sorted(layers.rows, key=lambda row: row.depth)), layers.diagnosis
    first = next((row for row in rows if shortfall(row) > MARGIN_DB), None)
    said = "" if found is None else " ".join(_sentences(found, first, within, remarks))
    option = f"--keep-fp32 {shlex.quote(found.remedy.keep_fp32)}" if found and found.remedy else ""
    return LayerSeries(profile, layers.measured, rows, first, found, said, option)


def _sentences(found: DiagnosisEntry, first: LayerEntry | None, within: bool, remarks: str) -> Iterator[str]:
    if not found.ails:
        yield "Every output has the SQNR predicted for rounding to bf16, so its drift comes from all layers alike."
        if first is not None:
            yield f"The first layer below its predicted SQNR is {layer_name(first)}; later ones average its error away."
        yield "No remedy is needed."
        return
    if found.leaves is None:
        yield (
            "An output is over budget, though no layer is below its predicted SQNR: the errors of all layers add up, or"
            " are large beside what the output's values differ by."
        )
    else:
        yield (
            f"SQNR falls below its prediction at {found.leaves.name} ({found.leaves.op}):"
            f" {found.leaves.sqnr_db:.1f} dB, predicted {found.leaves.expected_db:.1f} dB."
        )
    if remarks:
        yield remarks
    if (remedy := found.remedy) is not None:
        names = listed(remedy.nodes) if len(remedy.nodes) <= _NAMED else f"{len(remedy.nodes)} nodes and weights"
        yield (
            f"Keeping {names} in fp32 would raise output {remedy.output} from {remedy.before_db:.1f} to"
            f" {remedy.after_db:.1f} dB (tested on the CPU):"
        )
    elif not remarks and found.tried:
        yield "Keeping nodes and weights in fp32 does not mend it; look at its inputs or its weights."
    elif not remarks and within:
        yield "No remedy is needed, because the budget is met on all samples together."
    elif not remarks:
        yield "No remedy was looked for; bf16-convert explain looks for one."
