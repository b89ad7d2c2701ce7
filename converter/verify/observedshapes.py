"""Corrects a manifest's inputs and outputs by what running the reference has shown."""

from __future__ import annotations

from collections.abc import Sequence

from bf16kit.artifact.manifest import Manifest, SpecEntry
from bf16kit.messages.errors import ConversionError
from bf16kit.numerics.tensors import TensorSpec, describe
from converter.graph.dimensions import corrected_by, name_dimensions, reconciled
from converter.source import Feeds
from converter.verify import measure


def edges(manifest: Manifest) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the manifest's inputs and outputs."""
    return tuple(entry.spec() for entry in manifest.inputs), tuple(entry.spec() for entry in manifest.outputs)


def with_observed_shapes(
    manifest: Manifest, feeds: Sequence[Feeds], found: Sequence[Feeds]
) -> tuple[Manifest, list[str]]:
    """Correct the outputs' dimensions (names, sizes and number) where the ``found`` outputs contradict them.

    Also returns a note on each corrected output.
    """
    inputs = [entry.spec() for entry in manifest.inputs]
    declared = [entry.spec() for entry in manifest.outputs]
    runs = [
        {name: array.shape for name, array in (feed | outputs).items()}
        for feed, outputs in zip(feeds, found, strict=True)
    ]
    given = [corrected_by(spec, _check_one_rank(spec.name, [run[spec.name] for run in runs])) for spec in declared]
    outputs = reconciled([*inputs, *name_dimensions(given, known=inputs)], runs)[len(inputs) :]
    notes = [
        f"output {was.name!r} is declared as {describe(was.shape)}, but the model gives"
        f" {describe(runs[0][was.name])}; the artifact declares {describe(now.shape)}"
        for was, found, now in zip(declared, given, outputs, strict=True)
        if found != was
    ]
    return manifest.model_copy(update={"outputs": [SpecEntry.of(spec) for spec in outputs]}), notes


def _check_one_rank(output: str, shapes: Sequence[tuple[int, ...]]) -> Sequence[tuple[int, ...]]:
    for shape in shapes:
        if len(shape) != len(shapes[0]):
            raise ConversionError(
                f"output {output!r} is {describe(shapes[0])} for one sample and {describe(shape)} for another;"
                " export the model with the same number of dimensions for all samples"
            )
    return shapes


def with_batch_axis(manifest: Manifest, axis: int | None) -> Manifest:
    """Declare the batch axis, and name every output's batch dimension as the inputs name it."""
    if axis is None:
        return manifest
    outputs: Sequence[TensorSpec] = [entry.spec() for entry in manifest.outputs]
    outputs = measure.with_batch_dimension(outputs, str(manifest.inputs[0].shape[0]))
    return manifest.model_copy(update={"batch_axis": axis, "outputs": [SpecEntry.of(spec) for spec in outputs]})
