"""Writes the weights of all graphs once: bf16 and fp32 for the profiles, and beside them what rounding removed."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from bf16kit.artifact.manifest import RESIDUAL, CheckpointEntry, Plan, Segment, TensorEntry
from bf16kit.artifact.weightfile import WeightWriter, little_endian_bytes
from bf16kit.converter.graph.equality import Fingerprint, fingerprint, same_bits
from bf16kit.converter.graph.initializers import blocks, dims, reader, rows_of, stays_inline
from bf16kit.converter.graph.names import FreshNames
from bf16kit.converter.plan import check_ranges, narrowed, take_census
from bf16kit.converter.rewrite import Prepared
from bf16kit.messages.errors import ConversionError
from bf16kit.numerics.panels import strips
from bf16kit.numerics.residual import ALL_BITS, Encoder, Scale, bits_needed
from bf16kit.numerics.rounding import BF16, Census, Subnormals, census, to_bf16
from bf16kit.numerics.tensors import BY_NAME, BY_ONNX, Array

BF16_FILE, FP32_FILE = "weights.bf16", "weights.fp32"

_SMALL = 1 << 20  # bytes of an fp32 tensor up to which equal ones are written once

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Rounding:
    """The options for rounding weights to bf16; see :func:`bf16kit.numerics.rounding.to_bf16`."""

    subnormals: Subnormals = "keep"
    saturate: bool = False


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The places of all tensors.

    ``tensors`` holds the entries of the initializers of reference and profiles, by name. If a profile reads other bytes
    than the reference under the same name (a folded weight kept in fp32), ``aliases`` gives the name of the profile's
    tensor. ``census`` counts what rounding changed, per bf16 tensor.
    """

    tensors: Mapping[str, TensorEntry]
    checkpoint: tuple[CheckpointEntry, ...]
    aliases: Mapping[str, str]
    census: Mapping[str, Census]


def write_total(prepared: Prepared, checkpoint: Mapping[str, Array]) -> int:
    """Return about the number of bytes that :func:`write_weights` reports to ``progress`` in all."""
    graph = sum(t.nbytes for t in stored_tensors(prepared.base).values())
    return graph + sum(array.nbytes for name, array in checkpoint.items() if name not in prepared.matches)


def write_weights(
    prepared: Prepared,
    plan: Plan,
    checkpoint: Mapping[str, Array],
    writer: Callable[[str], WeightWriter],
    rounding: Rounding,
    *,
    residual: bool = True,
    panels: Mapping[str, int] = MappingProxyType({}),
    progress: Progress = lambda _: None,
) -> StoredWeights:
    """Write weights.bf16, weights.fp32 and, with ``residual``, residual.bin, each through ``writer(file name)``.

    ``checkpoint`` holds the source's tensors; those that no graph uses are stored in residual.bin unchanged. ``panels``
    names the bf16 matrices to store as panels, each with the axis they lie along (:mod:`bf16kit.numerics.panels`). A
    tensor is processed once, a block of rows at a time; only its bf16 values, half its size, are in memory as a whole.
    ``progress`` is called with the fp32 bytes that were written. Raises :class:`RangeError` if bf16 cannot hold the
    weights; the files are then useless.
    """
    narrow = narrowed(plan.tensors)
    base, reference = stored_tensors(prepared.base), stored_tensors(prepared.reference)
    names = FreshNames((*base, *reference))
    low_bits = {match.initializer: bits_needed(checkpoint[name].dtype.name) for name, match in prepared.matches.items()}
    tensors: dict[str, TensorEntry] = {}
    aliases: dict[str, str] = {}
    counted: dict[str, Census] = {}
    entries: tuple[CheckpointEntry, ...] = ()
    with ExitStack() as files:
        bf16_file, fp32_file = (files.enter_context(writer(name)) for name in (BF16_FILE, FP32_FILE))
        residual_file = files.enter_context(writer(RESIDUAL)) if residual else None
        small: dict[bytes, Segment] = {}

        def write_fp32(name: str, tensor: ir.TensorProtocol) -> None:
            """Write ``tensor`` as it is, equal small ones once: a BatchNorm's scale may be the folded scale."""
            if tensor.nbytes > _SMALL:
                written = fp32_file.append_chunks(little_endian_bytes(array) for _, array in blocks(tensor))
            else:
                data = little_endian_bytes(tensor.numpy())
                digest = sha256(data).digest()
                written = small[digest] = small.get(digest) or fp32_file.append_chunks([data])
            tensors[name] = tensor_entry(name, tensor.dtype.numpy(), dims(tensor), FP32_FILE, written)

        for name, tensor in base.items():
            scale = prepared.folds.get(name) if residual else None
            if name in narrow:
                bf16, counted[name], segment = round_weight(
                    tensor,
                    rounding,
                    progress,
                    residual_file,
                    original=reference.get(name),
                    scale=scale,
                    low_bits=low_bits.get(name, ALL_BITS),
                )
                axis = panels.get(name)
                written = bf16_file.append_chunks(strips(bf16, axis))
                entry = tensor_entry(name, BF16, bf16.shape, BF16_FILE, written, segment)
                more: dict[str, Any] = {"panels": axis}
                if scale is not None:
                    more |= {"scale": names.make(f"{name}.scale"), "scale_axis": scale.axis}
                    write_fp32(more["scale"], ir.tensor(scale.values))
                tensors[name] = entry.model_copy(update=more)
                continue
            stored = name
            if residual and (name in prepared.folds or name in prepared.clamped):
                # the reference keeps the name and the source's bytes
                stored = aliases[name] = names.make(f"{name}.lowered")
            write_fp32(stored, tensor)
            progress(tensor.nbytes)
        if residual_file is not None:
            for name, tensor in reference.items():
                if name not in tensors:  # only the reference reads it: BatchNorm's parameters, replaced biases
                    write_fp32(name, tensor)
            entries = tuple(_write_checkpoint(prepared, checkpoint, tensors, residual_file, progress))
    return StoredWeights(tensors, entries, aliases, check_ranges(prepared, narrow, counted, saturate=rounding.saturate))


def round_weight(
    tensor: ir.TensorProtocol,
    rounding: Rounding,
    progress: Progress,
    residual: WeightWriter | None = None,
    *,
    original: ir.TensorProtocol | None = None,
    scale: Scale | None = None,
    low_bits: int = ALL_BITS,
) -> tuple[Array, Census, Segment | None]:
    """Round an fp32 tensor, a block of rows at a time; return the bf16 values, the census, and the residual's place.

    Only a tensor where something overflows is saturated: in others, infinities are masks and stay. ``residual`` gets
    what restores ``original``, which is ``tensor`` without the ``scale`` folded into it. ``low_bits`` is how many bits
    of the low halves of its words may be nonzero.
    """
    bf16, counts = np.empty(dims(tensor), BF16), [Census()]
    saturate = rounding.saturate and take_census(tensor).overflow > 0
    encoder = None
    if residual is not None and original is not None:
        encoder = Encoder(bf16.shape, scale, ALL_BITS if scale is not None else low_bits)
    read = reader(tensor if original is None else original)

    def chunks() -> Iterator[bytes | memoryview]:
        for rows, array in blocks(tensor):
            counts.append(census(array))
            part = rows_of(bf16, rows)
            to_bf16(array, subnormals=rounding.subnormals, saturate=saturate, out=part)
            if encoder is not None:
                values = array if original is tensor else np.asarray(read(rows), order="C")
                yield from encoder.rows(values, part)
            progress(array.nbytes)
        if encoder is not None:
            yield from encoder.finish()

    segment = None
    if residual is None or encoder is None:
        deque(chunks(), maxlen=0)
    else:
        segment = residual.append_chunks(chunks())
    return bf16, sum(counts, Census()), segment


def _write_checkpoint(
    prepared: Prepared,
    checkpoint: Mapping[str, Array],
    tensors: dict[str, TensorEntry],
    residual: WeightWriter,
    progress: Progress,
) -> Iterator[CheckpointEntry]:
    """Yield the place of each checkpoint tensor; write those that are stored nowhere yet, equal ones once."""
    others = {name: array for name, array in checkpoint.items() if name not in prepared.matches}
    shared = shared_names(others, FreshNames(tensors))
    for name, array in checkpoint.items():
        match = prepared.matches.get(name)
        if match is not None:
            graph_dtype = prepared.reference.graph.initializers[match.initializer].dtype
            rounded = array.dtype == np.float64 and graph_dtype == ir.DataType.FLOAT
            yield checkpoint_entry(name, array, match.initializer, match.permutation, rounded=rounded)
            continue
        stored = shared[name]
        if stored not in tensors:
            segment = residual.append(array)
            tensors[stored] = tensor_entry(stored, array.dtype, array.shape, RESIDUAL, segment)
            progress(array.nbytes)
        yield checkpoint_entry(name, array, stored)


def shared_names(arrays: Mapping[str, Array], names: FreshNames) -> dict[str, str]:
    """Return the name under which each of ``arrays`` is stored; equal ones share the first one's."""
    known: dict[Fingerprint, list[tuple[str, Array]]] = defaultdict(list)
    shared: dict[str, str] = {}
    for name, array in arrays.items():
        twins = known[fingerprint(array)]
        stored = next((other for other, twin in twins if same_bits(twin, array)), None)
        if stored is None:
            stored = names.make(name)
            twins.append((stored, array))
        shared[name] = stored
    return shared


def stored_tensors(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Return the initializers of a graph that are stored outside it, in the order of their names."""
    found = {}
    for name, value in sorted(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None and not stays_inline(tensor):
            if int(tensor.dtype) not in BY_ONNX:
                raise ConversionError(f"tensor {name!r} is {tensor.dtype.name.lower()}, which artifacts cannot hold")
            found[name] = tensor
    return found


def tensor_entry(
    name: str, dtype: np.dtype[Any], shape: tuple[int, ...], file: str, at: Segment, residual: Segment | None = None
) -> TensorEntry:
    """Return the manifest's entry for a tensor in ``file``, which ``residual`` restores."""
    kept = _checked(name, dtype)
    return TensorEntry(
        name=name, dtype=kept, shape=list(shape), file=file, offset=at.offset, bytes=at.bytes, residual=residual
    )


def checkpoint_entry(
    name: str, array: Array, tensor: str, permutation: tuple[int, ...] | None = None, *, rounded: bool = False
) -> CheckpointEntry:
    """Return the manifest's entry for the checkpoint's ``array``, restored from ``tensor``; as fp32 if ``rounded``."""
    dtype = "float32" if rounded else _checked(name, array.dtype)
    order = None if permutation is None else list(permutation)
    return CheckpointEntry(name=name, dtype=dtype, shape=list(array.shape), tensor=tensor, permutation=order)


def _checked(name: str, dtype: np.dtype[Any]) -> str:
    if dtype.name not in BY_NAME:
        raise ConversionError(f"tensor {name!r} is {dtype.name}, which artifacts cannot hold")
    return dtype.name
