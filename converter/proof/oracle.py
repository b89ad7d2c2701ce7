"""Certifying the fp32 reference against the source itself, which answered a few samples before anything was done to it.

Drift says how far a profile is from the reference; this says that the reference is the model that was given. Both
compute in fp32, in another order, so their answers differ by fp32 noise and no more. :data:`FLOOR` is noise that any
model may have. A model that amplifies noise may differ more: how much is measured by nudging its weights (``nudge``),
but only where the floor does not do. docs/decisions/0017-the-oracle.md has the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bf16kit.errors import ConversionError, RuntimeFailure
from bf16kit.manifest import OracleEntry, OracleFigure
from bf16kit.runtime import Runtime
from converter.model import FP32_ROUNDOFF, Feeds, Source
from converter.proof.distance import Distance, between, is_float, leave_out
from converter.proof.nudge import nudged_feeds
from converter.proof.spool import Spool

FEEDS = 4  # the source answers the first so many samples
FLOOR = 64 * FP32_ROUNDOFF
# In unit roundoffs, like FLOOR. Fewer: fp16 is rounded to once a node, fp32 once for each term of a sum.
_COARSE_FLOOR = 8
_MULTIPLE = 4  # the bound is so many times what nudging the weights by 16 ulps changes
_RUNS = 3
_TELLING = 1e-3  # a bound above this could hide faults as large as bf16's own drift; a note says so

OpenNudged = Callable[[np.random.Generator], Runtime]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the source itself answered to the first samples; without answers, ``how`` says why it was not asked."""

    answers: Sequence[Feeds]
    how: str
    roundoff: float = FP32_ROUNDOFF


def ask(source: Source, feeds: Sequence[Feeds], scratch: Path) -> Asked:
    """The answers of ``source`` to the first :data:`FEEDS` of ``feeds``, in an unnamed file in ``scratch``.

    A source that cannot be run, or answers the same feed differently from one time to the next, is not an error: the
    result says so.
    """
    oracle = source.oracle
    if oracle is None:
        return Asked((), source.unasked)
    chosen = feeds[:FEEDS]
    kept = Spool(scratch)
    unstable: list[str] = []
    try:
        for answer in oracle.answers([*chosen, chosen[0]]):
            if len(kept) < len(chosen):
                kept.append(answer)
                continue
            unstable = [name for name, array in kept[0].items() if between(array, answer[name]).relative_l2 > FLOOR]
    except RuntimeFailure as error:
        return Asked((), f"{oracle.how}: {error}")
    if unstable:
        return Asked((), f"{oracle.how} answers the same input differently each time (output {unstable[0]!r})")
    return Asked(kept, oracle.how, oracle.roundoff)


def certify(
    asked: Asked,
    feeds: Sequence[Feeds],
    expected: Sequence[Feeds],
    nudged: OpenNudged | None,
    scratch: Path | None = None,
    what: str = "the fp32 reference",
) -> OracleEntry:
    """Compare the answers ``expected`` of the reference, or ``what`` else, with the source's own, by output.

    ``nudged`` opens the reference with its weights nudged, and is asked only when an answer is beyond :data:`FLOOR`;
    what it answers lies in an unnamed file in ``scratch`` (None: the system's directory). None where its weights cannot
    be: then nothing beyond that is explained.
    Raises :class:`ConversionError` naming the outputs that differ more than this model's fp32 noise explains.
    """
    if not asked.answers:
        return OracleEntry(checked=False, how=asked.how)
    entry = measure(asked, feeds, expected, nudged, scratch)
    _judge(entry, what)
    return entry


def measure(
    asked: Asked,
    feeds: Sequence[Feeds],
    expected: Sequence[Feeds],
    nudged: OpenNudged | None,
    scratch: Path | None = None,
) -> OracleEntry:
    """How far the answers ``expected`` are from those ``asked``, by output, and what noise explains; judges nothing.

    The arguments are those of :func:`certify`.
    """
    floor = FLOOR if asked.roundoff <= FP32_ROUNDOFF else _COARSE_FLOOR * asked.roundoff
    found = {name: _worst(asked.answers, expected, name) for name in expected[0]}
    bounds = {name: floor if is_float(expected[0][name]) else 0.0 for name in found}
    if nudged is not None and any(found[name].relative_l2 > bounds[name] for name in found):
        noise = _Noise.of(asked, feeds, expected, nudged, scratch)
        for name in found:
            if bounds[name]:
                bounds[name] = max(floor, _MULTIPLE * noise.figure(name))
            found[name] = noise.without_unstable(asked.answers, expected, name)
    return OracleEntry(
        checked=True,
        how=asked.how,
        feeds=len(asked.answers),
        outputs={
            name: OracleFigure(relative_l2=distance.relative_l2, max_abs=distance.max_abs, bound=bounds[name])
            for name, distance in found.items()
        },
    )


def _worst(answers: Sequence[Feeds], expected: Sequence[Feeds], name: str) -> Distance:
    if name not in answers[0]:
        raise ConversionError(f"the fp32 reference has an output {name!r}, and the source has {', '.join(answers[0])}")
    return max(between(own[name], reference[name]) for own, reference in zip(answers, expected, strict=False))


@dataclass(frozen=True, slots=True)
class _Noise:
    """What nudging the reference's weights changed in its answers: by run, by feed."""

    expected: Sequence[Feeds]
    runs: Sequence[Sequence[Feeds]]

    @classmethod
    def of(
        cls,
        asked: Asked,
        feeds: Sequence[Feeds],
        expected: Sequence[Feeds],
        nudged: OpenNudged,
        scratch: Path | None,
    ) -> _Noise:
        chosen = feeds[: len(asked.answers)]
        runs = [_run(nudged, chosen, np.random.default_rng(seed), asked.roundoff, scratch) for seed in range(_RUNS)]
        return cls(expected[: len(chosen)], [run for run in runs if run is not None])

    def figure(self, name: str) -> float:
        """The largest relative change of an output."""
        distances = [
            between(reference[name], run[index][name]).relative_l2
            for run in self.runs
            for index, reference in enumerate(self.expected)
        ]
        return max(distances, default=0.0)

    def without_unstable(self, answers: Sequence[Feeds], expected: Sequence[Feeds], name: str) -> Distance:
        """The distance from the source's own answers, of integers and the like over those that noise does not flip."""
        worst = []
        for index, (own, reference) in enumerate(zip(answers, expected, strict=False)):
            changed = [run[index][name] for run in self.runs]
            worst.append(between(own[name], leave_out(reference[name], own[name], changed)))
        return max(worst)


def _run(
    nudged: OpenNudged, feeds: Sequence[Feeds], random: np.random.Generator, roundoff: float, scratch: Path | None
) -> Spool | None:
    """The nudged reference's answers; None where it does not run: a size that was computed came out another."""
    runtime = nudged(random)
    kept = Spool(scratch)
    try:
        for feed in nudged_feeds(feeds, random, roundoff):
            kept.append(runtime.run(feed))
    except RuntimeFailure:
        return None
    finally:
        runtime.close()
    return kept


def _judge(entry: OracleEntry, what: str) -> None:
    over = [(name, figure) for name, figure in entry.outputs.items() if not figure.relative_l2 <= figure.bound]
    if not over:
        return
    listed = "".join(
        f"\n  output {name!r}: relative_l2 is {figure.relative_l2:.3g} (max_abs {figure.max_abs:.3g}), this model's"
        f" fp32 noise explains at most {figure.bound:.3g}"
        for name, figure in over
    )
    raise ConversionError(
        f"{what} does not answer as the source itself does ({entry.how}), nothing published:{listed}\n"
        "Reading, exporting or preparing the model changed what it computes. Export it to ONNX by other means and"
        " convert that, or with other versions of torch and onnxscript, and please report it"
    )


def remarks(entry: OracleEntry) -> Iterator[str]:
    """What the conversion's maker should know about the check: that there was none, or that it proves little."""
    if not entry.checked:
        yield f"the fp32 reference was not checked against the source itself: {entry.how}"
    for name, figure in _vague(entry.outputs):
        yield (
            f"output {name!r} amplifies fp32 noise so much that its check against the source proves little: differences"
            f" up to {figure.bound:.3g} would pass, {figure.relative_l2:.3g} was found"
        )


def _vague(outputs: Mapping[str, OracleFigure]) -> list[tuple[str, OracleFigure]]:
    return [(name, figure) for name, figure in sorted(outputs.items()) if figure.bound > _TELLING]
