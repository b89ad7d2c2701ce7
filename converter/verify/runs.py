"""Runs one profile or export of an artifact on samples, and measures the drift from the reference's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bf16kit.artifact.artifact import Artifact
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Runtime, RuntimeInfo
from converter.verify import measure
from converter.verify.exported import GraphReference, open_export
from converter.verify.measure import Drifts, Expected
from converter.verify.observedshapes import edges
from converter.verify.running import open_profile, open_traced
from converter.write.traced import TRACED

_MAX_SAMPLES = 8  # samples that a torch module is run on in both arithmetics: this CPU's and the other
_ARITHMETICS = {"bf16": "bf16", "bf16-weights": "fp32, to which a CPU without bf16 instructions widens it"}


@dataclass(frozen=True, slots=True)
class Run:
    """The drift of a profile from the reference, one entry per sample that was run, and how the profile ran.

    Every ``step``-th sample was run, starting with the first. ``note`` tells the user what ``info`` does not say; it is
    "" if there is nothing to add.
    """

    drifts: list[Drifts]
    info: RuntimeInfo
    emulated: bool
    note: str = ""
    step: int = 1

    def by_sample(self) -> dict[int, Drifts]:
        """Return the drift of each given sample that was run, by sample number."""
        numbered = {self.step * place: found for place, found in enumerate(self.drifts)}
        return {n: found for n, found in numbered.items() if not measure.is_made(found)}


def run_as_served(artifact: Artifact, profile: str, expected: Expected) -> Run:
    """Run as :func:`run_profile` does; a torch module in the worse of the two arithmetics that a server may use."""
    if profile in TRACED and (worse := _worse_arithmetic(artifact, profile, expected)) is not None:
        return worse
    return run_profile(artifact, profile, expected)


def run_profile(artifact: Artifact, profile: str, expected: Expected) -> Run:
    """Run ``profile`` as a server would, or emulated if there is no device for it, and compare with ``expected``.

    Each output is reduced to its drift at once.
    """
    manifest = artifact.manifest
    outputs = edges(manifest)[1]
    runtime, emulated = open_profile(artifact, profile)
    try:
        return Run(_drifts(runtime, expected, outputs, manifest.batch_axis), runtime.info, emulated)
    finally:
        runtime.close()


def run_export(
    artifact: Artifact,
    export: str,
    expected: Expected,
    source: GraphReference | None = None,
    scratch: Path | None = None,
) -> Run:
    """Run the reference with the tensors of ``export``; ``source`` replaces a missing reference."""
    runtime, note = open_export(artifact, export, source, scratch)
    try:
        outputs, axis = edges(artifact.manifest)[1], artifact.manifest.batch_axis
        return Run(_drifts(runtime, expected, outputs, axis), runtime.info, False, note)
    finally:
        runtime.close()


def _worse_arithmetic(artifact: Artifact, profile: str, expected: Expected) -> Run | None:
    """Run a torch module in bf16 and in fp32, to which CPUs without bf16 instructions widen it; return the worse run.

    Returns None if the module has nothing in bf16. A server may use either arithmetic. Both run on the same
    :data:`_MAX_SAMPLES` feeds at most, so that the result does not depend on this CPU. A run takes ten times as
    long on a CPU without bf16 instructions.
    """
    outputs, axis = edges(artifact.manifest)[1], artifact.manifest.batch_axis
    step = -(-len(expected.feeds) // _MAX_SAMPLES)
    chosen = expected.every(step)
    own = run_profile(artifact, profile, chosen)
    if own.info.precision == "fp32":
        return None
    runtime = open_traced(artifact, profile, native_bf16=own.info.precision != "bf16")
    try:
        other = _drifts(runtime, chosen, outputs, axis)
        found = {own.info.precision: own.drifts, runtime.info.precision: other}
    finally:
        runtime.close()
    worse = max(sorted(found), key=lambda precision: _largest_error(found[precision]))
    some = f" on {len(chosen.feeds)} of {len(expected.feeds)} samples" if step > 1 else ""
    note = f"when verified: run in both arithmetics{some}; the drift is that of {_ARITHMETICS[worse]}, the worse"
    return Run(found[worse], own.info, own.emulated, note, step)


def _drifts(
    runtime: Runtime, expected: Expected, outputs: Sequence[TensorSpec], batch_axis: int | None
) -> list[Drifts]:
    found = measure.run_all(runtime, expected.feeds)
    return measure.drifts(expected.outputs, found, outputs, batch_axis, expected.scales, expected.given)


def _largest_error(found: Sequence[Drifts]) -> float:
    """Return the largest error of any output."""
    return max(measure.error_of(summary) for summary in measure.summarise(found).values())


def describe_run(info: RuntimeInfo) -> str:
    """Describe what was special about a run that was not emulated; "" if nothing was."""
    return f"on the CPU kernel, path {info.kernel}" if info.kernel else info.note
