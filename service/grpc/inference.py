"""The RPCs that run a model: decode and check the request, run it, encode the response, observe all of it."""

# ruff: noqa: N802 -- methods are named as the protocol names its RPCs, and found by that name

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias
from weakref import WeakKeyDictionary

import grpc

from bf16kit.messages.errors import Cancelled, Overloaded, RequestError, Unavailable
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.contract import Model, Registry, Slot
from bf16kit.service.grpc.admission import MessageBytes, Shares
from bf16kit.service.grpc.status import Status, status_of
from bf16kit.service.grpc.stream import OrderedResponses, StreamRequest
from bf16kit.service.request import REFUSALS, Cancellation, Observation, Reply, Request, Tracer
from bf16kit.service.wire.codec import InferenceCodec, OutputOptions, SharedMemory
from bf16kit.service.wire.parameters import check_request, wants_final_mark

_log = logging.getLogger(__name__)
Respond: TypeAlias = "Callable[[pb.ModelInferResponse | Status], None]"
_StreamResult = tuple[pb.ModelInferRequest, pb.ModelInferResponse | Status]


class CallContext(Protocol):
    """One call as an RPC sees it, whether it comes from a gRPC server or from another source of messages.

    ``started`` and ``deadline`` are :func:`time.monotonic` seconds.
    """

    started: float
    deadline: float | None
    cancellation: Cancellation

    @property
    def client(self) -> str:
        """The client, among those that share the server's places."""

    def metadata_value(self, key: str) -> str | bytes | None: ...

    def reserve_more(self, nbytes: int) -> None:
        """Count ``nbytes`` of a response or of shared memory until the call ends. Raises Overloaded without room."""


@dataclass(eq=False, slots=True)
class OtherCall:
    """A :class:`CallContext` of another source than a gRPC server. ``held`` counts the bytes of its request."""

    client: str
    metadata: Mapping[str, str | bytes]
    held: MessageBytes
    started: float = field(default_factory=time.monotonic)
    deadline: float | None = None  # unknown: whoever knows it cancels the call when it has passed
    cancellation: Cancellation = field(default_factory=Cancellation)

    def metadata_value(self, key: str) -> str | bytes | None:
        return self.metadata.get(key)

    def reserve_more(self, nbytes: int) -> None:
        self.held.reserve_more(nbytes)


class InferenceServicer:
    """One method per RPC, named as in the protocol. Errors leave only as a :class:`Status`.

    ``max_in_flight`` is shared by models, so that one model's requests cannot take the places of all others. A stream's
    request waits for room in its model's queue, where other requests are rejected; meanwhile the stream is not read.
    """

    def __init__(
        self,
        registry: Registry,
        count_refusal: Callable[[str], None],
        max_in_flight: int,
        stream_threads: Executor,
        stream_window: int,
        memory: SharedMemory = SharedMemory(),  # noqa: B008 -- frozen: it is off
        tracer: Tracer | None = None,
    ) -> None:
        """``stream_threads`` has one for every stream."""
        self.registry = registry
        self.count_refusal = count_refusal
        self.shares = Shares(max_in_flight)
        self.tracer = tracer
        self._stream_threads = stream_threads
        self._stream_window = stream_window
        self._memory = memory
        self.reads_shared_memory = memory.regions is not None
        # Weak: a codec must not keep an unloaded model alive, nor be found for the model loaded in its place.
        self._codecs: WeakKeyDictionary[Model, InferenceCodec] = WeakKeyDictionary()
        self._open: set[Callable[[], None]] = set()  # functions that end a stream
        self._draining = False

    def drain(self) -> None:
        """End every stream once its requests in flight are answered: an idle stream would outlast any timeout."""
        self._draining = True
        for end in tuple(self._open):
            end()

    def ModelInfer(self, message: pb.ModelInferRequest, call: CallContext, respond: Respond) -> None:
        """Begin to answer a request. ``respond`` gets the response or a status, once and on any thread."""
        _Inference(self, "ModelInfer", message, call, call.started, call.reserve_more, respond).begin()

    def ModelStreamInfer(
        self, requests: Iterator[StreamRequest], call: CallContext
    ) -> Iterator[pb.ModelStreamInferResponse | Status]:
        def begin(request: StreamRequest, respond: Callable[[_StreamResult], None]) -> None:
            message: pb.ModelInferRequest = request.message
            _Inference(
                self, "ModelStreamInfer", message, call, request.arrived, request.reserve_more,
                lambda result: respond((message, result)),
            ).begin()  # fmt: skip

        responses = OrderedResponses(requests, begin, self._stream_threads, self._stream_window)
        call.cancellation.subscribe(responses.close)
        ends_on_error = call.metadata_value("triton_grpc_error") == "true"
        self._open.add(responses.close)
        try:
            if self._draining:
                responses.close()
            for message, result in responses:
                if ends_on_error and isinstance(result, Status):
                    yield result
                yield _stream_response(message, result)
                del message, result  # an idle stream keeps none
        finally:
            self._open.discard(responses.close)
        if self._draining:
            raise Unavailable("the server is shutting down; open the stream again on another", "draining")

    def codec(self, model: Model) -> InferenceCodec:
        codec = self._codecs.get(model)
        if codec is None:
            codec = self._codecs[model] = InferenceCodec(model, self._memory)
        return codec


@dataclass(slots=True, eq=False)
class _Inference:
    """One request, from its message to its response. :meth:`begin` queues it; the rest happens once it has run."""

    servicer: InferenceServicer
    rpc: str
    message: pb.ModelInferRequest
    call: CallContext
    started: float
    reserve_more: Callable[[int], None]
    respond: Respond
    deadline: float | None = None
    model: Model | None = None
    has_share: bool = False
    request: Request | None = None
    output_options: OutputOptions = field(init=False)

    def begin(self) -> None:
        """Check and decode the request, and queue it. Its end is reported in any case; nothing is raised."""
        message, call, servicer = self.message, self.call, self.servicer
        self.deadline = call.deadline
        try:
            model = self.model = servicer.registry.acquire(message.model_name, message.model_version)
            timeout = check_request(message.parameters) if message.parameters else None
            if timeout is not None:
                until = self.started + timeout
                self.deadline = until if self.deadline is None else min(self.deadline, until)
            request, self.output_options = servicer.codec(model).decode(
                message, self.deadline, call.cancellation, self.reserve_more
            )
            self.request = request
            request.client = call.client
            request.waits_for_room = self.rpc == "ModelStreamInfer"
            if not request.waits_for_room:
                self._take_share(model.name)
            model.begin(request, self._finish)
        except Exception as error:  # noqa: BLE001 -- the client always gets a status, and the metrics a code
            self._finish(error)

    def _take_share(self, model: str) -> None:
        shares = self.servicer.shares
        if not shares.acquire(model):
            raise Overloaded(
                f"model {model!r} has its share of the {shares.limit} requests in flight; try again later",
                "model_share",
            )
        self.has_share = True

    def _finish(self, result: Reply | Exception) -> None:
        """Encode the reply, or find the status for the error; release the model, observe, and respond."""
        try:
            response = self._status(result) if isinstance(result, Exception) else self._encoded(result)
        except Exception as error:  # noqa: BLE001 -- as above
            response = self._status(error)
        model = self.model
        if model is not None:
            if self.has_share:
                self.servicer.shares.release(model.name)
            model.release()
        try:
            self._observe(response.code if isinstance(response, Status) else self._client_code())
        except Exception as error:  # noqa: BLE001 -- as above
            response = self._status(error)
        self.respond(response)

    def _encoded(self, reply: Reply) -> pb.ModelInferResponse:
        if self.model is None:
            raise RuntimeError("there is a reply without a model")
        if self.output_options.sinks and self.call.cancellation.cancelled:
            # It may belong to other requests now.
            raise Cancelled("the client left before its shared memory was written to")
        codec = self.servicer.codec(self.model)
        return codec.encode(self.message.id, reply, self.output_options, self.reserve_more)

    def _status(self, error: Exception) -> Status:
        deadline, message = self.deadline, self.message
        if isinstance(error, Overloaded) and error.reason in REFUSALS:  # a model counts what its queue rejects
            self.servicer.count_refusal(error.reason)
        if isinstance(error, Cancelled) and deadline is not None and time.monotonic() >= deadline:
            # gRPC reports a deadline that passed in the same way as a client that left
            return Status(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed before the request ran")
        name, version = _name_and_version(message, self.model)
        return status_of(error, {"model": name, "version": version or None, "request_id": message.id or None})

    def _client_code(self) -> grpc.StatusCode:
        """Return the code that the client sees: it may have stopped waiting while the request ran."""
        call = self.call
        if call.deadline is not None and time.monotonic() >= call.deadline:
            return grpc.StatusCode.DEADLINE_EXCEEDED
        return grpc.StatusCode.CANCELLED if call.cancellation.cancelled else grpc.StatusCode.OK

    def _observe(self, code: grpc.StatusCode) -> None:
        """Report the request to metrics, log and trace. Only the name of an existing model becomes a label."""
        message, request, tracer = self.message, self.request, self.servicer.tracer
        seconds = time.monotonic() - self.started
        served: Model | Slot | None = self.model or self._find()
        name, version = _name_and_version(message, served)
        timings, rows = (None, 0) if request is None else (request.timings, request.rows)
        trace = None if tracer is None else tracer.sample(name, self.call.metadata_value)
        observation = Observation(
            name, version, message.id, code.name, seconds, timings, rows, trace.id if trace else ""
        )
        if served is not None:
            served.observe(observation)
        else:
            self.servicer.count_refusal("unknown_model")
        if _log.isEnabledFor(logging.DEBUG):
            _log_request(observation)
        if trace is not None:
            trace.end(self.rpc, observation)

    def _find(self) -> Slot | None:
        try:
            return self.servicer.registry.find(self.message.model_name, self.message.model_version)
        except RequestError:
            return None


def _log_request(observation: Observation) -> None:
    """Log what was requested, the outcome and the time of each phase; never any tensors."""
    timings = observation.timings
    fields = {
        "model": observation.model,
        "version": observation.version or None,
        "request_id": observation.request_id or None,
        "code": observation.code,
        "trace_id": observation.trace or None,
        "total_s": observation.seconds,
        "queue_s": timings and timings.queue,
        "compute_s": timings and timings.compute,
    }
    _log.debug("request %s", "answered" if observation.succeeded else "not answered", extra=fields)


def _stream_response(
    message: pb.ModelInferRequest, result: pb.ModelInferResponse | Status
) -> pb.ModelStreamInferResponse:
    if isinstance(result, Status):
        about = pb.ModelInferResponse(model_name=message.model_name, model_version=message.model_version, id=message.id)
        return pb.ModelStreamInferResponse(error_message=result.details, infer_response=about)
    if wants_final_mark(message.parameters):
        result.parameters["triton_final_response"].bool_param = True
    return pb.ModelStreamInferResponse(infer_response=result)


def _name_and_version(message: pb.ModelInferRequest, served: Model | Slot | None) -> tuple[str, str]:
    """Return the model and version that were used; without them, those that the client named."""
    return (served.name, str(served.version)) if served else (message.model_name, message.model_version)
