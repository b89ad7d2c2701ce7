"""An unmodified tritonclient with tensors in system shared memory; the conformance suite has the rules."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm

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
