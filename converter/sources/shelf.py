"""Arrays side by side in one temporary file, for checkpoints whose arrays cannot be mapped in place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bf16kit.errors import SourceError
from bf16kit.runtime.scratch import NoScratch, scratch_file
from bf16kit.tensors import BY_NAME
from converter.model import Array

_ALIGNMENT = 64  # bytes


@dataclass(frozen=True, slots=True)
class Form:
    """An array before memory is allocated: ``dtype`` is a key of :data:`~bf16kit.tensors.BY_NAME`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BY_NAME[self.dtype].numpy.itemsize


@dataclass(frozen=True, slots=True)
class Shelf:
    """The file, which has its name only while it is filled, and each array's offset in it and view of it."""

    path: Path
    offsets: Mapping[str, int]
    arrays: Mapping[str, Array]


@contextmanager
def shelf(forms: Mapping[str, Form], directory: Path, source: Path) -> Iterator[Shelf]:
    """Allocate an array for each of ``forms`` in a temporary file in ``directory``.

    If that has no room, the file is in the system's directory, even if that is in memory. The arrays are writable and
    aligned, and stay valid after the block. Raises :class:`SourceError` naming ``source`` when there is no room.
    """
    offsets, end = {}, 0
    for name, form in forms.items():
        offsets[name] = end
        end += form.nbytes + -form.nbytes % _ALIGNMENT
    try:
        with _file(max(end, 1), directory) as (path, data):
            views = {
                name: data[start : start + forms[name].nbytes].view(BY_NAME[forms[name].dtype].numpy)
                for name, start in offsets.items()
            }
            yield Shelf(path, offsets, {name: views[name].reshape(forms[name].shape) for name in forms})
    except NoScratch as error:
        raise SourceError(
            f"{source}: its {end / 1e6:.0f} MB of arrays do not fit in the temporary directory: {error}"
        ) from None


@contextmanager
def _file(size: int, directory: Path) -> Iterator[tuple[Path, Array]]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(scratch_file(size, directory))
        except NoScratch:  # a container whose disk is in memory: the arrays would be in memory in any case
            found = stack.enter_context(scratch_file(size, in_memory=True))
        yield found
