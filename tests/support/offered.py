"""Several different requests, the server's response to each of them alone, and a comparison with those under load.

If all requests were equal, a test could not notice a response that goes to the wrong client.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from loopback import infer_request

from bench.serving.openloop import Outcome
from bf16kit.artifact.artifact import Artifact
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.runtime.loading import load
from bf16kit.service.grpc.handlers import SERVICE

INFER = f"/{SERVICE}/ModelInfer"
_COUNT, _WIDTH = 16, 16


class Requests:
    """Sixteen requests to the model of :func:`artifacts.write_mlp`."""

    def __init__(self, model: str = "mlp") -> None:
        self._rows = np.random.default_rng(8).standard_normal((_COUNT, 1, _WIDTH), np.float32)
        self.messages = [infer_request(model, x=x).SerializeToString() for x in self._rows]

    def computed(self, artifact: Path) -> list[np.ndarray[Any, Any]]:
        """Return the model's output for each request, computed without a server."""
        runtime = load(Artifact.open(artifact), "cpu", threads=1)
        return [runtime.run({"x": x})["y"][0] for x in self._rows]

    def ask(self, target: str, timeout: float = 5.0) -> list[np.ndarray[Any, Any]]:
        """Send the requests one at a time, and return the outputs. The call waits until the server is reachable."""
        with grpc.insecure_channel(target) as channel:
            call: Any = channel.unary_unary(INFER)
            answers = [call(message, timeout=timeout, wait_for_ready=True) for message in self.messages]
        return [_values(answer) for answer in answers]


def wrong(outcome: Outcome, expected: Sequence[np.ndarray[Any, Any]]) -> int:
    """Return how many responses differ from those ``expected``; the batch size may change the last bit."""
    return sum(
        count
        for right, answers in zip(expected, outcome.answers, strict=True)
        for answer, count in answers.items()
        if not np.allclose(_values(answer[5:]), right, atol=1e-5)
    )


def _values(response: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(pb.ModelInferResponse.FromString(response).raw_output_contents[0], np.float32)
