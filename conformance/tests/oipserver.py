"""A complete server of the protocol in a few hundred lines, for tests of the conformance suite. It echoes its inputs.

It keeps every rule that the suite checks. A test passes a ``twist``, which intercepts each call and may break a rule.
Nothing of ``service`` is used, so that the suite is tested with a server other than the one it was developed with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from oipextensions import Extensions, Refused, classes, read_region, write_region

from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.protocol import probes_pb2 as probes
from oip_conformance.target import SERVICE
from oip_conformance.wire import DATATYPES, Array, Malformed, decode, encode, read_contents
from oip_conformance.wire import Tensor as Value

Code = grpc.StatusCode
#: Handles a call in place of the server. Its arguments are the RPC, the request, and the server's correct handler.
Twist = Callable[[str, Any, Callable[[Any], Any]], Any]
_RESERVED: Mapping[str, tuple[str, ...]] = {
    "timeout": ("int64_param",),
    "priority": ("int64_param", "uint64_param"),
    "sequence_id": ("int64_param", "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "triton_enable_empty_final_response": ("bool_param",),
}


def honest(rpc: str, request: Any, proceed: Callable[[Any], Any]) -> Any:
    """The twist that changes nothing."""
    return proceed(request)


@dataclass
class Served:
    """A model that returns each input ``x_TYPE`` as ``y_TYPE``. ``optional``: the datatypes whose input is optional."""

    name: str
    datatypes: Sequence[str]
    max_batch_size: int = 8
    versions: Sequence[str] = ("1",)
    optional: Sequence[str] = ()
    ready: bool = True
    counts: dict[str, pb.ModelStatistics] = field(default_factory=dict)

    @property
    def dims(self) -> list[int]:
        return [4] if self.max_batch_size else [-1, 4]

    def metadata(self) -> pb.ModelMetadataResponse:
        shape = [-1, 4]
        made = pb.ModelMetadataResponse(name=self.name, versions=self.versions, platform="echo")
        for name in self.datatypes:
            made.inputs.add(name=f"x_{name}", datatype=name, shape=shape)
            made.outputs.add(name=f"y_{name}", datatype=name, shape=shape)
        return made

    def config(self) -> pb.ModelConfigResponse:
        config = pb.ModelConfig(name=self.name, max_batch_size=self.max_batch_size)
        for name in self.datatypes:
            kind = pb.DataType.Value("TYPE_STRING" if name == "BYTES" else f"TYPE_{name}")
            config.input.add(name=f"x_{name}", data_type=kind, dims=self.dims, optional=name in self.optional)
            config.output.add(name=f"y_{name}", data_type=kind, dims=self.dims)
        return pb.ModelConfigResponse(config=config)


def models() -> list[Served]:
    """Return the server's models: every datatype, two versions, one without batches, one with an optional input."""
    typed = [name for name, kind in DATATYPES.items() if kind.field]
    return [
        Served("echo", ["FP32"], versions=("1", "3")),
        Served("kinds", [*DATATYPES]),
        Served("typed", typed),
        Served("loose", ["FP32", "INT32"], max_batch_size=0),
        Served("maybe", ["FP32", "INT32"], optional=("INT32",)),
    ]


class OipServer(Extensions):
    """The RPCs; those of the extensions are in :class:`Extensions`."""

    def __init__(self, twist: Twist = honest, *, lenient: bool = False) -> None:
        super().__init__({model.name: model for model in models()})
        self.twist = twist
        self.lenient = lenient

    def parsed(self, kind: Any, data: bytes) -> Any:
        """Return the parsed request. A lenient server treats invalid bytes as an empty request."""
        try:
            return kind.FromString(data)
        except Exception as error:  # noqa: BLE001 -- protobuf's implementations raise errors of their own
            if self.lenient:
                return kind()
            raise Refused(Code.INTERNAL, f"unable to parse the request: {error}") from None

    # --- the protocol -----------------------------------------------------------------------------------------------

    def ServerLive(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    def ServerReady(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=all(model.ready for model in self.models.values()))

    def ModelReady(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        try:
            self.found(request.name, request.version)
        except Refused as refused:
            if refused.code is not Code.NOT_FOUND:
                raise
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=True)

    def ServerMetadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="echo", version="1.0", extensions=self.DECLARED)

    def ModelMetadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        return self.found(request.name, request.version).metadata()

    def ModelInfer(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        model = self.found(request.model_name, request.model_version)
        _check_parameters(request.parameters)
        started = time.monotonic_ns()
        outputs = self._outputs(model, request, _feeds(self, model, request))
        version = str(int(request.model_version)) if request.model_version else model.versions[-1]
        made = pb.ModelInferResponse(model_name=model.name, model_version=version, id=request.id)
        for name, (tensor, raw) in outputs.items():
            made.outputs.add(name=name, datatype=tensor.datatype, shape=tensor.array.shape)
            made.raw_output_contents.append(raw)
        rows = next(iter(request.inputs)).shape[0] if model.max_batch_size else 1
        self.count(model, version, rows, time.monotonic_ns() - started)
        return made

    def _outputs(
        self, model: Served, request: pb.ModelInferRequest, feeds: Mapping[str, Value]
    ) -> dict[str, tuple[Value, bytes]]:
        found = {f"y{name[1:]}": tensor for name, tensor in feeds.items()}
        requested = {output.name: output.parameters for output in request.outputs} or dict.fromkeys(found)
        made = {}
        for name, parameters in requested.items():
            if name not in found and name.removeprefix("y_") not in model.datatypes:
                raise Refused(Code.INVALID_ARGUMENT, f"unexpected inference output {name!r}")
            if name in found:
                tensor = classes(model, found[name], parameters or {})
                made[name] = tensor, write_region(self, name, encode(tensor), parameters or {})
        return made

    def ModelStreamInfer(self, requests: Sequence[pb.ModelInferRequest]) -> list[pb.ModelStreamInferResponse]:
        made = []
        for request in requests:
            try:
                answer = self.twist("ModelInfer", request, self.ModelInfer)
                answer.parameters["triton_final_response"].bool_param = True
                made.append(pb.ModelStreamInferResponse(infer_response=answer))
            except Refused as refused:
                about = pb.ModelInferResponse(id=request.id)
                made.append(pb.ModelStreamInferResponse(error_message=refused.text, infer_response=about))
        return made

    # --- health and reflection --------------------------------------------------------------------------------------

    def Check(self, request: probes.HealthCheckRequest) -> probes.HealthCheckResponse:
        if request.service not in ("", SERVICE):
            raise Refused(Code.NOT_FOUND, "unknown service")
        return probes.HealthCheckResponse(status=probes.HealthCheckResponse.SERVING)

    def Watch(self, request: probes.HealthCheckRequest) -> list[probes.HealthCheckResponse]:
        return [self.Check(request)]

    def ServerReflectionInfo(
        self, requests: Sequence[probes.ServerReflectionRequest]
    ) -> list[probes.ServerReflectionResponse]:
        services = [probes.ServerReflectionResponse.Service(name=SERVICE)]
        listed = probes.ServerReflectionResponse.Services(service=services)
        return [probes.ServerReflectionResponse(list_services_response=listed)]


def _feeds(server: OipServer, model: Served, request: pb.ModelInferRequest) -> dict[str, Value]:
    raw, feeds = request.raw_input_contents, {}
    outside = ["shared_memory_region" in tensor.parameters for tensor in request.inputs]
    if raw and len(raw) < len(request.inputs) - sum(outside):
        raise Refused(Code.INVALID_ARGUMENT, "raw_input_contents are not there for every input")
    specs = {spec.name: spec for spec in model.metadata().inputs}
    for at, tensor in enumerate(request.inputs):
        if tensor.name in feeds or tensor.name not in specs:
            raise Refused(Code.INVALID_ARGUMENT, f"input {tensor.name!r} is unknown or came twice")
        feeds[tensor.name] = _feed(server, model, specs[tensor.name], tensor, raw[at] if raw else None)
    missing = [name for name in specs if name not in feeds and name.removeprefix("x_") not in model.optional]
    if missing:
        raise Refused(Code.INVALID_ARGUMENT, f"missing inputs: {missing}")
    return feeds


def _feed(server: OipServer, model: Served, spec: Any, tensor: Any, raw: bytes | None) -> Value:
    name, shape = tensor.name, list(tensor.shape)
    if tensor.datatype != spec.datatype:
        raise Refused(Code.INVALID_ARGUMENT, f"input {name!r} is {tensor.datatype!r}, expected {spec.datatype!r}")
    if len(shape) != 2 or shape[1] != 4 or not 0 <= shape[0] < 2**31:
        raise Refused(Code.INVALID_ARGUMENT, f"input {name!r} has shape {shape[:8]}, expected [-1,4]")
    if 0 < model.max_batch_size < shape[0]:
        raise Refused(Code.INVALID_ARGUMENT, f"batch-size must be <= {model.max_batch_size}")
    return Value(tensor.datatype, _array(server, tensor, shape, raw))


def _array(server: OipServer, tensor: Any, shape: list[int], raw: bytes | None) -> Array:
    name = tensor.name
    region = read_region(server, name, tensor.parameters)
    if region is not None or raw is not None:
        if tensor.HasField("contents"):
            raise Refused(Code.INVALID_ARGUMENT, f"contents beside raw_input_contents or a region for {name!r}")
        data = region if region is not None else raw
    try:
        if region is not None or raw is not None:
            return decode(tensor.datatype, shape, data or b"")
        return read_contents(tensor.datatype, shape, tensor.contents)
    except Malformed as error:
        raise Refused(Code.INVALID_ARGUMENT, f"input {name!r}: {error}") from None


def _check_parameters(parameters: Mapping[str, pb.InferParameter]) -> None:
    for name, value in parameters.items():
        choice = value.WhichOneof("parameter_choice")
        reserved = name.startswith("triton_") and name not in _RESERVED
        if choice is None or reserved or choice not in _RESERVED.get(name, (choice,)):
            raise Refused(Code.INVALID_ARGUMENT, f"parameter {name!r} has a wrong type or is reserved")
    if "priority" in parameters and parameters["priority"].int64_param < 0:
        raise Refused(Code.INVALID_ARGUMENT, "priority must be >= 0")


# --- on a socket ------------------------------------------------------------------------------------------------------


def _unary(server: OipServer, rpc: str, kind: Any) -> Any:
    def handle(data: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            answer = server.twist(rpc, server.parsed(kind, data), getattr(server, rpc))
        except Refused as refused:
            context.abort(refused.code, refused.text)
        return bytes(answer.SerializeToString())

    return grpc.unary_unary_rpc_method_handler(handle)


def _stream(server: OipServer, rpc: str, kind: Any) -> Any:
    def handle(data: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            answers = server.twist(rpc, [server.parsed(kind, one) for one in data], getattr(server, rpc))
        except Refused as refused:
            context.abort(refused.code, refused.text)
        for answer in answers:
            yield answer.SerializeToString()

    return grpc.stream_stream_rpc_method_handler(handle)


def _watch(server: OipServer) -> Any:
    def handle(data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        for answer in server.twist("Watch", server.parsed(probes.HealthCheckRequest, data), server.Watch):
            yield answer.SerializeToString()

    return grpc.unary_stream_rpc_method_handler(handle)


class _AnswersAnything(grpc.GenericRpcHandler):
    """Returns OK and an empty response for any method."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda data, context: b"")


@contextmanager
def oip_server(
    twist: Twist = honest,
    *,
    lenient: bool = False,
    answers_anything: bool = False,
    tls: grpc.ServerCredentials | None = None,
) -> Iterator[str]:
    """Run the server on a free port of this machine, and yield its address."""
    server = OipServer(twist, lenient=lenient)
    rpcs = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    handlers = {
        name: (_stream if rpc.client_streaming else _unary)(server, name, GetMessageClass(rpc.input_type))
        for name, rpc in rpcs.items()
    }
    health = {"Check": _unary(server, "Check", probes.HealthCheckRequest), "Watch": _watch(server)}
    reflection = {"ServerReflectionInfo": _stream(server, "ServerReflectionInfo", probes.ServerReflectionRequest)}
    listening = grpc.server(ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", 64 << 20)])
    for service, methods in (
        (SERVICE, handlers),
        ("grpc.health.v1.Health", health),
        ("grpc.reflection.v1.ServerReflection", reflection),
    ):
        listening.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    if answers_anything:
        listening.add_generic_rpc_handlers((_AnswersAnything(),))
    free = "127.0.0.1:0"
    port = listening.add_insecure_port(free) if tls is None else listening.add_secure_port(free, tls)
    listening.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        listening.stop(0).wait()
