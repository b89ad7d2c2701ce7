"""Which initializers of an ONNX file keep their data in another file."""

from __future__ import annotations

from pathlib import Path

from bf16kit.errors import RuntimeFailure


def initializers(path: Path, location: str) -> list[str]:
    """Names of the main graph's initializers in ``path`` whose external data is in the file ``location``.

    Raises :class:`RuntimeFailure` when ``path`` is not an ONNX file.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        graph = onnx.load(path, load_external_data=False).graph
    except (OSError, DecodeError) as error:
        raise RuntimeFailure(f"{path.name} is not an ONNX file: {error}") from error
    return [
        tensor.name
        for tensor in graph.initializer
        if any(entry.key == "location" and entry.value == location for entry in tensor.external_data)
    ]
