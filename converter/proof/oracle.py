"""Certifies the fp32 reference against the source itself, which answered a few samples before anything was changed.

Drift measures how far a profile is from the reference; this check proves that the reference is the given model. Both
compute in fp32, in another order, so their outputs differ only by fp32 noise. :data:`FLOOR` is noise that any model may
have. A model that amplifies noise may differ more. How much is measured by nudging its weights (``nudge``), but only if
the floor is exceeded. docs/decisions/0017-the-oracle.md has the numbers.
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
from converter.proof.distance import Distance, is_float, mask_unstable, measure_distance
from converter.proof.nudge import nudged_feeds
from converter.proof.spool import Spool

FEEDS = 4  # the source runs on this many samples, the first ones
FLOOR = 64 * FP32_ROUNDOFF
# In unit roundoffs, like FLOOR. Smaller, because fp16 rounds once per node, fp32 once per term of a sum.
_COARSE_FLOOR = 8
_MULTIPLE = 4  # the bound is this many times the change that nudging the weights by 16 ulps causes
_RUNS = 3
_LARGEST_USEFUL_BOUND = 1e-3  # a bound above this could hide faults as large as bf16's own drift, so a note says so

OpenNudged = Callable[[np.random.Generator], Runtime]


@dataclass(frozen=True, slots=True)
class OracleRun:
    """The source's own outputs for the first samples; if there are none, ``how`` says why the source was not run."""

    outputs: Sequence[Feeds]
    how: str
    roundoff: float = FP32_ROUNDOFF


def run_oracle(source: Source, feeds: Sequence[Feeds], scratch: Path) -> OracleRun:
    """Run ``source`` on the first :data:`FEEDS` of ``feeds``; its outputs are kept in an unnamed file in ``scratch``.

    A source that cannot be run, or gives different outputs for the same feed each time, is no error: the result says
    so.
    """
    oracle = source.oracle
    if oracle is None:
        return OracleRun((), source.no_oracle_reason)
    chosen = feeds[:FEEDS]
    outputs = Spool(scratch)
    unstable: list[str] = []
    try:
        for found in oracle.outputs([*chosen, chosen[0]]):
            if len(outputs) < len(chosen):
                outputs.append(found)
                continue
            unstable = [
                name for name, array in outputs[0].items() if measure_distance(array, found[name]).relative_l2 > FLOOR
            ]
    except RuntimeFailure as error:
        return OracleRun((), f"{oracle.how}: {error}")
    if unstable:
        return OracleRun((), f"{oracle.how} gives different outputs for the same input (output {unstable[0]!r})")
    return OracleRun(outputs, oracle.how, oracle.roundoff)


def certify(
    oracle_run: OracleRun,
    feeds: Sequence[Feeds],
    expected: Sequence[Feeds],
    nudged: OpenNudged | None,
    scratch: Path | None = None,
    what: str = "the fp32 reference",
) -> OracleEntry:
    """Compare the outputs ``expected`` of the reference, or of ``what``, with the source's own, by output.

    ``nudged`` opens the reference with its weights nudged. It is called only if an output is beyond :data:`FLOOR`, and
    its outputs are kept in an unnamed file in ``scratch`` (None: the system's directory). It is None if the weights
    cannot be nudged; then any difference beyond the floor is an error. Raises :class:`ConversionError` that names the
    outputs whose difference exceeds this model's fp32 noise.
    """
    if not oracle_run.outputs:
        return OracleEntry(checked=False, how=oracle_run.how)
    entry = measure(oracle_run, feeds, expected, nudged, scratch)
    _check_bounds(entry, what)
    return entry


def measure(
    oracle_run: OracleRun,
    feeds: Sequence[Feeds],
    expected: Sequence[Feeds],
    nudged: OpenNudged | None,
    scratch: Path | None = None,
) -> OracleEntry:
    """Measure how far ``expected`` is from the outputs in ``oracle_run``, by output, and the noise bound; do not judge.

    The arguments are those of :func:`certify`.
    """
    floor = FLOOR if oracle_run.roundoff <= FP32_ROUNDOFF else _COARSE_FLOOR * oracle_run.roundoff
    found = {name: _worst(oracle_run.outputs, expected, name) for name in expected[0]}
    bounds = {name: floor if is_float(expected[0][name]) else 0.0 for name in found}
    if nudged is not None and any(found[name].relative_l2 > bounds[name] for name in found):
        noise = _Noise.of(oracle_run, feeds, expected, nudged, scratch)
        for name in found:
            if bounds[name]:
                bounds[name] = max(floor, _MULTIPLE * noise.largest_change(name))
            found[name] = noise.without_unstable(oracle_run.outputs, expected, name)
    return OracleEntry(
        checked=True,
        how=oracle_run.how,
        feeds=len(oracle_run.outputs),
        outputs={
            name: OracleFigure(relative_l2=distance.relative_l2, max_abs=distance.max_abs, bound=bounds[name])
            for name, distance in found.items()
        },
    )


def _worst(oracle_outputs: Sequence[Feeds], expected: Sequence[Feeds], name: str) -> Distance:
    if name not in oracle_outputs[0]:
        raise ConversionError(
            f"the fp32 reference has an output {name!r}, which the source lacks; the source has"
            f" {', '.join(oracle_outputs[0])}"
        )
    return max(
        measure_distance(own[name], reference[name]) for own, reference in zip(oracle_outputs, expected, strict=False)
    )


@dataclass(frozen=True, slots=True)
class _Noise:
    """The reference's outputs with nudged weights: by run, by feed."""

    expected: Sequence[Feeds]
    runs: Sequence[Sequence[Feeds]]

    @classmethod
    def of(
        cls,
        oracle_run: OracleRun,
        feeds: Sequence[Feeds],
        expected: Sequence[Feeds],
        nudged: OpenNudged,
        scratch: Path | None,
    ) -> _Noise:
        chosen = feeds[: len(oracle_run.outputs)]
        runs = [
            _run(nudged, chosen, np.random.default_rng(seed), oracle_run.roundoff, scratch) for seed in range(_RUNS)
        ]
        return cls(expected[: len(chosen)], [run for run in runs if run is not None])

    def largest_change(self, name: str) -> float:
        """Return the largest relative change of an output."""
        distances = [
            measure_distance(reference[name], run[index][name]).relative_l2
            for run in self.runs
            for index, reference in enumerate(self.expected)
        ]
        return max(distances, default=0.0)

    def without_unstable(self, oracle_outputs: Sequence[Feeds], expected: Sequence[Feeds], name: str) -> Distance:
        """Return the distance from the source's outputs; values that noise flips (integers and flags) are left out."""
        worst = []
        for index, (own, reference) in enumerate(zip(oracle_outputs, expected, strict=False)):
            changed = [run[index][name] for run in self.runs]
            worst.append(measure_distance(own[name], mask_unstable(reference[name], own[name], changed)))
        return max(worst)


def _run(
    nudged: OpenNudged, feeds: Sequence[Feeds], random: np.random.Generator, roundoff: float, scratch: Path | None
) -> Spool | None:
    """Return the nudged reference's outputs; None if it does not run, because noise changed a computed size."""
    runtime = nudged(random)
    outputs = Spool(scratch)
    try:
        for feed in nudged_feeds(feeds, random, roundoff):
            outputs.append(runtime.run(feed))
    except RuntimeFailure:
        return None
    finally:
        runtime.close()
    return outputs


def _check_bounds(entry: OracleEntry, what: str) -> None:
    failing = [(name, figure) for name, figure in entry.outputs.items() if not figure.relative_l2 <= figure.bound]
    if not failing:
        return
    listed = "".join(
        f"\n  output {name!r}: relative_l2 is {figure.relative_l2:.3g} (max_abs {figure.max_abs:.3g}), this model's"
        f" fp32 noise explains at most {figure.bound:.3g}"
        for name, figure in failing
    )
    raise ConversionError(
        f"{what} does not give the outputs of the source itself ({entry.how}), nothing published:{listed}\nReading,"
        " exporting or preparing the model changed what it computes. Export it to ONNX by other means and convert"
        " that, or use other versions of torch and onnxscript; please report it"
    )


def remarks(entry: OracleEntry) -> Iterator[str]:
    """Yield notes on the check for the user: that there was none, or that it proves little."""
    if not entry.checked:
        yield f"the fp32 reference was not checked against the source itself: {entry.how}"
    for name, figure in _loose_bounds(entry.outputs):
        yield (
            f"output {name!r} amplifies fp32 noise so much that its check against the source proves little: differences"
            f" up to {figure.bound:.3g} would pass, {figure.relative_l2:.3g} was found"
        )


def _loose_bounds(outputs: Mapping[str, OracleFigure]) -> list[tuple[str, OracleFigure]]:
    return [(name, figure) for name, figure in sorted(outputs.items()) if figure.bound > _LARGEST_USEFUL_BOUND]
