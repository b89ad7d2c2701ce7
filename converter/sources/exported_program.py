"""Reading a torch.export program (.pt2) as a source: tensors as they are stored, inputs, and what it computes."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bf16kit.errors import RuntimeFailure, SourceError
from bf16kit.runtime.exported.archive import Archive, Stored, read_archive
from bf16kit.runtime.exported.graph import Program, parse_program
from bf16kit.tensors import BY_NAME, TensorSpec
from converter.graph.dimensions import UNKNOWN, name_all
from converter.graph.equality import OTHER_FLOATS
from converter.model import Array

_BATCH = "batch"
_UNBOUNDED = 2**31  # a bound that nobody set


@dataclass(frozen=True, slots=True)
class Exported:
    """What a file holds. ``parameters`` are the names of the tensors that its module called so."""

    program: Program
    tensors: Mapping[str, Array]
    parameters: frozenset[str]
    notes: tuple[str, ...]

    @property
    def halves(self) -> frozenset[str]:
        """The precisions of parameters that are not fp32: the module is made to compute in fp32 instead of these."""
        return frozenset(self.tensors[name].dtype.name for name in self.parameters) & frozenset(OTHER_FLOATS)

    def inputs(self) -> tuple[TensorSpec, ...]:
        """The program's inputs, in its order. A free dimension is called ``batch`` where it is the first one's first,
        else after the input and axis where it comes first."""
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
            dtype = "float32" if edge.dtype in self.halves else edge.dtype
            specs.append(TensorSpec(edge.name, dtype, tuple(dims)))
        return name_all(specs)


def read_file(path: Path, *, trust_pickle: bool) -> Exported:
    """The program at ``path``; its tensors are views of the mapped file, which nothing writes to.

    Raises :class:`SourceError` for what :mod:`bf16kit.runtime.exported` refuses.
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
    """Contiguous arrays by name, one for all names of the same elements."""
    found: dict[object, Array] = {}
    for name, stored in archive.tensors.items():
        key = name if stored.pickled else stored.place
        if key not in found:
            found[key] = _tensor(archive, stored)
    return {name: found[name if stored.pickled else stored.place] for name, stored in archive.tensors.items()}


def _tensor(archive: Archive, stored: Stored) -> Array:
    array = _unpickled(archive, stored) if stored.pickled else archive.tensor(stored.name)
    if array.dtype.name not in BY_NAME:
        raise RuntimeFailure(f"tensor {stored.name!r} is {array.dtype.name}, which bf16kit does not store")
    return np.asarray(array, order="C")


def _unpickled(archive: Archive, stored: Stored) -> Array:
    """A tensor that is a pickle, in an archive whose author is trusted: plain memory, whatever class it had."""
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
    except Exception as error:  # noqa: BLE001 - a pickle may raise anything, and be anything
        raise RuntimeFailure(f"tensor {stored.name!r} is a pickle of no plain tensor: {first_line(error)}") from None


def _notes(program: Program, json: Mapping[str, Any]) -> tuple[str, ...]:
    """A sentence where the program was exported for some sizes of its free dimensions only."""
    ranges = json.get("range_constraints")
    found = []
    for edge in program.inputs:
        for axis, dim in enumerate(edge.shape):
            bounds = ranges.get(dim) if isinstance(ranges, dict) and isinstance(dim, str) else None
            most = bounds.get("max_val") if isinstance(bounds, dict) else None
            if isinstance(most, int) and most < _UNBOUNDED:
                found.append(f"the program was exported for sizes up to {most} in dimension {axis} of {edge.name}")
    return tuple(found)
