"""Evidence of a breach: one live sample whose drift was over budget, and everything needed to reproduce it.

A safetensors file holds the tensors ``input:NAME`` (the request), ``served:NAME`` (the model's response) and
``reference:NAME`` (the fp32 reference's response), and a :class:`Header` as JSON under :data:`KEY` of its metadata.
Reading it executes nothing. safetensors has neither bf16 in numpy nor strings: bf16 is kept as its uint16 bits, strings
as a JSON list in uint8. The file holds a client's data, so protect it as you protect the model's inputs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, ValidationError

from bf16kit.artifact.entries import Entry, Number, first_error
from bf16kit.artifact.reading import read_bounded
from bf16kit.messages.errors import UsageError
from bf16kit.messages.wording import brief, quoted
from bf16kit.numerics.tensors import BY_NAME, Array

KEY = "bf16kit.evidence"
MOST_BYTES = 256 << 20  # of a file; a server keeps far less

_STORED = {"bfloat16": np.dtype(np.uint16), "string": np.dtype(np.uint8)}


class TensorMetadata(Entry):
    """A tensor's original dtype and shape: ``dtype`` is a key of :data:`bf16kit.numerics.tensors.BY_NAME`."""

    dtype: str
    shape: tuple[Annotated[int, Field(ge=0, le=MOST_BYTES)], ...]


class Header(Entry):
    """The context of the tensors; ``profile`` and ``precision`` are those of the served response, ``at`` is in UTC.

    ``drift`` is this sample's own, by output and metric. ``verdict`` is the one over all recent samples
    (:class:`bf16kit.service.drift.contract.DriftVerdict`). ``files`` are the artifact's, with their sha256.
    """

    model_config = ConfigDict(ser_json_inf_nan="strings")  # of the verdict's numbers

    format: Literal[1] = 1
    model: str
    version: int
    at: str
    profile: str
    precision: str
    rows: int = Field(ge=0)
    of_rows: int = Field(ge=0)  # rows of the request; only those that show the breach were kept
    batch_axis: int | None
    budget: dict[str, float]
    drift: dict[str, dict[str, Number]]
    verdict: dict[str, Any]
    files: dict[str, str]
    versions: dict[str, str]
    tensors: dict[str, TensorMetadata] = {}


@dataclass(frozen=True)
class Evidence:
    """One breach, in memory."""

    header: Header
    feeds: dict[str, Array]
    served: dict[str, Array]
    reference: dict[str, Array]

    def dumps(self) -> bytes:
        """Return the bytes of the file."""
        from safetensors.numpy import save

        parts = {"input": self.feeds, "served": self.served, "reference": self.reference}
        arrays = {f"{part}:{name}": array for part, found in parts.items() for name, array in found.items()}
        notes = {name: TensorMetadata(dtype=_dtype(array), shape=array.shape) for name, array in arrays.items()}
        header = self.header.model_copy(update={"tensors": notes})
        return save({name: _stored(array) for name, array in arrays.items()}, {KEY: header.model_dump_json()})

    @classmethod
    def loads(cls, data: bytes, where: str) -> Evidence:
        """Parse what :meth:`dumps` wrote; for anything else raise UsageError, with one line that names ``where``."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            tensors, end = load(data), 8 + int.from_bytes(data[:8], "little")
            metadata = json.loads(data[8:end]).get("__metadata__") or {}
        except (SafetensorError, ValueError, KeyError, AttributeError) as error:
            raise UsageError(f"{where}: is not evidence, or is damaged ({brief(error)})") from None
        if KEY not in metadata:
            raise UsageError(f"{where}: a safetensors file, but not evidence; fetch that with `bf16-serve evidence`")
        try:
            header = Header.model_validate_json(metadata[KEY])
        except ValidationError as error:
            raise UsageError(f"{where}: has a header that this bf16kit cannot read: {first_error(error)}") from None
        parts: dict[str, dict[str, Array]] = {"input": {}, "served": {}, "reference": {}}
        try:
            for key, note in header.tensors.items():
                part, _, name = key.partition(":")
                parts[part][name] = _restored(tensors[key], note)
        except (KeyError, ValueError, TypeError, RecursionError):
            raise UsageError(f"{where}: {quoted(key)} is not what its header says: fetch it again") from None
        served, reference = ({n: (a.dtype, a.shape) for n, a in parts[p].items()} for p in ("served", "reference"))
        if served != reference or not served:
            raise UsageError(f"{where}: its answers and the reference's are not of the same outputs: fetch it again")
        return cls(header, parts["input"], parts["served"], parts["reference"])

    @classmethod
    def read(cls, path: Path) -> Evidence:
        """Read the evidence in the file ``path``; a one-line UsageError if it cannot be read or is no evidence."""
        return cls.loads(read_bounded(path, MOST_BYTES, UsageError, "the limit for evidence"), str(path))


def _dtype(array: Array) -> str:
    return "string" if array.dtype == np.object_ else array.dtype.name


def _stored(array: Array) -> Array:
    """Return ``array`` in a dtype that safetensors supports, C-contiguous."""
    if array.dtype == np.object_:
        texts = [each if isinstance(each, str) else bytes(each).decode("utf-8", "replace") for each in array.flat]
        return np.frombuffer(json.dumps(texts).encode(), np.uint8)
    contiguous = np.asarray(array, order="C")
    return contiguous.view(np.uint16) if array.dtype.name == "bfloat16" else contiguous


def _restored(stored: Array, note: TensorMetadata) -> Array:
    """Return the original of ``stored``; KeyError, TypeError or ValueError if it is not what ``note`` says."""
    dtype = BY_NAME[note.dtype].numpy
    if stored.dtype != _STORED.get(note.dtype, dtype):
        raise TypeError
    if note.dtype != "string":
        if stored.shape != note.shape:
            raise ValueError
        return stored.view(dtype)
    texts = json.loads(stored.tobytes())
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise TypeError
    return np.array([*texts, None], np.object_)[:-1].reshape(note.shape)
