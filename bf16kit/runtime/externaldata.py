"""Where an ONNX graph keeps its tensors, the refusal of any place that its artifact does not hold, and moving them."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from bf16kit.errors import ArtifactError, RuntimeFailure
from bf16kit.tensors import BY_ONNX
from bf16kit.weightfile import ALIGNMENT

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from onnx import ModelProto, TensorProto

# The external data file that reference.onnx names and nobody writes: those weights are rebuilt from bf16 and residual.
REBUILT = "residual.rebuilt"


def initializers(path: Path, location: str) -> list[str]:
    """Names of the main graph's initializers in ``path`` whose external data is in the file ``location``.

    Raises :class:`RuntimeFailure` when ``path`` is not an ONNX file.
    """
    return [tensor.name for tensor in _model(path).graph.initializer if location in _locations(tensor)]


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """Bytes of the file ``location``."""

    location: str
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class Regions:
    """What ``extents`` cover, each byte once: one region after the other, ``size`` bytes in all with what aligns them.

    However many tensors a graph says are in a file: what is taken is the size of the files.
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
        """Each region, and where it begins among all."""
        return iter(self._regions)

    def target(self, extent: Extent) -> int:
        """Where ``extent`` begins among all regions."""
        index = bisect.bisect_right(self._regions, (extent.location, extent.offset), key=_beginning) - 1
        region, start = self._regions[index]
        return start + extent.offset - region.offset


def _beginning(region: tuple[Extent, int]) -> tuple[str, int]:
    return region[0].location, region[0].offset


@dataclass(frozen=True, slots=True)
class Move:
    """A tensor's ``nbytes``: where they are, and where in one file for all they shall be."""

    name: str
    location: str
    offset: int
    nbytes: int
    target: int


class GatheredTensors:
    """The graph in ``path``, whose external tensors are to be gathered: by ``moves`` in one file of ``size`` bytes, but
    those named in ``given`` by ``given_moves`` in memory of ``given_size``.

    Its locations have passed :func:`check_locations`. Raises :class:`RuntimeFailure` when it is not an ONNX file.
    """

    def __init__(self, path: Path, given: Collection[str] = ()) -> None:
        self._model = _model(path)
        tensors = _external(self._model)
        own = _given(self._model, tensors, given)
        self.moves, self.size = _moves(path, [tensor for tensor in tensors if tensor.name not in own])
        self.given_moves, self.given_size = _moves(path, [tensor for tensor in tensors if tensor.name in own])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of those that are given, by name."""
        given = {move.name for move in self.given_moves}
        return {tensor.name: tuple(tensor.dims) for tensor in self._model.graph.initializer if tensor.name in given}

    def graph_at(self, location: str) -> bytes:
        """The graph when its external tensors are in the file ``location`` beside it. ONNX Runtime wants that to be
        named for those that are given, too, and reads nothing of them."""
        files = iter(self.moves)
        given = {move.name: move.nbytes for move in self.given_moves}
        for tensor in _external(self._model):
            if tensor.name in given:
                start, nbytes = 0, given[tensor.name]
            else:
                move = next(files)
                start, nbytes = move.target, move.nbytes
            _place(tensor, location, start, nbytes)
        return bytes(self._model.SerializeToString())


class CopiedTensors:
    """The graph in ``path``, whose external tensors are to be copied: those named in ``given`` to memory, where each
    byte that several share is once, the others to one file of ``size`` bytes, likewise.

    Their locations have passed :func:`check_locations`. Raises :class:`RuntimeFailure` when it is not an ONNX file.
    """

    def __init__(self, path: Path, given: Collection[str] = ()) -> None:
        self._model = _model(path)
        self._extents = [(tensor, _extent(path, tensor)) for tensor in _external(self._model)]
        self._given = _given(self._model, [tensor for tensor, _ in self._extents], given)
        self.file = Regions(extent for tensor, extent in self._extents if tensor.name not in self._given)
        self.memory = Regions(extent for tensor, extent in self._extents if tensor.name in self._given)

    def given(self) -> Iterator[tuple[TensorProto, int]]:
        """Those that are given, and where in memory each begins."""
        for tensor, extent in self._extents:
            if tensor.name in self._given:
                yield tensor, self.memory.target(extent)

    def graph_at(self, location: str) -> bytes:
        """The graph when the others are in the file ``location`` beside it. ONNX Runtime wants it to exist for those
        that are given, too, and reads nothing of them."""
        for tensor, extent in self._extents:
            start = 0 if tensor.name in self._given else self.file.target(extent)
            _place(tensor, location, start, extent.nbytes)
        return bytes(self._model.SerializeToString())


def _given(model: ModelProto, external: Iterable[TensorProto], given: Collection[str]) -> set[str]:
    """Those of ``given`` that are one tensor each: a name may stand for another in a body or a function."""
    times = Counter(tensor.name for tensor in external)
    names = {tensor.name for tensor in model.graph.initializer}
    return {name for name in names.intersection(given) if times[name] == 1}


def _moves(path: Path, tensors: Iterable[TensorProto]) -> tuple[list[Move], int]:
    """Each tensor behind the one before, aligned; and the size of all."""
    moves, size = [], 0
    for tensor in tensors:
        extent = _extent(path, tensor)
        moves.append(Move(tensor.name, extent.location, extent.offset, extent.nbytes, size))
        size += extent.nbytes + -extent.nbytes % ALIGNMENT
    return moves, size


def _place(tensor: TensorProto, location: str, offset: int, nbytes: int) -> None:
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", nbytes)):
        tensor.external_data.add(key=key, value=str(value))


def check_locations(path: Path, allowed: Collection[str]) -> None:
    """Refuse a graph whose tensors are not where an artifact keeps them.

    That is a file beside it among the ``allowed``, from a multiple of 64 bytes on, as whoever maps it relies on, as
    many bytes as its shape and dtype need, and whole within the file. A file that is not there, as the reference's
    never is, has no end to check. The digests prove that a graph is the one that was written, not that whoever wrote it
    meant well, or knew how long the weights are.

    Raises :class:`ArtifactError` naming the tensor and the file, :class:`RuntimeFailure` when ``path`` is not an ONNX
    file.
    """
    sizes: dict[str, int | None] = {}
    for tensor in _tensors(_model(path)):
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


def _check_extent(path: Path, tensor: TensorProto, location: str, size: int | None) -> None:
    """Refuse a ``tensor`` that does not start where tensors do, is not as long as its shape and dtype say, or ends
    beyond the ``size`` bytes of ``location``."""
    place = f"{path}: tensor {tensor.name!r} in {location!r}"
    offset = _number(place, tensor, "offset", 0)
    needed = _nbytes(place, tensor)
    length = _number(place, tensor, "length", needed or 0)
    if offset % ALIGNMENT:
        raise ArtifactError(
            f"{place} starts at byte {offset}, which is no multiple of {ALIGNMENT}; convert the checkpoint again"
        )
    if needed is not None and length != needed:
        raise ArtifactError(
            f"{place} has {length} bytes, but its shape {list(tensor.dims)} and dtype need {needed}; convert the"
            " checkpoint again"
        )
    if size is not None and offset + length > size:
        raise ArtifactError(
            f"{place} ends at byte {offset + length}, beyond the {size} bytes of the file; the graph is not this file's"
            " or the file was cut short: copy the artifact again, or convert the checkpoint again"
        )


def _extent(path: Path, tensor: TensorProto) -> Extent:
    place = f"{path}: tensor {tensor.name!r}"
    nbytes = _nbytes(place, tensor)
    if nbytes is None:
        nbytes = _number(place, tensor, "length", 0)
    return Extent(_locations(tensor)[0], _number(place, tensor, "offset", 0), nbytes)


def _number(place: str, tensor: TensorProto, key: str, default: int) -> int:
    """The value of ``key`` in bytes, given once or not at all."""
    values = [entry.value for entry in tensor.external_data if entry.key == key]
    if len(values) > 1:
        raise ArtifactError(f"{place} has {len(values)} values of {key}, and may have one")
    if not values:
        return default
    if not (values[0].isascii() and values[0].isdecimal() and len(values[0]) < 20):
        raise ArtifactError(f"{place} has the {key} {values[0][:40]!r}, which is not a number of bytes")
    return int(values[0])


def _nbytes(place: str, tensor: TensorProto) -> int | None:
    """The bytes of its elements, None where their type is unknown: ONNX Runtime will say so."""
    if any(dim < 0 for dim in tensor.dims):
        raise ArtifactError(f"{place} has the shape {list(tensor.dims)}; no dimension may be negative")
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
    """Every tensor inside ``message``, wherever ONNX lets one be: initializers, dense and sparse, attributes, the
    bodies of If and Loop, and functions."""
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
    """The files it names: one, where whoever wrote it kept to the format."""
    return [entry.value for entry in tensor.external_data if entry.key == "location"]
