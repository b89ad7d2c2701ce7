"""The external data of an ONNX graph: finds its tensors, checks their places, and moves them."""

from __future__ import annotations

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

    from bf16kit.artifact.manifest import Manifest

# The external data file that reference.onnx names but that does not exist: its weights are rebuilt from bf16 and
# residual.
REBUILT = "residual.rebuilt"


def initializers(path: Path, location: str) -> list[str]:
    """Return the names of the main graph's initializers in ``path`` whose external data is in the file ``location``.

    Raises :class:`RuntimeFailure` when ``path`` is not an ONNX file.
    """
    return [tensor.name for tensor in _model(path).graph.initializer if location in _locations(tensor)]


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes of a tensor: where they are now, and their offset ``target`` in the file or memory that gathers all."""

    name: str  # of the tensor, or of one of those that share the bytes
    location: str
    offset: int
    nbytes: int
    target: int


_Place = tuple[str, int, int, str]  # location, offset, size and, of a weight that is to be rebuilt, its name


class GatheredTensors:
    """The graph in ``path``, whose external tensors are to be gathered in one file of ``size`` bytes, as ``moves`` say.

    Those named in ``given`` go to memory of ``given_size`` bytes instead, as ``given_moves`` say. Bytes that several
    tensors share are gathered once. The graph's locations have passed :func:`check_locations`. Raises
    :class:`RuntimeFailure` when ``path`` is not an ONNX file.
    """

    def __init__(self, path: Path, given: Collection[str] = (), manifest: Manifest | None = None) -> None:
        """With a ``manifest``, a tensor beyond its file or, if it is to be rebuilt, of another size is an error."""
        self._model = _model(path)
        self._places = [(tensor, _place(path, tensor)) for tensor in _external(self._model)]
        if manifest is not None:
            _check_sizes(path, self._places, manifest)
        self._given = _given(self._model, [tensor for tensor, _ in self._places], given)
        self._targets, self.moves, self.size = self._laid_out(given=False)
        self._given_targets, self.given_moves, self.given_size = self._laid_out(given=True)

    def given(self) -> Iterator[tuple[TensorProto, int]]:
        """Yield the tensors that go to memory, each with its offset there."""
        for tensor, place in self._places:
            if tensor.name in self._given:
                yield tensor, self._given_targets[place]

    def graph_at(self, location: str) -> bytes:
        """Return the graph with its other tensors in the file ``location`` beside it.

        ONNX Runtime requires this file to exist for the tensors in memory, too, but does not read them from it.
        """
        for tensor, place in self._places:
            start = 0 if tensor.name in self._given else self._targets[place]
            del tensor.external_data[:]
            for key, value in (("location", location), ("offset", start), ("length", place[2])):
                tensor.external_data.add(key=key, value=str(value))
        return bytes(self._model.SerializeToString())

    def _laid_out(self, *, given: bool) -> tuple[dict[_Place, int], list[Move], int]:
        """Lay distinct places out one after the other, aligned, in the order of their files."""
        names = {place: t.name for t, place in self._places if (t.name in self._given) == given}
        targets: dict[_Place, int] = {}
        moves, size = [], 0
        for place, name in sorted(names.items()):
            targets[place] = size
            moves.append(Move(name, *place[:3], size))
            size += place[2] + -place[2] % ALIGNMENT
        return targets, moves, size


def _given(model: ModelProto, external: Iterable[TensorProto], given: Collection[str]) -> set[str]:
    """Return the names in ``given`` that belong to one tensor only; a subgraph or function may reuse a name."""
    times = Counter(tensor.name for tensor in external)
    names = {tensor.name for tensor in model.graph.initializer}
    return {name for name in names.intersection(given) if times[name] == 1}


def check_locations(path: Path, allowed: Collection[str]) -> ModelProto:
    """Return the graph in ``path``; ArtifactError if one of its tensors is in a file that is not ``allowed``.

    These are files beside the graph. Whether a tensor lies within its file is for ONNX Runtime to check.

    Raises :class:`ArtifactError` naming the tensor and the file, :class:`RuntimeFailure` when ``path`` is not an ONNX
    file.
    """
    model = _model(path)
    for tensor in all_tensors(model):
        for location in _locations(tensor):
            if location not in allowed:
                raise ArtifactError(
                    f"{path}: tensor {tensor.name!r} keeps its data in {location!r},"
                    " which is not a file of this artifact"
                )
    return model


def _place(path: Path, tensor: TensorProto) -> _Place:
    """Return where ``tensor`` is; ArtifactError for a shape or a number that is impossible."""
    values = {entry.key: entry.value for entry in tensor.external_data}
    known = BY_ONNX.get(tensor.data_type)
    try:
        offset = int(values.get("offset", "0"))
        nbytes = int(values.get("length", "0")) if known is None else known.numpy.itemsize * math.prod(tensor.dims)
    except ValueError:
        offset = nbytes = -1
    if offset < 0 or nbytes < 0 or min(tensor.dims, default=0) < 0:
        raise ArtifactError(
            f"{path}: tensor {tensor.name!r} of shape {list(tensor.dims)} is at no possible place of its file; convert"
            " the checkpoint again"
        )
    return values["location"], offset, nbytes, tensor.name if values["location"] == REBUILT else ""


def _check_sizes(path: Path, places: Iterable[tuple[TensorProto, _Place]], manifest: Manifest) -> None:
    """Raise ArtifactError, before anything is allocated, for a tensor that its file or the manifest does not hold."""
    rebuilt = {entry.name: 4 * math.prod(entry.shape) for entry in manifest.tensors}
    for tensor, (location, offset, nbytes, _) in places:
        held = rebuilt.get(tensor.name, 0) if location == REBUILT else manifest.files[location].bytes
        if offset + nbytes > held:
            raise ArtifactError(
                f"{path}: tensor {tensor.name!r} ends at byte {offset + nbytes} of {location!r}, which has {held} for"
                " it; convert the checkpoint again"
            )


def _model(path: Path) -> ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        return onnx.load(path, format="protobuf", load_external_data=False)
    except (OSError, DecodeError) as error:
        raise RuntimeFailure(f"{path.name} is not an ONNX file: {error}") from error


def all_tensors(message: Message) -> Iterator[TensorProto]:
    """Yield every tensor in ``message``, at any depth.

    They may be initializers, dense or sparse, attributes, the subgraphs of If and Loop, and functions.
    """
    if message.DESCRIPTOR.name == "TensorProto":
        yield cast("TensorProto", message)
        return
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for inner in value if descriptor.is_repeated else (value,):
                yield from all_tensors(inner)


def _external(model: ModelProto) -> list[TensorProto]:
    return [tensor for tensor in all_tensors(model) if _locations(tensor)]


def _locations(tensor: TensorProto) -> list[str]:
    """Return the files that ``tensor`` names; exactly one if it follows the format."""
    return [entry.value for entry in tensor.external_data if entry.key == "location"]
