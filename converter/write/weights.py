"""Writes the weights of all graphs once: bf16 and fp32 for the profiles, and beside them what rounding removed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bf16kit.artifact.manifest import RESIDUAL, CheckpointEntry, Plan, Segment, TensorEntry
from bf16kit.artifact.weightfile import WeightWriter, little_endian_bytes
from bf16kit.messages.errors import ConversionError
from bf16kit.numerics.panels import strips
from bf16kit.numerics.residual import Scale
from bf16kit.numerics.residualparts import bits_needed
from bf16kit.numerics.rounding import BF16, Census, census
from bf16kit.numerics.tensors import BY_NAME, BY_ONNX
from converter.graph.equality import Fingerprint, fingerprint, same_bits
from converter.graph.initializers import blocks, const, dims, stays_inline
from converter.graph.names import FreshNames
from converter.plan import narrowed
from converter.plan.ranges import check_ranges, take_census
from converter.rewrite import Prepared
from converter.write.roundweights import NEAREST, Rounding, WeightRounding

BF16_FILE, FP32_FILE = "weights.bf16", "weights.fp32"

_SMALL = 1 << 20  # bytes of an fp32 tensor up to which equal ones are written once

Progress = Callable[[int], None]


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


def write_total(prepared: Prepared, checkpoint: Mapping[str, NDArray[Any]]) -> int:
    """Return about the number of bytes that :func:`write_weights` reports to ``progress`` in all."""
    graph = sum(t.nbytes for t in stored_tensors(prepared.base).values())
    return graph + sum(array.nbytes for name, array in checkpoint.items() if name not in prepared.matches)


def write_weights(
    prepared: Prepared,
    plan: Plan,
    checkpoint: Mapping[str, NDArray[Any]],
    writer: Callable[[str], WeightWriter],
    rounding: Rounding = NEAREST,
    *,
    residual: bool = True,
    panels: Mapping[str, int] = MappingProxyType({}),
    progress: Progress | None = None,
) -> StoredWeights:
    """Write weights.bf16, weights.fp32 and, with ``residual``, residual.bin, each through ``writer(file name)``.

    ``checkpoint`` holds the source's tensors; those that no graph uses are stored in residual.bin unchanged. ``panels``
    names the bf16 matrices to store as panels, each with the axis they lie along (:mod:`bf16kit.numerics.panels`). A
    tensor is processed once, a block of rows at a time; only its bf16 values, half its size, are in memory as a whole.
    ``progress`` is called with the fp32 bytes of each block once it is written.

    Raises :class:`RangeError` if bf16 cannot hold the weights; the files are then useless.
    """
    narrow = narrowed(plan.tensors)
    on_progress = progress or (lambda _: None)
    with writer(BF16_FILE) as bf16_file, writer(FP32_FILE) as fp32_file:
        low_bits = _low_bits(prepared, checkpoint)
        weights_writer = _WeightsWriter(prepared, bf16_file, fp32_file, panels, on_progress, rounding, low_bits)
        if not residual:
            weights_writer.write_profiles(narrow, None)
            return weights_writer.result((), narrow)
        with writer(RESIDUAL) as residual_file:
            weights_writer.write_profiles(narrow, residual_file)
            weights_writer.write_reference_only()
            entries = weights_writer.write_checkpoint(checkpoint, residual_file)
        return weights_writer.result(entries, narrow)


@dataclass
class _WeightsWriter:
    """The tensors written so far."""

    prepared: Prepared
    bf16_file: WeightWriter
    fp32_file: WeightWriter
    panels: Mapping[str, int]
    on_progress: Progress
    rounding: Rounding
    low_bits: Mapping[str, int]
    census: dict[str, Census] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    small_segments: dict[bytes, Segment] = field(default_factory=dict)

    def write_profiles(self, narrow: frozenset[str], residual: WeightWriter | None) -> None:
        """Write the tensors that the profiles' graphs read, and the residual of those that were rounded."""
        names = FreshNames((*stored_tensors(self.prepared.base), *stored_tensors(self.prepared.reference)))
        for name, tensor in sorted(stored_tensors(self.prepared.base).items()):
            if name in narrow:
                self._narrow(name, tensor, residual, names)
            elif residual is not None and self._differs_from_source(name):
                # the reference keeps the name and the source's bytes
                self.aliases[name] = names.make(f"{name}.lowered")
                self._write_unchanged(self.aliases[name], name, tensor)
            else:
                self._write_unchanged(name, name, tensor)

    def write_reference_only(self) -> None:
        """Write the tensors that only the reference reads: BatchNorm's parameters, replaced biases."""
        for name, tensor in sorted(stored_tensors(self.prepared.reference).items()):
            if name not in self.tensors:
                self._write_tensor(name, tensor.numpy(), self.fp32_file, FP32_FILE)

    def write_checkpoint(
        self, checkpoint: Mapping[str, NDArray[Any]], residual: WeightWriter
    ) -> tuple[CheckpointEntry, ...]:
        """Return the place of each checkpoint tensor; write those that are stored nowhere yet, equal ones once."""
        shared_names = SharedNames(FreshNames(self.tensors))
        entries = []
        for name, array in checkpoint.items():
            match = self.prepared.matches.get(name)
            if match is not None:
                dtype = (
                    np.dtype(np.float32)
                    if array.dtype == np.float64
                    and self.prepared.reference.graph.initializers[match.initializer].dtype == ir.DataType.FLOAT
                    else array.dtype
                )
                entries.append(checkpoint_entry(name, array, match.initializer, match.permutation, dtype))
                continue
            stored, is_new = shared_names.assign(name, array)
            if is_new:
                self._write_tensor(stored, array, residual, RESIDUAL)
                self.on_progress(array.nbytes)
            entries.append(checkpoint_entry(name, array, stored, None))
        return tuple(entries)

    def result(self, checkpoint: Iterable[CheckpointEntry], narrow: frozenset[str]) -> StoredWeights:
        census = check_ranges(self.prepared, narrow, self.census, saturate=self.rounding.saturate)
        return StoredWeights(self.tensors, tuple(checkpoint), self.aliases, census)

    def _narrow(self, name: str, tensor: ir.TensorProtocol, residual: WeightWriter | None, names: FreshNames) -> None:
        axis, bf16 = self.panels.get(name), np.empty(dims(tensor), BF16)
        original = const(self.prepared.reference.graph.initializers.get(name))
        narrowing = WeightRounding(tensor, bf16, self._rounding(tensor), self.on_progress)
        if residual is None or original is None:
            segment = scale = None
            for _ in narrowing.blocks():
                pass
        else:
            scale = self._scale(name)
            segment = residual.append_chunks(narrowing.residual(original, scale, self.low_bits.get(name, 16)))
        self.census[name] = narrowing.census
        written = self.bf16_file.append_chunks(strips(bf16, axis))
        entry = tensor_entry(name, bf16, BF16_FILE, written, axis)
        if segment is not None:
            entry = entry.model_copy(update={"residual": segment})
        if scale is not None:
            scale_name = names.make(f"{name}.scale")
            self._write_tensor(scale_name, scale.values, self.fp32_file, FP32_FILE)
            entry = entry.model_copy(update={"scale": scale_name, "scale_axis": scale.axis})
        self.tensors[name] = entry

    def _rounding(self, tensor: ir.TensorProtocol) -> Rounding:
        """Saturate only a tensor where something overflows: in others, infinities are masks and stay."""
        saturate = self.rounding.saturate and take_census(tensor).overflow > 0
        return Rounding(self.rounding.subnormals, saturate)

    def _scale(self, name: str) -> Scale | None:
        return self.prepared.folds.get(name)

    def _write_unchanged(self, stored_as: str, name: str, tensor: ir.TensorProtocol) -> None:
        """Write a tensor that the profiles read unchanged."""

        def chunks() -> Iterator[memoryview]:
            counts = Census()
            for _, array in blocks(tensor):
                if array.dtype == np.float32:
                    counts += census(array)
                yield little_endian_bytes(array)
                self.on_progress(array.nbytes)
            self.census[name] = counts

        segment = self._write_once(tensor.numpy()) if tensor.nbytes <= _SMALL else None
        if segment is None:
            segment = self.fp32_file.append_chunks(chunks())
        else:
            deque(chunks(), maxlen=0)  # so that they are counted too
        like = np.empty(0, tensor.dtype.numpy())
        self.tensors[stored_as] = tensor_entry(stored_as, like, FP32_FILE, segment, shape=dims(tensor))

    def _differs_from_source(self, name: str) -> bool:
        return name in self.prepared.folds or name in self.prepared.clamped

    def _write_tensor(self, name: str, array: NDArray[Any], file: WeightWriter, file_name: str) -> None:
        segment = self._write_once(array) if file is self.fp32_file and array.nbytes <= _SMALL else file.append(array)
        self.tensors[name] = tensor_entry(name, array, file_name, segment)

    def _write_once(self, array: NDArray[Any]) -> Segment:
        """Return the place of ``array``'s bytes in weights.fp32, and write them if they are not there yet.

        A BatchNorm that is only a product and a sum has the bytes of the folded scale and of the bias.
        """
        data = little_endian_bytes(array)
        digest = sha256(data).digest()
        if digest not in self.small_segments:
            self.small_segments[digest] = self.fp32_file.append(array)
        return self.small_segments[digest]


class SharedNames:
    """The names under which checkpoint tensors are stored; equal tensors share one."""

    def __init__(self, names: FreshNames) -> None:
        self._names = names
        self._known: dict[Fingerprint, list[tuple[NDArray[Any], str]]] = {}

    def assign(self, name: str, array: NDArray[Any]) -> tuple[str, bool]:
        """Return the name under which ``array``, the checkpoint's ``name``, is stored, and whether that is new."""
        twins = self._known.setdefault(fingerprint(array), [])
        stored = next((other for twin, other in twins if same_bits(twin, array)), None)
        if stored is not None:
            return stored, False
        twins.append((array, self._names.make(name)))
        return twins[-1][1], True


def _low_bits(prepared: Prepared, checkpoint: Mapping[str, NDArray[Any]]) -> dict[str, int]:
    """Return the number of low bits that may be nonzero, for each initializer that is a widened checkpoint tensor."""
    return {match.initializer: bits_needed(checkpoint[name].dtype.name) for name, match in prepared.matches.items()}


def stored_tensors(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Return the initializers of a graph that are stored outside it, by name."""
    found = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and not stays_inline(tensor):
            if int(tensor.dtype) not in BY_ONNX:
                raise ConversionError(f"tensor {name!r} is {tensor.dtype.name.lower()}, which artifacts cannot hold")
            found[name] = tensor
    return found


def tensor_entry(
    name: str,
    array: NDArray[Any],
    file: str,
    segment: Segment,
    panels: int | None = None,
    shape: tuple[int, ...] | None = None,
) -> TensorEntry:
    """Return the manifest's entry for ``array`` (or one like it, of another ``shape``) at ``segment`` of ``file``."""
    return TensorEntry(
        name=name,
        dtype=_dtype(name, array),
        shape=list(array.shape if shape is None else shape),
        file=file,
        offset=segment.offset,
        bytes=segment.bytes,
        panels=panels,
    )


def checkpoint_entry(
    name: str,
    array: NDArray[Any],
    tensor: str,
    permutation: tuple[int, ...] | None,
    dtype: np.dtype[Any] | None = None,
) -> CheckpointEntry:
    """Return the manifest's entry for the checkpoint's ``array``, restored from ``tensor``."""
    return CheckpointEntry(
        name=name,
        dtype=_dtype(name, array if dtype is None else np.empty(0, dtype)),
        shape=list(array.shape),
        tensor=tensor,
        permutation=None if permutation is None else list(permutation),
    )


def _dtype(name: str, array: NDArray[Any]) -> str:
    dtype = np.dtype(array.dtype).name
    if dtype not in BY_NAME:
        raise ConversionError(f"tensor {name!r} is {dtype}, which artifacts cannot hold")
    return dtype
