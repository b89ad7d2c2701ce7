"""Writes the bf16 checkpoint for other frameworks: safetensors files with the source's tensors, names and shapes.

Tensors that the plan stores in bf16 are rounded once, from the checkpoint's own values: no BatchNorm is folded in. All
others are written unchanged. docs/decisions/0032 describes the layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir

from bf16kit.artifact.manifest import Segment
from bf16kit.artifact.reading import damaged_if_unreadable
from bf16kit.artifact.weightfile import ALIGNMENT, WeightWriter, little_endian_bytes
from bf16kit.messages.errors import ArtifactDamaged, RangeError, UsageError
from bf16kit.numerics.residual import bits_needed
from bf16kit.numerics.rounding import BF16, Census
from bf16kit.numerics.tensors import BY_NAME
from bf16kit.numerics.tensors import Array as Array
from converter.graph.equality import OTHER_FLOATS, in_fp32
from converter.graph.initializers import ComputedTensor, rows_of
from converter.plan import is_matrix
from converter.plan.decisions import Overrides
from converter.plan.ranges import complaint, take_census
from converter.rewrite import Prepared
from converter.rewrite.clampmasks import is_weight
from converter.write.roundweights import Rounding, WeightRounding

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_ROWS_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Selection:
    """The tensors of a checkpoint that an export rounds; those in ``masks`` saturate, as the graphs clamp them."""

    rounded: frozenset[str]
    masks: frozenset[str]
    weights: frozenset[str]


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """The place of an exported tensor: ``segment`` counts from the start of ``file``."""

    file: str
    dtype: str
    segment: Segment
    residual: Segment | None = None


@dataclass(slots=True)
class Exported:
    """The result of an export: the files, with the index last if there is one, and the place of each tensor.

    ``tensors`` and ``census`` (of the rounding) are by the checkpoint's names.
    """

    selection: Selection
    files: list[str] = field(default_factory=list)
    tensors: dict[str, ExportedTensor] = field(default_factory=dict)
    census: dict[str, Census] = field(default_factory=dict)


def select(
    checkpoint: Mapping[str, Array], prepared: Prepared, narrow: frozenset[str], overrides: Overrides
) -> Selection:
    """Select the tensors of ``checkpoint`` to become bf16.

    They are the tensors that a graph's plan stores so (``narrow``, by initializer) and, of tensors that no graph reads
    unchanged, the matrices.
    """
    rounded, masks, weights = set(), set(), set()
    for name, array in checkpoint.items():
        match = prepared.matches.get(name)
        if match is None:
            if _is_float(array) and _rounds(name, array, overrides):
                rounded.add(name)
        elif match.initializer in narrow:
            rounded.add(name)
            if match.initializer in prepared.clamped:
                masks.add(name)
            elif is_weight(prepared.reference.graph.initializers[match.initializer]):
                weights.add(name)
    return Selection(frozenset(rounded), frozenset(masks), frozenset(weights))


def _is_float(array: Array) -> bool:
    return array.dtype.name in ("float32", *OTHER_FLOATS)


def _rounds(name: str, array: Array, overrides: Overrides) -> bool:
    if overrides.keep_fp32_pattern(name) is not None:
        return False
    return overrides.bf16_pattern(name) is not None or is_matrix(array.shape)


def write_export(
    checkpoint: Mapping[str, Array],
    shards: Sequence[Sequence[str]],
    selection: Selection,
    directory: Path,
    rounding: Rounding,
    *,
    residual: WeightWriter | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Exported:
    """Write ``checkpoint`` into ``directory`` as one file, or as one file for each of ``shards``, with their index.

    ``residual`` gets what restores the rounded tensors. ``progress`` is called with bytes of the checkpoint. Raises
    :class:`RangeError` for weights that bf16 cannot hold; the files written so far are then useless.
    """
    exported = Exported(selection)
    groups = _names_by_file(checkpoint, shards)
    for number, names in enumerate(groups, start=1):
        name = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        with (directory / name).open("xb") as file:
            data = _lay_out(checkpoint, names, selection)
            head = header(data, metadata={"format": "pt"}, alignment=ALIGNMENT)
            file.write(head)
            for place in sorted(data, key=lambda place: place.start):
                residual_segment, chunks = None, _unchanged_chunks(checkpoint[place.name], progress)
                if place.name in selection.rounded:
                    narrowing = _narrowing(checkpoint[place.name], place.name, selection, rounding, progress)
                    residual_segment = _write_residual(narrowing, checkpoint[place.name], residual)
                    exported.census[place.name] = narrowing.census
                    chunks = iter([little_endian_bytes(narrowing.bf16)])
                for chunk in chunks:
                    file.write(chunk)
                segment = Segment(offset=len(head) + place.start, bytes=place.nbytes)
                exported.tensors[place.name] = ExportedTensor(name, place.dtype, segment, residual_segment)
        exported.files.append(name)
    if len(groups) > 1:
        (directory / INDEX).write_bytes(_index(exported))
        exported.files.append(INDEX)
    _check_ranges(exported.census, selection, rounding)
    return exported


def _names_by_file(checkpoint: Mapping[str, Array], shards: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the names in each file; tensors in no shard go to the last."""
    groups = [list(names) for names in shards] or [[]]
    known = {name for names in groups for name in names}
    groups[-1] += [name for name in checkpoint if name not in known]
    return groups


def _lay_out(checkpoint: Mapping[str, Array], names: Sequence[str], selection: Selection) -> list[Place]:
    """Return the place of each tensor, listed in the checkpoint's order; wide dtypes are placed first.

    The format allows no gaps, so this aligns each tensor to its own element size.
    """
    dtypes = {name: "bfloat16" if name in selection.rounded else checkpoint[name].dtype.name for name in names}
    empty = {name: Place(name, dtypes[name], checkpoint[name].shape, 0) for name in names}
    start, starts = 0, {}
    for name in sorted(names, key=lambda name: -_width(dtypes[name])):  # stable: the checkpoint's order within a width
        starts[name] = start
        start += empty[name].nbytes
    return [Place(name, dtypes[name], checkpoint[name].shape, starts[name]) for name in names]


def _width(dtype: str) -> int:
    return BF16.itemsize if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _unchanged_chunks(array: Array, progress: Callable[[int], None]) -> Iterator[memoryview]:
    step = max(1, _ROWS_BYTES // max(1, array.nbytes // max(1, len(array)))) if array.ndim else 1
    for start in range(0, len(array) if array.ndim else 1, step):
        block = rows_of(array, slice(start, start + step))
        yield little_endian_bytes(block)
        progress(block.nbytes)


def _narrowing(
    array: Array, name: str, selection: Selection, rounding: Rounding, progress: Callable[[int], None]
) -> WeightRounding:
    tensor = fp32_tensor(array, name)
    may_saturate = rounding.saturate or name in selection.masks
    # As in weights.bf16: infinities stay (they are masks) in a tensor where nothing overflows.
    saturate = may_saturate and take_census(tensor).overflow > 0
    return WeightRounding(tensor, np.empty(array.shape, BF16), Rounding(rounding.subnormals, saturate), progress)


def _write_residual(narrowing: WeightRounding, array: Array, residual: WeightWriter | None) -> Segment | None:
    if residual is None:
        for _ in narrowing.blocks():
            pass
        return None
    return residual.append_chunks(narrowing.residual(narrowing.tensor, None, bits_needed(array.dtype.name)))


def fp32_tensor(array: Array, name: str) -> ir.TensorProtocol:
    """Return ``array`` as a graph holds it: unchanged, or converted to fp32 whenever it is read."""
    if array.dtype.name not in OTHER_FLOATS:
        return ir.Tensor(array, name=name)
    like = ir.Tensor(np.broadcast_to(np.zeros((), np.float32), array.shape), name=name)
    return ComputedTensor(lambda rows: in_fp32(rows_of(array, rows)), like)


def _index(exported: Exported) -> bytes:
    total = sum(written.segment.bytes for written in exported.tensors.values())
    weight_map = {name: written.file for name, written in exported.tensors.items()}
    fields = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


def _check_ranges(found: Mapping[str, Census], selection: Selection, rounding: Rounding) -> None:
    for name, counts in sorted(found.items()):
        saturates = rounding.saturate or name in selection.masks
        problem = complaint(counts, name in selection.weights, not saturates)
        if problem is not None:
            raise RangeError(f"tensor {name!r}: {problem}")


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
