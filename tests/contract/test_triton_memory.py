"""An unmodified tritonclient with tensors in system shared memory; the conformance suite has the rules."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm

X = np.arange(32, dtype=np.float32).reshape(2, 16) / 32


@pytest.fixture
def client(memory_address: str) -> Iterator[Any]:
    with triton.InferenceServerClient(memory_address) as client:
        yield client
        client.unregister_system_shared_memory()


def test_shared_memory_gives_the_same_results_as_tensors_in_the_message(client: Any) -> None:
    sent, shared = (triton.InferInput("x", [2, 16], "FP32") for _ in range(2))
    sent.set_data_from_numpy(X)
    shared.set_shared_memory("in", X.nbytes, 0)
    expected = client.infer("mlp", [sent]).as_numpy("y")
    wanted = triton.InferRequestedOutput("y")
    wanted.set_shared_memory("out", expected.nbytes, 64)
    with ExitStack() as stack:
        made = {}
        for name, nbytes in {"in": X.nbytes, "out": expected.nbytes + 64}.items():
            key = f"/contract-{os.getpid()}-{name}"
            made[name] = shm.create_shared_memory_region(name, key, nbytes)
            stack.callback(shm.destroy_shared_memory_region, made[name])
            client.register_system_shared_memory(name, key, nbytes)
        shm.set_shared_memory_region(made["in"], [X])
        np.testing.assert_array_equal(client.infer("mlp", [shared]).as_numpy("y"), expected)
        result = client.infer("mlp", [shared], outputs=[wanted])
        np.testing.assert_array_equal(shm.get_contents_as_numpy(made["out"], np.float32, [2, 16], 64), expected)
    response = result.get_response()
    assert list(response.raw_output_contents) == [b""]
    told = {key: value.string_param or value.int64_param for key, value in response.outputs[0].parameters.items()}
    assert told == {
        "shared_memory_region": "out",
        "shared_memory_byte_size": expected.nbytes,
        "shared_memory_offset": 64,
    }
