"""Mends profiles that are over budget: runs a search for each, until what is written is within the budget.

A search tries plans in its own graph, which sums in another order than the written graph, so a few values are rounded
the other way; a device uses yet another order. If certifying the written graph does not confirm a search's result, the
search is repeated with less of the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bf16kit.artifact.manifest import Plan
from converter.islands.ranking import Group
from converter.islands.result import SearchResult, merged
from converter.islands.search import Task, search
from converter.islands.trials import Deadline, Edges
from converter.options import Options
from converter.plan import make_plan
from converter.plan.decisions import Islands
from converter.plan.profiles import PROFILES, Profile
from converter.process.memory import release_memory
from converter.process.progress import Progress
from converter.rewrite import Prepared
from converter.verify import measure
from converter.verify.certify import Certified
from converter.verify.measure import Expected
from converter.verify.running import open_fp32_graph
from converter.verify.samples import Samples

_SHARES = (1.0, 0.9, 0.75)  # of the budget, for a profile's first, second and third search


class IslandSearches:
    """The searches of one conversion; temporary files go to ``scratch``.

    ``results`` has each profile's last result, by profile name.
    """

    def __init__(
        self, prepared: Prepared, options: Options, samples: Samples, progress: Progress, scratch: Path
    ) -> None:
        self._prepared = prepared
        self._options = options
        self._samples = samples
        self._progress = progress
        self._scratch = scratch
        self._deadline: Deadline | None = None  # starts with the first search
        self._tried: dict[str, int] = {}
        self._expected: Expected | None = None  # written by the first search
        self._rankings: dict[str, Sequence[Group]] = {}
        self.results: dict[str, SearchResult] = {}

    def next_islands(self, certified: Certified) -> Islands | None:
        """Return the islands to write and certify next; None if nothing is over budget or nothing more can be done.

        If a search found nothing, the reason is added to ``certified.breaches`` for its profile.
        """
        over_budget = self._profiles_over_budget(certified)
        found = [self._search_profile(name, certified) for name in over_budget]
        release_memory()
        return merged(self.results.values()) if any(found) else None

    def sentences(self) -> list[str]:
        """Return the sentences for the user on the islands."""
        return [sentence for _, result in sorted(self.results.items()) for sentence in result.sentences()]

    def remarks(self) -> list[str]:
        """Return the notes of the searches, which the measurements do not hold."""
        return [note for _, result in sorted(self.results.items()) for note in result.notes]

    def _profiles_over_budget(self, certified: Certified) -> Sequence[str]:
        """Return the profiles to search for, in the order of ``PROFILES``: those that only round weights come first.

        Torch modules are never searched: torch.autocast decides their islands. cpu-bf16 is not searched either, but
        profits from what is kept in fp32 for the others.
        """
        if not self._options.search or self._options.allow_over_budget:
            return ()
        return [name for name, profile in PROFILES.items() if profile.searched and certified.breaches.get(name)]

    def _search_profile(self, name: str, certified: Certified) -> bool:
        """Search for new islands for the profile ``name``; return whether there are any."""
        if self._deadline is None:
            self._deadline = Deadline.after(self._options.search_minutes)
        while self._tried.get(name, 0) < len(_SHARES):
            share = _SHARES[self._tried.get(name, 0)]
            self._tried[name] = self._tried.get(name, 0) + 1
            before = self.results.pop(name, None)
            result = search(self._make_task(name, share, certified, self._deadline), self._progress)
            self._rankings[name] = result.ranking
            if result.error:
                self._tried[name] = len(_SHARES)
                certified.breaches[name].append(result.error)
                return False
            if result.islands and (before is None or result.as_islands() != before.as_islands()):
                self.results[name] = result
                return True
        certified.breaches[name].append(_NOT_CONFIRMED)
        return False

    def _make_task(self, name: str, share: float, certified: Certified, deadline: Deadline) -> Task:
        manifest = certified.manifest
        inputs, outputs = (tuple(entry.spec() for entry in edges) for edges in (manifest.inputs, manifest.outputs))
        edges = Edges(inputs, outputs, manifest.batch_axis)
        return Task(
            prepared=self._prepared,
            profile=PROFILES[name],
            replan=self._replan,
            islands=merged(self.results.values()),
            edges=edges,
            expected=self._reference_outputs(edges, certified),
            budget=self._options.budget.tightened(share),
            deadline=deadline,
            saturate=self._options.saturate,
            ranking=self._rankings.get(name, ()),
            scratch=self._scratch,
        )

    def _reference_outputs(self, edges: Edges, certified: Certified) -> Expected:
        if self._expected is None:
            reference = open_fp32_graph(self._prepared.reference, edges.inputs, edges.outputs, self._scratch)
            outputs = measure.spool(reference, self._samples, self._scratch)
            reference.close()
            self._expected = Expected(self._samples.feeds, outputs, certified.scales, len(self._samples.given))
        return self._expected

    def _replan(self, islands: Islands, profile: Profile) -> Plan:
        return make_plan(
            self._prepared,
            keep_fp32=self._options.keep_fp32,
            bf16=self._options.bf16,
            islands=islands,
            profiles=[profile.name] if profile.rounds else [],
        ).plan


_NOT_CONFIRMED = (
    "the search for fp32 islands found sets that suffice, but running the written graph did not confirm any"
)
