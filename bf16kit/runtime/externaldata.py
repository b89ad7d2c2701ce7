"""Which files an ONNX graph keeps its tensors in, and the refusal of any that its artifact does not hold."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bf16kit.errors import ArtifactError, RuntimeFailure

if TYPE_CHECKING:
    from onnx import GraphProto, TensorProto


def initializers(path: Path, location: str) -> list[str]:
    """Names of the main graph's initializers in ``path`` whose external data is in the file ``location``.

    Raises :class:`RuntimeFailure` when ``path`` is not an ONNX file.
    """
    return [tensor.name for tensor in _graph(path).initializer if _location(tensor) == location]


def check_locations(path: Path, allowed: Collection[str]) -> None:
    """Refuse a graph that would make ONNX Runtime read a file other than the ``allowed`` ones beside it.

    The digests prove that a graph is the one that was written, not that whoever wrote it meant well. Raises
    :class:`ArtifactError` naming the tensor and the file, :class:`RuntimeFailure` when ``path`` is not an ONNX file.
    """
    for tensor in _tensors(_graph(path)):
        location = _location(tensor)
        if location is not None and location not in allowed:
            raise ArtifactError(
                f"{path}: tensor {tensor.name!r} keeps its data in {location!r}, which is not a file of this artifact"
            )


def _graph(path: Path) -> GraphProto:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        return onnx.load(path, load_external_data=False).graph
    except (OSError, DecodeError) as error:
        raise RuntimeFailure(f"{path.name} is not an ONNX file: {error}") from error


def _tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Every tensor stored in ``graph``: initializers, attributes, and those of the bodies of If and Loop."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for body in (attribute.g, *attribute.graphs):
                yield from _tensors(body)


def _location(tensor: TensorProto) -> str | None:
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), None)
