"""The external data of an ONNX graph: finds its tensors, checks their places, and moves them."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from bf16kit.artifact.weightfile import ALIGNMENT
from bf16kit.messages.errors import ArtifactError, RuntimeFailure
from bf16kit.numerics.tensors import BY_ONNX

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from onnx import ModelProto, TensorProto

# The external data file that reference.onnx names but that does not exist: its weights are rebuilt from bf16 and
# residual.
REBUILT = "residual.rebuilt"


def initializers(path: Path, location: str) -> list[str]:
    """Return the names of the main graph's initializers in ``path`` whose external data is in the file ``location``.

    Raises :class:`RuntimeFailure` when ``path`` is not an ONNX file.
    """
    return [tensor.name for tensor in _model(path).graph.initializer if location in _locations(tensor)]


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A range of bytes in the file ``location``."""

    location: str
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class Regions:
    """The bytes that ``extents`` cover, each byte once, laid out as regions one after the other.

    ``size`` is the total in bytes, with alignment. However many tensors a graph claims to be in a file, no more than
    the file's size is allocated.
    """

    def __init__(self, extents: Iterable[Extent]) -> None:
        self.size = 0
        self._regions: list[tuple[Extent, int]] = []
        for extent in sorted(set(extents)):
            last = self._regions[-1][0] if self._regions else None
            if last is None or last.location != extent.location or extent.offset > last.end:
                self._regions.append((extent, self.size))
            elif extent.end > last.end:
                longer = Extent(last.location, last.offset, extent.end - last.offset)
                self._regions[-1] = (longer, self._regions[-1][1])
            region, start = self._regions[-1]
            self.size = start + region.nbytes + -region.nbytes % ALIGNMENT

    def __iter__(self) -> Iterator[tuple[Extent, int]]:
        """Yield each region and its offset in the layout."""
        return iter(self._regions)

    def target(self, extent: Extent) -> int:
        """Return the offset of ``extent`` in the layout."""
        index = bisect.bisect_right(self._regions, (extent.location, extent.offset), key=_beginning) - 1
        region, start = self._regions[index]
        return start + extent.offset - region.offset


def _beginning(region: tuple[Extent, int]) -> tuple[str, int]:
    return region[0].location, region[0].offset


@dataclass(frozen=True, slots=True)
class Move:
    """The bytes of one tensor: where they are now, and their offset ``target`` in the file that gathers all tensors."""

    name: str
    location: str
    offset: int
    nbytes: int
    target: int


class GatheredTensors:
    """The graph in ``path``, whose external tensors are to be gathered in one file of ``size`` bytes, as ``moves`` say.

    Those named in ``given`` go to memory of ``given_size`` bytes instead, as ``given_moves`` say. The graph's locations
    have passed :func:`check_locations`. Raises :class:`RuntimeFailure` when ``path`` is not an ONNX file.
    """

    def __init__(self, path: Path, given: Collection[str] = ()) -> None:
        self._model = _model(path)
        tensors = _external(self._model)
        own = _given(self._model, tensors, given)
        self.moves, self.size = _moves(path, [tensor for tensor in tensors if tensor.name not in own])
        self.given_moves, self.given_size = _moves(path, [tensor for tensor in tensors if tensor.name in own])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that go to memory, by name."""
        given = {move.name for move in self.given_moves}
        return {tensor.name: tuple(tensor.dims) for tensor in self._model.graph.initializer if tensor.name in given}

    def graph_at(self, location: str) -> bytes:
        """Return the graph with its external tensors in the file ``location`` beside it.

        ONNX Runtime requires a location for the tensors in memory, too, but does not read it.
        """
        files = iter(self.moves)
        given = {move.name: move.nbytes for move in self.given_moves}
        for tensor in _external(self._model):
            if tensor.name in given:
                start, nbytes = 0, given[tensor.name]
            else:
                move = next(files)
                start, nbytes = move.target, move.nbytes
            _set_external_data(tensor, location, start, nbytes)
        return bytes(self._model.SerializeToString())


class CopiedTensors:
    """The graph in ``path``, whose external tensors are to be copied to one file, laid out as the regions ``file``.

    Those named in ``given`` go to memory instead, laid out as ``memory``. Bytes that several tensors share are copied
    once. The graph's locations have passed :func:`check_locations`. Raises :class:`RuntimeFailure` when ``path`` is not
    an ONNX file.
    """

    def __init__(self, path: Path, given: Collection[str] = ()) -> None:
        self._model = _model(path)
        self._extents = [(tensor, _extent(path, tensor)) for tensor in _external(self._model)]
        self._given = _given(self._model, [tensor for tensor, _ in self._extents], given)
        self.file = Regions(extent for tensor, extent in self._extents if tensor.name not in self._given)
        self.memory = Regions(extent for tensor, extent in self._extents if tensor.name in self._given)

    def given(self) -> Iterator[tuple[TensorProto, int]]:
        """Yield the tensors that go to memory, each with its offset there."""
        for tensor, extent in self._extents:
            if tensor.name in self._given:
                yield tensor, self.memory.target(extent)

    def graph_at(self, location: str) -> bytes:
        """Return the graph with its other tensors in the file ``location`` beside it.

        ONNX Runtime requires this file to exist for the tensors in memory, too, but does not read them from it.
        """
        for tensor, extent in self._extents:
            start = 0 if tensor.name in self._given else self.file.target(extent)
            _set_external_data(tensor, location, start, extent.nbytes)
        return bytes(self._model.SerializeToString())


def _given(model: ModelProto, external: Iterable[TensorProto], given: Collection[str]) -> set[str]:
    """Return the names in ``given`` that belong to one tensor only; a subgraph or function may reuse a name."""
    times = Counter(tensor.name for tensor in external)
    names = {tensor.name for tensor in model.graph.initializer}
    return {name for name in names.intersection(given) if times[name] == 1}


def _moves(path: Path, tensors: Iterable[TensorProto]) -> tuple[list[Move], int]:
    """Lay the tensors out one after the other, aligned; return the moves and the total size."""
    moves, size = [], 0
    for tensor in tensors:
        extent = _extent(path, tensor)
        moves.append(Move(tensor.name, extent.location, extent.offset, extent.nbytes, size))
        size += extent.nbytes + -extent.nbytes % ALIGNMENT
    return moves, size


def _set_external_data(tensor: TensorProto, location: str, offset: int, nbytes: int) -> None:
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", nbytes)):
        tensor.external_data.add(key=key, value=str(value))


def check_locations(path: Path, allowed: Collection[str]) -> ModelProto:
    """Return the graph in ``path``; ArtifactError if one of its tensors is not stored as an artifact stores it.

    A tensor must be in one of the ``allowed`` files beside the graph, at a multiple of 64 bytes, because mapping relies
    on that. It must have as many bytes as its shape and dtype need, and lie within the file. A missing file, such as
    the reference's, has no end to check. The digests prove only that the graph is the one that was written. They do not
    prove that its author was honest, or knew how long the weights are.

    Raises :class:`ArtifactError` naming the tensor and the file, :class:`RuntimeFailure` when ``path`` is not an ONNX
    file.
    """
    sizes: dict[str, int | None] = {}
    model = _model(path)
    for tensor in _tensors(model):
        for location in _locations(tensor):
            if location not in allowed:
                raise ArtifactError(
                    f"{path}: tensor {tensor.name!r} keeps its data in {location!r},"
                    " which is not a file of this artifact"
                )
            if location not in sizes:
                file = path.parent / location
                sizes[location] = file.stat().st_size if file.is_file() else None
            _check_extent(path, tensor, location, sizes[location])
    return model


def _check_extent(path: Path, tensor: TensorProto, location: str, size: int | None) -> None:
    """Raise ArtifactError if ``tensor`` is not aligned, has the wrong length, or ends beyond its file.

    ``size`` is the size of the file ``location`` in bytes, None if it does not exist.
    """
    description = f"{path}: tensor {tensor.name!r} in {location!r}"
    offset = _number(description, tensor, "offset", 0)
    needed = _nbytes(description, tensor)
    length = _number(description, tensor, "length", needed or 0)
    if offset % ALIGNMENT:
        raise ArtifactError(
            f"{description} starts at byte {offset}, which is not a multiple of {ALIGNMENT}; convert the checkpoint"
            " again"
        )
    if needed is not None and length != needed:
        raise ArtifactError(
            f"{description} has {length} bytes, but its shape {list(tensor.dims)} and dtype need {needed}; convert the"
            " checkpoint again"
        )
    if size is not None and offset + length > size:
        raise ArtifactError(
            f"{description} ends at byte {offset + length}, beyond the {size} bytes of the file; the graph belongs to"
            " another file, or this file is truncated: copy the artifact again, or convert the checkpoint again"
        )


def _extent(path: Path, tensor: TensorProto) -> Extent:
    description = f"{path}: tensor {tensor.name!r}"
    nbytes = _nbytes(description, tensor)
    if nbytes is None:
        nbytes = _number(description, tensor, "length", 0)
    return Extent(_locations(tensor)[0], _number(description, tensor, "offset", 0), nbytes)


def _number(description: str, tensor: TensorProto, key: str, default: int) -> int:
    """Return the value of ``key`` in bytes, or ``default`` if it is absent; ArtifactError if it is given twice."""
    values = [entry.value for entry in tensor.external_data if entry.key == key]
    if len(values) > 1:
        raise ArtifactError(f"{description} has {len(values)} values of {key}, expected one")
    if not values:
        return default
    if not (values[0].isascii() and values[0].isdecimal() and len(values[0]) < 20):
        raise ArtifactError(f"{description} has the {key} {values[0][:40]!r}, which is not a number of bytes")
    return int(values[0])


def _nbytes(description: str, tensor: TensorProto) -> int | None:
    """Return the size of the elements in bytes; None if their type is unknown, which ONNX Runtime will report."""
    if any(dim < 0 for dim in tensor.dims):
        raise ArtifactError(f"{description} has the shape {list(tensor.dims)}; no dimension may be negative")
    known = BY_ONNX.get(tensor.data_type)
    return None if known is None else known.numpy.itemsize * math.prod(tensor.dims)


def _model(path: Path) -> ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        return onnx.load(path, format="protobuf", load_external_data=False)
    except (OSError, DecodeError) as error:
        raise RuntimeFailure(f"{path.name} is not an ONNX file: {error}") from error


def _tensors(message: Message) -> Iterator[TensorProto]:
    """Yield every tensor in ``message``, at any depth.

    They may be initializers, dense or sparse, attributes, the subgraphs of If and Loop, and functions.
    """
    if message.DESCRIPTOR.name == "TensorProto":
        yield cast("TensorProto", message)
        return
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for inner in value if descriptor.is_repeated else (value,):
                yield from _tensors(inner)


def _external(model: ModelProto) -> list[TensorProto]:
    return [tensor for tensor in _tensors(model) if _locations(tensor)]


def _locations(tensor: TensorProto) -> list[str]:
    """Return the files that ``tensor`` names; exactly one if it follows the format."""
    return [entry.value for entry in tensor.external_data if entry.key == "location"]
