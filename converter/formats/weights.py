"""The weights of all graphs, written once: bf16 and fp32 for the profiles, and what rounding removed beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bf16kit.errors import ConversionError
from bf16kit.manifest import RESIDUAL, CheckpointEntry, Plan, Segment, TensorEntry
from bf16kit.numerics import Census, Subnormals, to_bf16
from bf16kit.panels import pack
from bf16kit.residual import Scale, encode_chunks
from bf16kit.tensors import BY_NAME, BY_ONNX
from bf16kit.weightfile import WeightWriter
from converter.graph.equality import Fingerprint, fingerprint, same_bits
from converter.graph.initializers import stays_inline
from converter.graph.names import FreshNames
from converter.passes import Prepared
from converter.plan import narrowed
from converter.plan.ranges import check_ranges

BF16_FILE, FP32_FILE = "weights.bf16", "weights.fp32"

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Where every tensor is.

    ``tensors`` holds what the reference's initializers and the profiles' are made of, by name. Where a profile reads
    other bytes than the reference under the same name (a folded weight kept in fp32), ``aliases`` gives the name of the
    profile's. ``census`` says what rounding met, per bf16 tensor.
    """

    tensors: Mapping[str, TensorEntry]
    checkpoint: tuple[CheckpointEntry, ...]
    aliases: Mapping[str, str]
    census: Mapping[str, Census]


def write_total(prepared: Prepared, checkpoint: Mapping[str, NDArray[Any]]) -> int:
    """The bytes that ``progress`` will have been told of when :func:`write_weights` returns, about."""
    graph = sum(t.nbytes for t in _tensors(prepared.folded).values())
    return graph + sum(array.nbytes for name, array in checkpoint.items() if name not in prepared.matches)


def write_weights(
    prepared: Prepared,
    plan: Plan,
    checkpoint: Mapping[str, NDArray[Any]],
    writer: Callable[[str], WeightWriter],
    *,
    subnormals: Subnormals = "keep",
    saturate: bool = False,
    residual: bool = True,
    panels: Mapping[str, int] = MappingProxyType({}),
    progress: Progress | None = None,
) -> StoredWeights:
    """Write weights.bf16, weights.fp32 and, with ``residual``, residual.bin, each through ``writer(file name)``.

    ``checkpoint`` holds the source's tensors; those that no graph uses travel in residual.bin as they are. ``panels``
    names the bf16 matrices to store as panels, each with the axis they lie along (:mod:`bf16kit.panels`). One tensor at
    a time is in memory beside the model. ``progress`` is told the fp32 bytes of each tensor when it is written.

    Raises :class:`~bf16kit.errors.RangeError` before anything is written when bf16 cannot hold the weights.
    """
    narrow = narrowed(plan.tensors)
    census = check_ranges(prepared, narrow, saturate=saturate)
    done = progress or (lambda _: None)
    with writer(BF16_FILE) as bf16_file, writer(FP32_FILE) as fp32_file:
        store = _Store(prepared, bf16_file, fp32_file, panels, done)
        if not residual:
            store.profiles(narrow, census, subnormals, saturate, None)
            return store.result((), census)
        with writer(RESIDUAL) as residual_file:
            store.profiles(narrow, census, subnormals, saturate, residual_file)
            store.reference_only()
            entries = store.source(checkpoint, residual_file)
        return store.result(entries, census)


@dataclass
class _Store:
    """The tensors written so far."""

    prepared: Prepared
    bf16_file: WeightWriter
    fp32_file: WeightWriter
    panels: Mapping[str, int]
    done: Progress
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def profiles(
        self,
        narrow: frozenset[str],
        census: Mapping[str, Census],
        subnormals: Subnormals,
        saturate: bool,
        residual: WeightWriter | None,
    ) -> None:
        """Write what the profiles' graphs read, and the residual of what was rounded."""
        names = FreshNames((*_tensors(self.prepared.folded), *_tensors(self.prepared.reference)))
        for name, tensor in sorted(_tensors(self.prepared.folded).items()):
            if name in narrow:
                overflows = saturate and census[name].overflow > 0
                bf16 = to_bf16(tensor.numpy(), subnormals=subnormals, saturate=overflows)
                self._narrow(name, bf16, residual, names)
            elif residual is not None and self._differs(name):
                # the reference keeps the name and the source's bytes
                self.aliases[name] = names.make(f"{name}.lowered")
                self._add(self.aliases[name], tensor.numpy(), self.fp32_file, FP32_FILE)
            else:
                self._add(name, tensor.numpy(), self.fp32_file, FP32_FILE)
            self.done(tensor.nbytes)

    def reference_only(self) -> None:
        """Write what only the reference reads: BatchNorm's parameters, replaced biases."""
        for name, tensor in sorted(_tensors(self.prepared.reference).items()):
            if name not in self.tensors:
                self._add(name, tensor.numpy(), self.fp32_file, FP32_FILE)

    def source(self, checkpoint: Mapping[str, NDArray[Any]], residual: WeightWriter) -> tuple[CheckpointEntry, ...]:
        """Say where each tensor of the checkpoint is; write those that are nowhere yet, equal ones once."""
        names = FreshNames(self.tensors)
        passengers: dict[Fingerprint, list[tuple[NDArray[Any], str]]] = {}
        entries = []
        for name, array in checkpoint.items():
            match = self.prepared.matches.get(name)
            if match is not None:
                entries.append(_checkpoint_entry(name, array, match.initializer, match.permutation))
                continue
            twins = passengers.setdefault(fingerprint(array), [])
            stored = next((other for twin, other in twins if same_bits(twin, array)), None)
            if stored is None:
                stored = names.make(name)
                self._add(stored, array, residual, RESIDUAL)
                twins.append((array, stored))
                self.done(array.nbytes)
            entries.append(_checkpoint_entry(name, array, stored, None))
        return tuple(entries)

    def result(self, checkpoint: Iterable[CheckpointEntry], census: Mapping[str, Census]) -> StoredWeights:
        return StoredWeights(self.tensors, tuple(checkpoint), self.aliases, census)

    def _narrow(self, name: str, bf16: NDArray[Any], residual: WeightWriter | None, names: FreshNames) -> None:
        axis = self.panels.get(name)
        written = self.bf16_file.append(bf16 if axis is None else pack(bf16, axis))
        entry = _entry(name, bf16, BF16_FILE, written, axis)
        original = self.prepared.reference.graph.initializers.get(name)
        if residual is None or original is None or original.const_value is None:
            self.tensors[name] = entry
            return
        fold, scale = self.prepared.folds.get(name), None
        if fold is not None:
            scale = Scale(fold.axis, fold.scale)
            scale_name = names.make(f"{name}.scale")
            self._add(scale_name, fold.scale, self.fp32_file, FP32_FILE)
            entry = entry.model_copy(update={"scale": scale_name, "scale_axis": fold.axis})
        segment = residual.append_chunks(encode_chunks(original.const_value.numpy(), bf16, scale))
        self.tensors[name] = entry.model_copy(update={"residual": segment})

    def _differs(self, name: str) -> bool:
        return name in self.prepared.folds or name in self.prepared.clamped

    def _add(self, name: str, array: NDArray[Any], file: WeightWriter, file_name: str) -> None:
        self.tensors[name] = _entry(name, array, file_name, file.append(array))


def _tensors(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """The initializers of a graph that are stored outside it."""
    found = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and not stays_inline(tensor):
            if int(tensor.dtype) not in BY_ONNX:
                raise ConversionError(f"tensor {name!r} is {tensor.dtype.name.lower()}, which artifacts cannot hold")
            found[name] = tensor
    return found


def _entry(name: str, array: NDArray[Any], file: str, segment: Segment, panels: int | None = None) -> TensorEntry:
    return TensorEntry(
        name=name,
        dtype=_dtype(name, array),
        shape=list(array.shape),
        file=file,
        offset=segment.offset,
        bytes=segment.bytes,
        panels=panels,
    )


def _checkpoint_entry(
    name: str, array: NDArray[Any], tensor: str, permutation: tuple[int, ...] | None
) -> CheckpointEntry:
    return CheckpointEntry(
        name=name,
        dtype=_dtype(name, array),
        shape=list(array.shape),
        tensor=tensor,
        permutation=None if permutation is None else list(permutation),
    )


def _dtype(name: str, array: NDArray[Any]) -> str:
    dtype = np.dtype(array.dtype).name
    if dtype not in BY_NAME:
        raise ConversionError(f"tensor {name!r} is {dtype}, which artifacts cannot hold")
    return dtype
