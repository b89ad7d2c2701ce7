"""The external data of an ONNX graph: which of its tensors are in files, and whether those may be read."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from bf16kit.messages.errors import ArtifactError, RuntimeFailure

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from onnx import ModelProto, TensorProto

# The external data file that reference.onnx names but that does not exist: its weights are rebuilt from bf16 and
# residual.
REBUILT = "residual.rebuilt"


def check_locations(path: Path, allowed: Collection[str]) -> ModelProto:
    """Return the graph in ``path``; ArtifactError if one of its tensors is in a file that is not ``allowed``.

    These are files beside the graph. Whether a tensor lies within its file is for whoever reads it to check.

    Raises :class:`ArtifactError` naming the tensor and the file, :class:`RuntimeFailure` when ``path`` is not an ONNX
    file.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, format="protobuf", load_external_data=False)
    except (OSError, DecodeError) as error:
        raise RuntimeFailure(f"{path.name} is not an ONNX file: {error}") from error
    for tensor in all_tensors(model):
        for location in locations(tensor):
            if location not in allowed:
                raise ArtifactError(
                    f"{path}: tensor {tensor.name!r} keeps its data in {location!r},"
                    " which is not a file of this artifact"
                )
    return model


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


def locations(tensor: TensorProto) -> list[str]:
    """Return the files that ``tensor`` names: none if it is in the graph, exactly one if it follows the format."""
    return [entry.value for entry in tensor.external_data if entry.key == "location"]
