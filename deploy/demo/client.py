"""A client as an application for sentence embeddings would write it: plain tritonclient, without bf16kit."""

from __future__ import annotations

from typing import Any, Self

import minilm
import numpy as np
import tritonclient.grpc as triton
from numpy.typing import NDArray
from publish import MODEL

OUTPUT = "last_hidden_state"


class Client:
    """Returns sentence embeddings; ``precision`` is that of the last response."""

    def __init__(self, address: str) -> None:
        self._server = triton.InferenceServerClient(address)
        self._inputs = [tensor.name for tensor in self._server.get_model_metadata(MODEL).inputs]
        self._tokenizer = minilm.tokenizer()
        self.precision = ""

    def embed(self, sentence: str) -> NDArray[np.float64]:
        """Return the unit-length embedding [384] of a sentence."""
        feeds = minilm.tokenize(self._tokenizer, [sentence])
        reply = self._server.infer(MODEL, [_tensor(name, feeds[name]) for name in self._inputs])
        self.precision = reply.get_response().parameters["precision"].string_param
        return np.asarray(minilm.mean_pool(reply.as_numpy(OUTPUT), feeds["attention_mask"])[0])

    @property
    def profile(self) -> str:
        """The profile that the server runs, such as cpu-bf16."""
        config = self._server.get_model_config(MODEL).config
        return str(config.parameters["profile"].string_value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()


def _tensor(name: str, value: NDArray[np.int64]) -> Any:
    tensor = triton.InferInput(name, list(value.shape), "INT64")
    tensor.set_data_from_numpy(value)
    return tensor
