"""Names of free dimensions: two of one name are one size, unless nobody named them or the model shows otherwise."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from bf16kit.tensors import TensorSpec
from converter.graph.names import FreshNames

UNKNOWN = "?"
# What exporters write for a dimension of which they know nothing. PaddlePaddle's calls every one of them "?".
_NOBODYS = frozenset({"", UNKNOWN, "*", "-1", "None", "unk", "unknown"})

Shape = tuple[int, ...]
Place = tuple[int, int]  # which spec, which axis


def is_named(dim: int | str | None) -> bool:
    """Whether ``dim`` is a free dimension with a name that tells it from others."""
    return isinstance(dim, str) and dim.strip() not in _NOBODYS


def name_all(specs: Sequence[TensorSpec], known: Iterable[TensorSpec] = ()) -> tuple[TensorSpec, ...]:
    """``specs`` with every dimension that nobody named called after its tensor and axis: names of their own.

    ``known`` are specs whose names are taken. An unknown dimension is one that :func:`is_named` denies.
    """
    own = {spec.name for spec in specs}  # a tensor that is both input and output has one name for its dimension
    taken = (*specs, *(spec for spec in known if spec.name not in own))
    fresh = FreshNames(str(dim) for spec in taken for dim in spec.shape if is_named(dim))
    return tuple(
        replace(
            spec,
            shape=tuple(
                dim if isinstance(dim, int) or is_named(dim) else fresh.make(f"{spec.name}_{axis}")
                for axis, dim in enumerate(spec.shape)
            ),
        )
        for spec in specs
    )


def loosened(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """``specs`` with no two dimensions of one name: what they demand when nothing is believed but the sizes."""
    return name_all([replace(s, shape=tuple(d if isinstance(d, int) else UNKNOWN for d in s.shape)) for s in specs])


def reconciled(specs: Sequence[TensorSpec], seen: Iterable[Mapping[str, Shape]]) -> tuple[TensorSpec, ...]:
    """``specs`` without the equalities that ``seen`` contradicts: shapes by tensor name, each mapping those of one run.

    Of the dimensions of one name, those that were the same size in every run keep a name together: the first ones
    theirs, the others one after the first of them.
    """
    runs = list(seen)
    fresh = FreshNames(dim for spec in specs for dim in spec.shape if isinstance(dim, str))
    groups: dict[tuple[str, Shape], str] = {}
    taken: set[str] = set()
    shapes = [list(spec.shape) for spec in specs]
    for index, axis in _free(specs):
        name = str(specs[index].shape[axis])
        sizes = tuple(run[specs[index].name][axis] for run in runs if specs[index].name in run)
        key = (name, sizes)
        if key not in groups:
            groups[key] = name if name not in taken else fresh.make(f"{specs[index].name}_{axis}")
            taken.add(name)
        shapes[index][axis] = groups[key]
    return tuple(replace(spec, shape=tuple(shape)) for spec, shape in zip(specs, shapes, strict=True))


def as_given(spec: TensorSpec, shapes: Collection[Shape]) -> TensorSpec:
    """``spec`` as ``shapes`` of one rank bear it out: a size that one of them contradicts is unknown, and so are all
    where the spec is of another rank."""
    (rank,) = {len(shape) for shape in shapes}
    if rank != len(spec.shape):
        return replace(spec, shape=(UNKNOWN,) * rank)
    seen = [{shape[axis] for shape in shapes} for axis in range(rank)]
    return replace(
        spec,
        shape=tuple(
            dim if isinstance(dim, str) or sizes == {dim} else UNKNOWN
            for dim, sizes in zip(spec.shape, seen, strict=True)
        ),
    )


def _free(specs: Sequence[TensorSpec]) -> Iterator[Place]:
    for index, spec in enumerate(specs):
        yield from ((index, axis) for axis, dim in enumerate(spec.shape) if isinstance(dim, str))
