"""Samples of live requests on their way to another process: a description in the message, the tensors in a file.

The file is memory without a name, sealed: whoever gets it reads what was written, and as much.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bf16kit.tensors import BY_NAME, Array
from service.drift.sampling import Sample
from service.peers.channel import Body
from service.wire.tensors import decode_raw, encode_raw

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_PLAIN = ("rows", "nbytes", "probability", "precision", "profile")  # what of a sample travels as it is


def pack(sample: Sample) -> tuple[Body, int]:
    """The description, and the descriptor of the file, which is the caller's to close."""
    parts = [*_raw("feeds", sample.feeds), *_raw("outputs", sample.outputs)]
    file = os.memfd_create("bf16kit-sample", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(file, "wb", closefd=False) as written:
            for _, raw in parts:
                written.write(raw)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(file)
        raise
    body = {name: getattr(sample, name) for name in _PLAIN}
    return body | {"tensors": [described for described, _ in parts]}, file


def unpack(told: Mapping[str, Any], file: int) -> Sample:
    """The sample again, in memory of its own. Raises ValueError for a file that is not as described."""
    tensors: Sequence[Sequence[Any]] = told["tensors"]
    size = sum(nbytes for *_, nbytes in tensors)
    if os.fstat(file).st_size != size:
        raise ValueError(f"a sample of {os.fstat(file).st_size} bytes is described as {size}")
    found: dict[str, dict[str, Array]] = {"feeds": {}, "outputs": {}}
    at = 0
    for kind, name, dtype, shape, nbytes in tensors:
        raw = os.pread(file, nbytes, at)
        found[kind][name] = np.array(decode_raw(name, BY_NAME[dtype], tuple(shape), raw))
        at += nbytes
    return Sample(found["feeds"], found["outputs"], **{name: told[name] for name in _PLAIN})


def _raw(kind: str, arrays: Mapping[str, Array]) -> list[tuple[list[Any], bytes]]:
    parts = []
    for name, array in arrays.items():
        dtype = BY_NAME["string" if array.dtype == np.object_ else array.dtype.name]
        raw = encode_raw(dtype, array)
        parts.append(([kind, name, dtype.name, list(array.shape), len(raw)], raw))
    return parts
