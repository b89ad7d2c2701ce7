"""Handlers in Ray's gRPC proxies (``deploy.ray.ingress.add_inference``): choose the replicas and the status of a call.

They wrap Ray's own handlers. A request goes to its model's application, with the client's deadline, which Ray's proxy
does not pass on. The replica's frame is opened. When Ray fails, clients get a status of ours, and the details stay in
the proxy's log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from deploy.ray.calls import FRONT, IN_PROXIES, INFER, RPCS, STREAM, Rpc, application, steered
from deploy.ray.frames import opened
from deploy.ray.requests import Requests
from service.process.config import ENV_PREFIX, ServerConfig
from service.transport.direct import too_large
from service.transport.services import REFLECTION_SECONDS
from service.transport.status import Status
from service.wire.skim import peek_model

_log = logging.getLogger("ray.serve")  # Ray's logger, which writes to the proxy's file
_NEVER = 1e9  # seconds: for a call without a deadline gRPC reports a larger time remaining
_GONE = Status(grpc.StatusCode.UNAVAILABLE, "the replica that had this request is gone; send it again")
_LATE = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "the call's deadline passed")
_FULL = Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue for the replicas is full; try again later")
_STARTING = Status(grpc.StatusCode.UNAVAILABLE, "no replica is available; try again later")
_LEFT = Status(grpc.StatusCode.CANCELLED, "the client has left")


def add_inference(servicer: Any, server: Any) -> None:
    """Add every RPC to the server of Ray's proxy, which then adds its own handlers."""
    server.add_generic_rpc_handlers((Ingress(),))


def _unary(request: bytes, context: Any) -> None: ...


class Ingress(grpc.GenericRpcHandler):
    """Handles every RPC. Ray reads ``_method_handlers`` and replaces the values with its own handlers."""

    def __init__(self) -> None:
        self._method_handlers: dict[str, Any] = {rpc.path: _handler(rpc) for rpc in RPCS.values()}
        self._max_bytes, self._idle_seconds, overload = map(_setting, IN_PROXIES)
        self._full = Status(grpc.StatusCode[overload], _FULL.details)

    def service(self, handler_call_details: Any) -> Any:
        rpc = RPCS.get(handler_call_details.method)
        if rpc is None:
            return None  # gRPC responds UNIMPLEMENTED
        rays = self._method_handlers[rpc.path]
        if rpc.kind == "unary":
            return rays._replace(unary_unary=self._answers_one(rpc, rays.unary_unary))
        if rpc.kind == "watch":
            return rays._replace(unary_stream=self._answers_many(rpc, rays.unary_stream))
        return rays._replace(stream_stream=self._answers_many(rpc, rays.stream_stream))

    def _answers_one(self, rpc: Rpc, rays: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(data: bytes, context: Any) -> bytes:
            if len(data) > self._max_bytes:
                return _tell(context, too_large(len(data), self._max_bytes))
            told = await _ask(rays, data, context, _application(rpc, data))
            if told is None:  # no such application: the front knows the reason
                told = await _ask(rays, data, context, FRONT)
            return _tell(context, self._worded(_UNKNOWN if told is None else told))

        return answer

    def _answers_many(self, rpc: Rpc, rays: Callable[..., Any]) -> Callable[..., Any]:
        async def answers(request: Any, context: Any) -> AsyncIterator[bytes]:
            requests = Requests(request, self._patience(rpc)) if rpc.kind == "stream" else None
            app = FRONT
            if rpc.path == STREAM and requests is not None:
                app = _application(rpc, await requests.first() or b"")
            ended: Status | None = (requests.ending if requests is not None else None) or _UNKNOWN
            for name in dict.fromkeys((app, FRONT)):
                if ended is _UNKNOWN:  # no such application: the front knows the reason
                    ended = None
                    async for told in _each(rays, request if requests is None else requests.all(), context, name):
                        if isinstance(told, Status):
                            ended = told
                            continue
                        yield told
                        if requests is not None:
                            requests.answered()
            ended = ended or (requests.ending if requests is not None else None)
            if ended is not None:
                _tell(context, self._worded(ended))

        return answers

    def _worded(self, told: bytes | Status) -> bytes | Status:
        """Return the status for the client when Ray has no replica or its queue is full; else ``told``."""
        if told is _UNKNOWN:
            return _STARTING
        return self._full if told is _FULL else told

    def _patience(self, rpc: Rpc) -> float:
        """Return how many seconds a stream waits for its next request."""
        return self._idle_seconds if rpc.path == STREAM else REFLECTION_SECONDS


def _setting(key: str) -> Any:
    """Return a setting from this process' environment, or its default, in its type."""
    default = ServerConfig.model_fields[key].default
    return type(default)(os.environ.get(f"{ENV_PREFIX}{key.upper()}") or default)


def _handler(rpc: Rpc) -> Any:
    make = {
        "unary": grpc.unary_unary_rpc_method_handler,
        "watch": grpc.unary_stream_rpc_method_handler,
        "stream": grpc.stream_stream_rpc_method_handler,
    }[rpc.kind]
    return make(_unary)  # Ray replaces it


# Ray's proxy does not know the application, or could not start any replica; no replica has seen the request.
_UNKNOWN = Status(grpc.StatusCode.NOT_FOUND, "")


async def _ask(rays: Callable[..., Any], data: bytes, context: Any, app: str) -> bytes | Status | None:
    """Return the response of a replica of ``app``; None if there is none."""
    asked = _Asked(context, app)
    try:
        answer = await rays(data, asked)
        failure = asked.failure()
        if failure is _UNKNOWN:
            return None
        return opened(answer) if failure is None else failure
    except asyncio.CancelledError:
        raise
    except Exception as error:  # noqa: BLE001 -- nothing of it is for the client
        return _unexpected(error)


def _tell(context: Any, told: bytes | Status) -> bytes:
    if isinstance(told, bytes):
        return told
    context.set_code(told.code)
    context.set_details(told.details)
    return b""


def _application(rpc: Rpc, data: bytes) -> str:
    model = peek_model(data) if rpc.path in (INFER, STREAM) else ""
    return application(model) if model else FRONT


async def _each(rays: Callable[..., Any], request: Any, context: Any, app: str) -> AsyncIterator[bytes | Status]:
    """Yield the responses of the replica of ``app``; a status is the last."""
    asked = _Asked(context, app)
    try:
        async for data in rays(request, asked):
            told = opened(data)
            yield told
            if isinstance(told, Status):
                return
        failure = asked.failure()
    except asyncio.CancelledError:
        raise
    except Exception as error:  # noqa: BLE001 -- nothing of it is for the client
        failure = _unexpected(error)
    if failure is not None:
        yield failure


class _Asked:
    """The context of a call for Ray's handler. It keeps Ray's own status and details from the client."""

    def __init__(self, context: Any, app: str) -> None:
        left = context.time_remaining()
        self._context = context
        self._metadata = steered(
            context.invocation_metadata() or (), app, None if left is None or left > _NEVER else left
        )
        self._code: Any = None
        self._details = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def invocation_metadata(self) -> Any:
        return self._metadata

    def code(self) -> Any:
        return self._code

    def set_code(self, code: Any) -> None:
        self._code = code

    def details(self) -> str:
        return self._details

    def set_details(self, details: Any) -> None:
        self._details = details if isinstance(details, str) else str(details)

    def trailing_metadata(self) -> Any:
        return ()

    def set_trailing_metadata(self, metadata: Any) -> None: ...

    def set_compression(self, compression: Any) -> None: ...

    def failure(self) -> Status | None:
        """Return the status for the client if Ray failed to bring a replica's response; else None."""
        code = self._code
        if code in (None, 0, grpc.StatusCode.OK):
            return None
        if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE):
            return _UNKNOWN
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return _FULL
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return _LATE
        if code is grpc.StatusCode.CANCELLED:
            return _LEFT
        # A live replica never raises: it or its node has died, or Ray has a bug.
        incident = secrets.token_hex(6)
        _log.error("incident %s: %s %s", incident, code, " | ".join(self._details.splitlines())[:2000])
        return Status(_GONE.code, f"{_GONE.details} (incident {incident})")


def _unexpected(error: Exception) -> Status:
    incident = secrets.token_hex(6)
    _log.error("incident %s: while a call was handed on", incident, exc_info=error)
    return Status(
        grpc.StatusCode.INTERNAL, f"internal error, incident {incident}; the log of Ray's proxy has the details"
    )
