"""The front: gets every request from Ray's proxies. It answers what concerns no single model, and passes on the rest.

It runs no model. It learns all it knows from Ray and from the replicas, so there may be several, and they may restart.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from google.protobuf.message import DecodeError
from grpc import StatusCode
from grpc_health.v1 import health_pb2
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from bf16kit.deploy.ray.models import RAY_ERRORS, RunningModels
from bf16kit.deploy.ray.rpcs import RPCS, Rpc, Serialized, held_bytes
from bf16kit.messages.errors import Bf16kitError, InvalidRequest, NotFound, Overloaded, Unsupported
from bf16kit.messages.wording import quoted
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.config.certificates import Credentials
from bf16kit.service.config.logs import configure
from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.grpc.admission import ByteBudget, MessageBytes, RequiredScope
from bf16kit.service.grpc.control import ControlServicer
from bf16kit.service.grpc.handlers import SERVICE
from bf16kit.service.grpc.health import LIVE
from bf16kit.service.grpc.status import Status, status_of
from bf16kit.service.models.repository import parse_version
from bf16kit.service.operations import Operations
from ray.serve.exceptions import BackPressureError

_log = logging.getLogger(__name__)
CALLS = 4096  # at once; Ray lets further ones wait
LONG_CALLS = CALLS // 2  # of them: streams and health watches, which last as long as their clients want
_STREAM_WINDOW = 8  # requests of one stream that are answered at once
_PARSED_BYTES = 64 << 10  # largest request that is parsed here, where all calls wait for it
_WATCH_SECONDS = 1.0  # between two looks of a health watch, as often as the models are looked at
_FULL = Status(StatusCode.RESOURCE_EXHAUSTED, "the queue for the replicas is full; try again later")
_UNSUPPORTED = {  # by a part of the RPC's name; a server of one process has other reasons
    "RepositoryModel": "models are not loaded over the network here: change the repository",
    "SharedMemory": "a replica may be on another machine than the client; send tensors in raw_input_contents",
}
_Health = health_pb2.HealthCheckResponse
_Answer = bytes | Status  # a serialised response, or why there is none


class StreamEnd(Exception):
    """Ends a stream with the status that was set in its context, which is Ray's way to do so."""


class Front:
    """Has a method for each RPC, by its name in the protocol, and :meth:`__call__` for pages."""

    def __init__(self, config: ServerConfig, request_bytes: int, models: RunningModels | None = None) -> None:
        """``request_bytes``: of all requests in flight. ``models``: None, those that Ray runs."""
        configure(config.log_level, config.log_format)
        self._max_message_bytes = config.max_message_bytes
        self._tokens = Credentials.of(config).tokens
        self._models = models or RunningModels()
        listed: Any = self._models
        self._control = ControlServicer(listed, Operations(models=listed))
        self._budget = ByteBudget(request_bytes)
        self._long_calls = 0

    async def check_health(self) -> None:
        """Look at the cluster. Ray calls this each second, and once before a front gets requests."""
        try:
            await self._models.update()
        except RAY_ERRORS as error:
            if not self._models.known:
                raise
            _log.warning("the cluster's state is not known: %s; it will be asked again", type(error).__name__)

    async def retire(self) -> None:
        """Be not ready from now on; requests that still arrive are answered."""
        self._models.retired = True

    async def unary(self, rpc: Rpc, data: bytes, context: Any) -> Serialized:
        """Answer an RPC with one request and one response. No exception leaves: Ray would tell its text to clients."""
        answer = await self._guarded(rpc, data, context, self._answer)
        if isinstance(answer, bytes):
            return Serialized(answer)
        _set_status(context, answer)
        return Serialized(b"")

    async def ModelStreamInfer(self, requests: Any, grpc_context: Any) -> AsyncIterator[Serialized]:  # noqa: N802
        """Answer the requests of a stream in their order, each by any replica of the model that it names."""
        rpc = RPCS["ModelStreamInfer"]
        # Two more are begun: the one that the client gets next, and the one that waits for room in the queue.
        begun: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(_STREAM_WINDOW - 2)
        tasks = set[asyncio.Task[Any]]()

        async def read() -> None:
            with suppress(Exception):  # the client has left
                async for data in requests:
                    tasks.add(task := asyncio.create_task(self._stream_response(rpc, data, grpc_context)))
                    await begun.put(task)
            await begun.put(None)

        with self._long_call(rpc, grpc_context):
            tasks.add(asyncio.create_task(read()))
            try:
                while (task := await begun.get()) is not None:
                    yield Serialized(await task)
                    tasks.discard(task)
            finally:
                for each in tasks:
                    each.cancel()

    async def Watch(self, request: bytes, grpc_context: Any) -> AsyncIterator[Serialized]:  # noqa: N802
        """Yield the health of a service now and at each change."""
        rpc, last = RPCS["Watch"], None
        with self._long_call(rpc, grpc_context):
            service = rpc.parse(request, lambda nbytes: None).service
            while True:
                if (status := self._health(service)) != last:
                    yield Serialized(_Health(status=status).SerializeToString())
                last = status
                await asyncio.sleep(_WATCH_SECONDS)

    @contextmanager
    def _long_call(self, rpc: Rpc, context: Any) -> Iterator[None]:
        """Count a call that ends when its client wants. Turns an error into the call's status."""
        self._long_calls += 1
        try:
            self._check_token(rpc, context)
            if self._long_calls > LONG_CALLS:
                raise Overloaded(f"{LONG_CALLS} open streams and watches are the limit of a front; try again later")
            yield
        except Bf16kitError as error:
            raise _stream_end(context, status_of(error)) from None
        finally:
            self._long_calls -= 1

    async def _guarded(self, rpc: Rpc, data: bytes, context: Any, answer: Callable[..., Any]) -> _Answer:
        """Return the answer to one request, whose bytes count until then, or the status of its error."""
        with held_bytes(self._budget) as held:
            try:
                self._check_token(rpc, context)
                if len(data) > (most := self._max_message_bytes):
                    raise Overloaded(f"the message has {len(data)} bytes; max_message_bytes is {most}")
                held.reserve(len(data))
                found: _Answer = await answer(rpc, data, context, held)
            except Exception as error:  # noqa: BLE001 -- the table decides what the client may know
                return status_of(error)
        return found

    def _check_token(self, rpc: Rpc, context: Any) -> None:
        """Raise if the call has no token for the RPC."""
        RequiredScope(self._tokens, rpc.scope).check(dict(context.invocation_metadata()).get("authorization"))

    async def _answer(self, rpc: Rpc, data: bytes, context: Any, held: MessageBytes) -> _Answer:
        if rpc.name in ("ModelInfer", "ModelMetadata", "ModelConfig"):
            return await self._pass_on(rpc, data, context, held)
        own = next((reason for part, reason in _UNSUPPORTED.items() if part in rpc.name), "")
        if own:
            raise Unsupported(f"{rpc.name}: {own}")
        message = rpc.parse(data, held.reserve)
        if rpc.name == "ModelStatistics":
            await self._models.ask(message.name)
        answer = self._check_health if rpc.name == "Check" else getattr(self._control, rpc.name)
        response: bytes = answer(message, context).SerializeToString()
        return response

    def _check_health(self, message: Any, context: Any) -> Any:
        if (status := self._health(message.service)) == _Health.SERVICE_UNKNOWN:
            raise NotFound(f"unknown service {quoted(message.service)}; for a model, give its name")
        return _Health(status=status)

    def _health(self, service: str) -> Any:
        if service in ("", SERVICE, LIVE):
            serving = service == LIVE or self._models.ready
        elif service in self._models.by_name:
            serving = self._models.is_ready(service)
        else:
            return _Health.SERVICE_UNKNOWN
        return _Health.SERVING if serving else _Health.NOT_SERVING

    async def _pass_on(self, rpc: Rpc, data: bytes, context: Any, held: MessageBytes) -> _Answer:
        """Return a replica's response to a request for a model. Only the replica parses a ModelInferRequest."""
        try:
            # Its first two fields are those of a ModelInferRequest, and the rest of one stays bytes here.
            named = pb.ModelMetadataRequest.FromString(data)
        except DecodeError:
            raise InvalidRequest("the request is not a message of this RPC: its bytes cannot be parsed") from None
        parse_version(named.version)
        return await self._ask(self._models.get(named.name).handle, rpc, data, context)

    async def _ask(self, handle: Any, rpc: Rpc, data: bytes, context: Any) -> _Answer:
        """Return a replica's response. If the client leaves, the request is cancelled there, or in the queue for it."""
        sent = {name: value for name, value in context.invocation_metadata() if name != "authorization"}
        response = handle.answer.remote(rpc.name, data, str(context.peer()), sent)
        try:
            found: _Answer = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except BackPressureError:
            return _FULL
        except Exception as error:  # noqa: BLE001 -- of Ray, for replicas raise nothing; its text is not for clients
            incident = secrets.token_hex(6)
            _log.error("incident %s: no replica answers %s: %s", incident, rpc.name, error)
            details = f"the replica that had this request is gone, incident {incident}; send it again"
            return Status(StatusCode.UNAVAILABLE, details)
        return found

    async def _stream_response(self, rpc: Rpc, data: bytes, context: Any) -> bytes:
        """Return the response to one request of a stream; an error is part of it, unless the client wants a status."""
        response = await self._guarded(rpc, data, context, self._pass_on)
        if isinstance(response, bytes):
            return response
        if ("triton_grpc_error", "true") in context.invocation_metadata():
            raise _stream_end(context, response)
        about = pb.ModelInferResponse()
        with suppress(DecodeError):  # bytes that are no request name none
            asked = pb.ModelInferRequest.FromString(data if len(data) <= _PARSED_BYTES else b"")
            about = pb.ModelInferResponse(model_name=asked.model_name, model_version=asked.model_version, id=asked.id)
        failed = pb.ModelStreamInferResponse(error_message=response.details, infer_response=about)
        return failed.SerializeToString()

    async def __call__(self, request: Request) -> Response:
        """Answer a request for a page: probes, the models' states, and where Prometheus scrapes the replicas."""
        path, models = request.url.path, self._models
        if path in ("/livez", "/readyz"):
            ready = path == "/livez" or models.ready
            return PlainTextResponse("ready\n" if ready else "not ready\n", 200 if ready else 503)
        scopes = None if self._tokens is None else self._tokens.scopes(request.headers.get("authorization", ""))
        if self._tokens is not None and "read" not in (scopes or ()):
            return PlainTextResponse("a token with the scope read is needed\n", 401, {"WWW-Authenticate": "Bearer"})
        if path == "/targets":
            targets = sorted(report.target for model in models.by_name.values() for report in model.reports)
            return JSONResponse([{"targets": targets, "labels": {"job": "bf16kit"}}])
        if path in ("/", "/status.json"):
            keys = ("name", "version", "state", "reason")
            versions = [{key: getattr(version, key) for key in keys} for version in models.index()]
            return JSONResponse({"ready": models.ready, "models": versions})
        return PlainTextResponse("not found\n", 404)


def _unary_method(rpc: Rpc) -> Callable[..., Any]:
    """Return the method for ``rpc``. Ray finds the call's context by the parameter name ``grpc_context``."""

    async def unary(self: Front, request: bytes, grpc_context: Any) -> Serialized:
        return await self.unary(rpc, request, grpc_context)

    return unary


for _rpc in RPCS.values():
    if _rpc.unary:
        setattr(Front, _rpc.name, _unary_method(_rpc))


def _set_status(context: Any, status: Status) -> None:
    context.set_code(status.code)
    context.set_details(status.details)


def _stream_end(context: Any, status: Status) -> StreamEnd:
    _set_status(context, status)
    return StreamEnd()
