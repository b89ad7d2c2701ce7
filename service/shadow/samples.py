"""Samples of live requests on their way to another process: a description in the message, the tensors in a file.

Several go together. The file is memory without a name, sealed: whoever gets it reads what was written, and as much.
"""

from __future__ import annotations

import fcntl
import io
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


def pack(samples: Sequence[Sample]) -> tuple[Body, int]:
    """The description of them all, and the descriptor of their file, which is the caller's to close."""
    described: list[Body] = []
    raws: list[bytes] = []
    for sample in samples:
        parts = [*_raw("feeds", sample.feeds), *_raw("outputs", sample.outputs)]
        plain = {name: getattr(sample, name) for name in _PLAIN}
        described.append(plain | {"tensors": [tensor for tensor, _ in parts]})
        raws += [raw for _, raw in parts]
    file = os.memfd_create("bf16kit-samples", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(file, "wb", buffering=0, closefd=False) as written:
            _write(written, b"".join(raws))
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(file)
        raise
    return {"samples": described, "nbytes": sum(sample.nbytes for sample in samples)}, file


def unpack(told: Mapping[str, Any], file: int) -> list[Sample]:
    """The samples again, in memory of their own. Raises ValueError for a file that is not as described."""
    samples: Sequence[Mapping[str, Any]] = told["samples"]
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
    left = memoryview(content)
    while left:
        left = left[file.write(left) or 0 :]


def _raw(kind: str, arrays: Mapping[str, Array]) -> list[tuple[list[Any], bytes]]:
    parts = []
    for name, array in arrays.items():
        dtype = BY_NAME["string" if array.dtype == np.object_ else array.dtype.name]
        raw = encode_raw(dtype, array)
        parts.append(([kind, name, dtype.name, list(array.shape), len(raw)], raw))
    return parts
