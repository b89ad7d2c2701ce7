"""An unmodified tritonclient with tensors in system shared memory: sync, asyncio and streams."""

from __future__ import annotations

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


def shared_input(name: str, region: str, shape: list[int], datatype: str, nbytes: int, offset: int = 0) -> Any:
    made = triton.InferInput(name, shape, datatype)
    made.set_shared_memory(region, nbytes, offset)
    return made


def sent_input(name: str, array: np.ndarray[Any, Any], datatype: str) -> Any:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def shared_output(name: str, region: str, nbytes: int, offset: int = 0) -> Any:
    made = triton.InferRequestedOutput(name)
    made.set_shared_memory(region, nbytes, offset)
    return made


def refusal(call: Callable[[], Any], code: str) -> str:
    with pytest.raises(InferenceServerException) as refused:
        call()
    assert refused.value.status() == f"StatusCode.{code}"
    return str(refused.value.message())


def test_shared_memory_gives_the_same_results_as_tensors_in_the_message(client: Any, memory: Memory) -> None:
    expected = client.infer("mlp", [sent_input("x", X, "FP32")]).as_numpy("y")
    memory("in", X.nbytes, X)
    out = memory("out", expected.nbytes + 64)
    x = shared_input("x", "in", [2, 16], "FP32", X.nbytes)
    np.testing.assert_array_equal(client.infer("mlp", [x]).as_numpy("y"), expected)
    result = client.infer("mlp", [x], outputs=[shared_output("y", "out", expected.nbytes, 64)])
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


def test_inputs_in_the_message_and_in_shared_memory_may_be_mixed_in_any_order(client: Any, memory: Memory) -> None:
    rows, small = np.ones((1, 4), np.float32), np.arange(4, dtype=np.int32).reshape(1, 4)
    large, flag = np.arange(4, dtype=np.int64).reshape(1, 4), np.array([[True, False, True, True]])
    memory("in", 64, rows, flag)
    out = memory("out", 64)
    inputs = [
        shared_input("x", "in", [1, 4], "FP32", 16),
        sent_input("small", small, "INT32"),
        shared_input("flag", "in", [1, 4], "BOOL", 4, 16),
        sent_input("large", large, "INT64"),
    ]
    outputs = [
        triton.InferRequestedOutput("negated"),
        shared_output("doubled", "out", 16),
        triton.InferRequestedOutput("denied"),
    ]
    result = client.infer("types", inputs, outputs=outputs)
    np.testing.assert_array_equal(result.as_numpy("negated"), -small)
    np.testing.assert_array_equal(result.as_numpy("denied"), ~flag)
    np.testing.assert_array_equal(shm.get_contents_as_numpy(out, np.float32, [1, 4]), 2 * rows)


def test_shared_memory_works_in_asyncio_and_on_streams(client: Any, memory: Memory, memory_address: str) -> None:
    expected = client.infer("mlp", [sent_input("x", X, "FP32")]).as_numpy("y")
    memory("in", X.nbytes, X)
    out = memory("out", 4 * X.nbytes)
    inputs = [shared_input("x", "in", [2, 16], "FP32", X.nbytes)]

    def outputs(part: int) -> list[Any]:
        return [shared_output("y", "out", X.nbytes, part * X.nbytes)]

    async def ask() -> None:
        async with triton_aio.InferenceServerClient(memory_address) as asking:
            status = await asking.get_system_shared_memory_status(as_json=True)
            assert set(status["regions"]) == {"in", "out"}
            await asking.infer("mlp", inputs, outputs=outputs(0))

            async def requests() -> AsyncIterator[dict[str, Any]]:
                yield {"model_name": "mlp", "inputs": inputs, "outputs": outputs(1)}

            async for _, error in asking.stream_infer(requests()):
                assert error is None

    asyncio.run(ask())
    done: SimpleQueue[Any] = SimpleQueue()
    client.start_stream(callback=lambda result, error: done.put((result, error)))
    for part in (2, 3):
        client.async_stream_infer("mlp", inputs, outputs=outputs(part))
    assert [done.get(timeout=60)[1] for _ in range(2)] == [None, None]
    client.stop_stream()
    found = shm.get_contents_as_numpy(out, np.float32, [4, 2, 16])
    np.testing.assert_array_equal(found, np.stack([expected] * 4))


def test_cuda_shared_memory_can_only_be_unregistered(client: Any) -> None:
    client.unregister_cuda_shared_memory()
    client.unregister_cuda_shared_memory("anything")
    assert not client.get_cuda_shared_memory_status().regions
    refusal(lambda: client.get_cuda_shared_memory_status("anything"), "NOT_FOUND")
    words = refusal(lambda: client.register_cuda_shared_memory("r", b"aGFuZGxl", 0, 64), "UNIMPLEMENTED")
    assert "CUDA shared memory is not supported" in words


def test_the_extension_is_declared_only_if_it_is_enabled(client: Any, address: str) -> None:
    assert "system_shared_memory" in client.get_server_metadata().extensions
    assert "cuda_shared_memory" not in client.get_server_metadata().extensions
    with triton.InferenceServerClient(address) as off:
        assert "system_shared_memory" not in off.get_server_metadata().extensions
        x = shared_input("x", "in", [2, 16], "FP32", X.nbytes)
        assert "shared memory, which is off" in refusal(lambda: off.infer("mlp", [x]), "UNIMPLEMENTED")


def test_an_output_that_does_not_fit_is_rejected_and_not_written(client: Any, memory: Memory) -> None:
    out = memory("out", 256)
    small = shared_output("y", "out", 64)
    x = sent_input("x", X, "FP32")
    assert "128 bytes do not fit into the 64" in refusal(
        lambda: client.infer("mlp", [x], outputs=[small]), "INVALID_ARGUMENT"
    )
    beyond = shared_output("y", "out", 128, 200)
    refusal(lambda: client.infer("mlp", [x], outputs=[beyond]), "INVALID_ARGUMENT")
    unknown = shared_output("y", "none", 128)
    refusal(lambda: client.infer("mlp", [x], outputs=[unknown]), "NOT_FOUND")
    assert not shm.get_contents_as_numpy(out, np.uint8, [256]).any()
