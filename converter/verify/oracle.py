"""Certifies the fp32 reference against the source itself, which answered a few samples before anything was changed.

Drift measures how far a profile is from the reference; this check proves that the reference is the given model. Both
compute in fp32, in another order, so their outputs differ only by fp32 noise. :data:`FLOOR` is noise that any model may
have. A model that amplifies noise may differ more. How much is measured by perturbing the weights of the source's own
graph (:mod:`bf16kit.converter.verify.fp32noise`), but only if the floor is exceeded. docs/decisions/0017-the-oracle.md
has the numbers.

A slice whose variation is at fp32's noise says nothing that bf16 could destroy, so it is excused. How large the noise
is shows in the difference between the source's outputs and the reference's. That difference is no excuse by itself,
because a fault in the reference would make it too: the source's own noise, with its weights perturbed, must explain it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from bf16kit.artifact.manifest import OracleEntry, OracleFigure
from bf16kit.converter.rewrite import Prepared
from bf16kit.converter.source import CHANGED, FP32_ROUNDOFF, Array, Feeds, Oracle, Source
from bf16kit.converter.verify.fp32noise import Distance, Noise, measure_distance
from bf16kit.converter.verify.measure import Spool
from bf16kit.converter.verify.running import open_fp32_graph, with_external_weights
from bf16kit.converter.verify.samples import Samples
from bf16kit.converter.write.graphs import serialize
from bf16kit.drift import metrics as drift
from bf16kit.drift.slices import SliceSums, Values
from bf16kit.messages.errors import ConversionError, RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import CPU, RuntimeInfo
from bf16kit.runtime.ort.onnxgraph import REBUILT

FEEDS = 4  # the source runs on this many samples, the first ones
FLOOR = 64 * FP32_ROUNDOFF
# In unit roundoffs, like FLOOR. Smaller, because fp16 rounds once per node, fp32 once per term of a sum.
_COARSE_FLOOR = 8
MULTIPLE = 4  # the bound is this many times the change that perturbing the weights by 16 ulps causes
_LARGEST_USEFUL_BOUND = 1e-3  # a bound above this could hide faults as large as bf16's own drift, so a note says so
# A slice is resolved if fp32 programs differ by at most this share of its variation: an eighth of what the default
# budget allows bf16.
_RESOLVED = 2.0**-4
# The difference is seen in few samples, and may be small by chance. Then the noise of the perturbed source counts, up
# to this many times the mean square seen: it is larger than that of two programs.
_MISSED = 16.0
_RANDOM = frozenset({"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike"})
_RANDOM |= {"RandomUniform", "RandomUniformLike"}
_ADVICE = (
    "Reading, exporting or preparing the model changed what it computes. If it branches on a free dimension, declare"
    " that as a number. Otherwise export it to ONNX by other means, or with a newer opset, and convert that, or use"
    " other versions of torch and onnxscript; please report it"
)
# ONNX Runtime's DFT of a length that is no power of two has the errors of coarser arithmetic, which grow with the
# length: 3e-5 (relative_l2) at 400, as in torchaudio's and Whisper's spectrograms, 8e-5 at 1,000. Torch's are 1e-7.
_COARSE = frozenset({"DFT", "STFT"})
_COARSE_ROUNDOFF = 128 * FP32_ROUNDOFF
_TRAINS = ("Dropout", 3)  # and its inputs, if the last says that it trains
_ULPS = 2.0**-22  # of the output's largest value: two programs may differ by that even where no weight matters


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
    so. :class:`ConversionError` if these differ because a node of its graph draws random numbers, or because the module
    changes its own tensors.
    """
    oracle = source.oracle
    if oracle is None:
        return OracleRun((), source.no_oracle_reason)
    chosen = feeds[:FEEDS]
    try:
        outputs = Spool(scratch, oracle.outputs([*chosen, chosen[0]]))
    except RuntimeFailure as error:
        return OracleRun((), f"{oracle.how}: {error}")
    again = outputs.pop()
    unstable = [n for n, array in outputs[0].items() if measure_distance(array, again[n]).relative_l2 > FLOOR]
    if unstable:
        for what in _unsteady(source.graph):
            raise ConversionError(
                f"{what}, so output {unstable[0]!r} differs from run to run, and drift cannot be measured; export the"
                " model in evaluation mode, or make the noise or state an input"
            )
        return OracleRun((), f"{oracle.how} gives different outputs for the same input (output {unstable[0]!r})")
    noise, roundoff = None, oracle.roundoff
    if source.graph is not None:
        if any(node.op_type in _COARSE for node in source.graph.graph.all_nodes()):
            roundoff = max(roundoff, _COARSE_ROUNDOFF)
        opened = partial(open_fp32_graph, source.graph, source.inputs, source.outputs, scratch)
        noise = Noise(opened, chosen, roundoff, scratch)
    return OracleRun(outputs, oracle.how, roundoff, noise)


def _unsteady(graph: ir.Model | None) -> Iterator[str]:
    """Yield what makes a graph's outputs, or those of the module that it was made of, differ from run to run."""
    if graph is None:
        return
    for name in graph.meta.get(CHANGED, ()):
        yield f"the module changes its own {name.removeprefix('module.')!r}"
    for node in graph.graph.all_nodes():
        if node.op_type in _RANDOM or (node.op_type, len(node.inputs)) == _TRAINS:
            yield f"node {node.name!r} ({node.op_type}) draws random numbers"


def certify(oracle_run: OracleRun, expected: Sequence[Feeds], what: str = "the fp32 reference") -> OracleEntry:
    """Compare the outputs ``expected`` of the reference, or of ``what``, with the source's own, by output.

    Raises :class:`ConversionError` that names the outputs whose difference exceeds this model's fp32 noise, which is
    measured only if an output is beyond :data:`FLOOR`.
    """
    if not oracle_run.outputs:
        return OracleEntry(checked=False, how=oracle_run.how)
    entry = _measure(oracle_run, expected)
    if failing := _beyond(entry):
        listed = "".join(
            f"\n  output {name!r}: relative_l2 is {figure.relative_l2:.3g} (max_abs {figure.max_abs:.3g}), this model's"
            f" fp32 noise explains at most {figure.bound:.3g}"
            for name, figure in failing
        )
        raise ConversionError(
            f"{what} does not give the outputs of the source itself ({entry.how}), nothing published:{listed}"
            f"\n{_ADVICE}"
        )
    return entry


def _beyond(entry: OracleEntry) -> list[tuple[str, OracleFigure]]:
    return [(name, figure) for name, figure in entry.outputs.items() if not figure.relative_l2 <= figure.bound]


def _measure(oracle_run: OracleRun, expected: Sequence[Feeds]) -> OracleEntry:
    """Measure how far ``expected`` is from the outputs in ``oracle_run``, by output, and its bound; do not judge."""
    floor = FLOOR if oracle_run.roundoff <= FP32_ROUNDOFF else _COARSE_FLOOR * oracle_run.roundoff
    noise = oracle_run.noise
    found = {name: _worst(oracle_run.outputs, expected, name) for name in expected[0]}
    bounds = {name: floor if drift.has_slices(expected[0][name]) else 0.0 for name in found}
    if noise is not None and any(found[name].relative_l2 > bounds[name] for name in found):
        for name in found:
            if bounds[name]:
                bounds[name] = max(floor, MULTIPLE * noise.largest_change(name))
            found[name] = _worst(oracle_run.outputs, expected, name, noise)
    figures = {
        name: OracleFigure(relative_l2=distance.relative_l2, max_abs=distance.max_abs, bound=bounds[name])
        for name, distance in found.items()
    }
    return OracleEntry(checked=True, how=oracle_run.how, feeds=len(oracle_run.outputs), outputs=figures)


def _worst(
    oracle_outputs: Sequence[Feeds], expected: Sequence[Feeds], name: str, noise: Noise | None = None
) -> Distance:
    """Return the largest distance from the source's output; values that ``noise`` flips are left out."""
    if name not in oracle_outputs[0]:
        raise ConversionError(
            f"the fp32 reference has an output {name!r}, which the source lacks; the source has"
            f" {', '.join(oracle_outputs[0])}"
        )
    pairs = enumerate((own[name], reference[name]) for own, reference in zip(oracle_outputs, expected, strict=False))
    return max(
        measure_distance(own, array if noise is None else noise.without_unstable(array, own, name, index))
        for index, (own, array) in pairs
    )


def remarks(entry: OracleEntry) -> Iterator[str]:
    """Yield notes on the check for the user: that there was none, or that it proves little."""
    if not entry.checked:
        yield f"the fp32 reference was not checked against the source itself: {entry.how}"
    for name, figure in sorted(entry.outputs.items()):
        if figure.bound > _LARGEST_USEFUL_BOUND:
            yield (
                f"output {name!r} amplifies fp32 noise so much that its check against the source proves little:"
                f" differences up to {figure.bound:.3g} would pass, {figure.relative_l2:.3g} was found"
            )


class OracleReference:
    """The source in place of a reference graph: a :class:`bf16kit.runtime.Runtime` that calls ``oracle``.

    ``rowwise`` is false if one row's input may change another row's outputs. Then no batch axis may be declared,
    whatever a test with two rows shows.
    """

    def __init__(self, oracle: Oracle, source: Source) -> None:
        self._oracle, self.rowwise = oracle, source.rowwise
        self.inputs, self.outputs = tuple(source.inputs), tuple(source.outputs)
        self.info = RuntimeInfo("torch", CPU, "reference", "fp32", "unknown", oracle.how)

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, seconds: float | None = None
    ) -> dict[str, Array]:
        """See :meth:`bf16kit.runtime.Runtime.run`."""
        (found,) = self._oracle([dict(feeds)])
        return found if outputs is None else {name: found[name] for name in outputs}

    def close(self) -> None:
        """Do nothing: the source is its owner's."""


def check_expected_outputs(samples: Samples, oracle_run: OracleRun) -> str:
    """Say how the source's outputs in ``oracle_run`` differ from those that came with ``samples``; "" if they agree."""
    if not oracle_run.outputs:
        return f"the model could not be run: {oracle_run.how}"
    count = len(oracle_run.outputs)
    expected = list(samples.expected[:count])
    names = [name for name in oracle_run.outputs[0] if all(name in feed for feed in expected)]
    if not names:
        return "the samples do not hold outputs for every input"
    own = [{name: np.asarray(outputs[name]) for name in names} for outputs in oracle_run.outputs]
    wanted = replace(oracle_run, outputs=[{name: feed[name] for name in names} for feed in expected], how="the samples")
    return "; ".join(
        f"output {name!r} is {figure.relative_l2:.3g} (relative_l2) from the expected one, and fp32 noise explains at"
        f" most {figure.bound:.3g}"
        for name, figure in _beyond(_measure(wanted, own))
    )


def check_prepared(
    oracle_run: OracleRun, prepared: Prepared, model: ir.Model, source: Source, feeds: Sequence[Feeds], scratch: Path
) -> None:
    """Run ``model``, one of the graphs of ``prepared``, in fp32 and compare it with the source's own outputs.

    Nothing is run if preparing changed nothing, or if the source has no outputs to compare with. The weights are kept
    in a file in ``scratch`` while it runs. Raises :class:`ConversionError` if it fails or differs beyond fp32 noise.
    """
    changed = prepared.folds or prepared.clamped or _structure(model) != _structure(prepared.reference)
    if not oracle_run.outputs or not changed:
        return
    try:
        runtime = open_fp32_graph(model, source.inputs, source.outputs, scratch)
        found = Spool(scratch, map(runtime.run, feeds[: len(oracle_run.outputs)]))
    except RuntimeFailure as error:
        raise ConversionError(f"the prepared graph, before rounding, does not run: {error}\n{_ADVICE}") from error
    runtime.close()
    certify(oracle_run, found, what="the prepared graph, before rounding,")


def _structure(model: ir.Model) -> bytes:
    return serialize(with_external_weights(model, lambda _name, tensor: (REBUILT, 0, tensor.nbytes)))


def resolved(
    oracle_run: OracleRun,
    expected: Sequence[Feeds],
    outputs: Sequence[TensorSpec],
    batch_axis: int | None,
    scales: dict[str, list[Values]],
) -> dict[str, list[Values]]:
    """Return ``scales`` with inf for slices that fp32 does not resolve; ``expected`` are the reference's outputs.

    Raises :class:`ConversionError` naming a slice in which the reference differs from the source by more than that.
    """
    found = dict(scales)
    for spec in outputs:
        name = spec.name
        if name not in scales or not oracle_run.outputs or name not in oracle_run.outputs[0]:
            continue
        pairs = [(own[name], each[name]) for own, each in zip(oracle_run.outputs, expected, strict=False)]
        differences = _errors(pairs, spec, batch_axis, scales[name])
        if not any((each > _RESOLVED**2).any() for each in differences):
            continue
        noise = differences  # of a source that cannot be perturbed
        if oracle_run.noise is not None:
            runs = [_errors(run, spec, batch_axis, scales[name]) for run in oracle_run.noise.pairs(name)]
            noise = [np.max(axis, axis=0) for axis in zip(*runs, strict=True)] if runs else differences
        finite = (drift.difference(own, own)[0] for own, _ in pairs if own.size)  # without fills
        ulps = _ULPS * max((float(np.nanmax(np.abs(r), initial=0.0)) for r in finite), default=0.0)
        by_axis = list(zip(differences, noise, scales[name], strict=True))
        for axis, (difference, own_noise, scale) in enumerate(by_axis):
            _check_slices(name, axis, difference, np.maximum(MULTIPLE**2 * own_noise, ulps**2 / scale))
        found[name] = [
            np.where(np.maximum(difference, np.minimum(own, _MISSED * difference)) > _RESOLVED**2, np.inf, scale)
            for difference, own, scale in by_axis
        ]
    return found


def _errors(
    pairs: Iterable[tuple[Array, Array]], spec: TensorSpec, batch_axis: int | None, scales: Sequence[Values]
) -> list[Values]:
    """Return the mean square error ÷ scale by slice along each axis; 0 where a slice is not judged."""
    sums = SliceSums(spec, batch_axis)
    for one, other in pairs:
        noise = drift.compare(one, other, spec, batch_axis).noise
        if noise is not None:
            sums.merge(noise)
    return [
        np.pad(mean, (0, max(0, len(scale) - len(mean))))[: len(scale)] / scale
        for mean, scale in zip(sums.means(), scales, strict=True)
    ]


def _check_slices(output: str, axis: int, difference: Values, allowed: Values) -> None:
    wrong = (difference > _RESOLVED**2) & (difference > allowed)
    if wrong.any():
        index = int(np.where(wrong, difference, 0.0).argmax())
        raise ConversionError(
            f"the fp32 reference does not give the outputs of the source itself, nothing published: output {output!r}"
            f" differs in index {index} along its axis {axis} (not counting the batch's) by"
            f" {np.sqrt(difference[index]):.3g} of the variation there; this model's fp32 noise explains at most"
            f" {np.sqrt(allowed[index]):.3g}; please report it"
        )
