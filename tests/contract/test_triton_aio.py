"""An unmodified tritonclient.grpc.aio."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.grpc import InferInput

X = np.ones((2, 16), np.float32)


def inputs() -> list[Any]:
    x = InferInput("x", [2, 16], "FP32")
    x.set_data_from_numpy(X)
    return [x]


@pytest.mark.long
def test_concurrent_requests_get_the_same_response_and_a_stream_its_responses_in_order(address: str) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(5):
            yield {"model_name": "mlp", "inputs": inputs(), "request_id": str(number)}

    async def ask() -> tuple[list[Any], list[str]]:
        async with triton.InferenceServerClient(address) as client:
            answers = await asyncio.gather(*(client.infer("mlp", inputs()) for _ in range(32)))
            streamed = [
                result.get_response().id async for result, error in client.stream_infer(requests()) if not error
            ]
            return [answer.as_numpy("y") for answer in answers], streamed

    (first, *others), streamed = asyncio.run(ask())
    assert first.shape == (2, 16)
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-5, atol=1e-6)
    assert streamed == ["0", "1", "2", "3", "4"]
