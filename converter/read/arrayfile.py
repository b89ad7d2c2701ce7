"""Arrays side by side in one temporary file, for checkpoints whose arrays cannot be mapped in place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bf16kit.messages.errors import SourceError
from bf16kit.numerics.tensors import BY_NAME
from bf16kit.runtime.memory.scratch import ScratchUnavailable, scratch_file
from converter.source import Array

_ALIGNMENT = 64  # bytes


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array before memory is allocated: ``dtype`` is a key of :data:`~bf16kit.numerics.tensors.BY_NAME`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BY_NAME[self.dtype].numpy.itemsize


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """The file, which has its name only while it is filled, and each array's offset in it and view of it."""

    path: Path
    offsets: Mapping[str, int]
    arrays: Mapping[str, Array]


@contextmanager
def array_file(specs: Mapping[str, ArraySpec], directory: Path, source: Path) -> Iterator[ArrayFile]:
    """Allocate an array for each of ``specs`` in a temporary file in ``directory``.

    If that has no room, the file is in the system's directory, even if that is in memory. The arrays are writable and
    aligned, and stay valid after the block. Raises :class:`SourceError` naming ``source`` when there is no room.
    """
    offsets, end = {}, 0
    for name, spec in specs.items():
        offsets[name] = end
        end += spec.nbytes + -spec.nbytes % _ALIGNMENT
    try:
        with _file(max(end, 1), directory) as (path, data):
            views = {
                name: data[start : start + specs[name].nbytes].view(BY_NAME[specs[name].dtype].numpy)
                for name, start in offsets.items()
            }
            yield ArrayFile(path, offsets, {name: views[name].reshape(specs[name].shape) for name in specs})
    except ScratchUnavailable as error:
        raise SourceError(
            f"{source}: its {end / 1e6:.0f} MB of arrays do not fit in the temporary directory: {error}"
        ) from None


@contextmanager
def _file(size: int, directory: Path) -> Iterator[tuple[Path, Array]]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(scratch_file(size, directory))
        except ScratchUnavailable:  # a container whose disk is in memory: the arrays would be in memory in any case
            found = stack.enter_context(scratch_file(size, in_memory=True))
        yield found
