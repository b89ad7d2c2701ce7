"""Calls with MLServer's generated stubs, its converters and its codecs, run by the Python of its own environment.

``python calls_of_mlserver.py HOST:PORT`` runs each function below that takes a stub, and reports the results. The
models are those of ``conftest.py``. (``mlserver infer`` supports only HTTP. docs/conformance.md lists what these stubs
cannot read.)
"""

import inspect
import sys
from typing import Any

import grpc
import numpy as np
from clientcalls import Report, X, of_every_datatype, refused
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.grpc import converters
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc import model_repository_pb2 as mr_pb
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub
from mlserver.types import InferenceRequest, Parameters, RequestOutput


def infer(stub: Any, model: str, request: Any, *, raw: bool = False, version: str = "") -> Any:
    message = converters.ModelInferRequestConverter.from_types(request, model, version, use_raw=raw)
    return converters.ModelInferResponseConverter.to_types(stub.ModelInfer(message, timeout=20))


def mlp(array: Any = X, **more: Any) -> Any:
    return InferenceRequest(inputs=[NumpyCodec.encode_input("x", array)], **more)


def health(stub: Any) -> None:
    assert stub.ServerLive(pb.ServerLiveRequest()).live
    assert stub.ServerReady(pb.ServerReadyRequest()).ready
    assert stub.ModelReady(pb.ModelReadyRequest(name="mlp")).ready
    assert not stub.ModelReady(pb.ModelReadyRequest(name="nobody")).ready


def metadata_of_the_server(stub: Any) -> None:
    server = converters.ServerMetadataResponseConverter.to_types(stub.ServerMetadata(pb.ServerMetadataRequest()))
    assert server.name == "bf16kit"
    assert "model_repository" in server.extensions


def raw_tensors_of_every_datatype(stub: Any) -> None:
    _every_datatype(stub, raw=True)


def typed_tensors_of_every_datatype(stub: Any) -> None:
    _every_datatype(stub, raw=False)


def _every_datatype(stub: Any, *, raw: bool) -> None:
    values = of_every_datatype()
    inputs = [NumpyCodec.encode_input(*each) for each in values.items()]
    answer = infer(stub, "typed", InferenceRequest(inputs=inputs), raw=raw)
    assert len(answer.outputs) == len(values)
    for output in answer.outputs:
        np.testing.assert_array_equal(NumpyCodec.decode_output(output), values[output.name.removesuffix(".out")])


def strings(stub: Any) -> None:
    words = ["bf16", "é", "", "x" * 300]
    for raw in (True, False):
        text = StringCodec.encode_input("BYTES", words)
        text.shape = [2, 2]
        numbers = NumpyCodec.encode_input("FP32", np.ones((2, 2), np.float32))
        answer = infer(stub, "words", InferenceRequest(inputs=[text, numbers]), raw=raw)
        found = next(output for output in answer.outputs if output.name == "BYTES.out")
        assert StringCodec.decode_output(found) == words


def ids_versions_chosen_outputs_and_parameters(stub: Any) -> None:
    asked = mlp(id="é 7", outputs=[RequestOutput(name="y")], parameters=Parameters(customer="a", timeout=20_000_000))
    answer = infer(stub, "mlp", asked, version="1")
    assert (answer.id, answer.model_name, answer.model_version) == ("é 7", "mlp", "1")
    assert [(output.name, output.shape) for output in answer.outputs] == [("y", [2, 16])]


def the_repository(stub: Any) -> None:
    index = stub.RepositoryIndex(mr_pb.RepositoryIndexRequest())
    assert {(line.name, line.state) for line in index.models} >= {("mlp", "READY"), ("typed", "READY")}
    stub.RepositoryModelUnload(mr_pb.RepositoryModelUnloadRequest(model_name="spare"))
    assert not stub.ModelReady(pb.ModelReadyRequest(name="spare")).ready
    stub.RepositoryModelLoad(mr_pb.RepositoryModelLoadRequest(model_name="spare"))
    assert stub.ModelReady(pb.ModelReadyRequest(name="spare")).ready


def refusals(stub: Any) -> None:
    invalid, unknown = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
    with refused(unknown, "nobody"):
        infer(stub, "nobody", mlp())
    with refused(unknown, "7"):
        infer(stub, "mlp", mlp(), version="7")
    with refused(invalid, "'x'", "[2, 3]"):
        infer(stub, "mlp", mlp(X[:, :3]))
    with refused(invalid, "FP64"):
        infer(stub, "mlp", mlp(X.astype(np.float64)))


def main(target: str) -> None:
    report = Report()
    with grpc.insecure_channel(target) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for call in CALLS:
            with report.of(call.__name__):
                call(stub)
    report.write()


CALLS = [
    each
    for each in list(globals().values())
    if inspect.isfunction(each) and list(inspect.signature(each).parameters) == ["stub"]
]
if __name__ == "__main__":
    main(sys.argv[1])
