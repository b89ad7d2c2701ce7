"""Writes an artifact whose weights are those of its export, or of the file that torch runs: the rest is added.

This is used only if no ONNX profile is written. Those need panels, 64-byte alignment, and weights with BatchNorm folded
in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from bf16kit.artifact.manifest import RESIDUAL, CheckpointEntry, Plan, Segment, TensorEntry
from bf16kit.artifact.weightfile import ALIGNMENT, WeightWriter, little_endian_bytes
from bf16kit.converter.graph.initializers import initializer
from bf16kit.converter.graph.names import FreshNames, all_value_names
from bf16kit.converter.plan import complaint, narrowed
from bf16kit.converter.plan.decisions import Overrides
from bf16kit.converter.rewrite import Match, Prepared
from bf16kit.converter.write.export import Exported, fp32_tensor, select, write_export
from bf16kit.converter.write.weights import (
    FP32_FILE,
    Rounding,
    StoredWeights,
    checkpoint_entry,
    shared_names,
    stored_tensors,
    tensor_entry,
)
from bf16kit.messages.errors import RangeError
from bf16kit.numerics.residual import encode_chunks
from bf16kit.numerics.rounding import BF16, Census, census, to_bf16
from bf16kit.numerics.tensors import Array

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
            straight.add(match.initializer)
            tensor = fp32_tensor(checkpoint[name], name)
            stored = Match(_read_transposed(reference.graph, match.initializer, tensor, names, match.permutation))
            twins = [other for other, found in prepared.matches.items() if found.initializer == match.initializer]
            matches.update(dict.fromkeys(twins, stored))
    return replace(prepared, reference=reference, base=reference, cuda=reference, folds={}, matches=matches)


def _read_transposed(
    graph: ir.Graph, name: str, tensor: ir.TensorProtocol, names: FreshNames, permutation: Sequence[int]
) -> str:
    """Replace the initializer ``name`` by a Transpose of ``tensor``, which equals it up to ``permutation`` of the axes.

    Returns the name of the Transpose's input.
    """
    old = graph.initializers[name]
    stored = initializer(graph, names.make(f"{name}.stored"), tensor)
    order = [int(axis) for axis in np.argsort(permutation)]
    node = ir.node("Transpose", [stored], {"perm": order}, name=names.make(f"{name}/as_read"))
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
    narrow = narrowed(plan.tensors) & {match.initializer for match in prepared.matches.values()}
    selection = select(checkpoint, prepared, narrow, overrides)
    with ExitStack() as files:
        file = files.enter_context(writer(RESIDUAL)) if residual else None
        exported = write_export(checkpoint, shards, selection, directory, rounding, residual=file, progress=progress)
    tensors, entries, counted = _locate(prepared, checkpoint, exported)
    rest = {name: tensor for name, tensor in stored_tensors(prepared.reference).items() if name not in tensors}
    if residual and rest:
        with writer(FP32_FILE) as fp32_file:
            for name, tensor in rest.items():
                array = tensor.numpy()
                tensors[name] = tensor_entry(name, array.dtype, array.shape, FP32_FILE, fp32_file.append(array))
    stored = StoredWeights(tensors, tuple(entries) if residual else (), {}, counted)
    kept = {"precision": "fp32", "code": "reference_only", "reason": _REARRANGED}
    as_written = [
        entry if entry.precision == "fp32" or entry.name in narrow else entry.model_copy(update=kept)
        for entry in plan.tensors
    ]
    return stored, exported, plan.model_copy(update={"tensors": as_written})


def _locate(
    prepared: Prepared, checkpoint: Mapping[str, Array], exported: Exported
) -> tuple[dict[str, TensorEntry], list[CheckpointEntry], dict[str, Census]]:
    """Return the manifest's entries for an export's tensors, and the census of those rounded.

    The first tensor that holds an initializer takes its name.
    """
    tensors: dict[str, TensorEntry] = {}
    entries: list[CheckpointEntry] = []
    counted: dict[str, Census] = {}
    names = FreshNames(prepared.reference.graph.initializers)  # inline ones too: their names are taken
    for name, array in checkpoint.items():
        match, rounded = prepared.matches.get(name), name in exported.selection
        if not (rounded or array.dtype == np.float32):
            match = None  # it is in a graph in another precision, or in none
        if match is not None and match.permutation is not None and match.initializer not in tensors:
            match = None  # for example a square matrix with a twin that is not transposed
        found = match or Match(names.make(name))
        stored = found.initializer
        tensors.setdefault(stored, exported.tensors[name].model_copy(update={"name": stored}))
        if rounded:
            counted[stored] = exported.census[name]
        as_fp32 = rounded and array.dtype == np.float64
        entries.append(checkpoint_entry(name, array, stored, found.permutation, rounded=as_fp32))
    return tensors, entries, counted


_SHOWN = 5  # complaints named in an error


def write_without_graph(
    checkpoint: Mapping[str, Array],
    written: Path,
    residual: WeightWriter | None,
    progress: Callable[[int], None] = lambda _: None,
) -> StoredWeights:
    """Record where the file ``written`` by torch holds each tensor of ``checkpoint``; write others to ``residual``.

    If ``residual`` is None, nothing can be restored, and only tensors that the file holds are listed. ``progress`` is
    called with bytes of the checkpoint. Raises :class:`RangeError` for values that bf16 cannot hold.
    """
    records = _records(written)

    def locate(array: Array) -> Segment | None:
        return records.get(hashlib.sha256(little_endian_bytes(array)).digest()) if array.size else None

    tensors: dict[str, TensorEntry] = {}
    counted: dict[str, Census] = {}
    complaints: list[str] = []
    shared = shared_names(checkpoint, FreshNames())
    for name, array in checkpoint.items():
        progress(array.nbytes)
        if shared[name] != name:
            continue
        rounds = array.dtype == np.float32 and array.ndim > 0
        bf16 = to_bf16(np.ascontiguousarray(array)) if rounds else None
        segment = None if bf16 is None else locate(bf16)
        if bf16 is not None and segment is not None:
            restoring = None if residual is None else residual.append_chunks(encode_chunks(array, bf16))
            tensors[name] = tensor_entry(name, BF16, array.shape, written.name, segment, restoring)
        elif (segment := locate(array)) is not None:
            tensors[name] = tensor_entry(name, array.dtype, array.shape, written.name, segment)
        elif residual is not None:
            tensors[name] = tensor_entry(name, array.dtype, array.shape, RESIDUAL, residual.append(array))
        if array.dtype == np.float32:
            counts = census(np.ascontiguousarray(array))
            rounded = name in tensors and tensors[name].dtype == "bfloat16"
            counted |= {name: counts} if rounded else {}
            problem = complaint(counts, finite=rounded, in_range=False)
            if problem is None and rounded and counts.overflow:
                problem = (
                    f"{counts.overflow} of {counts.count} values overflow bfloat16 (largest magnitude"
                    f" {counts.max_abs:.6g}), and --saturate and --keep-fp32 are for ONNX; clamp them in the module"
                )
            complaints += [] if problem is None else [f"tensor {name!r}: {problem}"]
    if complaints:
        raise RangeError("\n".join(complaints[:_SHOWN]))
    entries = [checkpoint_entry(name, array, shared[name]) for name, array in checkpoint.items()]
    return StoredWeights(tensors, () if residual is None else tuple(entries), {}, counted)


def _records(path: Path) -> dict[bytes, Segment]:
    """Return the aligned records of the archive at ``path``, which torch has just written, by sha256."""
    import torch

    found: dict[bytes, Segment] = {}
    reader: Any = torch._C.PyTorchFileReader(str(path))
    for name in reader.get_all_records():
        offset, record = reader.get_record_offset(name), reader.get_record(name)
        if record and offset % ALIGNMENT == 0:
            found.setdefault(hashlib.sha256(record).digest(), Segment(offset=offset, bytes=len(record)))
    return found
