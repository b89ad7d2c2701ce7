"""Calls with KServe's InferenceGRPCClient, run by the Python of its own environment.

``python calls_of_kserve.py HOST:PORT`` runs each function below that takes a client, and reports the results. The
models are those of ``conftest.py``.
"""

import asyncio
import logging
import sys
from typing import Any

import grpc
import numpy as np
from clientcalls import Report, X, calls_of, of_every_datatype, refused
from kserve import InferenceGRPCClient, InferInput, InferRequest
from kserve.protocol.infer_type import RequestedOutput


def tensor(name: str, array: Any, datatype: str, *, raw: bool = True) -> Any:
    made = InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=raw)
    return made


def mlp(array: Any = X, datatype: str = "FP32", **more: Any) -> Any:
    return InferRequest("mlp", [tensor("x", array, datatype)], **more)


async def health(client: Any) -> None:
    assert await client.is_server_live()
    assert await client.is_server_ready()
    assert await client.is_model_ready("mlp")
    assert not await client.is_model_ready("nobody")


async def raw_tensors_of_every_datatype(client: Any) -> None:
    values = of_every_datatype()
    answer = await client.infer(InferRequest("typed", [tensor(name, value, name) for name, value in values.items()]))
    assert len(answer.outputs) == len(values)
    for output in answer.outputs:
        np.testing.assert_array_equal(output.as_numpy(), values[output.name.removesuffix(".out")])


async def typed_tensors_of_every_datatype(client: Any) -> None:
    values = of_every_datatype()
    inputs = [tensor(name, value, name, raw=False) for name, value in values.items()]
    answer = await client.infer(InferRequest("typed", inputs))
    assert len(answer.outputs) == len(values)
    for output in answer.outputs:
        np.testing.assert_array_equal(output.as_numpy(), values[output.name.removesuffix(".out")])


async def strings(client: Any) -> None:
    words = np.array([["bf16", "é"], ["", "x" * 300]], dtype=np.object_)
    numbers = np.ones((2, 2), np.float32)
    for raw in (True, False):
        inputs = [tensor("BYTES", words, "BYTES", raw=raw), tensor("FP32", numbers, "FP32", raw=raw)]
        answer = await client.infer(InferRequest("words", inputs))
        outputs = {output.name: output.as_numpy() for output in answer.outputs}
        assert outputs["BYTES.out"].tolist() == [[word.encode() for word in row] for row in words]


async def half_precision_for_fp32(client: Any) -> None:
    rounded = X.astype(np.float16)
    wide = (await client.infer(mlp(rounded.astype(np.float32)))).outputs[0].as_numpy()
    half = (await client.infer(mlp(rounded, "FP16"))).outputs[0].as_numpy()
    np.testing.assert_array_equal(half, wide)


async def ids_versions_and_chosen_outputs(client: Any) -> None:
    answer = await client.infer(mlp(request_id="é 7", model_version="1", request_outputs=[RequestedOutput("y")]))
    assert (answer.id, answer.model_name, answer.model_version) == ("é 7", "mlp", "1")
    assert [output.name for output in answer.outputs] == ["y"]
    assert answer.outputs[0].as_numpy().shape == (2, 16)


async def parameters(client: Any) -> None:
    answer = await client.infer(mlp(parameters={"timeout": 20_000_000, "customer": "a"}))
    assert answer.outputs[0].shape == [2, 16]


async def many_at_once(client: Any) -> None:
    answers = await asyncio.gather(*(client.infer(mlp(X + i)) for i in range(64)))
    alone = await client.infer(mlp(X + 5))
    np.testing.assert_allclose(answers[5].outputs[0].as_numpy(), alone.outputs[0].as_numpy(), rtol=1e-5, atol=1e-6)


async def refusals(client: Any) -> None:
    invalid, unknown = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
    with refused(unknown, "nobody"):
        await client.infer(InferRequest("nobody", [tensor("x", X, "FP32")]))
    with refused(unknown, "7"):
        await client.infer(mlp(model_version="7"))
    with refused(invalid, "'x'", "[2, 3]"):
        await client.infer(mlp(X[:, :3]))
    with refused(invalid, "FP64"):
        await client.infer(mlp(X.astype(np.float64), "FP64"))
    with refused(invalid, "sequence_id"):
        await client.infer(mlp(parameters={"sequence_id": 3}))


async def main(target: str) -> None:
    logging.disable()  # otherwise each rejection logs a traceback
    report = Report()
    async with InferenceGRPCClient(target) as client:
        for call in calls_of(globals(), "client"):
            with report.of(call.__name__):
                await call(client)
    report.write()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
