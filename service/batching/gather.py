"""Join the tensors of several requests along the batch axis, and split the batch's outputs again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bf16kit.messages.errors import RuntimeFailure
from service.contract import Array
from service.request import Request


def signature(feeds: Mapping[str, Array], axis: int) -> tuple[object, ...]:
    """Return what must be equal for two requests to share a batch: dtypes, and shapes without the batch axis."""
    parts = [(name, array.dtype.char, array.shape[:axis], array.shape[axis + 1 :]) for name, array in feeds.items()]
    parts.sort(key=lambda part: part[0])
    return tuple(parts)


def gather(requests: Sequence[Request], axis: int | None) -> Mapping[str, Array]:
    """Return one feed per input, with the requests joined along ``axis``; a single request's feeds are not copied."""
    if len(requests) == 1 or axis is None:
        return requests[0].feeds
    return {
        name: np.concatenate([request.feeds[name] for request in requests], axis=axis) for name in requests[0].feeds
    }


def requested_outputs(requests: Sequence[Request]) -> tuple[str, ...] | None:
    """Return the outputs to compute: all that any request asks for, in order of asking; None = all."""
    if len(requests) == 1:
        return requests[0].outputs
    names: dict[str, None] = {}
    for request in requests:
        if request.outputs is None:
            return None
        names.update(dict.fromkeys(request.outputs))
    return tuple(names)


def split(outputs: dict[str, Array], requests: Sequence[Request], axis: int | None) -> list[dict[str, Array]]:
    """Return each request's rows of the outputs it asked for, as views.

    Raises RuntimeFailure if an output does not have the batch's number of rows.
    """
    if len(requests) == 1 or axis is None:
        return [outputs]
    total = sum(request.rows for request in requests)
    for name, array in outputs.items():
        if array.ndim <= axis or array.shape[axis] != total:
            raise RuntimeFailure(f"output {name!r} has shape {list(array.shape)} for a batch of {total} rows")
    parts: list[dict[str, Array]] = []
    start = 0
    for request in requests:
        window = (slice(None),) * axis + (slice(start, start + request.rows),)
        names = outputs if request.outputs is None else request.outputs
        parts.append({name: outputs[name][window] for name in names})
        start += request.rows
    return parts
