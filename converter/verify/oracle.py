"""Certifies the fp32 reference against the source itself, which answered a few samples before anything was changed.

Drift measures how far a profile is from the reference; this check proves that the reference is the given model. Both
compute in fp32, in another order, so their outputs differ only by fp32 noise. :data:`FLOOR` is noise that any model may
have. A model that amplifies noise may differ more. How much is measured by perturbing the weights of the source's own
graph (:mod:`converter.verify.fp32noise`), but only if the floor is exceeded. docs/decisions/0017-the-oracle.md has the
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from bf16kit.artifact.manifest import OracleEntry, OracleFigure
from bf16kit.messages.errors import ConversionError, RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Array, RuntimeInfo
from bf16kit.runtime.device import CPU
from bf16kit.runtime.ort.externaldata import REBUILT
from converter.rewrite import Prepared
from converter.source import FP32_ROUNDOFF, Feeds, Oracle, Source
from converter.verify.fp32noise import Distance, Noise, is_float, measure_distance
from converter.verify.running import open_fp32_graph, with_external_weights
from converter.verify.samples import Samples
from converter.verify.spool import Spool
from converter.write.graphs import serialize

FEEDS = 4  # the source runs on this many samples, the first ones
FLOOR = 64 * FP32_ROUNDOFF
# In unit roundoffs, like FLOOR. Smaller, because fp16 rounds once per node, fp32 once per term of a sum.
_COARSE_FLOOR = 8
MULTIPLE = 4  # the bound is this many times the change that perturbing the weights by 16 ulps causes
_LARGEST_USEFUL_BOUND = 1e-3  # a bound above this could hide faults as large as bf16's own drift, so a note says so


@dataclass(frozen=True, slots=True)
class OracleRun:
    """The source's own outputs for the first samples; if there are none, ``how`` says why the source was not run.

    ``noise`` is that of the source's graph on these samples. It is None if the source has no graph; then any difference
    beyond :data:`FLOOR` is an error.
    """

    outputs: Sequence[Feeds]
    how: str
    roundoff: float = FP32_ROUNDOFF
    noise: Noise | None = None


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
    return OracleRun(outputs, oracle.how, oracle.roundoff, _noise(source, chosen, oracle.roundoff, scratch))


def _noise(source: Source, feeds: Sequence[Feeds], roundoff: float, scratch: Path) -> Noise | None:
    graph, inputs, outputs = source.graph, source.inputs, source.outputs
    if graph is None:
        return None
    return Noise(lambda read: open_fp32_graph(graph, inputs, outputs, scratch, read), feeds, roundoff, scratch)


def certify(oracle_run: OracleRun, expected: Sequence[Feeds], what: str = "the fp32 reference") -> OracleEntry:
    """Compare the outputs ``expected`` of the reference, or of ``what``, with the source's own, by output.

    Raises :class:`ConversionError` that names the outputs whose difference exceeds this model's fp32 noise, which is
    measured only if an output is beyond :data:`FLOOR`.
    """
    if not oracle_run.outputs:
        return OracleEntry(checked=False, how=oracle_run.how)
    entry = measure(oracle_run, expected)
    _check_bounds(entry, what)
    return entry


def measure(oracle_run: OracleRun, expected: Sequence[Feeds]) -> OracleEntry:
    """Measure how far ``expected`` is from the outputs in ``oracle_run``, by output, and its bound; do not judge."""
    floor = FLOOR if oracle_run.roundoff <= FP32_ROUNDOFF else _COARSE_FLOOR * oracle_run.roundoff
    noise = oracle_run.noise
    found = {name: _worst(oracle_run.outputs, expected, name) for name in expected[0]}
    bounds = {name: floor if is_float(expected[0][name]) else 0.0 for name in found}
    if noise is not None and any(found[name].relative_l2 > bounds[name] for name in found):
        for name in found:
            if bounds[name]:
                bounds[name] = max(floor, MULTIPLE * noise.largest_change(name))
            found[name] = _worst(oracle_run.outputs, expected, name, noise)
    return OracleEntry(
        checked=True,
        how=oracle_run.how,
        feeds=len(oracle_run.outputs),
        outputs={
            name: OracleFigure(relative_l2=distance.relative_l2, max_abs=distance.max_abs, bound=bounds[name])
            for name, distance in found.items()
        },
    )


def _worst(
    oracle_outputs: Sequence[Feeds], expected: Sequence[Feeds], name: str, noise: Noise | None = None
) -> Distance:
    """Return the largest distance from the source's output; values that ``noise`` flips are left out."""
    if name not in oracle_outputs[0]:
        raise ConversionError(
            f"the fp32 reference has an output {name!r}, which the source lacks; the source has"
            f" {', '.join(oracle_outputs[0])}"
        )
    worst = []
    for index, (own, reference) in enumerate(zip(oracle_outputs, expected, strict=False)):
        array = reference[name] if noise is None else noise.without_unstable(reference[name], own[name], name, index)
        worst.append(measure_distance(own[name], array))
    return max(worst)


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


@dataclass(frozen=True, slots=True)
class OracleReference:
    """The source in place of a reference graph.

    ``rowwise`` is false if one row's input may change another row's outputs. Then no batch axis may be declared,
    whatever a test with two rows shows.
    """

    oracle: Oracle
    rowwise: bool

    def open(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> OracleRuntime:
        """Return a runtime that takes ``inputs`` and computes ``outputs``."""
        return OracleRuntime(self.oracle, inputs, outputs)


class OracleRuntime:
    """A :class:`bf16kit.runtime.Runtime` that calls ``oracle``."""

    def __init__(self, oracle: Oracle, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        self._oracle: Oracle | None = oracle
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)

    @property
    def info(self) -> RuntimeInfo:
        how = "" if self._oracle is None else self._oracle.how
        return RuntimeInfo("torch", CPU, "reference", "fp32", "unknown", how)

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, seconds: float | None = None
    ) -> dict[str, Array]:
        """See :meth:`bf16kit.runtime.Runtime.run`."""
        if self._oracle is None:
            raise RuntimeFailure("the model is closed")
        (found,) = self._oracle([dict(feeds)])
        return found if outputs is None else {name: found[name] for name in outputs}

    def close(self) -> None:
        """Release the source. ``run`` fails from now on."""
        self._oracle = None


def check_expected_outputs(samples: Samples, oracle_run: OracleRun) -> str | None:
    """Return how the source's outputs in ``oracle_run`` differ from those that came with ``samples``, as a sentence.

    Returns None if they agree.
    """
    if not oracle_run.outputs:
        return f"the model could not be run: {oracle_run.how}"
    count = len(oracle_run.outputs)
    expected = list(samples.expected[:count])
    names = [name for name in oracle_run.outputs[0] if all(name in feed for feed in expected)]
    if not names:
        return "the samples do not hold outputs for every input"
    own = [{name: np.asarray(outputs[name]) for name in names} for outputs in oracle_run.outputs]
    wanted = replace(oracle_run, outputs=[{name: feed[name] for name in names} for feed in expected], how="the samples")
    found = measure(wanted, own)
    wrong = [(name, figure) for name, figure in found.outputs.items() if not figure.relative_l2 <= figure.bound]
    return (
        None
        if not wrong
        else "; ".join(
            f"output {name!r} is {figure.relative_l2:.3g} (relative_l2) from the expected one, and fp32 noise explains"
            f" at most {figure.bound:.3g}"
            for name, figure in wrong
        )
    )


def check_prepared(
    oracle_run: OracleRun,
    prepared: Prepared,
    model: ir.Model,
    signature: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
    feeds: Sequence[Feeds],
    scratch: Path,
) -> None:
    """Run ``model``, one of the graphs of ``prepared``, in fp32 and compare it with the source's own outputs.

    Nothing is run if preparing changed nothing, or if the source has no outputs to compare with. The weights are kept
    in a file in ``scratch`` while it runs. Raises :class:`ConversionError` if the difference exceeds
    fp32 noise.
    """
    if not oracle_run.outputs or not _changed(prepared, model):
        return
    runtime = open_fp32_graph(model, *signature, scratch)
    found = Spool(scratch)
    for feed in feeds[: len(oracle_run.outputs)]:
        found.append(runtime.run(feed))
    runtime.close()
    certify(oracle_run, found, what="the prepared graph, before rounding,")


def _changed(prepared: Prepared, model: ir.Model) -> bool:
    return bool(prepared.folds or prepared.clamped) or _structure(model) != _structure(prepared.reference)


def _structure(model: ir.Model) -> bytes:
    return serialize(with_external_weights(model, lambda _name, tensor: (REBUILT, 0, tensor.nbytes)))
