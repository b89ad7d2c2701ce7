"""Writes an artifact whose weights are those of its export: only tensors of the reference alone are added.

This is used only if no ONNX profile is written. Those need panels, 64-byte alignment, and weights with BatchNorm folded
in.
"""

from __future__ import annotations

import hashlib
import mmap
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from bf16kit.artifact.manifest import RESIDUAL, CheckpointEntry, Plan, PlanEntry, Segment, TensorEntry
from bf16kit.artifact.weightfile import ALIGNMENT, WeightWriter, little_endian_bytes
from bf16kit.messages.errors import RangeError
from bf16kit.numerics.residual import encode_chunks
from bf16kit.numerics.rounding import Census, census, to_bf16
from bf16kit.numerics.tensors import Array as Array
from converter.graph.initializers import initializer
from converter.graph.names import FreshNames, all_value_names
from converter.plan import narrowed
from converter.plan.decisions import Overrides
from converter.plan.ranges import complaint
from converter.rewrite import Match, Prepared
from converter.write.export import Exported, Selection, fp32_tensor, select, write_export
from converter.write.roundweights import Rounding
from converter.write.weights import (
    FP32_FILE,
    SharedNames,
    StoredWeights,
    checkpoint_entry,
    stored_tensors,
    tensor_entry,
)

_REARRANGED = "only the fp32 reference reads it; the checkpoint's own tensors hold its values in another order"


def unfolded(prepared: Prepared, checkpoint: Mapping[str, Array]) -> Prepared:
    """Return ``prepared`` for an export alone: nothing is folded, and transposed initializers read the stored tensor.

    An initializer that holds a tensor of ``checkpoint`` transposed becomes a Transpose of the tensor as it is stored.
    """
    reference, matches = prepared.reference.clone(), dict(prepared.matches)
    names = FreshNames(all_value_names(reference))
    straight = {match.initializer for match in matches.values() if match.permutation is None}
    for name, match in prepared.matches.items():
        if match.permutation is not None and match.initializer not in straight:
            old = reference.graph.initializers[match.initializer]
            stored = _transposed(reference.graph, old, fp32_tensor(checkpoint[name], name), names, match.permutation)
            straight.add(stored)
            for other, found in prepared.matches.items():
                if found.initializer == match.initializer:
                    matches[other] = Match(stored)
            straight.add(match.initializer)
    return replace(prepared, reference=reference, base=reference, cuda=reference, folds={}, matches=matches)


def _transposed(
    graph: ir.Graph, old: ir.Value, tensor: ir.TensorProtocol, names: FreshNames, permutation: Sequence[int]
) -> str:
    """Replace the initializer ``old`` by a Transpose of ``tensor``, which equals it up to ``permutation`` of the axes.

    Returns the name of the Transpose's input.
    """
    name = old.name or ""
    stored = initializer(graph, names.make(f"{name}.stored"), tensor)
    node = ir.node(
        "Transpose",
        [stored],
        {"perm": [int(axis) for axis in np.argsort(permutation)]},
        name=names.make(f"{name}/as_read"),
    )
    output = node.outputs[0]
    output.type, output.shape = old.type, old.shape
    old.replace_all_uses_with(output, replace_graph_outputs=True)
    graph.initializers.pop(name)
    output.name = name
    graph.insert_before(graph[0], node)
    return stored.name or ""


def write_as_export(
    prepared: Prepared,
    plan: Plan,
    overrides: Overrides,
    checkpoint: Mapping[str, Array],
    shards: Sequence[Sequence[str]],
    directory: Path,
    writer: Callable[[str], WeightWriter],
    rounding: Rounding,
    *,
    residual: bool,
    progress: Callable[[int], None],
) -> tuple[StoredWeights, Exported, Plan]:
    """Write the export and, with ``residual``, the files that restore it and the tensors that only the reference reads.

    ``prepared`` comes from :func:`unfolded`. In the returned plan, weights that the checkpoint holds in another order
    are fp32, because they were not rounded after all.
    """
    matched = {match.initializer for match in prepared.matches.values()}
    narrow = narrowed(plan.tensors) & matched
    selection = select(checkpoint, prepared, narrow, overrides)
    if not residual:
        exported = write_export(checkpoint, shards, selection, directory, rounding, progress=progress)
        entries = _ManifestEntries(prepared, checkpoint, selection, exported)
        return StoredWeights(entries.tensors, (), {}, entries.census), exported, _plan_as_written(plan, narrow)
    with writer(RESIDUAL) as residual_file, writer(FP32_FILE) as fp32_file:
        exported = write_export(
            checkpoint, shards, selection, directory, rounding, residual=residual_file, progress=progress
        )
        entries = _ManifestEntries(prepared, checkpoint, selection, exported)
        for name, tensor in sorted(stored_tensors(prepared.reference).items()):
            if name not in entries.tensors:
                array = tensor.numpy()
                entries.tensors[name] = tensor_entry(name, array, FP32_FILE, fp32_file.append(array))
        checkpoint_entries = tuple(entries.checkpoint)
    if all(entry.file != FP32_FILE for entry in entries.tensors.values()):
        (directory / FP32_FILE).unlink()
    return (
        StoredWeights(entries.tensors, checkpoint_entries, {}, entries.census),
        exported,
        _plan_as_written(plan, narrow),
    )


class _ManifestEntries:
    """The manifest's entries for an export's tensors. The first tensor that holds an initializer takes its name."""

    def __init__(
        self, prepared: Prepared, checkpoint: Mapping[str, Array], selection: Selection, exported: Exported
    ) -> None:
        self.tensors: dict[str, TensorEntry] = {}
        self.checkpoint: list[CheckpointEntry] = []
        self.census = {}
        names = FreshNames(prepared.reference.graph.initializers)  # inline ones too: their names are taken
        for name, array in checkpoint.items():
            match = prepared.matches.get(name)
            rounded = name in selection.rounded
            stored, order = None if match is None else match.initializer, None if match is None else match.permutation
            if stored is None or not (rounded or array.dtype == np.float32):
                stored, order = names.make(name), None  # in no graph, or there in another precision
            if stored not in self.tensors:
                if order is not None:  # for example a square matrix with a twin that is not transposed
                    stored, order = names.make(name), None
                self.tensors[stored] = _entry(stored, array, exported, name)
            if rounded:
                self.census[stored] = exported.census[name]
            dtype = "float32" if rounded and array.dtype == np.float64 else array.dtype.name
            self.checkpoint.append(
                CheckpointEntry(
                    name=name,
                    dtype=dtype,
                    shape=list(array.shape),
                    tensor=stored,
                    permutation=None if order is None else list(order),
                )
            )


def _entry(stored: str, array: Array, exported: Exported, name: str) -> TensorEntry:
    written = exported.tensors[name]
    return TensorEntry(
        name=stored,
        dtype=written.dtype,
        shape=list(array.shape),
        file=written.file,
        offset=written.segment.offset,
        bytes=written.segment.bytes,
        residual=written.residual,
    )


def _plan_as_written(plan: Plan, narrow: frozenset[str]) -> Plan:
    """Return ``plan`` with fp32 for each tensor that was not written in bf16."""
    return plan.model_copy(update={"tensors": [_kept(entry, narrow) for entry in plan.tensors]})


def _kept(entry: PlanEntry, narrow: frozenset[str]) -> PlanEntry:
    if entry.precision == "fp32" or entry.name in narrow:
        return entry
    return entry.model_copy(update={"precision": "fp32", "code": "reference_only", "reason": _REARRANGED})


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
            entry = _record_entry(stored, array, records, residual)
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


def _record_entry(name: str, array: Array, records: FileRecords, residual: WeightWriter | None) -> TensorEntry | None:
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
