"""Which files an ONNX graph keeps its tensors in, and the refusal of any that its artifact does not hold."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from bf16kit.errors import ArtifactError, RuntimeFailure

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from onnx import ModelProto, TensorProto


def initializers(path: Path, location: str) -> list[str]:
    """Names of the main graph's initializers in ``path`` whose external data is in the file ``location``.

    Raises :class:`RuntimeFailure` when ``path`` is not an ONNX file.
    """
    return [tensor.name for tensor in _model(path).graph.initializer if location in _locations(tensor)]


def check_locations(path: Path, allowed: Collection[str]) -> None:
    """Refuse a graph that would make ONNX Runtime read a file other than the ``allowed`` ones beside it.

    The digests prove that a graph is the one that was written, not that whoever wrote it meant well. Raises
    :class:`ArtifactError` naming the tensor and the file, :class:`RuntimeFailure` when ``path`` is not an ONNX file.
    """
    for tensor in _tensors(_model(path)):
        for location in _locations(tensor):
            if location not in allowed:
                raise ArtifactError(
                    f"{path}: tensor {tensor.name!r} keeps its data in {location!r},"
                    " which is not a file of this artifact"
                )


def _model(path: Path) -> ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        return onnx.load(path, load_external_data=False)
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


def _locations(tensor: TensorProto) -> list[str]:
    """The files it names: one, where whoever wrote it kept to the format."""
    return [entry.value for entry in tensor.external_data if entry.key == "location"]
