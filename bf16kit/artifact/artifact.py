"""Opens an artifact: checks every file before use, maps tensors from disk and restores the fp32 checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bf16kit.artifact.manifest import RESIDUAL, Manifest, Segment, TensorEntry
from bf16kit.artifact.reading import (
    Digests,
    check_files,
    damaged_if_unreadable,
    open_inside,
    read_bounded,
    read_manifest,
    read_segment,
)
from bf16kit.drift.measurements import MAX_BYTES, Measurements
from bf16kit.drift.slices import Scales, Values
from bf16kit.messages.errors import ArtifactDamaged, ArtifactError
from bf16kit.numerics import panels
from bf16kit.numerics.residual import Decoder, Scale
from bf16kit.numerics.rounding import BF16
from bf16kit.numerics.tensors import BY_NAME
from bf16kit.numerics.tensors import Array as Array

_BLOCK = 4 << 20  # bytes of bf16 that are unpacked from panels at a time


def _numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype that safetensors calls ``name``; ValueError or TypeError for one that numpy does not have."""
    return BF16 if name == "BF16" else np.dtype(bool if name == "BOOL" else f"{name[0].lower()}{int(name[1:]) // 8}")


@dataclass(frozen=True, slots=True)
class Golden:
    """Golden samples: a few inputs, the reference's outputs for them, and by output what its slices are judged against.

    These ``scales`` are the variation over all of the conversion's samples, absent before schema version 7.
    """

    inputs: dict[str, Array]
    outputs: dict[str, Array]
    scales: dict[str, Scales]


@dataclass(frozen=True, eq=False)
class Artifact:
    """One converted model version, opened read-only. Its tensors are views of memory-mapped files.

    With ``copies``, files are read into memory instead of mapped. A process that maps a file dies of SIGBUS when the
    file is truncated in place, and sees the new bytes when it is overwritten in place.
    """

    path: Path
    manifest: Manifest = field(repr=False)
    copies: bool = False
    _maps: dict[str, NDArray[np.uint8]] = field(default_factory=dict, repr=False)
    _digests: Digests = field(default_factory=Digests, repr=False)

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True, copies: bool = False) -> Artifact:
        """Open the artifact in directory ``path``; files that its manifest does not list are ignored.

        Names, links and sizes are always checked, and unless ``verify`` is false the sha256 of every file. Raises
        :class:`ArtifactError` when the directory is no artifact, :class:`ManifestVersionError` when the artifact is
        newer than this program, and :class:`ArtifactDamaged`, naming the file, when a file is missing or changed.
        """
        artifact = cls(Path(path), read_manifest(Path(path)), copies)
        check_files(artifact.path, artifact.manifest)
        if verify:
            artifact.verify()
        return artifact

    def verify(self) -> None:
        """Hash every file, in parallel; raise ArtifactDamaged for the first whose sha256 differs from the manifest's.

        A later call reads only the files that changed since. So a caller that has read the files in between can call it
        again to make sure that it read what was verified.
        """

        def sha256(name: str) -> str:
            with damaged_if_unreadable(self.path / name):
                return self._digests.entry(self.path / name).sha256

        largest_first = sorted(self.manifest.files.items(), key=lambda item: -item[1].bytes)
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            found = pool.map(sha256, [name for name, _ in largest_first])
            for (name, entry), digest in zip(largest_first, found, strict=True):
                if digest != entry.sha256:
                    raise ArtifactDamaged(
                        f"{self.path / name}: its sha256 is {digest[:12]}…, the manifest says {entry.sha256[:12]}…;"
                        " copy or convert the artifact again"
                    )

    def file(self, name: str) -> Path:
        """Return the path of a file that the manifest lists; ArtifactError for any other name."""
        if name not in self.manifest.files:
            raise ArtifactError(f"{self.path}: no file {name!r} in this artifact")
        return self.path / name

    def tensor(self, name: str) -> Array:
        """Return the tensor at its stored dtype (bfloat16, float32, ...): a read-only view of the mapped file.

        A tensor stored as panels is unpacked into memory, in C order.
        """
        entry = self._entry(name)
        flat = self._flat(entry)
        if entry.panels is None:
            return flat.reshape(entry.shape)
        matrix = panels.unpack(flat, entry.shape, entry.panels)
        matrix.flags.writeable = False
        return matrix

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(self._entry(name).shape)

    def restore(self, name: str, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Return the tensor in fp32, bit for bit as it was before rounding.

        A tensor stored as fp32 is returned as stored. The result is written to ``out`` when given: same shape,
        C-contiguous. Little memory is needed beyond the result.

        Raises ArtifactError when the artifact was converted without its residual, or when the tensor is neither fp32
        nor bf16.
        """
        entry = self._entry(name)
        if entry.dtype == "float32":
            if out is None:
                return self.tensor(name)
            out[...] = self.tensor(name)
            return out
        if entry.dtype != "bfloat16":
            raise ArtifactError(f"{self.path}: tensor {name!r} is {entry.dtype}, which was not rounded")
        if entry.residual is None:
            raise ArtifactError(
                f"{self.path}: no residual of tensor {name!r}, fp32 cannot be restored; convert without --no-residual"
            )
        shape, scale = tuple(entry.shape), None
        if entry.scale is not None and entry.scale_axis is not None:
            try:
                scale = Scale(entry.scale_axis, self.tensor(entry.scale))
            except ValueError as error:
                raise ArtifactDamaged(f"{self.path}: the scale of tensor {name!r}: {error}") from None
        decoder = Decoder(self._bytes(RESIDUAL, entry.residual).data, shape, scale)
        restored = np.empty(shape, np.float32) if out is None else out
        if entry.panels is None:
            decoder.rows(self.tensor(name), restored)
            return restored
        flat, row = self._flat(entry), max(1, 2 * math.prod(shape[1:]))
        step = max(1, _BLOCK // row // panels.WIDTH) * panels.WIDTH
        for start in range(0, shape[0], step):
            stop = min(start + step, shape[0])
            decoder.rows(panels.rows(flat, shape, entry.panels, start, stop), restored[start:stop])
        return restored

    def checkpoint_tensors(self) -> Iterator[tuple[str, Array]]:
        """Yield every tensor of the source checkpoint, bit for bit, C-contiguous, in the manifest's order."""
        for entry in self.manifest.checkpoint:
            stored = self._entry(entry.tensor)
            if stored.dtype == entry.dtype and stored.residual is None:
                array = self.tensor(entry.tensor)
            elif entry.dtype == "bfloat16":  # the upper 16 bits, NaN payloads included
                bits = self.restore(entry.tensor).view(np.uint32)
                array = (bits >> np.uint32(16)).astype(np.uint16).view(BY_NAME["bfloat16"].numpy)
            else:
                array = self.restore(entry.tensor).astype(BY_NAME[entry.dtype].numpy, copy=False)
            if entry.permutation is not None:
                array = np.ascontiguousarray(array.transpose(entry.permutation))
            yield entry.name, array

    def golden(self, profile: str | None = None) -> Golden:
        """Return the golden samples, those of ``profile`` if it has its own; ArtifactError if there are none."""
        name = self.manifest.golden_of(profile)
        if name is None:
            raise ArtifactError(f"{self.path}: this artifact has no golden samples")
        from safetensors import SafetensorError, deserialize

        path = self.file(name)
        with damaged_if_unreadable(path), open_inside(path, ArtifactError) as file:
            data = file.read()  # load_file would map it
        try:
            arrays = {
                key: np.frombuffer(found["data"], _numpy_dtype(found["dtype"])).reshape(found["shape"])
                for key, found in deserialize(data)  # type: ignore[no-untyped-call]
            }
        except (SafetensorError, TypeError, ValueError) as error:  # ValueError: more axes than numpy's arrays have
            raise ArtifactDamaged(f"{path}: {error}") from None
        parts: dict[str, dict[str, Array]] = {"input": {}, "output": {}, "slices": {}}
        for key in sorted(arrays, key=lambda key: (len(key), key)):  # "slices:OUTPUT:AXIS", axes in order
            part, _, rest = key.partition(":")
            parts.setdefault(part, {})[rest] = arrays[key]
        scales: dict[str, list[Values]] = {}
        for key, array in parts["slices"].items():
            scales.setdefault(key.rpartition(":")[0], []).append(np.square(array.astype(np.float64)))
        return Golden(parts["input"], parts["output"], dict(scales))

    def measurements(self) -> Measurements | None:
        """Return what the conversion measured, in rows, or None if it kept none; ArtifactError for an invalid file."""
        if self.manifest.measurements is None:
            return None
        path = self.file(self.manifest.measurements)
        data = read_bounded(path, MAX_BYTES, ArtifactDamaged, "not measurements", within=self.path)
        return Measurements.loads(data, path)

    @cached_property
    def _entries(self) -> dict[str, TensorEntry]:
        return {entry.name: entry for entry in self.manifest.tensors}

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._entries:
            raise ArtifactError(f"{self.path}: no tensor {name!r} in this artifact")
        return self._entries[name]

    def _flat(self, entry: TensorEntry) -> Array:
        """Return the elements of a tensor in the order of the file."""
        data = self._bytes(entry.file, Segment(offset=entry.offset, bytes=entry.bytes))
        return data.view(BY_NAME[entry.dtype].numpy)

    def _bytes(self, name: str, segment: Segment) -> NDArray[np.uint8]:
        if segment.bytes == 0:  # an empty file cannot be mapped
            return np.empty(0, np.uint8)
        if self.copies:
            return read_segment(self.file(name), segment)
        if name not in self._maps:
            with open_inside(self.file(name), ArtifactError) as file:
                mapped = np.memmap(file, np.uint8, mode="r")
            self._maps[name] = mapped.view(np.ndarray)
        return self._maps[name][segment.offset : segment.offset + segment.bytes]
