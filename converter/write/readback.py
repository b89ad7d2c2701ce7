"""Reads back the written files: each checkpoint tensor must be restored bit for bit, each bf16 value be the nearest.

The reference for drift is itself decoded from these files. A fault in writing them would be on both sides of the
comparison, and not show. This pass compares the closed files with the source's own memory, by code that did not write
them. The decoding is what ``restore`` uses; the rounding rule is implemented a second time here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import RESIDUAL, TensorEntry
from bf16kit.messages.errors import ArtifactDamaged, ConversionError
from bf16kit.numerics.rounding import BF16, Subnormals
from bf16kit.numerics.tensors import Array as Array
from converter.graph.equality import in_fp32, same_bits
from converter.graph.initializers import const, stays_inline
from converter.plan.profiles import PROFILES
from converter.rewrite import Prepared
from converter.write.export import INDEX, Exported, read
from converter.write.insertcasts import NARROWED
from converter.write.weights import StoredWeights

Advance = Callable[[int], None]

_BLOCK = 1 << 14  # elements: the C library reuses the memory of small arrays, but maps large ones anew each time
_SIGN, _MAGNITUDE = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_SCALED_SLACK = 4  # fp32 ulps: the stored scale is fp32, but the weight was multiplied by it in float64
_LARGEST, _SMALLEST_NORMAL = np.uint32(0x7F7F), np.uint32(0x0080)


@dataclass(frozen=True, slots=True)
class Rounding:
    """The bf16 values that a conversion's options allow. ``nearest``: only the nearest neighbour, not the other one."""

    subnormals: Subnormals = "keep"
    saturate: bool = False
    nearest: bool = True


def total(artifact: Artifact, checkpoint: Mapping[str, Array]) -> int:
    """Return the bytes that ``advance`` will have been called with when :func:`check` returns."""
    restored = sum(checkpoint[entry.name].nbytes for entry in artifact.manifest.checkpoint if entry.name in checkpoint)
    return restored + sum(entry.bytes for entry in artifact.manifest.tensors)


def check(
    artifact: Artifact,
    prepared: Prepared,
    stored: StoredWeights,
    checkpoint: Mapping[str, Array],
    rounding: Rounding,
    advance: Advance,
) -> None:
    """Compare the files of ``artifact`` with the source, in one pass, one tensor in memory at a time.

    ``advance`` is called with the bytes compared (:func:`total`). Without a residual, only the rounding is checked,
    because nothing can be restored. Raises :class:`ConversionError` that names the first tensor that differs.
    """

    def allowed(name: str) -> Rounding:
        return replace(rounding, saturate=rounding.saturate or name in prepared.clamped)

    with _explaining_damage():
        _check_tensors(artifact, _origins(artifact, prepared, stored), checkpoint, allowed, advance)
        _check_constants(artifact, prepared)


def check_without_graph(artifact: Artifact, checkpoint: Mapping[str, Array], advance: Advance) -> None:
    """Do as :func:`check` for an artifact without a graph, whose tensors are the checkpoint's own."""
    origins = {entry.tensor: partial(checkpoint.__getitem__, entry.name) for entry in artifact.manifest.checkpoint}
    with _explaining_damage():
        _check_tensors(artifact, origins, checkpoint, lambda _: Rounding(), advance)


def check_export(directory: Path, exported: Exported, checkpoint: Mapping[str, Array], rounding: Rounding) -> None:
    """Read the export's files in ``directory`` back, as another program would, and compare them with ``checkpoint``.

    Raises :class:`ConversionError` that names the first tensor that differs.
    """
    found: dict[str, Array] = {}
    try:
        for name in exported.files:
            if name != INDEX:
                found |= read(directory / name)
    except ArtifactDamaged as error:
        raise ConversionError(f"the export cannot be read back: {error}; nothing was published") from error
    if found.keys() != checkpoint.keys():
        raise _fault(min(found.keys() ^ checkpoint.keys()), "is missing from either the checkpoint or its export")
    for name, array in checkpoint.items():
        if name not in exported.selection.rounded:
            _check_same(name, array, found[name], "is not exported unchanged")
            continue
        if found[name].dtype != BF16 or found[name].shape != array.shape:
            raise _fault(name, f"is exported with another dtype or shape ({_difference(array, found[name])})")
        allowed = replace(rounding, saturate=rounding.saturate or name in exported.selection.masks)
        wrong = sum(
            int(np.count_nonzero(_misrounded(in_fp32(block), stored, None, allowed)))
            for block, stored, _ in _blocks(array, found[name], None, None)
        )
        if wrong:
            raise _fault(
                name, f"has {wrong} of {array.size} exported values that differ from the source's rounded values"
            )


@contextmanager
def _explaining_damage() -> Iterator[None]:
    try:
        yield
    except ArtifactDamaged as error:
        raise ConversionError(f"what was written cannot be read back: {error}; nothing was published") from error


def _check_tensors(
    artifact: Artifact,
    origins: Mapping[str, Callable[[], Array]],
    checkpoint: Mapping[str, Array],
    allowed: Callable[[str], Rounding],
    advance: Advance,
) -> None:
    """Compare the restored tensors with the checkpoint's, and each stored tensor with its origin.

    A tensor without an origin is read by no graph; it restores a tensor of the checkpoint, or is a scale.
    """
    entries = {entry.name: entry for entry in artifact.manifest.checkpoint}
    unseen = {entry.name: entry for entry in artifact.manifest.tensors}
    if entries:
        missing = (name for name in sorted(checkpoint.keys() - entries.keys()))
        unwritten = next((name for name in missing if checkpoint[name].dtype != np.float64), None)
        if unwritten is not None:
            raise _fault(unwritten, "was not written, so it could not be restored")
    restored = []
    for name, array in artifact.checkpoint_tensors():
        source = checkpoint.get(name)
        if source is None:
            raise _fault(name, "was written, but is not in the checkpoint")
        if source.dtype == np.float64 and array.dtype == np.float32:
            source = in_fp32(source)  # narrowed when it was read, with a note; fp32 is what is restored
        _check_same(name, source, array, "is not restored bit for bit")
        restored.append(name)
        advance(checkpoint[name].nbytes)
        stored = unseen.pop(entries[name].tensor, None)
        if stored is not None:
            _check_stored(artifact, stored, origins, allowed)
            advance(stored.bytes)
    if restored != list(entries):
        raise _fault(min({*entries} ^ {*restored}, default="any"), "is not restored exactly once")
    for stored in unseen.values():
        origin = _check_stored(artifact, stored, origins, allowed)
        if origin is not None and stored.residual is not None:
            _check_same(stored.name, origin, artifact.restore(stored.name), "is not restored bit for bit")
        advance(stored.bytes)


def _check_same(name: str, source: Array, found: Array, what: str) -> None:
    if not same_bits(source, found):
        raise _fault(name, f"{what} ({_difference(source, found)})")


def _check_stored(
    artifact: Artifact,
    entry: TensorEntry,
    origins: Mapping[str, Callable[[], Array]],
    allowed: Callable[[str], Rounding],
) -> Array | None:
    """Compare one stored tensor with the graph's weight that it was made from, if there is one, and return that."""
    if entry.name not in origins:
        return None
    origin, array = origins[entry.name](), artifact.tensor(entry.name)
    if entry.dtype != "bfloat16" or origin.dtype != np.float32:
        _check_same(entry.name, origin, array, "is not stored unchanged")
        return origin
    scale, rounding = None if entry.scale is None else artifact.tensor(entry.scale), allowed(entry.name)
    wrong = sum(
        int(np.count_nonzero(_misrounded(weight, found, factor, rounding)))
        for weight, found, factor in _blocks(origin, array, scale, entry.scale_axis)
    )
    if wrong:
        raise _fault(
            entry.name, f"has {wrong} of {array.size} bf16 values that differ from the source's rounded values"
        )
    return origin


def _origins(artifact: Artifact, prepared: Prepared, stored: StoredWeights) -> dict[str, Callable[[], Array]]:
    """Return the weight that each stored tensor was made from: the reference's or, if only profiles read it, theirs.

    Tensors that no graph reads are stored beside the residual, and are compared with the checkpoint alone.
    """
    manifest = artifact.manifest
    lowered = {alias: name for name, alias in stored.aliases.items()}
    scales = {entry.scale for entry in manifest.tensors}
    base = prepared.base if manifest.reference is None else prepared.reference
    origins = {}
    for entry in manifest.tensors:
        if entry.file == RESIDUAL or entry.name in scales:
            continue
        name = lowered.get(entry.name, entry.name)
        for model in (prepared.base if entry.name in lowered else base, prepared.base):
            tensor = const(model.graph.initializers.get(name))
            if tensor is not None:
                origins[entry.name] = tensor.numpy
                break
    return origins


def _check_constants(artifact: Artifact, prepared: Prepared) -> None:
    """Compare the constants within each graph with those of the prepared graph that it was made from."""
    manifest = artifact.manifest
    profiles = {name: entry for name, entry in manifest.profiles.items() if name in PROFILES}
    bases = {entry.graph: PROFILES[name].base(prepared) for name, entry in profiles.items()}
    if manifest.reference is not None:
        bases[manifest.reference] = prepared.reference
    for file, base in bases.items():
        origins = base.graph.initializers
        for name, value in ir.load(artifact.file(file)).graph.initializers.items():
            found, origin = const(value), const(origins.get(name, origins.get(name.rpartition(NARROWED)[0])))
            if found is None or origin is None or not stays_inline(origin):
                continue
            source, stored, what = origin.numpy(), found.numpy(), f"is not written into {file} as it is"
            if origin.dtype == found.dtype:
                _check_same(name, source, stored, what)
            elif _misrounded(np.atleast_1d(source), np.atleast_1d(stored), None, Rounding()).any():
                raise _fault(name, f"is not rounded to nearest in {file}")


def _blocks(
    source: Array, array: Array, scale: Array | None, axis: int | None
) -> Iterator[tuple[Array, Array, Array | None]]:
    """Yield blocks of rows of a weight, of its stored values, and of its scale, shaped to broadcast with them."""
    if scale is not None and axis is not None:
        scale = scale.reshape([-1 if i == axis else 1 for i in range(source.ndim)])
    if source.ndim == 0:
        yield source.reshape(1), array.reshape(1), scale
        return
    rows = max(1, _BLOCK // max(1, source[:1].size))
    for start in range(0, len(source), rows):
        chosen = slice(start, start + rows)
        factor = scale if scale is None or len(scale) == 1 else scale[chosen]
        yield np.ascontiguousarray(source[chosen]), np.ascontiguousarray(array[chosen]), factor


def _misrounded(source: Array, stored: Array, scale: Array | None, rounding: Rounding) -> NDArray[np.bool_]:
    """Return where ``stored`` is no bf16 value that ``source``, fp32 and multiplied by ``scale``, may be rounded to."""
    found = stored.view(np.uint16).astype(np.uint32)
    if scale is None:
        bits, slack = source.view(np.uint32), 0
    else:
        with np.errstate(all="ignore"):  # values that are not finite are compared as such
            product = (source.astype(np.float64) * scale.astype(np.float64)).astype(np.float32)
        bits, slack = product.view(np.uint32), _SCALED_SLACK
    magnitude = bits & _MAGNITUDE
    nan = magnitude > _INFINITY
    least = most = _rounded(magnitude, rounding)
    if slack:
        least = _rounded(np.where(magnitude > slack, magnitude - np.uint32(slack), np.uint32(0)), rounding)
        most = _rounded(np.where(nan, magnitude, np.minimum(magnitude + np.uint32(slack), _INFINITY)), rounding)
    if not rounding.nearest:  # then either neighbour is allowed
        least = np.minimum(least, magnitude >> np.uint32(16))
        most = np.maximum(most, (magnitude + np.uint32(0xFFFF)) >> np.uint32(16))
    kept = found & np.uint32(0x7FFF)
    right = (kept >= least) & (kept <= most) & ((found << np.uint32(16) & _SIGN) == (bits & _SIGN))
    return np.where(nan, kept <= np.uint32(0x7F80), ~right)


def _rounded(magnitude: NDArray[np.uint32], rounding: Rounding) -> NDArray[np.uint32]:
    """Round the bits of fp32 magnitudes to nearest, ties to even: add half of the last place, and a tie's odd bit."""
    odd = (magnitude >> np.uint32(16)) & np.uint32(1)
    result = (np.minimum(magnitude, _INFINITY) + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    if rounding.saturate:
        result = np.minimum(result, _LARGEST)
    if rounding.subnormals == "flush":
        result = np.where(result < _SMALLEST_NORMAL, np.uint32(0), result)
    return result


def _difference(source: Array, found: Array) -> str:
    if source.dtype != found.dtype or source.shape != found.shape:
        return f"{source.dtype.name}{list(source.shape)} became {found.dtype.name}{list(found.shape)}"
    a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (source, found))
    first = int(np.flatnonzero(a != b)[0]) // source.dtype.itemsize
    place = tuple(int(index) for index in np.unravel_index(first, source.shape))
    return f"the first difference is at {list(place)}: {source[place]!s} became {found[place]!s}"


def _fault(name: str, what: str) -> ConversionError:
    return ConversionError(
        f"tensor {name!r} {what}; nothing was published. The written files are wrong: either a bug in bf16-convert,"
        " or a fault of this machine's memory or disk. Run it again, and report it if it happens again"
    )
