"""Reads back the written files: each checkpoint tensor must be restored bit for bit, each bf16 value be the nearest.

The reference for drift is itself decoded from these files. A fault in writing them would be on both sides of the
comparison, and not show. This pass compares the closed files with the source's own memory, by code that did not write
them. The decoding is what ``restore`` uses; the rounding rule is implemented a second time here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import RESIDUAL, TensorEntry
from bf16kit.converter.graph.equality import in_fp32, same_bits
from bf16kit.converter.graph.initializers import const, stays_inline
from bf16kit.converter.plan.profiles import PROFILES
from bf16kit.converter.rewrite import Prepared
from bf16kit.converter.write.export import INDEX, Exported, read
from bf16kit.converter.write.graphs import NARROWED
from bf16kit.converter.write.weights import Rounding, StoredWeights
from bf16kit.messages.errors import ArtifactDamaged, ConversionError
from bf16kit.numerics.rounding import BF16
from bf16kit.numerics.tensors import Array

Advance = Callable[[int], None]
Origins = Mapping[str, Callable[[], Array]]

_BLOCK = 1 << 14  # elements: the C library reuses the memory of small arrays, but maps large ones anew each time
_SIGN, _MAGNITUDE = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_SCALED_SLACK = np.uint32(4)  # fp32 ulps: the stored scale is fp32, but the weight was multiplied by it in float64
_LARGEST, _SMALLEST_NORMAL = np.uint32(0x7F7F), np.uint32(0x0080)


@contextmanager
def _explaining_damage() -> Iterator[None]:
    try:
        yield
    except ArtifactDamaged as error:
        raise ConversionError(f"what was written cannot be read back: {error}; nothing was published") from error


def total(artifact: Artifact, checkpoint: Mapping[str, Array]) -> int:
    """Return the bytes that ``advance`` will have been called with when :func:`check` returns."""
    restored = sum(checkpoint[entry.name].nbytes for entry in artifact.manifest.checkpoint if entry.name in checkpoint)
    return restored + sum(entry.bytes for entry in artifact.manifest.tensors)


@_explaining_damage()
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

    _check_tensors(artifact, _origins(artifact, prepared, stored), checkpoint, allowed, advance)
    _check_constants(artifact, prepared)


@_explaining_damage()
def check_without_graph(artifact: Artifact, checkpoint: Mapping[str, Array], advance: Advance) -> None:
    """Do as :func:`check` for an artifact without a graph, whose tensors are the checkpoint's own."""
    origins = {entry.tensor: partial(checkpoint.__getitem__, entry.name) for entry in artifact.manifest.checkpoint}
    _check_tensors(artifact, origins, checkpoint, lambda _: Rounding(), advance)


@_explaining_damage()
def check_export(directory: Path, exported: Exported, checkpoint: Mapping[str, Array], rounding: Rounding) -> None:
    """Read the export's files in ``directory`` back, as another program would, and compare them with ``checkpoint``.

    Raises :class:`ConversionError` that names the first tensor that differs.
    """
    found: dict[str, Array] = {}
    for file in exported.files:
        found |= {} if file == INDEX else read(directory / file)
    if found.keys() != checkpoint.keys():
        raise _fault(min(found.keys() ^ checkpoint.keys()), "is missing from either the checkpoint or its export")
    for name, array in checkpoint.items():
        if name not in exported.selection:
            _check_same(name, array, found[name], "is not exported unchanged")
        elif found[name].dtype != BF16 or found[name].shape != array.shape:
            raise _fault(name, f"is exported as {found[name].dtype.name}{list(found[name].shape)}")
        else:
            allowed = replace(rounding, saturate=rounding.saturate or exported.selection[name] == "mask")
            _check_rounded(name, "exported", array, found[name], allowed)


def _check_tensors(
    artifact: Artifact,
    origins: Origins,
    checkpoint: Mapping[str, Array],
    allowed: Callable[[str], Rounding],
    advance: Advance,
) -> None:
    """Compare the restored tensors with the checkpoint's, and each stored tensor with its origin.

    A tensor without an origin is read by no graph; it restores a tensor of the checkpoint, or is a scale.
    """
    entries = artifact.manifest.checkpoint
    unseen = {entry.name: entry for entry in artifact.manifest.tensors}
    different = checkpoint.keys() ^ {entry.name for entry in entries}
    if entries and different:
        raise _fault(min(different), "is missing from either the checkpoint or what was written")
    restored = artifact.checkpoint_tensors()
    for entry in entries:
        name, array = next(restored, ("", np.empty(0)))
        if name != entry.name:
            raise _fault(entry.name, "is not restored exactly once")
        source = checkpoint[name]
        if source.dtype == np.float64 and array.dtype == np.float32:
            source = in_fp32(source)  # narrowed when it was read, with a note; fp32 is what is restored
        _check_same(name, source, array, "is not restored bit for bit")
        advance(checkpoint[name].nbytes)
        stored = unseen.pop(entry.tensor, None)
        if stored is not None:
            _check_stored(artifact, stored, origins, allowed)
            advance(stored.bytes)
    for stored in unseen.values():
        _check_stored(artifact, stored, origins, allowed)
        if stored.name in origins and stored.residual is not None:
            origin = origins[stored.name]()
            _check_same(stored.name, origin, artifact.restore(stored.name), "is not restored bit for bit")
        advance(stored.bytes)


def _check_stored(artifact: Artifact, entry: TensorEntry, origins: Origins, allowed: Callable[[str], Rounding]) -> None:
    """Compare one stored tensor with the graph's weight that it was made from, if there is one."""
    if entry.name not in origins:
        return
    origin, array = origins[entry.name](), artifact.tensor(entry.name)
    if entry.dtype != "bfloat16" or origin.dtype != np.float32:
        _check_same(entry.name, origin, array, "is not stored unchanged")
        return
    scale = None
    if entry.scale is not None:
        scale = artifact.tensor(entry.scale).reshape([-1 if i == entry.scale_axis else 1 for i in range(origin.ndim)])
    _check_rounded(entry.name, "bf16", origin, array, allowed(entry.name), scale)


def _origins(artifact: Artifact, prepared: Prepared, stored: StoredWeights) -> dict[str, Callable[[], Array]]:
    """Return the weight that each stored tensor was made from: the reference's or, if only profiles read it, theirs.

    Tensors that no graph reads are stored beside the residual, and are compared with the checkpoint alone.
    """
    manifest, base = artifact.manifest, dict(prepared.base.graph.initializers)
    held = base if manifest.reference is None else base | dict(prepared.reference.graph.initializers)
    held |= {alias: base[name] for name, alias in stored.aliases.items()}
    elsewhere = {entry.scale for entry in manifest.tensors}
    elsewhere |= {entry.name for entry in manifest.tensors if entry.file == RESIDUAL}
    tensors = {entry.name: const(held.get(entry.name)) for entry in manifest.tensors if entry.name not in elsewhere}
    return {name: tensor.numpy for name, tensor in tensors.items() if tensor is not None}


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
            source, stored = origin.numpy(), found.numpy()
            if origin.dtype == found.dtype:
                _check_same(name, source, stored, f"is not written into {file} as it is")
            elif misrounded(np.atleast_1d(source), np.atleast_1d(stored), Rounding()).any():
                raise _fault(name, f"is not rounded to nearest in {file}")


def _check_same(name: str, source: Array, found: Array, what: str) -> None:
    if same_bits(source, found):
        return
    a, b = (f"{array.dtype.name}{list(array.shape)}" for array in (source, found))
    if a != b:
        raise _fault(name, f"{what} ({a} became {b})")
    left, right = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (source, found))
    first = int(np.flatnonzero(left != right)[0]) // source.dtype.itemsize
    place = tuple(int(index) for index in np.unravel_index(first, source.shape))
    changed = f"{source[place]!s} became {found[place]!s}"
    raise _fault(name, f"{what} (the first difference is at {list(place)}: {changed})")


def _check_rounded(
    name: str, kind: str, source: Array, found: Array, rounding: Rounding, scale: Array | None = None
) -> None:
    """Compare the bf16 tensor ``found`` with ``source`` times ``scale``, a block of rows at a time."""
    values, stored = np.atleast_1d(source), np.atleast_1d(found)
    rows, wrong = max(1, _BLOCK // max(1, values[:1].size)), 0
    for start in range(0, len(values), rows):
        chosen = slice(start, start + rows)
        block = values[chosen] if values.dtype == np.float32 else in_fp32(values[chosen])
        factor = scale if scale is None or len(scale) == 1 else scale[chosen]
        wrong += int(np.count_nonzero(misrounded(block, stored[chosen], rounding, factor)))
    if wrong:
        what = f"has {wrong} of {source.size} {kind} values that differ from the source's rounded values"
        raise _fault(name, what)


def misrounded(source: Array, stored: Array, rounding: Rounding, scale: Array | None = None) -> NDArray[np.bool_]:
    """Return where ``stored`` is not the bf16 value of ``source``, fp32, multiplied by ``scale`` and then rounded."""
    found = np.ascontiguousarray(stored).view(np.uint16).astype(np.uint32)
    if scale is not None:
        with np.errstate(all="ignore"):  # values that are not finite are compared as such
            source = (source.astype(np.float64) * scale.astype(np.float64)).astype(np.float32)
    bits = np.ascontiguousarray(source).view(np.uint32)
    magnitude = bits & _MAGNITUDE
    nan = magnitude > _INFINITY
    least = most = _rounded(magnitude, rounding)
    if scale is not None:
        least = _rounded(np.where(magnitude > _SCALED_SLACK, magnitude - _SCALED_SLACK, np.uint32(0)), rounding)
        most = _rounded(np.where(nan, magnitude, np.minimum(magnitude + _SCALED_SLACK, _INFINITY)), rounding)
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


def _fault(name: str, what: str) -> ConversionError:
    return ConversionError(
        f"tensor {name!r} {what}; nothing was published. The written files are wrong: either a bug in bf16-convert,"
        " or a fault of this machine's memory or disk. Run it again, and report it if it happens again"
    )
