"""Stores the weights of an artifact without a graph: finds them in the torch file, and writes what restores the rest.

A torch program holds its weights in records of a zip file, uncompressed and aligned to 64 bytes. If a record has the
bytes of a checkpoint tensor's bf16 values, the tensor is stored as that record and a residual. If a record has the
tensor's own bytes, it is stored as that record. Every other tensor is written unchanged. Records do not name their
tensors, so they are matched by their bytes.
"""

from __future__ import annotations

import hashlib
import mmap
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bf16kit.artifact.manifest import RESIDUAL, CheckpointEntry, Segment, TensorEntry
from bf16kit.artifact.weightfile import ALIGNMENT, WeightWriter, little_endian_bytes
from bf16kit.messages.errors import RangeError
from bf16kit.numerics.residual import encode_chunks
from bf16kit.numerics.rounding import Census, census, to_bf16
from bf16kit.numerics.tensors import Array as Array
from converter.graph.names import FreshNames
from converter.plan.ranges import complaint
from converter.write.weights import SharedNames, StoredWeights, checkpoint_entry, tensor_entry

_SHOWN = 5  # complaints named in an error


@dataclass(frozen=True, slots=True)
class FileRecords:
    """The records of ``file`` by their sha256."""

    file: str
    records: Mapping[bytes, Segment]

    def find(self, array: Array) -> Segment | None:
        """Return the record with the bytes of ``array`` in C order, or None."""
        return self.records.get(hashlib.sha256(little_endian_bytes(array)).digest()) if array.size else None


def read_records(path: Path) -> FileRecords:
    """Return the uncompressed, aligned records of the zip file at ``path``, which torch has just written."""
    import torch

    found: dict[bytes, Segment] = {}
    reader: Any = torch._C.PyTorchFileReader(str(path))
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        for info in archive.infolist():
            if info.compress_type == zipfile.ZIP_STORED and info.file_size:
                offset = reader.get_record_offset(info.filename.partition("/")[2])
                if offset % ALIGNMENT == 0:
                    digest = hashlib.sha256(data[offset : offset + info.file_size]).digest()
                    found.setdefault(digest, Segment(offset=offset, bytes=info.file_size))
    return FileRecords(path.name, found)


def write_without_graph(
    checkpoint: Mapping[str, Array],
    records: FileRecords,
    residual: WeightWriter | None,
    progress: Callable[[int], None] = lambda _: None,
) -> StoredWeights:
    """Record where each tensor of ``checkpoint`` is, and write those without a record to ``residual``.

    If ``residual`` is None, nothing can be restored, and only tensors with a record are listed. ``progress`` is
    called with bytes of the checkpoint. Raises :class:`RangeError` for values that bf16 cannot hold.
    """
    tensors: dict[str, TensorEntry] = {}
    entries: list[CheckpointEntry] = []
    counted: dict[str, Census] = {}
    complaints: list[str] = []
    shared_names = SharedNames(FreshNames())
    for name, array in checkpoint.items():
        stored, is_new = shared_names.assign(name, array)
        if is_new:
            entry = _entry(stored, array, records, residual)
            if entry is not None:
                tensors[stored] = entry
            if array.dtype == np.float32:
                counts, rounded = census(np.ascontiguousarray(array)), entry is not None and entry.dtype == "bfloat16"
                complaints += [f"tensor {name!r}: {problem}" for problem in _complaints(counts, rounded=rounded)]
                counted |= {stored: counts} if rounded else {}
        if residual is not None:
            entries.append(checkpoint_entry(name, array, stored, None))
        progress(array.nbytes)
    if complaints:
        raise RangeError("\n".join(complaints[:_SHOWN]))
    return StoredWeights(tensors, tuple(entries), {}, counted)


def _entry(name: str, array: Array, records: FileRecords, residual: WeightWriter | None) -> TensorEntry | None:
    """Return the entry of ``array``, after writing its missing part; None if there is no residual to write it to."""
    if array.dtype == np.float32 and array.ndim:
        values = np.ascontiguousarray(array)
        bf16 = to_bf16(values)
        segment = records.find(bf16)
        if segment is not None:
            entry = tensor_entry(name, bf16, records.file, segment)
            if residual is None:
                return entry
            return entry.model_copy(update={"residual": residual.append_chunks(encode_chunks(values, bf16))})
    segment = records.find(array)
    if segment is not None:
        return tensor_entry(name, array, records.file, segment)
    return None if residual is None else tensor_entry(name, array, RESIDUAL, residual.append(array))


def _complaints(counts: Census, *, rounded: bool) -> list[str]:
    """Return what is wrong with a tensor, which, unlike a graph's, cannot be clamped or left in fp32."""
    problem = complaint(counts, finite=rounded, in_range=False)
    if problem is None and rounded and counts.overflow:
        problem = (
            f"{counts.overflow} of {counts.count} values overflow bfloat16 (largest magnitude {counts.max_abs:.6g}),"
            " and --saturate and --keep-fp32 are for ONNX; clamp them in the module"
        )
    return [] if problem is None else [problem]
