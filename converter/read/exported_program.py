"""Reads a torch.export program (.pt2) as a source: its tensors as stored, its inputs, and its graph."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bf16kit.messages.errors import RuntimeFailure, SourceError
from bf16kit.numerics.tensors import BY_NAME, TensorSpec
from bf16kit.runtime.exported.archive import Archive, StoredTensor, read_archive
from bf16kit.runtime.exported.graph import Program, parse_program
from converter.graph.dimensions import UNKNOWN, name_dimensions
from converter.graph.equality import OTHER_FLOATS
from converter.source import Array

_BATCH = "batch"
_UNBOUNDED = 2**31  # an upper bound from here on means that none was set


@dataclass(frozen=True, slots=True)
class Exported:
    """The contents of a file. ``parameters`` are the names of the tensors that its module declared as parameters."""

    program: Program
    tensors: Mapping[str, Array]
    parameters: frozenset[str]
    notes: tuple[str, ...]

    @property
    def non_fp32_dtypes(self) -> frozenset[str]:
        """The parameters' dtypes other than fp32: the module is made to compute in fp32 instead."""
        return frozenset(self.tensors[name].dtype.name for name in self.parameters) & frozenset(OTHER_FLOATS)

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return the program's inputs, in its order.

        A free dimension is named after the input and axis where it occurs first, but ``batch`` if that is axis 0 of the
        first input with a free dimension.
        """
        names: dict[int | str, str] = {}
        specs = []
        for edge in self.program.inputs:
            dims: list[int | str] = []
            for axis, dim in enumerate(edge.shape):
                if isinstance(dim, int) or dim == UNKNOWN:
                    dims.append(dim)
                    continue
                first = _BATCH if axis == 0 and not names else f"{edge.name}_{axis}"
                dims.append(names.setdefault(dim, first))
            dtype = "float32" if edge.dtype in self.non_fp32_dtypes else edge.dtype
            specs.append(TensorSpec(edge.name, dtype, tuple(dims)))
        return name_dimensions(specs)


def read_file(path: Path, *, trust_pickle: bool) -> Exported:
    """Read the program at ``path``; its tensors are views of the mapped file, which is never written.

    Raises :class:`SourceError` for what :mod:`bf16kit.runtime.exported` rejects.
    """
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        archive = read_archive(data, trust_pickle=trust_pickle, check_crc=True)
        program = parse_program(archive.program, archive.tensors)
        tensors = _tensors(archive)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from None
    except RuntimeFailure as error:
        raise SourceError(f"{path}: {error}") from None
    parameters = frozenset(name for name, stored in archive.tensors.items() if stored.is_parameter)
    return Exported(program, tensors, parameters, _notes(program, archive.program))


def _tensors(archive: Archive) -> dict[str, Array]:
    """Return contiguous arrays by name, one array for all names of the same elements."""
    found: dict[object, Array] = {}
    for name, stored in archive.tensors.items():
        key = name if stored.pickled else stored.storage_key
        if key not in found:
            found[key] = _tensor(archive, stored)
    return {name: found[name if stored.pickled else stored.storage_key] for name, stored in archive.tensors.items()}


def _tensor(archive: Archive, stored: StoredTensor) -> Array:
    array = _unpickled(archive, stored) if stored.pickled else archive.tensor(stored.name)
    if array.dtype.name not in BY_NAME:
        raise RuntimeFailure(f"tensor {stored.name!r} is {array.dtype.name}, which bf16kit does not store")
    return np.asarray(array, order="C")


def _unpickled(archive: Archive, stored: StoredTensor) -> Array:
    """Load a pickled tensor from an archive whose author is trusted, as a plain tensor whatever its class was."""
    import io

    import ml_dtypes
    import torch

    from converter.process.quiet import first_line

    try:
        found = torch.load(io.BytesIO(archive.record(stored.record)), map_location="cpu", weights_only=False)
        tensor = found.detach().as_subclass(torch.Tensor).contiguous()
        if tensor.dtype is torch.bfloat16:
            return np.asarray(tensor.view(torch.int16).numpy()).view(ml_dtypes.bfloat16)
        return np.asarray(tensor.numpy())
    except Exception as error:  # noqa: BLE001 - a pickle may raise anything
        raise RuntimeFailure(
            f"tensor {stored.name!r} is a pickle that does not hold a plain tensor: {first_line(error)}"
        ) from None


def _notes(program: Program, json: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sentence for each free dimension that was exported with an upper bound."""
    ranges = json.get("range_constraints")
    found = []
    for edge in program.inputs:
        for axis, dim in enumerate(edge.shape):
            bounds = ranges.get(dim) if isinstance(ranges, dict) and isinstance(dim, str) else None
            most = bounds.get("max_val") if isinstance(bounds, dict) else None
            if isinstance(most, int) and most < _UNBOUNDED:
                found.append(f"the program was exported for sizes up to {most} in dimension {axis} of {edge.name}")
    return tuple(found)
