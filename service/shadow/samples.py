"""Serialises samples of live requests for another process: a description in the message, the tensors in a file.

Several samples share a file. It is anonymous memory and sealed, so the receiver reads exactly what was written.
"""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bf16kit.numerics.tensors import BY_NAME, Array
from service.drift.sampler import Sample
from service.peers.channel import Body
from service.wire.tensors import decode_raw, encode_raw

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
# Fields of a sample that are sent unchanged.
_PLAIN = ("rows", "nbytes", "probability", "precision", "profile", "client")


def pack(samples: Sequence[Sample]) -> tuple[Body, int]:
    """Return the samples' description and the descriptor of their file, which the caller closes."""
    descriptions: list[Body] = []
    raws: list[bytes] = []
    for sample in samples:
        parts = [*_raw("feeds", sample.feeds), *_raw("outputs", sample.outputs)]
        plain = {name: getattr(sample, name) for name in _PLAIN}
        descriptions.append(plain | {"tensors": [tensor for tensor, _ in parts]})
        raws += [raw for _, raw in parts]
    file = os.memfd_create("bf16kit-samples", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(file, "wb", buffering=0, closefd=False) as written:
            _write(written, b"".join(raws))
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(file)
        raise
    return {"samples": descriptions, "nbytes": sum(sample.nbytes for sample in samples)}, file


def unpack(description: Mapping[str, Any], file: int) -> list[Sample]:
    """Return the samples, in memory of their own. Raises ValueError if the file differs from its description."""
    samples: Sequence[Mapping[str, Any]] = description["samples"]
    size = sum(nbytes for sample in samples for *_, nbytes in sample["tensors"])
    if os.fstat(file).st_size != size:
        raise ValueError(f"samples of {os.fstat(file).st_size} bytes are described as {size}")
    at = 0
    unpacked = []
    for sample in samples:
        found: dict[str, dict[str, Array]] = {"feeds": {}, "outputs": {}}
        for kind, name, dtype, shape, nbytes in sample["tensors"]:
            raw = os.pread(file, nbytes, at)
            found[kind][name] = np.array(decode_raw(name, BY_NAME[dtype], tuple(shape), raw))
            at += nbytes
        unpacked.append(Sample(found["feeds"], found["outputs"], **{name: sample[name] for name in _PLAIN}))
    return unpacked


def _write(file: io.RawIOBase | io.FileIO, content: bytes) -> None:
    remaining = memoryview(content)
    while remaining:
        remaining = remaining[file.write(remaining) or 0 :]


def _raw(kind: str, arrays: Mapping[str, Array]) -> list[tuple[list[Any], bytes]]:
    parts = []
    for name, array in arrays.items():
        dtype = BY_NAME["string" if array.dtype == np.object_ else array.dtype.name]
        raw = encode_raw(dtype, array)
        parts.append(([kind, name, dtype.name, list(array.shape), len(raw)], raw))
    return parts
