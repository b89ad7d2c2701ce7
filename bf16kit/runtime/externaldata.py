"""Where an ONNX graph keeps its tensors, the refusal of any place that its artifact does not hold, and moving them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
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


@dataclass(frozen=True, slots=True)
class Move:
    """A tensor's ``nbytes``: where they are, and where in one file for all they shall be."""

    name: str
    location: str
    offset: int
    nbytes: int
    target: int


class GatheredTensors:
    """The graph in ``path``, whose external tensors are to be gathered in one file of ``size`` bytes by ``moves``.

    Its locations have passed :func:`check_locations`. Raises :class:`RuntimeFailure` when it is not an ONNX file.
    """

    def __init__(self, path: Path) -> None:
        self._model = _model(path)
        self.moves: list[Move] = []
        self.size = 0
        for tensor in _external(self._model):
            place = f"{path}: tensor {tensor.name!r}"
            nbytes = _nbytes(place, tensor) or _number(place, tensor, "length", 0)
            offset = _number(place, tensor, "offset", 0)
            self.moves.append(Move(tensor.name, _locations(tensor)[0], offset, nbytes, self.size))
            self.size += nbytes + -nbytes % ALIGNMENT

    def graph_at(self, location: str) -> bytes:
        """The graph when all its external tensors are in the file ``location`` beside it."""
        for tensor, move in zip(_external(self._model), self.moves, strict=True):
            del tensor.external_data[:]
            for key, value in (("location", location), ("offset", move.target), ("length", move.nbytes)):
                tensor.external_data.add(key=key, value=str(value))
        return bytes(self._model.SerializeToString())


class JoinedFiles:
    """The graph in ``path``, whose files of tensors are to lie one after the other in a single one of ``size`` bytes.

    ``files`` says where each of them begins there. Their locations have passed :func:`check_locations`. Raises
    :class:`RuntimeFailure` when ``path`` is not an ONNX file.
    """

    def __init__(self, path: Path, sizes: Mapping[str, int]) -> None:
        self._path = path
        self._model = _model(path)
        self.files: dict[str, int] = {}
        self.size = 0
        for name in sorted({_locations(tensor)[0] for tensor in _external(self._model)}):
            self.files[name] = self.size
            self.size += sizes[name] + -sizes[name] % ALIGNMENT

    def graph_at(self, location: str) -> bytes:
        """The graph when all is in the file ``location`` beside it."""
        for tensor in _external(self._model):
            start = self.files[_locations(tensor)[0]] + _number(str(self._path), tensor, "offset", 0)
            kept = [entry for entry in tensor.external_data if entry.key == "length"]
            del tensor.external_data[:]
            tensor.external_data.add(key="location", value=location)
            tensor.external_data.add(key="offset", value=str(start))
            tensor.external_data.extend(kept)
        return bytes(self._model.SerializeToString())


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
