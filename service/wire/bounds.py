"""Limits on one request beside the size of its message: its dimensions, its empty tensors, and its response."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bf16kit.messages.errors import InvalidRequest
from bf16kit.numerics.tensors import Array, DType, TensorSpec
from service.contract import Bounds, Model

# The most elements that an empty tensor may have if its empty dimensions are counted as 1. An empty tensor costs the
# client nothing, but a model may make a large one of it: the sum of [2^26,0] along its last axis has 256 MiB.
_MAX_EMPTY_ELEMENTS = 1 << 20
_MIN_ITEM_BYTES = 4  # of one element of a BYTES tensor: the length of an empty string


class BoundsCheck:
    """The limits of one model, and the parts of its shapes that the checks need."""

    def __init__(self, model: Model) -> None:
        self._bounds: Bounds = model.bounds
        known = {dim for spec in model.inputs for dim in spec.shape if isinstance(dim, str)}
        self._dims = {name: bound for name, bound in self._bounds.dims.items() if name in known}
        self._empty = {spec.name: max(_fixed(spec), _MAX_EMPTY_ELEMENTS) for spec in model.inputs}
        self._outputs = {spec.name: _size_of(spec) for spec in model.outputs if known.issuperset(_free(spec))}

    def check_request(self, feeds: Mapping[str, Array], sizes: Mapping[str, int], wanted: Mapping[str, DType]) -> None:
        """Raise InvalidRequest if a dimension is too large, or if the response is known to become too large.

        ``sizes`` has the sizes of the free dimensions, by name; ``wanted`` the datatypes of the requested outputs.
        """
        for name, bound in self._dims.items():
            if sizes[name] > bound:
                raise InvalidRequest(
                    f"dimension {name!r} is {sizes[name]}, expected at most {bound}"
                    " (max_dims of the model's serving.yaml)"
                )
        if 0 in sizes.values():
            self._check_empty(feeds)
        response_bytes = 0
        for name, dtype in wanted.items():
            if name in self._outputs:
                fixed, free = self._outputs[name]
                response_bytes += math.prod([sizes[dim] for dim in free], start=fixed) * item_size(dtype)
        self.check_response(response_bytes)

    def check_response(self, nbytes: int) -> None:
        """Raise InvalidRequest if ``nbytes`` bytes of outputs are too many for one response."""
        bound = self._bounds.response_bytes
        if nbytes > bound:
            raise InvalidRequest(
                f"the response has {nbytes} bytes or more, expected at most {bound}; ask for fewer rows,"
                " shorter inputs or fewer outputs"
            )

    def _check_empty(self, feeds: Mapping[str, Array]) -> None:
        for name, array in feeds.items():
            if not array.size and math.prod(max(size, 1) for size in array.shape) > self._empty[name]:
                raise InvalidRequest(f"input {name!r} has shape {list(array.shape)}: too large, although it is empty")


def item_size(dtype: DType) -> int:
    """Return the bytes of one element on the wire; for BYTES, the least."""
    return _MIN_ITEM_BYTES if dtype.oip == "BYTES" else dtype.numpy.itemsize


def _free(spec: TensorSpec) -> Sequence[str]:
    return [dim for dim in spec.shape if isinstance(dim, str)]


def _fixed(spec: TensorSpec) -> int:
    return math.prod(dim for dim in spec.shape if isinstance(dim, int))


def _size_of(spec: TensorSpec) -> tuple[int, Sequence[str]]:
    """Return the product of the fixed dimensions, and the names of the free ones."""
    return _fixed(spec), _free(spec)
