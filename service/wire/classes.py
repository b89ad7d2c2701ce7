"""The classification extension: returns an output's largest values as ``value:index`` strings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bf16kit.messages.errors import InvalidRequest
from bf16kit.numerics import rounding as numerics
from bf16kit.numerics.tensors import Array

_MAX_CLASSES = 1 << 16  # strings of one output: each is some 100 bytes in memory


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
