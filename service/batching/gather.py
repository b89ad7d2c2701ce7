"""Several requests' tensors into one batch along the batch axis, and the batch's outputs back to each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bf16kit.errors import RuntimeFailure
from service.contract import Array
from service.request import Request


def signature(feeds: Mapping[str, Array], axis: int) -> tuple[object, ...]:
    """What must be equal for two requests to share a batch: dtypes, and shapes but for the batch axis."""
    parts = [(name, array.dtype.char, array.shape[:axis], array.shape[axis + 1 :]) for name, array in feeds.items()]
    parts.sort(key=lambda part: part[0])
    return tuple(parts)


def gather(requests: Sequence[Request], axis: int | None) -> Mapping[str, Array]:
    """One feed per input, ``rows`` summed along ``axis``; a request alone is passed on without a copy."""
    if len(requests) == 1 or axis is None:
        return requests[0].feeds
    return {
        name: np.concatenate([request.feeds[name] for request in requests], axis=axis) for name in requests[0].feeds
    }


def wanted(requests: Sequence[Request]) -> tuple[str, ...] | None:
    """The outputs to compute: every one that some request asks for, in order of asking; None = all."""
    if len(requests) == 1:
        return requests[0].outputs
    names: dict[str, None] = {}
    for request in requests:
        if request.outputs is None:
            return None
        names.update(dict.fromkeys(request.outputs))
    return tuple(names)


def split(outputs: dict[str, Array], requests: Sequence[Request], axis: int | None) -> list[dict[str, Array]]:
    """Each request's rows of each output it asked for, as views. Raises RuntimeFailure if an output has other rows."""
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
