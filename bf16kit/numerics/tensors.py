"""Names, dtypes and shapes of a model's inputs and outputs, and the checks of a tensor before it is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from bf16kit.messages.errors import InvalidRequest
from bf16kit.messages.wording import first_line

Array = NDArray[Any]  # of any dtype and shape; all modules import it from here
Kind = Literal["logits", "embedding", "regression", "other"]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type under its three names: ours (numpy's), the Open Inference Protocol's, and ONNX's number."""

    name: str
    oip: str
    onnx: int
    numpy: np.dtype[Any]


_TABLE = (
    DType("bool", "BOOL", 9, np.dtype(np.bool_)),
    DType("int8", "INT8", 3, np.dtype(np.int8)),
    DType("int16", "INT16", 5, np.dtype(np.int16)),
    DType("int32", "INT32", 6, np.dtype(np.int32)),
    DType("int64", "INT64", 7, np.dtype(np.int64)),
    DType("uint8", "UINT8", 2, np.dtype(np.uint8)),
    DType("uint16", "UINT16", 4, np.dtype(np.uint16)),
    DType("uint32", "UINT32", 12, np.dtype(np.uint32)),
    DType("uint64", "UINT64", 13, np.dtype(np.uint64)),
    DType("float16", "FP16", 10, np.dtype(np.float16)),
    DType("bfloat16", "BF16", 16, np.dtype(ml_dtypes.bfloat16)),
    DType("float32", "FP32", 1, np.dtype(np.float32)),
    DType("float64", "FP64", 11, np.dtype(np.float64)),
    DType("string", "BYTES", 8, np.dtype(np.object_)),
)
BY_NAME: Mapping[str, DType] = {d.name: d for d in _TABLE}
BY_OIP: Mapping[str, DType] = {d.oip: d for d in _TABLE}
BY_ONNX: Mapping[int, DType] = {d.onnx: d for d in _TABLE}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output; ``dtype`` is a key of :data:`BY_NAME`.

    A dimension is a size, or the name of a free dimension. Dimensions of the same name must have the same size within
    one request. ``kind`` says what an output means.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    kind: Kind = "other"

    @property
    def labels(self) -> bool:
        """Whether the output holds decisions, not scores: integers or booleans of kind logits."""
        return self.kind == "logits" and BY_NAME[self.dtype].numpy.kind in "iub"


def check_feeds(specs: Sequence[TensorSpec], feeds: Mapping[str, NDArray[Any]]) -> dict[str, int]:
    """Check names, dtypes and shapes of ``feeds`` against ``specs``; return the size of every named dimension.

    Raises :class:`InvalidRequest` naming the input, the received value and the expected one.
    """
    unknown = sorted(feeds.keys() - {s.name for s in specs})
    if unknown:
        raise InvalidRequest(f"unknown input {unknown[0]!r}; the model's inputs are {_names(specs)}")
    sizes: dict[str, int] = {}
    for spec in specs:
        if spec.name not in feeds:
            raise InvalidRequest(f"input {spec.name!r} is missing; the model's inputs are {_names(specs)}")
        array = feeds[spec.name]
        expected = BY_NAME[spec.dtype]
        if array.dtype != expected.numpy:
            raise InvalidRequest(f"input {spec.name!r} has dtype {array.dtype.name}, expected {spec.dtype}")
        _check_shape(spec, array.shape, sizes)
    return sizes


def feed_of(given: object, specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """Return one array for each of ``specs``, by name, from a mapping, a sequence in their order, or one array alone.

    Arrays are numpy's or torch's; numbers and nested lists take the input's dtype. Further parts of a mapping are kept,
    and what follows in a sequence, such as labels, is left out. Nothing else is checked: see :func:`check_feeds`.

    Raises :class:`InvalidRequest` if there are too few parts, or for what is no array.
    """
    if not isinstance(given, Mapping):
        parts = given if isinstance(given, list | tuple) and hasattr((*given, None)[0], "shape") else [given]
        if len(parts) < len(specs):
            raise InvalidRequest(f"{len(parts)} of {len(specs)} arrays are given; the model's are {_names(specs)}")
        given = dict(zip((spec.name for spec in specs), parts, strict=False))
    dtypes, found = {spec.name: BY_NAME[spec.dtype].numpy for spec in specs}, {}
    for name, value in given.items():
        dtype = None if hasattr(value, "dtype") else dtypes.get(str(name))
        try:
            if hasattr(value, "detach"):  # torch's, which may require a gradient or be on a device
                value = value.detach().cpu()
            found[str(name)] = np.asarray(value, dtype)
        except (TypeError, ValueError, RuntimeError) as error:  # ragged lists; dtypes that numpy lacks
            raise InvalidRequest(
                f"input {str(name)!r} is not an array: {type(error).__name__}: {first_line(error)}"
            ) from None
    return found


def _check_shape(spec: TensorSpec, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    if len(shape) != len(spec.shape):
        raise InvalidRequest(
            f"input {spec.name!r} has shape {list(shape)} of rank {len(shape)}, expected {describe(spec.shape)}"
        )
    for axis, (size, dim) in enumerate(zip(shape, spec.shape, strict=True)):
        expected = dim if isinstance(dim, int) else sizes.setdefault(dim, size)
        if size != expected:
            raise InvalidRequest(
                f"input {spec.name!r} has shape {list(shape)}, expected {describe(spec.shape)}: dimension {axis} must"
                f" be {expected}"
            )


def describe(shape: Sequence[int | str]) -> str:
    """Return a shape as text: ``[batch,seq,384]``."""
    return "[" + ",".join(str(d) for d in shape) + "]"


def _names(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(s.name for s in specs)
