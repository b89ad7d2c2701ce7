"""Random changes to golden samples and weights."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from bf16kit.numerics.tensors import Array

Arrays = dict[str, Array]
_DTYPES = (np.float64, np.int32, np.uint8, np.bool_, np.float16)
_OTHERS: tuple[Callable[[Array, random.Random], Array], ...] = (
    lambda array, _: np.full_like(array, np.nan if array.dtype.kind == "f" else -1),
    lambda array, choice: array.astype(choice.choice(_DTYPES)),
    lambda array, _: np.ascontiguousarray(array[..., :-1]),
    lambda array, _: array[:0],
    lambda array, _: np.repeat(array, 100, 0),
    lambda array, _: array.reshape(-1),
    lambda array, _: array[None],
)


def change_golden(file: Path, choice: random.Random) -> str:
    """Replace, add or remove an array of the golden samples, or change bytes of their file. Return what was done."""
    try:
        arrays = load_file(file)
    except (SafetensorError, KeyError):  # an earlier change made it unreadable
        return change_weights(file, choice)
    kind = choice.randrange(16)
    if kind > 11 or not arrays:
        return _change_header(file, choice)
    name = choice.choice(sorted(arrays))
    if kind == 0:
        del arrays[name]
    elif kind == 1:
        arrays[f"{name}2"] = arrays[name]
    elif kind == 2:
        arrays = {key: np.concatenate([array, array]) for key, array in arrays.items()}
    else:
        arrays[name] = _OTHERS[kind % len(_OTHERS)](arrays[name], choice)
    save_file(arrays, file)
    return f"{name}, kind {kind}"


def _change_header(file: Path, choice: random.Random) -> str:
    """Change a safetensors file: the length of its header (u64), the header (JSON), or the data."""
    data = bytearray(file.read_bytes())
    kind = choice.randrange(5)
    if kind == 0:
        data[:8] = struct.pack("<Q", choice.choice((0, 1, len(data), 2**40, 2**63, 2**64 - 1)))
    elif kind == 1:
        at = 8 + choice.randrange(min(200, len(data) - 8))
        data[at] ^= 1 << choice.randrange(8)
    elif kind == 2:
        data = data.replace(b'"F32"', choice.choice((b'"F64"', b'"F16"', b'"I8" ', b'"F8 "', b'"BF16"'))[:5])
    elif kind == 3:
        data = data.replace(b'"shape":[4', b'"shape":[9', 1)
    else:
        del data[choice.randrange(len(data)) :]
    file.write_bytes(bytes(data))
    return f"header, kind {kind}"


def change_weights(file: Path, choice: random.Random) -> str:
    """Change the file's bytes, or make it shorter, longer or empty. Return what was done."""
    data = bytearray(file.read_bytes())
    kind = choice.randrange(6)
    if kind == 0 and data:
        at = choice.randrange(len(data))
        data[at : at + 64] = choice.randbytes(len(data[at : at + 64]))
    elif kind == 1:
        data = bytearray(choice.randbytes(len(data)))
    elif kind == 2:
        del data[choice.randrange(len(data) + 1) :]
    elif kind == 3:
        data += choice.randbytes(choice.randrange(5000))
    elif kind == 4:
        data = bytearray(choice.choice((b"\0\0", b"\xc0\x7f", b"\x80\x7f")) * (len(data) // 2))  # zero, NaN, infinity
    else:
        data.clear()
    file.write_bytes(bytes(data))
    return f"bytes, kind {kind}"
