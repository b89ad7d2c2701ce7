"""Writes the bf16 checkpoint for other frameworks: safetensors files with the source's tensors, names and shapes.

Tensors that the plan stores in bf16 are rounded once, from the checkpoint's own values: no BatchNorm is folded in. All
others are written unchanged. docs/decisions/0032 describes the layout.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir

from bf16kit.artifact.manifest import Segment, TensorEntry
from bf16kit.artifact.reading import damaged_if_unreadable
from bf16kit.artifact.weightfile import ALIGNMENT, WeightWriter, little_endian_bytes
from bf16kit.converter.graph.equality import OTHER_FLOATS, in_fp32
from bf16kit.converter.graph.initializers import ComputedTensor, blocks, rows_of
from bf16kit.converter.plan import complaint, is_matrix
from bf16kit.converter.plan.decisions import Overrides
from bf16kit.converter.rewrite import Prepared
from bf16kit.converter.rewrite.clampmasks import is_weight
from bf16kit.converter.write.weights import Rounding, round_weight, tensor_entry
from bf16kit.messages.errors import ArtifactDamaged, Bf16kitError, RangeError, UsageError
from bf16kit.numerics.residual import bits_needed
from bf16kit.numerics.rounding import Census
from bf16kit.numerics.tensors import BY_NAME, Array

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


# The tensors of a checkpoint that an export rounds. Masks saturate, as the graphs clamp them; weights must be finite.
Selection = Mapping[str, Literal["mask", "weight", "other"]]


@dataclass(slots=True)
class Exported:
    """The result of an export: the files, with the index last if there is one, and the place of each tensor.

    ``tensors`` and ``census`` (of the rounding) are by the checkpoint's names.
    """

    selection: Selection
    files: list[str] = field(default_factory=list)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    census: dict[str, Census] = field(default_factory=dict)


def select(
    checkpoint: Mapping[str, Array], prepared: Prepared, narrow: frozenset[str], overrides: Overrides
) -> Selection:
    """Select the tensors of ``checkpoint`` to become bf16.

    They are the tensors that a graph's plan stores so (``narrow``, by initializer) and, of tensors that no graph reads
    unchanged, the matrices.
    """
    selected: dict[str, Literal["mask", "weight", "other"]] = {}
    for name, array in checkpoint.items():
        match = prepared.matches.get(name)
        if match is None:
            wanted = overrides.bf16_pattern(name) is not None or is_matrix(array.shape)
            is_float = array.dtype.name in ("float32", *OTHER_FLOATS)
            if is_float and wanted and overrides.keep_fp32_pattern(name) is None:
                selected[name] = "other"
        elif match.initializer in narrow:
            weight = is_weight(prepared.reference.graph.initializers[match.initializer])
            selected[name] = "mask" if match.initializer in prepared.clamped else "weight" if weight else "other"
    return selected


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

    Tensors in no shard go into the last file. ``residual`` gets what restores the rounded tensors. ``progress`` is
    called with bytes of the checkpoint. Raises :class:`RangeError` for weights that bf16 cannot hold; the files written
    so far are then useless.
    """
    exported = Exported(selection)
    groups = [list(names) for names in shards] or [[]]
    known = {name for names in groups for name in names}
    groups[-1] += [name for name in checkpoint if name not in known]
    for number, names in enumerate(groups, start=1):
        file_name = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        dtypes = {name: "bfloat16" if name in selection else checkpoint[name].dtype.name for name in names}
        places = [Place(name, dtype, checkpoint[name].shape) for name, dtype in dtypes.items()]
        _lay_out(places)
        head = header(places, metadata={"format": "pt"}, alignment=ALIGNMENT)
        with (directory / file_name).open("xb") as file:
            file.write(head)
            for place in sorted(places, key=lambda place: place.start):
                name, segment = place.name, None
                tensor = fp32_tensor(checkpoint[name], name)
                if name in selection:
                    allowed = Rounding(rounding.subnormals, rounding.saturate or selection[name] == "mask")
                    low_bits = bits_needed(checkpoint[name].dtype.name)
                    bf16, counts, segment = round_weight(
                        tensor, allowed, progress, residual, original=tensor, low_bits=low_bits
                    )
                    problem = complaint(counts, selection[name] == "weight", not allowed.saturate)
                    if problem is not None:
                        raise RangeError(f"tensor {name!r}: {problem}")
                    exported.census[name] = counts
                    file.write(little_endian_bytes(bf16))
                else:
                    for _, array in blocks(ir.Tensor(checkpoint[name])):
                        file.write(little_endian_bytes(array))
                        progress(array.nbytes)
                at = Segment(offset=len(head) + place.start, bytes=place.nbytes)
                dtype = BY_NAME[place.dtype].numpy
                exported.tensors[name] = tensor_entry(name, dtype, place.shape, file_name, at, segment)
        exported.files.append(file_name)
    if len(groups) > 1:
        nbytes = sum(entry.bytes for entry in exported.tensors.values())
        held_in = {name: entry.file for name, entry in exported.tensors.items()}
        fields = {"metadata": {"total_size": nbytes}, "weight_map": held_in}
        (directory / INDEX).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
        exported.files.append(INDEX)
    return exported


def fp32_tensor(array: Array, name: str) -> ir.TensorProtocol:
    """Return ``array`` as a graph holds it: unchanged, or converted to fp32 whenever it is read."""
    if array.dtype.name not in OTHER_FLOATS:
        return ir.Tensor(array, name=name)
    like = ir.Tensor(np.broadcast_to(np.zeros((), np.float32), array.shape), name=name)
    return ComputedTensor(lambda rows: in_fp32(rows_of(array, rows)), like)


DTYPES: Mapping[str, str] = {"bool": "BOOL", "bfloat16": "BF16"} | {
    f"{kind}{bits}": f"{kind[0].upper()}{bits}"
    for kind, widths in (("uint", (8, 16, 32, 64)), ("int", (8, 16, 32, 64)), ("float", (16, 32, 64)))
    for bits in widths
}
_OWN_NAMES = {theirs: ours for ours, theirs in DTYPES.items()}
_METADATA = "__metadata__"


@dataclass(slots=True)
class Place:
    """One tensor of a file: bf16kit's name of its dtype, its shape, and the offset ``start`` in the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def itemsize(self) -> int:
        return BY_NAME[self.dtype].numpy.itemsize if self.dtype in BY_NAME else 0


def _lay_out(places: Sequence[Place]) -> None:
    """Give ``places`` their offsets. The format allows no gaps; with wide dtypes first, all are aligned."""
    start = 0
    for place in sorted(places, key=lambda place: -place.itemsize):  # stable: in the order given within a width
        place.start = start
        start += place.nbytes


def header(places: Iterable[Place], *, metadata: Mapping[str, str] | None = None, alignment: int = 8) -> bytes:
    """Return the bytes before the data, which then starts at a multiple of ``alignment``; tensors are listed as given.

    Raises :class:`UsageError` for a name or a dtype that a safetensors file cannot hold.
    """
    fields: dict[str, object] = {} if metadata is None else {_METADATA: dict(metadata)}
    for place in places:
        if place.name == _METADATA:
            raise UsageError(f"a tensor is named {_METADATA!r}, which safetensors reserves; rename the tensor")
        if place.dtype not in DTYPES:
            raise UsageError(f"tensor {place.name!r} is {place.dtype}, which safetensors cannot hold")
        offsets = [place.start, place.start + place.nbytes]
        fields[place.name] = {"dtype": DTYPES[place.dtype], "shape": list(place.shape), "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def read(path: Path, error: type[Bf16kitError] = ArtifactDamaged) -> dict[str, Array]:
    """Return every tensor of one file by name, in the order of its header, as views of the mapped file.

    The safetensors library checks the format's rules. Its own arrays would be copies, so the views are made here.
    Raises ``error`` if the file cannot be read or is damaged.
    """
    from safetensors import SafetensorError, safe_open

    with damaged_if_unreadable(path, error):
        try:
            with safe_open(path, framework="numpy"), path.open("rb") as file:
                # Copy-on-write: torch warns about read-only arrays, and the file must never change.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except SafetensorError as wrong:
            raise error(f"{path}: truncated or damaged: {wrong}") from None
    start = 8 + int.from_bytes(mapped[:8], "little")
    found = {}
    for name, entry in json.loads(mapped[8:start]).items():
        if name != _METADATA:
            shape, dtype = tuple(entry["shape"]), _OWN_NAMES.get(entry["dtype"])
            if dtype is None:
                known = ", ".join(_OWN_NAMES)
                raise error(f"{path}: tensor {name!r} has the unknown dtype {entry['dtype']!r}; known: {known}")
            flat = np.frombuffer(mapped, BY_NAME[dtype].numpy, math.prod(shape), start + entry["data_offsets"][0])
            found[name] = flat.reshape(shape)
    return found
