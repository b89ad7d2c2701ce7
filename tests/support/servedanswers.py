"""Run a real server for an artifact, and return its response over gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tritonclient.grpc as triton
from serverprocess import ServerProcess
from tritonclient.utils import np_to_triton_dtype


def served_answers(repository: Path, model: str, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Start a server of ``repository``, return the outputs of ``model`` for ``feeds`` by name, and stop the server."""
    server = ServerProcess("--grpc-port", "0", "--http-port", "0", "--repository", str(repository), "--device", "cpu")
    try:
        with triton.InferenceServerClient(server.wait_ready().target) as client:
            inputs = []
            for name, array in feeds.items():
                inputs.append(triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
                inputs[-1].set_data_from_numpy(array)
            answer = client.infer(model, inputs)
            return {output.name: answer.as_numpy(output.name) for output in answer.get_response().outputs}
    finally:
        server.close()
