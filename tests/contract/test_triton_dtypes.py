"""Datatypes that inputs and outputs of our artifacts do not have, over the same transport: BYTES, FP16, BF16."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
from loopback import LoopbackModel, serving

from bf16kit.numerics.tensors import BY_NAME, TensorSpec


@pytest.mark.parametrize("dtype", [name for name in BY_NAME if name != "string"])
def test_every_datatype_is_returned_unchanged(dtype: str) -> None:
    kind = BY_NAME[dtype]
    array = np.array([[0, 1, 1, 0]]).astype(kind.numpy)
    spec = TensorSpec("x", dtype, ("batch", 4))
    model = LoopbackModel(inputs=[spec], outputs=[TensorSpec("y", dtype, ("batch", 4))])
    with serving(model) as served, triton.InferenceServerClient(served.address) as client:
        x = triton.InferInput("x", [1, 4], kind.oip)
        x.set_data_from_numpy(array)
        answer: Any = client.infer("echo", [x])
        assert answer.get_output("y").datatype == kind.oip
        np.testing.assert_array_equal(answer.as_numpy("y"), array)


def test_texts_are_returned_unchanged() -> None:
    text = TensorSpec("x", "string", ("batch",))
    model = LoopbackModel(inputs=[text], outputs=[TensorSpec("y", "string", ("batch",))])
    with serving(model) as served, triton.InferenceServerClient(served.address) as client:
        x = triton.InferInput("x", [3], "BYTES")
        x.set_data_from_numpy(np.array(["", "naïve", "日本"], np.object_))
        assert [element.decode() for element in client.infer("echo", [x]).as_numpy("y")] == ["", "naïve", "日本"]


def test_an_fp32_output_as_bf16_is_rounded_to_nearest_even() -> None:
    with serving(LoopbackModel()) as served, triton.InferenceServerClient(served.address) as client:
        values = np.array([[1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-9]], np.float32)
        x = triton.InferInput("x", [1, 3], "FP32")
        x.set_data_from_numpy(values)
        output = triton.InferRequestedOutput("y")
        output._get_tensor().parameters["datatype"].string_param = "BF16"
        answer = client.infer("echo", [x], outputs=[output]).get_response()
        sent = np.frombuffer(answer.raw_output_contents[0], ml_dtypes.bfloat16)
        assert sent.astype(np.float32).tolist() == [1.0, 1 + 2**-6, 1.0]
