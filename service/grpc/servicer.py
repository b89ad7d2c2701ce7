"""The RPCs that run a model: decode and check the request, run it, encode the response."""

# ruff: noqa: N802 -- methods are named as the protocol names its RPCs, and found by that name

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from weakref import WeakKeyDictionary

import grpc

from bf16kit.messages.errors import Cancelled, Overloaded, RequestError, Unavailable
from bf16kit.protocol import inference_pb2 as pb
from service.contract import Model, Registry, Slot
from service.grpc.admission import FairShares
from service.grpc.callcontext import CallContext
from service.grpc.claims import ClaimedModel, claim_model
from service.grpc.requestlog import log_request
from service.grpc.scheduler import StreamScheduler, StreamTurns
from service.grpc.status import Status, StatusTable
from service.grpc.streamcall import StreamRequest
from service.grpc.streams import OrderedResponses
from service.request import REFUSALS, Observation, Reply, Request, Tracer
from service.wire.memory import SharedMemory
from service.wire.parameters import RequestParameters, check_request, wants_final_mark
from service.wire.request import InferenceCodec
from service.wire.skim import peek_model_and_version

# Features that make even a small message slow: megabytes to read or write, or 65,536 strings to create.
_SLOW_FEATURES = (b"shared_memory_region", b"classification")
_UNKNOWN_OUTCOME = grpc.StatusCode.INTERNAL
_StreamResult = tuple[pb.ModelInferRequest, pb.ModelInferResponse | Status]


class InferenceServicer:
    """One method per RPC, named as in the protocol. Errors leave only through :class:`StatusTable`.

    ``shares`` keeps one model's requests from taking the places of all others. A stream's requests wait for a place and
    for room in their model's queue, where other requests are rejected; meanwhile the stream is not read.
    """

    def __init__(
        self,
        registry: Registry,
        count_refusal: Callable[[str], None],
        statuses: StatusTable,
        shares: FairShares,
        stream_readers: Executor,
        stream_workers: Executor,
        scheduler: StreamScheduler,
        stream_window: int,
        memory: SharedMemory = SharedMemory(),  # noqa: B008 -- frozen: it is off
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._count_refusal = count_refusal
        self._statuses = statuses
        self._shares = shares
        self._stream_readers = stream_readers
        self._stream_workers = stream_workers
        self._scheduler = scheduler
        self._stream_window = stream_window
        self._memory = memory
        self._tracer = tracer
        self._clock = clock
        # Weak: a codec must not keep an unloaded model alive, nor be found for the model loaded in its place.
        self._codecs: WeakKeyDictionary[Model, InferenceCodec] = WeakKeyDictionary()
        self._open: set[Callable[[], None]] = set()  # functions that end a stream
        self._draining = False

    def drain(self) -> None:
        """End every stream once its requests in flight are answered: an idle stream would outlast any timeout."""
        self._draining = True
        for end in tuple(self._open):
            end()

    # --- inference --------------------------------------------------------------------------------------------------

    def ModelInfer(self, message: pb.ModelInferRequest, call: CallContext) -> pb.ModelInferResponse | Status:
        return self._respond(message, call, call.started, call.reserve_more)

    def claim(self, data: bytes) -> ClaimedModel | None:
        """Claim the model of the ModelInferRequest in ``data``, to answer it at once; None if it cannot be claimed.

        Never blocks, and rejects nothing.
        """
        name, version = peek_model_and_version(data)
        if not name or any(feature in data for feature in _SLOW_FEATURES):
            return None
        try:
            return claim_model(self._registry, name, version, len(data))
        except RequestError:
            return None

    def ModelStreamInfer(
        self, requests: Iterator[StreamRequest], call: CallContext
    ) -> Iterator[pb.ModelStreamInferResponse | Status]:
        turns = StreamTurns(self._scheduler, call.client)

        def respond(request: StreamRequest) -> _StreamResult:
            message: pb.ModelInferRequest = request.message
            try:
                return message, self._respond(message, call, request.arrived, request.reserve_more, waits_for_room=True)
            finally:
                turns.release(message.model_name)

        def end() -> None:
            responses.close()
            turns.close()

        admitted_requests = turns.admitted(requests, lambda request: request.message.model_name)
        responses = OrderedResponses(
            admitted_requests, respond, self._stream_readers, self._stream_workers, self._stream_window
        )
        call.cancellation.subscribe(end)
        ends_on_error = call.metadata_value("triton_grpc_error") == "true"
        self._open.add(end)
        try:
            if self._draining:
                end()
            for message, result in responses:
                if ends_on_error and isinstance(result, Status):
                    yield result
                yield _stream_response(message, result)
        finally:
            self._open.discard(end)
        if self._draining:
            raise Unavailable("the server is shutting down; open the stream again on another", "draining")

    def _respond(
        self,
        message: pb.ModelInferRequest,
        call: CallContext,
        started: float,
        reserve_more: Callable[[int], None],
        *,
        waits_for_room: bool = False,
    ) -> pb.ModelInferResponse | Status:
        """Return the response to one request, or the status that rejects it. Observes either, and never raises."""
        model: Model | None = None
        request: Request | None = None
        deadline = client_deadline = call.deadline
        code = _UNKNOWN_OUTCOME
        try:
            claimed = call.claimed
            with claimed or self._registry.acquire(message.model_name, message.model_version) as model:
                codec = self._codec(model)
                parameters = check_request(message.parameters) if message.parameters else RequestParameters()
                deadline = _earlier(deadline, parameters.timeout, started)
                request, output_options = codec.decode(
                    message, parameters.priority, deadline, call.cancellation, reserve_more
                )
                request.waits_for_room = waits_for_room
                request.nbytes = call.nbytes
                request.client = call.client
                request.claim = None if claimed is None else claimed.claim
                reply = self._infer(model, request)
                if output_options.sinks and call.cancellation.cancelled:
                    # It may belong to other requests now.
                    raise Cancelled("the client left before its shared memory was written to")
                response = codec.encode(message.id, reply, output_options, reserve_more)
            code = self._client_code(call, client_deadline)
            return response
        except Exception as error:  # noqa: BLE001 -- the client always gets a status, and the metrics a code
            status = self._refusal(error, deadline, message, model)
            code = status.code
            return status
        finally:
            self._observe(message, call, model, request, code, self._clock() - started)

    def _refusal(
        self, error: Exception, deadline: float | None, message: pb.ModelInferRequest, model: Model | None
    ) -> Status:
        if isinstance(error, Overloaded) and error.reason in REFUSALS:  # a model counts what its queue rejects
            self._count_refusal(error.reason)
        if isinstance(error, Cancelled) and deadline is not None and self._clock() >= deadline:
            # gRPC reports a deadline that passed in the same way as a client that left
            return Status(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed before the request ran")
        name, version = _name_and_version(message, model)
        return self._statuses.for_error(
            error, {"model": name, "version": version or None, "request_id": message.id or None}
        )

    def _client_code(self, call: CallContext, client_deadline: float | None) -> grpc.StatusCode:
        """Return the code that the client sees: it may have stopped waiting while the request ran."""
        if client_deadline is not None and self._clock() >= client_deadline:
            return grpc.StatusCode.DEADLINE_EXCEEDED
        return grpc.StatusCode.CANCELLED if call.cancellation.cancelled else grpc.StatusCode.OK

    def _infer(self, model: Model, request: Request) -> Reply:
        if request.waits_for_room:
            return model.infer(request)
        self._shares.acquire(model.name)
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
        log_request(observation)
        if trace is not None:
            trace.end("ModelStreamInfer" if call.streams else "ModelInfer", observation)

    def _find(self, message: pb.ModelInferRequest) -> Slot | None:
        try:
            return self._registry.find(message.model_name, message.model_version)
        except RequestError:
            return None


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


def _earlier(deadline: float | None, timeout: float | None, now: float) -> float | None:
    if timeout is None:
        return deadline
    return now + timeout if deadline is None else min(deadline, now + timeout)
