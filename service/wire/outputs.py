"""How to return the outputs of one request: their datatype, in shared memory or not, as values or as top classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bf16kit.messages.errors import InvalidRequest
from bf16kit.numerics import rounding as numerics
from bf16kit.numerics.tensors import Array, DType
from bf16kit.protocol import inference_pb2 as pb
from service.operations import RegionSlice
from service.wire.parameters import RegionPlace

_MAX_CLASSES = 1 << 16  # strings of one output: each is some 100 bytes in memory


@dataclass(frozen=True, slots=True)
class Sink:
    """The place in shared memory for one output."""

    place: RegionPlace
    slice: RegionSlice

    def fill(self, output: pb.ModelInferResponse.InferOutputTensor, data: Array) -> None:
        """Write the output, and describe its place in the response as Triton does."""
        self.slice.write(data)
        output.parameters["shared_memory_region"].string_param = self.place.region
        output.parameters["shared_memory_byte_size"].int64_param = self.place.byte_size
        if self.place.offset:
            output.parameters["shared_memory_offset"].int64_param = self.place.offset


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How to return the outputs, by name; ``dtypes`` is in the order of the response.

    ``sinks`` has the outputs that go into shared memory. ``classes`` has the number of classes of outputs returned as
    BYTES.
    """

    dtypes: Mapping[str, DType]
    sinks: Mapping[str, Sink] = field(default_factory=dict)
    classes: Mapping[str, int] = field(default_factory=dict)


def top_classes(name: str, array: Array, count: int, *, batched: bool, labels: Sequence[str] = ()) -> Array:
    """Return the ``count`` largest values of each row, the largest first, as Triton writes them.

    A value is ``0.913240:7``, or ``0.913240:7:tabby`` if index 7 has a label. ``batched``: each index of the first axis
    is a row; otherwise the whole array is one row, and the result has one dimension less. Equal values are in order of
    index; NaN comes last. Raises InvalidRequest for too many classes.
    """
    if array.dtype == numerics.BF16:
        array = numerics.to_fp32(array)
    rows = array.reshape(len(array), math.prod(array.shape[1:])) if batched else array.reshape(1, array.size)
    count = min(count, rows.shape[1])
    if len(rows) * count > _MAX_CLASSES:
        raise InvalidRequest(f"output {name!r} would have {len(rows) * count} classes, expected at most {_MAX_CLASSES}")
    is_integer = rows.dtype.kind in "iu"
    number_format = "%d" if is_integer else "%f"
    classes = np.empty((len(rows), count), np.object_)
    for row, values in enumerate(rows):  # row by row: the sort order takes twice the memory of the values
        sort_keys = ~values if is_integer else -values  # ~ reverses the order of integers, and never overflows
        for column, index in enumerate(np.argsort(sort_keys, kind="stable")[:count]):
            label = f":{labels[index]}" if index < len(labels) else ""
            classes[row, column] = f"{number_format % values[index]}:{index}{label}"
    return classes if batched else classes[0]
