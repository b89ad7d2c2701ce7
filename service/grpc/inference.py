"""The RPCs that run a model: decode and check the request, run it, encode the response, observe all of it."""

# ruff: noqa: N802 -- methods are named as the protocol names its RPCs, and found by that name

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Protocol
from weakref import WeakKeyDictionary

import grpc

from bf16kit.messages.errors import Cancelled, Overloaded, RequestError, Unavailable
from bf16kit.protocol import inference_pb2 as pb
from service.contract import Model, Registry, Slot
from service.grpc.admission import Shares
from service.grpc.status import Status, status_of
from service.grpc.stream import OrderedResponses, StreamRequest
from service.request import REFUSALS, Cancellation, Observation, Reply, Request, Tracer
from service.wire.codec import InferenceCodec, SharedMemory
from service.wire.parameters import check_request, wants_final_mark

STREAM_REQUESTS = 256  # at most, of all streams, that are answered at the same time
_UNKNOWN_OUTCOME = grpc.StatusCode.INTERNAL
_log = logging.getLogger(__name__)
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
        ...

    def metadata_value(self, key: str) -> str | bytes | None: ...

    def reserve_more(self, nbytes: int) -> None:
        """Count ``nbytes`` of a response or of shared memory until the call ends. Raises Overloaded if there is no
        room."""
        ...


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
        """``stream_threads`` has one for every stream, and :data:`STREAM_REQUESTS` more."""
        self._registry = registry
        self._count_refusal = count_refusal
        self._shares = Shares(max_in_flight)
        self._stream_threads = stream_threads
        self._stream_window = stream_window
        self._memory = memory
        self._tracer = tracer
        # Weak: a codec must not keep an unloaded model alive, nor be found for the model loaded in its place.
        self._codecs: WeakKeyDictionary[Model, InferenceCodec] = WeakKeyDictionary()
        self._open: set[Callable[[], None]] = set()  # functions that end a stream
        self._draining = False

    def drain(self) -> None:
        """End every stream once its requests in flight are answered: an idle stream would outlast any timeout."""
        self._draining = True
        for end in tuple(self._open):
            end()

    def ModelInfer(self, message: pb.ModelInferRequest, call: CallContext) -> pb.ModelInferResponse | Status:
        return self._respond("ModelInfer", message, call, call.started, call.reserve_more)

    def ModelStreamInfer(
        self, requests: Iterator[StreamRequest], call: CallContext
    ) -> Iterator[pb.ModelStreamInferResponse | Status]:
        def respond(request: StreamRequest) -> _StreamResult:
            message: pb.ModelInferRequest = request.message
            return message, self._respond("ModelStreamInfer", message, call, request.arrived, request.reserve_more)

        # Each request in flight has a thread. The windows of 64 streams, opened one after another, have 234 together.
        window = max(1, min(self._stream_window, STREAM_REQUESTS // (4 * len(self._open) + 4)))
        responses = OrderedResponses(requests, respond, self._stream_threads, window)
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
        finally:
            self._open.discard(responses.close)
        if self._draining:
            raise Unavailable("the server is shutting down; open the stream again on another", "draining")

    def _respond(
        self,
        rpc: str,
        message: pb.ModelInferRequest,
        call: CallContext,
        started: float,
        reserve_more: Callable[[int], None],
    ) -> pb.ModelInferResponse | Status:
        """Return the response to one request, or the status that rejects it. Observes either, and never raises."""
        model: Model | None = None
        request: Request | None = None
        deadline = call.deadline
        code = _UNKNOWN_OUTCOME
        try:
            with self._registry.acquire(message.model_name, message.model_version) as model:
                codec = self._codec(model)
                timeout = check_request(message.parameters) if message.parameters else None
                if timeout is not None:
                    deadline = started + timeout if deadline is None else min(deadline, started + timeout)
                request, output_options = codec.decode(message, deadline, call.cancellation, reserve_more)
                request.client = call.client
                request.waits_for_room = rpc == "ModelStreamInfer"
                reply = self._infer(model, request)
                if output_options.sinks and call.cancellation.cancelled:
                    # It may belong to other requests now.
                    raise Cancelled("the client left before its shared memory was written to")
                response = codec.encode(message.id, reply, output_options, reserve_more)
            code = self._client_code(call)
            return response
        except Exception as error:  # noqa: BLE001 -- the client always gets a status, and the metrics a code
            status = self._refusal(error, deadline, message, model)
            code = status.code
            return status
        finally:
            self._observe(rpc, message, call, model, request, code, time.monotonic() - started)

    def _refusal(
        self, error: Exception, deadline: float | None, message: pb.ModelInferRequest, model: Model | None
    ) -> Status:
        if isinstance(error, Overloaded) and error.reason in REFUSALS:  # a model counts what its queue rejects
            self._count_refusal(error.reason)
        if isinstance(error, Cancelled) and deadline is not None and time.monotonic() >= deadline:
            # gRPC reports a deadline that passed in the same way as a client that left
            return Status(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed before the request ran")
        name, version = _name_and_version(message, model)
        return status_of(error, {"model": name, "version": version or None, "request_id": message.id or None})

    def _client_code(self, call: CallContext) -> grpc.StatusCode:
        """Return the code that the client sees: it may have stopped waiting while the request ran."""
        if call.deadline is not None and time.monotonic() >= call.deadline:
            return grpc.StatusCode.DEADLINE_EXCEEDED
        return grpc.StatusCode.CANCELLED if call.cancellation.cancelled else grpc.StatusCode.OK

    def _infer(self, model: Model, request: Request) -> Reply:
        if request.waits_for_room:
            return model.infer(request)
        if not self._shares.acquire(model.name):
            raise Overloaded(
                f"model {model.name!r} has its share of the {self._shares.limit} requests in flight; try again later",
                "model_share",
            )
        try:
            return model.infer(request)
        finally:
            self._shares.release(model.name)

    def _codec(self, model: Model) -> InferenceCodec:
        codec = self._codecs.get(model)
        if codec is None:
            codec = self._codecs[model] = InferenceCodec(model, self._memory)
        return codec

    def _observe(
        self,
        rpc: str,
        message: pb.ModelInferRequest,
        call: CallContext,
        model: Model | None,
        request: Request | None,
        code: grpc.StatusCode,
        seconds: float,
    ) -> None:
        """Report the request to the metrics, the log and the trace.

        Only the name of an existing model becomes a label.
        """
        served: Model | Slot | None = model or self._find(message)
        name, version = _name_and_version(message, served)
        timings, rows = (None, 0) if request is None else (request.timings, request.rows)
        trace = None if self._tracer is None else self._tracer.sample(name, call.metadata_value)
        observation = Observation(
            name, version, message.id, code.name, seconds, timings, rows, trace.id if trace else ""
        )
        if served is not None:
            served.observe(observation)
        if _log.isEnabledFor(logging.DEBUG):
            _log_request(observation)
        if trace is not None:
            trace.end(rpc, observation)

    def _find(self, message: pb.ModelInferRequest) -> Slot | None:
        try:
            return self._registry.find(message.model_name, message.model_version)
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
