"""Pairs two sets of names whose shapes allow it: by a unique fit, by words, by the order of numbers.

The remaining pairs are guesses, and marked as such.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from converter.read.mapping.words import numbers_of, similarity, words_of

Fits = Callable[[str, str], bool]


@dataclass(frozen=True, slots=True)
class Pair:
    """A name on the left, one on the right, and the reason; ``guessed`` when neither shape nor name decides."""

    left: str
    right: str
    reason: str
    guessed: bool = False


def pair(lefts: Sequence[str], rights: Sequence[str], fits: Fits) -> list[Pair]:
    """Pair as many of ``lefts`` as have a counterpart among ``rights``; guesses follow the order of both."""
    found: list[Pair] = []
    for left_group, right_group in _independent_groups(lefts, rights, fits):
        found += _resolve(left_group, right_group, fits)
    return found


def _independent_groups(
    lefts: Sequence[str], rights: Sequence[str], fits: Fits
) -> Iterator[tuple[list[str], list[str]]]:
    """Split the names into groups; no name of one group fits a name of another."""
    remaining = list(lefts)
    candidates = {left: [right for right in rights if fits(left, right)] for left in lefts}
    owners: dict[str, list[str]] = defaultdict(list)
    for left, several in candidates.items():
        for right in several:
            owners[right].append(left)
    seen: set[str] = set()
    for start in remaining:
        if start in seen:
            continue
        group, pending = {start}, [start]
        while pending:
            more = {other for right in candidates[pending.pop()] for other in owners[right]} - group
            group |= more
            pending += more
        seen |= group
        reached = {right for left in group for right in candidates[left]}
        yield [left for left in lefts if left in group], [right for right in rights if right in reached]


def _resolve(lefts: list[str], rights: list[str], fits: Fits) -> Iterator[Pair]:
    if len(lefts) == len(rights) == 1:
        yield Pair(lefts[0], rights[0], "the only one of its shape")
        return
    left, right = _series(lefts), _series(rights)
    while left and right:
        best = _best(left, right, fits)
        if best is None:
            break
        (a, b), reason = best
        yield from _pairs_in_order(left.pop(a), right.pop(b), reason)
    left_rest, right_rest = ({name for names in series.values() for name in names} for series in (left, right))
    yield from _guesses(
        [name for name in lefts if name in left_rest], [name for name in rights if name in right_rest], fits
    )


def _series(names: Sequence[str]) -> dict[tuple[str, ...], list[str]]:
    """Group names that differ only in their numbers, in the order of the numbers."""
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in names:
        found[words_of(name)].append(name)
    return {words: sorted(several, key=numbers_of) for words, several in found.items()}


def _best(
    left: dict[tuple[str, ...], list[str]], right: dict[tuple[str, ...], list[str]], fits: Fits
) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], str] | None:
    """Return the two most similar series and the reason; None if one is as similar to another series.

    The last two series are returned even if they are not similar.
    """
    scores = {
        (a, b): similarity(a, b)
        for a, left_series in left.items()
        for b, right_series in right.items()
        if _series_match(left_series, right_series, fits)
    }
    if len(left) == len(right) == 1 and scores:
        return next(iter(scores)), "the only one left of its shape"
    for (a, b), score in sorted(scores.items(), key=lambda item: -item[1]):
        rivals = [other for (c, d), other in scores.items() if (c == a) != (d == b)]
        if score and all(other < score for other in rivals):
            return (a, b), "by name"
    return None


def _series_match(lefts: Sequence[str], rights: Sequence[str], fits: Fits) -> bool:
    """Return whether two series have equal lengths, unique numbers, and elements that fit one by one."""
    if len(lefts) != len(rights) or not all(map(fits, lefts, rights)):
        return False
    return all(len({numbers_of(name) for name in names}) == len(names) for names in (lefts, rights))


def _pairs_in_order(lefts: Sequence[str], rights: Sequence[str], reason: str) -> Iterator[Pair]:
    for a, b in zip(lefts, rights, strict=True):
        yield Pair(a, b, reason if len(lefts) == 1 else f"{reason}, in numerical order")


def _guesses(lefts: Sequence[str], rights: list[str], fits: Fits) -> Iterator[Pair]:
    """Pair names one after another, in the order given."""
    for left in lefts:
        chosen = next((name for name in rights if fits(left, name)), None)
        if chosen is not None:
            rights.remove(chosen)
            yield Pair(left, chosen, "GUESSED: others have the same shape, and names do not decide", guessed=True)
