"""The safetensors format as bf16kit writes and reads it: dtypes, header, and arrays over a mapped file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bf16kit.artifact.reading import damaged_if_unreadable
from bf16kit.messages.errors import ArtifactDamaged, UsageError
from bf16kit.numerics.tensors import BY_NAME
from bf16kit.numerics.tensors import Array as Array

DTYPES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
_OWN_NAMES = {theirs: ours for ours, theirs in DTYPES.items()}
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor of a file: bf16kit's name of its dtype, its shape, and the offset ``start`` in the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BY_NAME[self.dtype].numpy.itemsize


def header(places: Iterable[Place], *, metadata: Mapping[str, str] | None = None, alignment: int = 8) -> bytes:
    """Return the bytes before the data, which then starts at a multiple of ``alignment``; tensors are listed as given.

    Raises :class:`UsageError` for a name or a dtype that a safetensors file cannot hold.
    """
    fields: dict[str, object] = {} if metadata is None else {_METADATA: dict(metadata)}
    for place in places:
        if place.name == _METADATA:
            raise UsageError(f"a tensor is named {_METADATA!r}, which safetensors reserves; rename the tensor")
        dtype = DTYPES.get(place.dtype)
        if dtype is None:
            raise UsageError(f"tensor {place.name!r} is {place.dtype}, which safetensors cannot hold")
        offsets = [place.start, place.start + place.nbytes]
        fields[place.name] = {"dtype": dtype, "shape": list(place.shape), "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def read(path: Path) -> dict[str, Array]:
    """Read the tensors of the file at ``path`` in the order of its header, as read-only views of the mapped file.

    The safetensors library checks the rules of the format. Raises :class:`ArtifactDamaged` if they are broken.
    """
    from safetensors import SafetensorError, safe_open

    with damaged_if_unreadable(path):
        try:
            with safe_open(path, framework="numpy"):
                pass
        except SafetensorError as error:
            raise ArtifactDamaged(f"{path}: {error}") from None
        mapped = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    size = int.from_bytes(mapped[:8].tobytes(), "little")
    fields = json.loads(mapped[8 : 8 + size].tobytes())
    data = mapped[8 + size :]
    return {name: _view(path, data, name, entry) for name, entry in fields.items() if name != _METADATA}


def _view(path: Path, data: Array, name: str, entry: Mapping[str, object]) -> Array:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _OWN_NAMES:
        raise ArtifactDamaged(f"{path}: tensor {name!r} is {dtype}, which no export of bf16kit holds")
    assert isinstance(shape, list)  # noqa: S101 - the library has checked both
    assert isinstance(offsets, list)  # noqa: S101
    return data[offsets[0] : offsets[1]].view(BY_NAME[_OWN_NAMES[dtype]].numpy).reshape(shape)
