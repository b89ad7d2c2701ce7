"""A torch.export archive (.pt2) read as data: its zip records, its tensors, and the JSON of its one program.

``torch.export.load`` unpickles what the archive's tables name, evaluates shape expressions and guards, and accepts any
function of torch as an operator: it is for trusted files only. Here no part of the file is passed to it. Records that
are not needed, such as sample inputs, are not read at all.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

import numpy as np

from bf16kit.messages import boundedjson
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.tensors import BY_NAME, Array
from bf16kit.runtime.exported.records import Record, read_records
from bf16kit.runtime.exported.values import DTYPES, SYMBOLIC_LARGEST, field, integer, listed, mapping, text

MODELS = "models/"
WEIGHTS = "data/weights/"
CONSTANTS = "data/constants/"
LARGEST_JSON = 64 << 20  # bytes; MiniLM's program has 2 MB, mostly the stack traces of its Python code
_MOST_VALUES = 4_000_000  # an operator takes 80
_CONFIGS = ((WEIGHTS, "_weights_config.json", "weight"), (CONSTANTS, "_constants_config.json", "constant"))
_TENSOR_FILE = re.compile(r"(weight|tensor)_[0-9]{1,9}")
_FQN = re.compile(r"[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*")
_LONGEST = 1000  # characters of a name
_MOST_AXES = 64  # of numpy's arrays
_STRIDED = 7  # torch's number for a plain strided tensor: neither sparse nor in a backend's own layout
_MOST_VIEWS = 4  # times the file's bytes, for all tensors: torch writes a record per storage, and tensors may share it

StorageKey = tuple[Record, str, tuple[int, ...], tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: ``strides`` and ``offset`` are in elements of its record.

    For a ``pickled`` one, dtype, shape and strides are unknown.
    """

    name: str
    is_parameter: bool
    record: Record
    dtype: str
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int = 0
    pickled: bool = False

    @property
    def storage_key(self) -> StorageKey:
        """Equal for names that refer to the same elements of one record."""
        return self.record, self.dtype, self.shape, self.strides, self.offset

    @property
    def nbytes(self) -> int:
        """Size of its elements once they are copied."""
        return 0 if self.pickled else math.prod(self.shape) * BY_NAME[self.dtype].numpy.itemsize


@dataclass(frozen=True, slots=True)
class Archive:
    """The contents of an archive: the program's JSON, and its weights and constants by name.

    ``data`` is the whole file.

    Names that refer to the same elements of one record get the same array, so that a caller copies it only once.
    """

    program: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    data: memoryview
    _views: dict[StorageKey, Array] = dataclass_field(default_factory=dict, repr=False)

    def record(self, record: Record) -> memoryview:
        """Return the bytes of ``record``."""
        return self.data[record.offset : record.offset + record.nbytes]

    def tensor(self, name: str) -> Array:
        """Return a view of the archive's memory, writable if that is; not always contiguous.

        A record at an unaligned offset is copied.
        """
        stored = self.tensors[name]
        if stored.storage_key not in self._views:
            self._views[stored.storage_key] = self._view(stored)
        return self._views[stored.storage_key]

    def _view(self, stored: StoredTensor) -> Array:
        dtype = BY_NAME[stored.dtype].numpy
        if not stored.record.nbytes:
            return np.zeros(stored.shape, dtype)
        found = self.record(stored.record)
        strides = [stride * dtype.itemsize for stride in stored.strides]
        if stored.record.offset % dtype.itemsize:  # torch aligns records to 64 bytes
            single = np.frombuffer(found, np.uint8)[stored.offset * dtype.itemsize :]
            each = np.lib.stride_tricks.as_strided(single, (*stored.shape, dtype.itemsize), (*strides, 1))
            return each.copy().view(dtype).reshape(stored.shape)  # only its elements, not what lies between them
        flat = np.frombuffer(found, dtype, stored.record.nbytes // dtype.itemsize)[stored.offset :]
        return np.lib.stride_tricks.as_strided(flat, stored.shape, strides)


def read_archive(data: memoryview, *, trust_pickle: bool = False, check_crc: bool = False) -> Archive:
    """Read the archive in ``data``, the bytes of a file.

    With ``trust_pickle`` a pickled tensor is accepted and marked as one: nothing is unpickled here.

    Raises :class:`RuntimeFailure` for an archive that is damaged, compressed, of an older or newer format, that holds
    native code, objects or several programs, or whose tensors are longer than their records. With ``check_crc`` also
    for bytes that changed.
    """
    try:
        records = read_records(data)
        model = _model_name(records)
        program = _json(records, f"{MODELS}{model}.json", data)
        archive = Archive(program, dict(_tensors(records, model, data, trust_pickle)), data)
        _check_views(archive)
        if check_crc:
            _check_crc(archive)
    except RuntimeFailure:
        raise
    except Exception as error:  # damaged archives raise nearly anything
        raise RuntimeFailure(f"is a truncated or damaged zip archive ({str(error) or type(error).__name__})") from error
    return archive


def _model_name(records: Mapping[str, Record]) -> str:
    native = next((name for name in records if name.startswith(("data/aotinductor/", "data/executorch/"))), None)
    if native is not None:
        raise RuntimeFailure(
            f"holds compiled code ({native}), which cannot be converted or checked; save the exported program itself"
            " with torch.export.save"
        )
    models = sorted(name.removeprefix(MODELS).removesuffix(".json") for name in records if name.startswith(MODELS))
    if len(models) != 1:
        raise RuntimeFailure(f"holds {len(models)} programs ({', '.join(models)}), expected one: save each by itself")
    for folder in (WEIGHTS, CONSTANTS):
        if f"{folder}{models[0]}.pt" in records:
            raise RuntimeFailure(
                f"keeps its tensors as a pickle ({folder}{models[0]}.pt); save it again with torch 2.8"
            )
    return models[0]


def _json(records: Mapping[str, Record], name: str, data: memoryview) -> dict[str, Any]:
    if name not in records:
        raise RuntimeFailure(f"has no record {name!r}")
    record = records[name]
    if record.nbytes > LARGEST_JSON:
        raise RuntimeFailure(f"record {name!r} has {record.nbytes} bytes, over the limit of {LARGEST_JSON}")
    text = bytes(data[record.offset : record.offset + record.nbytes])
    found = boundedjson.parse(text, RuntimeFailure, f"record {name!r}", _MOST_VALUES)
    return mapping(found, name)


def _tensors(
    records: Mapping[str, Record], model: str, data: memoryview, trust_pickle: bool
) -> Iterator[tuple[str, StoredTensor]]:
    seen: set[str] = set()
    for folder, suffix, kind in _CONFIGS:
        config = _json(records, f"{folder}{model}{suffix}", data)
        for name, entry in mapping(field(config, "config"), suffix).items():
            if len(name) > _LONGEST or not _FQN.fullmatch(name):
                raise RuntimeFailure(f"{kind} {name[:_LONGEST]!r} has a name that no module gives its tensors")
            if name in seen:
                raise RuntimeFailure(f"has two tensors called {name!r}")
            seen.add(name)
            yield name, _stored(records, folder, f"{kind} {name!r}", name, mapping(entry, name), trust_pickle)


def _stored(
    records: Mapping[str, Record], folder: str, what: str, name: str, entry: dict[str, Any], trust_pickle: bool
) -> StoredTensor:
    file = text(field(entry, "path_name"), what)
    pickled = field(entry, "use_pickle")
    if file.startswith(("custom_obj_", "opaque_obj_")):
        raise RuntimeFailure(f"{what} is an object, not a tensor ({file}), which cannot be converted")
    if not _TENSOR_FILE.fullmatch(file) or f"{folder}{file}" not in records:
        raise RuntimeFailure(f"{what} lies in {file[:_LONGEST]!r}, which is not a tensor record of this archive")
    record = records[f"{folder}{file}"]
    if pickled is not False:
        if not trust_pickle:
            raise RuntimeFailure(
                f"{what} is a pickle, which can run any code; --trust-pickle reads it, for files of people you trust"
            )
        return StoredTensor(name, entry.get("is_param") is True, record, "", pickled=True)
    return _strided(name, entry, record, what, file)


def _strided(name: str, entry: dict[str, Any], record: Record, what: str, file: str) -> StoredTensor:
    meta = mapping(field(entry, "tensor_meta"), what)
    number = integer(field(meta, "dtype"), what)
    if number not in DTYPES:
        raise RuntimeFailure(f"{what} has torch's scalar type {number}, which bf16kit does not support")
    if field(meta, "layout") != _STRIDED:
        raise RuntimeFailure(f"{what} is not a plain strided tensor")
    shape, strides = (_sizes(field(meta, key), what) for key in ("sizes", "strides"))
    (offset,) = _sizes([field(meta, "storage_offset")], what)
    if len(shape) != len(strides):
        raise RuntimeFailure(f"{what} has {len(shape)} sizes and {len(strides)} strides")
    needed = _needed_bytes(shape, strides, offset, BY_NAME[DTYPES[number]].numpy.itemsize, what)
    if needed > record.nbytes:
        raise RuntimeFailure(
            f"{what} takes {needed} bytes from record {file!r}, which has {record.nbytes}; where it is an expanded"
            " tensor, save the module with a contiguous one"
        )
    if not needed:
        record = Record(record.offset, 0, 0)
    return StoredTensor(name, entry.get("is_param") is True, record, DTYPES[number], shape, strides, offset)


def _needed_bytes(shape: tuple[int, ...], strides: tuple[int, ...], offset: int, itemsize: int, what: str) -> int:
    """Return the bytes that a tensor's record must have.

    The record must hold the last element, and as many elements as the tensor has once it is copied: strides of 0 would
    multiply them.
    """
    if len(shape) > _MOST_AXES:
        raise RuntimeFailure(f"{what} has {len(shape)} dimensions, over the limit of {_MOST_AXES}")
    # Also checked without elements: numpy multiplies the other sizes.
    if math.prod(filter(None, shape)) > SYMBOLIC_LARGEST:
        raise RuntimeFailure(f"{what} has sizes whose product is beyond {SYMBOLIC_LARGEST}")
    elements = math.prod(shape)
    if not elements:
        return 0
    end = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return max(end, elements) * itemsize


def _sizes(values: Any, what: str) -> tuple[int, ...]:
    found = []
    for value in listed(values, what):
        size = integer(mapping(value, what).get("as_int"), what)
        if not 0 <= size <= SYMBOLIC_LARGEST:
            raise RuntimeFailure(f"{what} has a size, stride or offset of {size}")
        found.append(size)
    return tuple(found)


def _check_views(archive: Archive) -> None:
    """Limit the total size of distinct views of the records.

    A view that is not contiguous, or is widened, is copied. Many views of the same bytes, or records that overlap,
    would multiply the memory.
    """
    total = sum({stored.storage_key: stored.nbytes for stored in archive.tensors.values()}.values())
    if total > _MOST_VIEWS * len(archive.data):
        raise RuntimeFailure(
            f"takes {total} bytes of tensors from a file of {len(archive.data)}, more than {_MOST_VIEWS} times as many;"
            " save the module with memory of its own for each tensor"
        )


def _check_crc(archive: Archive) -> None:
    for record in {stored.record for stored in archive.tensors.values()}:
        if record.nbytes and zlib.crc32(archive.record(record)) != record.crc:
            names = [stored.name for stored in archive.tensors.values() if stored.record == record]
            raise RuntimeFailure(f"damaged: the bytes of tensor {names[0]!r} are not those that were written")
