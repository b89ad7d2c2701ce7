"""Mends profiles that are over budget: runs a search for each, until what is written is within the budget.

A search tries plans in its own graph, which sums in another order than the written graph, so a few values are rounded
the other way; a device uses yet another order. If certifying the written graph does not confirm a search's result, the
search is repeated with less of the budget.
"""

from __future__ import annotations

from pathlib import Path

from converter.islands.result import SearchResult, merged
from converter.islands.search import Task, search
from converter.islands.trials import Deadline, Signature
from converter.options import Options
from converter.plan.decisions import Islands
from converter.plan.profiles import PROFILES
from converter.process.memory import release_memory
from converter.process.progress import Progress
from converter.rewrite import Prepared
from converter.verify.certify import Certified

_SHARES = (1.0, 0.9, 0.75)  # of the budget, for a profile's first, second and third search


class IslandSearches:
    """The searches of one conversion; temporary files go to ``scratch``.

    ``results`` has each profile's last result, by profile name.
    """

    def __init__(self, prepared: Prepared, options: Options, progress: Progress, scratch: Path) -> None:
        self._prepared = prepared
        self._options = options
        self._progress = progress
        self._scratch = scratch
        self._deadline: Deadline | None = None  # starts with the first search
        self._tried: dict[str, int] = {}
        self.results: dict[str, SearchResult] = {}

    def next_islands(self, certified: Certified) -> Islands | None:
        """Return the islands to write and certify next; None if nothing is over budget or nothing more can be done.

        Profiles are searched in the order of ``PROFILES``: those that only round weights come first. Torch modules are
        not: torch.autocast decides their islands. cpu-bf16 is not searched either, but profits from what is kept in
        fp32 for the others. If a search found nothing, the reason is added to ``certified.breaches`` for its profile.
        """
        if not self._options.search or self._options.allow_over_budget:
            return None
        over_budget = [name for name, each in PROFILES.items() if each.searched and certified.breaches.get(name)]
        found = [self._search_profile(name, certified) for name in over_budget]
        release_memory()
        return merged(self.results.values()) if any(found) else None

    def sentences(self) -> list[str]:
        """Return the sentences for the user on the islands."""
        return [sentence for _, result in sorted(self.results.items()) for sentence in result.sentences()]

    def remarks(self) -> list[str]:
        """Return the notes of the searches, which the measurements do not hold."""
        return [note for _, result in sorted(self.results.items()) for note in result.notes]

    def _search_profile(self, name: str, certified: Certified) -> bool:
        """Search for new islands for the profile ``name``; return whether there are any."""
        tried = self._tried.get(name, 0)
        for share in _SHARES[tried:]:
            self._tried[name] = tried = tried + 1
            before = self.results.pop(name, None)
            result = search(self._task(name, share, certified), self._progress)
            if result.error:
                self._tried[name] = len(_SHARES)
                certified.breaches[name].append(result.error)
                return False
            if result.islands and (before is None or result.as_islands() != before.as_islands()):
                self.results[name] = result
                return True
        certified.breaches[name].append(_NOT_CONFIRMED)
        return False

    def _task(self, name: str, share: float, certified: Certified) -> Task:
        signature, options = Signature.of(certified.manifest), self._options
        if self._deadline is None:
            self._deadline = Deadline.after(options.search_minutes)
        return Task(
            prepared=self._prepared,
            profile=PROFILES[name],
            signature=signature,
            expected=certified.expected,
            budget=options.budget.tightened(share),
            deadline=self._deadline,
            islands=merged(self.results.values()),
            keep_fp32=options.keep_fp32,
            bf16=options.bf16,
            scratch=self._scratch,
        )


_NOT_CONFIRMED = (
    "the search for fp32 islands found sets that suffice, but running the written graph did not confirm any"
)
