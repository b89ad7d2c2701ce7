"""An unmodified tritonclient with tensors in system shared memory: sync, asyncio and streams."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

X = np.arange(32, dtype=np.float32).reshape(2, 16) / 32
Memory = Callable[..., Any]


@pytest.fixture
def client(memory_address: str) -> Iterator[Any]:
    with triton.InferenceServerClient(memory_address) as client:
        yield client
        client.unregister_system_shared_memory()


@pytest.fixture
def memory(client: Any) -> Iterator[Memory]:
    """Yield a function that creates shared memory and registers it under the same name."""
    handles = []

    def make(name: str, nbytes: int, *arrays: np.ndarray[Any, Any]) -> Any:
        key = f"/contract-{os.getpid()}-{name}"
        handles.append(shm.create_shared_memory_region(name, key, nbytes))
        shm.set_shared_memory_region(handles[-1], list(arrays))
        client.register_system_shared_memory(name, key, nbytes)
        return handles[-1]

    yield make
    for handle in handles:
        shm.destroy_shared_memory_region(handle)


@pytest.fixture
def sent() -> Any:
    """Return the input in a message."""
    made = triton.InferInput("x", [2, 16], "FP32")
    made.set_data_from_numpy(X)
    return made


@pytest.fixture
def shared() -> Any:
    """Return the input in the shared memory ``in``."""
    made = triton.InferInput("x", [2, 16], "FP32")
    made.set_shared_memory("in", X.nbytes, 0)
    return made


def shared_output(offset: int) -> Any:
    made = triton.InferRequestedOutput("y")
    made.set_shared_memory("out", X.nbytes, offset)
    return made


def test_shared_memory_gives_the_same_results_as_tensors_in_the_message(
    client: Any, memory: Memory, sent: Any, shared: Any
) -> None:
    expected = client.infer("mlp", [sent]).as_numpy("y")
    memory("in", X.nbytes, X)
    out = memory("out", expected.nbytes + 64)
    np.testing.assert_array_equal(client.infer("mlp", [shared]).as_numpy("y"), expected)
    result = client.infer("mlp", [shared], outputs=[shared_output(64)])
    np.testing.assert_array_equal(shm.get_contents_as_numpy(out, np.float32, [2, 16], 64), expected)
    answer = result.get_response()
    assert list(answer.raw_output_contents) == [b""]
    assert answer.parameters["precision"].string_param == "bf16"
    told = {key: value.string_param or value.int64_param for key, value in answer.outputs[0].parameters.items()}
    assert told == {
        "shared_memory_region": "out",
        "shared_memory_byte_size": expected.nbytes,
        "shared_memory_offset": 64,
    }


def test_shared_memory_works_in_asyncio_and_on_streams(
    client: Any, memory: Memory, memory_address: str, sent: Any, shared: Any
) -> None:
    expected = client.infer("mlp", [sent]).as_numpy("y")
    memory("in", X.nbytes, X)
    out = memory("out", 4 * X.nbytes)
    inputs, outputs = [shared], [[shared_output(part * X.nbytes)] for part in range(4)]

    async def ask() -> None:
        async with triton_aio.InferenceServerClient(memory_address) as asking:
            status = await asking.get_system_shared_memory_status(as_json=True)
            assert set(status["regions"]) == {"in", "out"}
            await asking.infer("mlp", inputs, outputs=outputs[0])

            async def requests() -> AsyncIterator[dict[str, Any]]:
                yield {"model_name": "mlp", "inputs": inputs, "outputs": outputs[1]}

            async for _, error in asking.stream_infer(requests()):
                assert error is None

    asyncio.run(ask())
    done: SimpleQueue[Any] = SimpleQueue()
    client.start_stream(callback=lambda result, error: done.put((result, error)))
    for part in (2, 3):
        client.async_stream_infer("mlp", inputs, outputs=outputs[part])
    assert [done.get(timeout=60)[1] for _ in range(2)] == [None, None]
    client.stop_stream()
    found = shm.get_contents_as_numpy(out, np.float32, [4, 2, 16])
    np.testing.assert_array_equal(found, np.stack([expected] * 4))


def test_the_extension_is_declared_only_if_it_is_enabled(client: Any, address: str, shared: Any) -> None:
    assert "system_shared_memory" in client.get_server_metadata().extensions
    assert "cuda_shared_memory" not in client.get_server_metadata().extensions
    with triton.InferenceServerClient(address) as off:
        assert "system_shared_memory" not in off.get_server_metadata().extensions
        with pytest.raises(InferenceServerException, match="shared memory, which is off") as refused:
            off.infer("mlp", [shared])
        assert refused.value.status() == "StatusCode.UNIMPLEMENTED"
