"""The peer of the latency benchmark: the least a gRPC server around one ONNX Runtime session can be.

A synchronous grpcio handler that parses the request, runs the session and serialises the reply: no checks, no batching,
no metrics, no errors in words. It answers the same bytes as `bf16-serve`, from a session opened with the same options.
It tells its port to who asks, and serves until its input ends.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from bench.core.child import answer_all
from bench.serving import wire
from bf16kit.numerics.tensors import BY_OIP
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.runtime.ort.onnxgraph import kernel_for
from bf16kit.runtime.ort.session import Session, open_session

_THREADS = 8


class Handler:
    """ModelInfer over ``session``; the outputs' names are looked up once."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._outputs = [output.name for output in session.get_outputs()]

    def infer(self, request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        """The outputs of the session for the raw contents of the request."""
        feeds = {
            tensor.name: np.frombuffer(content, BY_OIP[tensor.datatype].numpy).reshape(tuple(tensor.shape))
            for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        reply = pb.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        for name, array in zip(self._outputs, self._session.run(None, feeds), strict=True):
            reply.outputs.add(name=name, datatype="FP32", shape=array.shape)
            reply.raw_output_contents.append(array.tobytes())
        return reply


def serve(graph: Path) -> None:
    """Serve ``graph`` on a free port of the loopback interface."""
    session = open_session(graph, library=kernel_for(graph).library)
    handler = grpc.unary_unary_rpc_method_handler(
        Handler(session).infer, pb.ModelInferRequest.FromString, pb.ModelInferResponse.SerializeToString
    )
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"ModelInfer": handler}
    server = grpc.server(ThreadPoolExecutor(_THREADS))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    answer_all(lambda _: port)  # until its input ends


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
