"""The inputs of `bf16-serve bench`: golden samples, a file's samples, or zeros, in any number of rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bf16kit.messages.errors import InvalidRequest, UsageError
from bf16kit.messages.wording import brief, quoted
from bf16kit.numerics.tensors import BY_NAME, TensorSpec, check_feeds, describe
from service.contract import Array
from service.models.goldengate import golden_of
from service.models.opened import OpenedArtifact

_SHAPE = re.compile(r"(?P<name>.+)=(?P<dims>\d+(?:[x,]\d+)*)")


class Inputs:
    """Feeds of one model. ``arrays`` are repeated, or cut, to the number of rows."""

    def __init__(self, arrays: Mapping[str, Array], axis: int | None, origin: str) -> None:
        self._arrays = arrays
        self._axis = axis
        self.origin = origin  # where the inputs come from, as text

    def rows(self, count: int) -> dict[str, Array]:
        """Return feeds of ``count`` rows; for a model without a batch axis, the arrays as they are."""
        if self._axis is None:
            return dict(self._arrays)
        axis = self._axis
        return {
            name: np.ascontiguousarray(array.take(np.arange(count) % array.shape[axis], axis))
            for name, array in self._arrays.items()
        }

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shapes by input, with 1 for the batch axis."""
        return {name: list(array.shape) for name, array in self.rows(1).items()}


def inputs_of(opened: OpenedArtifact, samples: Path | None, shapes: Sequence[str]) -> Inputs:
    """Return the inputs: those of ``samples``, else the golden samples, else zeros.

    An input with a shape in ``shapes`` gets that shape, filled with its values over and over. Raises UsageError for a
    file that cannot be read, and for inputs that do not fit the model.
    """
    golden = None if samples is not None else golden_of(opened.artifact)
    if samples is not None:
        arrays, origin = _read(samples), str(samples)
    elif golden is not None:
        arrays, origin = dict(golden.inputs), "the golden samples"
    else:
        arrays, origin = {spec.name: _zeros(spec) for spec in opened.inputs}, "zeros"
    for name, shape in _parse(shapes, opened.inputs).items():
        known = arrays[name] if name in arrays and arrays[name].size else np.zeros(1, _dtype(opened.inputs, name))
        arrays[name] = np.resize(known, shape)
    try:
        check_feeds(opened.inputs, arrays)
    except InvalidRequest as error:
        raise UsageError(f"{origin}{' and --input' if shapes else ''}: {error}") from None
    axis = opened.batch_axis
    if axis is not None and not all(array.shape[axis] for array in arrays.values()):
        raise UsageError(f"{origin}: no row; give at least one")
    return Inputs(arrays, axis, f"{origin}{', shaped by --input' if shapes else ''}")


def _read(file: Path) -> dict[str, Array]:
    try:
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as found:
                return {name: found[name] for name in found.files}
        from safetensors.numpy import load_file

        return {name.removeprefix("input:"): array for name, array in load_file(file).items()}
    except OSError as error:
        raise UsageError(f"--samples {file}: {error.strerror or brief(error)}") from None
    except Exception as error:  # noqa: BLE001 - parsers raise many errors for a broken file
        raise UsageError(f"--samples {file}: neither .npz nor .safetensors: {brief(error)}") from None


def _parse(texts: Sequence[str], specs: Sequence[TensorSpec]) -> dict[str, tuple[int, ...]]:
    known = {spec.name: spec for spec in specs}
    shapes = {}
    for text in texts:
        found = _SHAPE.fullmatch(text)
        if found is None:
            raise UsageError(f"--input {quoted(text)}: expected NAME=SHAPE, for example input_ids=1x128")
        if found["name"] not in known:
            raise UsageError(f"--input {quoted(text)}: the model's inputs are {', '.join(known)}")
        shape = tuple(int(size) for size in re.split("[x,]", found["dims"]))
        spec = known[found["name"]]
        fits = len(shape) == len(spec.shape) and all(
            isinstance(dim, str) or dim == size for dim, size in zip(spec.shape, shape, strict=True)
        )
        if not fits or 0 in shape:
            raise UsageError(f"--input {quoted(text)}: the model declares {spec.name}{describe(spec.shape)}")
        shapes[spec.name] = shape
    return shapes


def _zeros(spec: TensorSpec) -> Array:
    return np.zeros([dim if isinstance(dim, int) else 1 for dim in spec.shape], BY_NAME[spec.dtype].numpy)


def _dtype(specs: Sequence[TensorSpec], name: str) -> np.dtype[np.generic]:
    return next(BY_NAME[spec.dtype].numpy for spec in specs if spec.name == name)
