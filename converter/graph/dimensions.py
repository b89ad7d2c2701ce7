"""Names of free dimensions. Two of one name have one size, unless the name means "unknown" or a run contradicts it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
import onnx_ir as ir

from bf16kit.converter.graph.names import FreshNames, values_of
from bf16kit.numerics.tensors import Array, TensorSpec

UNKNOWN = "?"
# What exporters write for an unknown dimension. PaddlePaddle's exporter calls every one of them "?".
_PLACEHOLDERS = frozenset({"", UNKNOWN, "*", "-1", "None", "unk", "unknown"})

Shape = tuple[int, ...]


def is_named(dim: int | str | None) -> bool:
    """Whether ``dim`` is a free dimension with a name that distinguishes it from others."""
    return isinstance(dim, str) and dim.strip() not in _PLACEHOLDERS


def _renamed(
    specs: Iterable[TensorSpec], name: Callable[[TensorSpec, int, int | str], int | str]
) -> tuple[TensorSpec, ...]:
    """Return ``specs`` with the dimensions that ``name`` gives for a spec, an axis, and its dimension so far."""
    return tuple(replace(s, shape=tuple(name(s, axis, dim) for axis, dim in enumerate(s.shape))) for s in specs)


def name_dimensions(specs: Sequence[TensorSpec], known: Iterable[TensorSpec] = ()) -> tuple[TensorSpec, ...]:
    """Return ``specs`` with a name of its own, from tensor and axis, for each dimension without a real name.

    ``known`` are specs whose names are taken. :func:`is_named` decides which names are real.
    """
    own = {spec.name for spec in specs}  # a tensor that is both input and output keeps one name per dimension
    taken = (*specs, *(spec for spec in known if spec.name not in own))
    fresh = FreshNames(str(dim) for spec in taken for dim in spec.shape if is_named(dim))
    return _renamed(
        specs,
        lambda spec, axis, dim: dim if isinstance(dim, int) or is_named(dim) else fresh.make(f"{spec.name}_{axis}"),
    )


def with_distinct_dimensions(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return ``specs`` with a different name for every free dimension, so that only the sizes are demanded."""
    return name_dimensions(_renamed(specs, lambda _spec, _axis, dim: dim if isinstance(dim, int) else UNKNOWN))


def reconciled(specs: Sequence[TensorSpec], seen: Iterable[Mapping[str, Shape]]) -> tuple[TensorSpec, ...]:
    """Return ``specs`` without the equalities that ``seen`` contradicts: the shapes of each run, by tensor.

    Dimensions of one name that had the same size in every run still share a name. The first group keeps the name; each
    other group is named after its first dimension.
    """
    runs = list(seen)
    fresh = FreshNames(dim for spec in specs for dim in spec.shape if isinstance(dim, str))
    groups: dict[tuple[str, Shape], str] = {}

    def name_of(spec: TensorSpec, axis: int, dim: int | str) -> int | str:
        if isinstance(dim, int):
            return dim
        key = dim, tuple(run[spec.name][axis] for run in runs if spec.name in run)
        if key not in groups:
            first = all(name != dim for name, _ in groups)
            groups[key] = dim if first else fresh.make(f"{spec.name}_{axis}")
        return groups[key]

    return _renamed(specs, name_of)


def corrected_by(spec: TensorSpec, shapes: Collection[Shape]) -> TensorSpec:
    """Return ``spec`` corrected by ``shapes``, which are all of one rank.

    A size that one of them contradicts becomes unknown; if the spec has another rank, all sizes do.
    """
    (rank,) = {len(shape) for shape in shapes}
    if rank != len(spec.shape):
        return replace(spec, shape=(UNKNOWN,) * rank)
    seen = [{shape[axis] for shape in shapes} for axis in range(rank)]
    (corrected,) = _renamed(
        [spec], lambda _, axis, dim: dim if isinstance(dim, str) or seen[axis] == {dim} else UNKNOWN
    )
    return corrected


GUESSED = "bf16kit.guessed"  # a model's metadata, in memory only
SIZES = "bf16kit.sizes"  # of its ``meta``: the conditions under which the graph holds


@dataclass(frozen=True, slots=True)
class SizeCondition:
    """What the sizes of free dimensions, by name, must fulfil so that a graph computes what its source does."""

    text: str
    holds: Callable[[Mapping[str, int]], bool]


def sizes_note(conditions: Sequence[SizeCondition]) -> str:
    """Return a note on the sizes of free dimensions for which a graph holds, if it does not hold for all."""
    listed = " and ".join(condition.text for condition in conditions)
    return f"the graph holds only where {listed}: the module branches on sizes, or checks them"


def broken(
    conditions: Sequence[SizeCondition], inputs: Sequence[TensorSpec], feeds: Iterable[Mapping[str, Array]]
) -> str | None:
    """Say which of ``conditions`` the first of ``feeds`` that breaks one breaks; None if all fulfil all."""
    for feed in feeds:
        dims = ((dim, size) for spec in inputs for dim, size in zip(spec.shape, feed[spec.name].shape, strict=True))
        sizes = {dim: size for dim, size in dims if isinstance(dim, str)}
        for condition in conditions:
            if not condition.holds(sizes):
                listed = ", ".join(f"{dim} = {size}" for dim, size in sizes.items())
                return (
                    f"the graph holds only where {condition.text}, because the module branches on sizes, and a sample"
                    f" has {listed}; declare dimensions on which it branches as numbers"
                )
    return None


def mark_guessed(model: ir.Model) -> None:
    """Note that names of dimensions inside ``model``, and its clones, may be wrong."""
    model.metadata_props[GUESSED] = "yes"  # `meta` is not cloned


def rename(model: ir.Model, names: Mapping[str, int | str | None]) -> None:
    """Replace the names of free dimensions in ``names`` by other names, sizes, or nothing, everywhere in ``model``."""
    for value in (value for graph in model.graphs() for value in values_of(graph)):
        if value.shape is not None and not value.is_initializer():
            value.shape = ir.Shape(
                [dim if isinstance(dim, int) else names.get(dim.value or "", dim) for dim in value.shape]
            )


def drop_guesses(model: onnx.ModelProto) -> None:
    """Remove the note, and the names of free dimensions of all values inside ``model``; edges keep theirs."""
    for note in [entry for entry in model.metadata_props if entry.key == GUESSED]:
        model.metadata_props.remove(note)
        _drop_names(model.graph)


def _drop_names(graph: onnx.GraphProto) -> None:
    for value in graph.value_info:
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                dim.ClearField("dim_param")
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        for body in (attribute.g, *attribute.graphs):
            _drop_names(body)
