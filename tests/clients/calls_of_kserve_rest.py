"""Calls with KServe's InferenceRESTClient and tritonclient.http, run by the Python of KServe's environment.

``python calls_of_kserve_rest.py HOST:PORT HOST:PORT`` (gRPC, REST) runs each function below that takes clients, and
reports the results. The models are those of ``conftest.py``.
"""

import asyncio
import logging
import sys
from typing import Any, NamedTuple

import httpx
import numpy as np
import tritonclient.http as triton
from clientcalls import Report, X, calls_of, of_every_datatype
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput
from tritonclient.utils import InferenceServerException, np_to_triton_dtype


class Clients(NamedTuple):
    """The clients, and the address that KServe's is given with each call."""

    grpc: InferenceGRPCClient
    rest: InferenceRESTClient
    triton: Any
    url: str


def request(model: str, values: dict[str, Any], *, binary: bool, **more: Any) -> Any:
    inputs = []
    for name, array in values.items():
        inputs.append(InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array, binary_data=binary)
    return InferRequest(model, inputs, **more)


async def the_same_by_rest_and_grpc(client: Any) -> None:
    alone = await client.grpc.infer(request("mlp", {"x": X}, binary=True))
    for binary in (True, False):
        answer = await client.rest.infer(client.url, request("mlp", {"x": X}, binary=binary), model_name="mlp")
        np.testing.assert_array_equal(answer.outputs[0].as_numpy(), alone.outputs[0].as_numpy())


async def tensors_of_every_datatype_in_json_and_binary(client: Any) -> None:
    values = of_every_datatype()
    for binary in (True, False):
        outputs = [RequestedOutput(f"{name}.out", {"binary_data": binary}) for name in values]
        asked = request("typed", values, binary=binary, request_outputs=outputs)
        answer = await client.rest.infer(client.url, asked, model_name="typed")
        assert len(answer.outputs) == len(values)
        for output in answer.outputs:
            np.testing.assert_array_equal(output.as_numpy(), values[output.name.removesuffix(".out")])


async def half_precision_for_fp32(client: Any) -> None:
    rounded = X.astype(np.float16)
    half, wide = [
        await client.rest.infer(client.url, request("mlp", {"x": array}, binary=True), model_name="mlp")
        for array in (rounded, rounded.astype(np.float32))
    ]
    np.testing.assert_array_equal(half.outputs[0].as_numpy(), wide.outputs[0].as_numpy())


async def ids_and_parameters(client: Any) -> None:
    parameters = {"timeout": 20_000_000, "customer": "a"}
    asked = request("mlp", {"x": X}, binary=False, request_id="é 7", parameters=parameters)
    answer = await client.rest.infer(client.url, asked, model_name="mlp")
    assert (answer.id, answer.model_name) == ("é 7", "mlp")  # this client drops the version


async def health(client: Any) -> None:
    assert await client.rest.is_server_live(client.url)
    assert await client.rest.is_server_ready(client.url)
    assert await client.rest.is_model_ready(client.url, "mlp")


async def refusals(client: Any) -> None:
    for asked, model, status in (
        (request("mlp", {"x": X[:, :3]}, binary=False), "mlp", 400),
        (request("mlp", {"x": X}, binary=True), "nobody", 404),
    ):
        try:
            await client.rest.infer(client.url, asked, model_name=model)
            response = None
        except httpx.HTTPStatusError as error:
            response = error.response
        assert response is not None
        assert response.status_code == status
        assert response.json()["error"]


async def tritons_tensors_of_every_datatype(client: Any) -> None:
    values = of_every_datatype()
    for binary in (True, False):
        inputs = []
        for name, array in values.items():
            inputs.append(triton.InferInput(name, list(array.shape), name))
            inputs[-1].set_data_from_numpy(array, binary_data=binary)
        asked = [triton.InferRequestedOutput(f"{name}.out", binary_data=binary) for name in values]
        for outputs in (asked, None):
            answer = client.triton.infer("typed", inputs, outputs=outputs)
            for name, array in values.items():
                np.testing.assert_array_equal(answer.as_numpy(f"{name}.out"), array)


async def tritons_strings(client: Any) -> None:
    words = np.array([["bf16", "é"], ["", "x" * 300]], dtype=np.object_)
    for binary in (True, False):
        inputs = [triton.InferInput("BYTES", [2, 2], "BYTES"), triton.InferInput("FP32", [2, 2], "FP32")]
        inputs[0].set_data_from_numpy(words, binary_data=binary)
        inputs[1].set_data_from_numpy(np.array([[np.nan, np.inf], [-np.inf, 1e-45]], np.float32), binary_data=binary)
        outputs = [triton.InferRequestedOutput(f"{name}.out", binary_data=binary) for name in ("BYTES", "FP32")]
        answer = client.triton.infer("words", inputs, outputs=outputs)
        found = [each if isinstance(each, str) else each.decode() for each in answer.as_numpy("BYTES.out").ravel()]
        assert found == words.ravel().tolist()
        np.testing.assert_array_equal(answer.as_numpy("FP32.out"), [[np.nan, np.inf], [-np.inf, np.float32(1e-45)]])


async def tritons_health_metadata_and_errors(client: Any) -> None:
    assert client.triton.is_server_live()
    assert client.triton.is_server_ready()
    assert client.triton.is_model_ready("mlp", "1")
    assert not client.triton.is_model_ready("nobody")
    assert "binary_tensor_data" in client.triton.get_server_metadata()["extensions"]
    assert client.triton.get_model_metadata("mlp")["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}]
    try:
        told = str(client.triton.get_model_repository_index())
    except InferenceServerException as error:
        told = str(error)
    assert "the gRPC port" in told


async def main(grpc_target: str, target: str) -> None:
    logging.disable()  # otherwise each rejection logs a traceback
    report = Report()
    async with InferenceGRPCClient(grpc_target) as grpc_client:
        rest = InferenceRESTClient(RESTConfig(protocol="v2"))
        clients = Clients(grpc_client, rest, triton.InferenceServerClient(target), f"http://{target}")
        for call in calls_of(globals(), "client"):
            with report.of(call.__name__):
                await call(clients)
    report.write()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
