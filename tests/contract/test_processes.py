"""Separate processes: a client without our stubs, and one that loads both sets of stubs in either order."""

import subprocess
import sys
from pathlib import Path

import pytest

INFER = """
import sys
import numpy as np
x = triton.InferInput("x", [1, 16], "FP32")
x.set_data_from_numpy(np.ones((1, 16), np.float32))
with triton.InferenceServerClient(sys.argv[1]) as client:
    print(client.infer("mlp", [x]).as_numpy("y").shape)
"""
THEIRS = "import tritonclient.grpc as triton\n"
OURS = "from bf16kit.protocol import inference_pb2\nimport bf16kit.service.grpc.transport\n"
OUR_MESSAGE = "print(inference_pb2.ModelInferRequest(model_name='m', raw_input_contents=[b'x']).ByteSize())\n"


def run(program: str, address: str) -> str:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, address],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_a_client_works_in_a_process_without_our_modules(address: str) -> None:
    only_theirs = THEIRS + INFER + "assert not any(name.startswith('bf16kit') for name in sys.modules)\n"
    assert run(only_theirs, address) == "(1, 16)\n"


@pytest.mark.long
@pytest.mark.parametrize("order", [THEIRS + OURS, OURS + THEIRS], ids=["theirs first", "ours first"])
def test_both_sets_of_stubs_load_in_either_order(address: str, order: str) -> None:
    assert run(order + INFER + OUR_MESSAGE, address) == "(1, 16)\n6\n"
