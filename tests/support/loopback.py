"""A server on a real socket with models written in numpy, for tests of the transport.

The models implement all of ``bf16kit.service.contract``, and their requests pass through the real batcher. They have no
artifact, so that a test can choose the shapes, states and failures that it needs.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import numpy as np
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bf16kit.messages.errors import NotFound, Unavailable
from bf16kit.numerics.tensors import BY_NAME, TensorSpec
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.runtime import RuntimeInfo
from bf16kit.service.batching.batcher import Batcher
from bf16kit.service.batching.queue import BatchPolicy
from bf16kit.service.config.certificates import CertificateFiles
from bf16kit.service.config.tokens import SCOPES, Scopes, TokenFile
from bf16kit.service.contract import (
    ActivePrecision,
    Array,
    Bounds,
    Duration,
    Scheduling,
    State,
    StatisticsSnapshot,
    TensorSemantics,
    describe,
)
from bf16kit.service.grpc.handlers import SERVICE
from bf16kit.service.grpc.transport import Transport, TransportOptions
from bf16kit.service.models.repository import find_slot, not_ready
from bf16kit.service.operations import Operations
from bf16kit.service.request import Done, Observation, Request, Timings, Tracer
from bf16kit.service.wire.tensors import encode_raw

Run = Callable[[Mapping[str, Array]], dict[str, Array]]
INFO = RuntimeInfo("onnxruntime", "cpu", "cpu", "bf16-weights", "fp32", "weights are widened as they are used")


class _Quiet:
    """Ignores the observations of a batcher."""

    def rejected(self, reason: str) -> None: ...
    def queued(self, change: int) -> None: ...
    def executed(self, requests: int, rows: int, timings: Timings) -> None: ...


@dataclass
class RequestLog:
    """Records every observation of a request (model, version, code), and the reasons of rejections."""

    seen: list[tuple[str, int, str]] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def request(self, seen: Observation) -> None:
        self.observations.append(seen)
        self.seen.append((seen.model, int(seen.version), seen.code))

    def refused(self, reason: str) -> None:
        self.refusals.append(reason)


class LoopbackModel:
    """A model that computes ``run`` on its inputs. By default it copies ``x`` to ``y``, both fp32[batch,3]."""

    def __init__(
        self,
        name: str = "echo",
        run: Run | None = None,
        *,
        version: int = 1,
        inputs: Sequence[TensorSpec] = (TensorSpec("x", "float32", ("batch", 3)),),
        outputs: Sequence[TensorSpec] = (TensorSpec("y", "float32", ("batch", 3)),),
        batch_axis: int | None = 0,
        max_batch_size: int = 8,
        max_queue: int = 64,
        state: State = "ready",
        info: RuntimeInfo = INFO,
        bounds: Bounds = Bounds(),  # noqa: B008 - frozen
        semantics: TensorSemantics = TensorSemantics(),  # noqa: B008 - frozen
    ) -> None:
        self.name = name
        self.version = version
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.batch_axis = batch_axis
        self.max_batch_size = max_batch_size
        self.max_queue_delay_s = 0.002
        self.instances = 1
        self.info = info
        self.active_precision = ActivePrecision()
        self.golden = "golden samples within budget (y relative_l2 0.0017)"
        self.budget: Mapping[str, float] = {"relative_l2": 0.015, "cosine_distance": 0.0005}
        self.bounds = bounds
        self.semantics = semantics
        self.scheduling = Scheduling()
        self.state: State = state
        self.reason = "" if state == "ready" else f"it is {state}"
        self.statistics = StatisticsSnapshot(1_700_000_000_000, 3, 2, success=Duration(3, 3000))
        self.log = RequestLog()
        self.calls = self.leases = 0
        self.seen: list[Request] = []
        self._run: Run = run or (lambda feeds: {"y": np.array(feeds["x"])})
        policy = BatchPolicy(batch_axis, max_batch_size, max_requests=max_queue)
        self.batcher = Batcher(self._execute, policy, _Quiet(), name=name)

    @property
    def model(self) -> Self | None:
        """Return the model itself while it is ready: this class is a slot and its generation in one."""
        return self if self.state == "ready" else None

    @property
    def running(self) -> dict[str, Any] | None:
        return None if self.model is None else describe(self.model)

    def _execute(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None) -> tuple[dict[str, Array], str]:
        self.calls += 1
        results = self._run(feeds)
        return results if outputs is None else {name: results[name] for name in outputs}, self.info.precision

    def begin(self, request: Request, done: Done) -> None:
        self.seen.append(request)
        self.batcher.begin(request, done)

    def release(self) -> None:
        self.leases -= 1

    def observe(self, seen: Observation) -> None:
        self.log.request(seen)


class LoopbackRegistry:
    """Models by name and version, found as in production. Subscribers are notified when a state changes."""

    def __init__(self, models: Sequence[LoopbackModel]) -> None:
        self._models = sorted(models, key=lambda m: (m.name, m.version))
        self._callbacks: list[Callable[[], None]] = []
        self.draining = False

    @property
    def ready(self) -> bool:
        return not self.draining and bool(self._models) and all(m.state == "ready" for m in self._models)

    def acquire(self, name: str, version: str) -> LoopbackModel:
        model = self.get(name, version)
        model.leases += 1
        return model

    def get(self, name: str, version: str) -> LoopbackModel:
        model = self.find(name, version)
        if self.draining:
            raise Unavailable("the server is shutting down; try another", "draining")
        if model.state != "ready":
            raise not_ready(model, version)
        return model

    def find(self, name: str, version: str) -> LoopbackModel:
        of_name = {m.version: m for m in self._models if m.name == name}
        return find_slot({name: of_name} if of_name else {}, name, version)

    def is_ready(self, name: str, version: str) -> bool:
        try:
            self.get(name, version)
        except (NotFound, Unavailable):
            return False
        return True

    def models(self) -> Sequence[LoopbackModel]:
        return self._models

    def versions(self, name: str) -> list[int]:
        return [m.version for m in self._models if m.name == name and m.state == "ready"]

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def drain(self) -> None:
        self.draining = True
        self._tell()

    def replace(self, old: LoopbackModel, new: LoopbackModel) -> None:
        """Replace ``old`` with another generation."""
        new.log = old.log
        self._models[self._models.index(old)] = new

    def change(self, model: LoopbackModel, state: State) -> None:
        model.state = state
        model.reason = "" if state == "ready" else f"it is {state}"
        self._tell()

    def _tell(self) -> None:
        for callback in self._callbacks:
            callback()


class Gate:
    """A ``run`` for a model: sets ``started``, then waits until the test sets ``go``, or the end of a ``with``."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.go = threading.Event()

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        self.started.set()
        assert self.go.wait(60)
        return {"y": np.array(feeds["x"])}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()


class SlowTokens(TokenFile):
    """Knows every token, after ``wait``: gRPC's own thread, which all calls share, asks it for each call with
    :data:`SOME_TOKEN`."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait = wait

    def scopes(self, authorization: str) -> Scopes | None:
        self._wait()
        return frozenset(SCOPES)


SOME_TOKEN = (("authorization", "Bearer 0123456789abcdef"),)


@dataclass
class Served:
    """A running server and a channel to it."""

    port: int
    channel: grpc.Channel
    registry: LoopbackRegistry
    log: RequestLog
    transport: Transport

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def reports_draining(self) -> bool:
        """Whether its health is NOT_SERVING: it has begun to stop, and rejects new inferences."""
        stub: Any = health_pb2_grpc.HealthStub(self.channel)  # its RPCs exist only after construction
        return bool(stub.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.NOT_SERVING)

    def stub(self, method: str) -> Any:
        return rpc(self.channel, method)

    def call(self, method: str, message: Any, timeout: float = 30.0, token: str | None = None) -> Any:
        metadata = [("authorization", f"Bearer {token}")] if token else None
        return self.stub(method)(message, timeout=timeout, metadata=metadata)

    def refusal(self, method: str, message: Any, token: str | None = None) -> tuple[grpc.StatusCode, str]:
        """Make a call that must fail, and return its status code and details."""
        try:
            answer = self.call(method, message, token=token)
        except grpc.RpcError as error:
            return error.code(), error.details() or ""
        raise AssertionError(f"{method} was answered: {answer}")


def _each(registry: LoopbackRegistry, do: Callable[[Batcher], object]) -> None:
    for model in registry.models():
        do(model.batcher)


@contextmanager
def serving(
    *models: LoopbackModel,
    tracer: Tracer | None = None,
    operations: Operations = Operations(),  # noqa: B008 - frozen
    tokens: TokenFile | None = None,
    certificates: CertificateFiles | None = None,
    **options: Any,
) -> Iterator[Served]:
    """Run the transport with ``models`` on a free port. ``options`` are those of :class:`TransportOptions`."""
    registry, log = LoopbackRegistry(models), RequestLog()
    for model in models:
        model.log = log
        del model
    del models  # a test may replace a model and check that the old one is freed
    transport = Transport(
        registry, log.refused, TransportOptions(port=0, **options), tokens, certificates, operations, tracer
    )
    _each(registry, Batcher.start)
    port = transport.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Served(port, channel, registry, log, transport)
    finally:
        transport.stop(grace=0)
        _each(registry, Batcher.close)


def rpc(channel: grpc.Channel, method: str) -> Any:
    """Return the callable of one RPC of the inference service, with the project's own messages."""
    described = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[method]
    make = channel.stream_stream if described.client_streaming else channel.unary_unary
    return make(
        f"/{SERVICE}/{method}",
        request_serializer=GetMessageClass(described.input_type).SerializeToString,
        response_deserializer=GetMessageClass(described.output_type).FromString,
    )


def infer_request(model: str = "echo", **arrays: Array) -> pb.ModelInferRequest:
    """Return a request with raw contents. The datatypes follow from the arrays."""
    message = pb.ModelInferRequest(model_name=model)
    for name, array in arrays.items():
        dtype = BY_NAME["string" if array.dtype == np.object_ else array.dtype.name]
        message.inputs.add(name=name, datatype=dtype.oip, shape=array.shape)
        message.raw_input_contents.append(encode_raw(dtype, array))
    return message
