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

from deploy.ray.calls import FRONT, INFER, PROXY_SETTINGS, RPCS, STREAM, Rpc, add_routing, application
from deploy.ray.frames import parse_frame
from deploy.ray.requests import StreamRequests
from service.config.serverconfig import ENV_PREFIX, ServerConfig
from service.grpc.direct import too_large
from service.grpc.services import REFLECTION_SECONDS
from service.grpc.status import Status
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
        self._max_bytes, self._idle_seconds, overload = map(_setting, PROXY_SETTINGS)
        self._full = Status(grpc.StatusCode[overload], _FULL.details)

    def service(self, handler_call_details: Any) -> Any:
        rpc = RPCS.get(handler_call_details.method)
        if rpc is None:
            return None  # gRPC responds UNIMPLEMENTED
        ray_handler = self._method_handlers[rpc.path]
        if rpc.kind == "unary":
            return ray_handler._replace(unary_unary=self._unary_handler(rpc, ray_handler.unary_unary))
        if rpc.kind == "watch":
            return ray_handler._replace(unary_stream=self._stream_handler(rpc, ray_handler.unary_stream))
        return ray_handler._replace(stream_stream=self._stream_handler(rpc, ray_handler.stream_stream))

    def _unary_handler(self, rpc: Rpc, ray_handler: Callable[..., Any]) -> Callable[..., Any]:
        async def respond(data: bytes, context: Any) -> bytes:
            if len(data) > self._max_bytes:
                return _finish(context, too_large(len(data), self._max_bytes))
            response = await _call_application(ray_handler, data, context, _application(rpc, data))
            if response is None:  # no such application: the front knows the reason
                response = await _call_application(ray_handler, data, context, FRONT)
            return _finish(context, self._client_result(_UNKNOWN if response is None else response))

        return respond

    def _stream_handler(self, rpc: Rpc, ray_handler: Callable[..., Any]) -> Callable[..., Any]:
        async def respond(request: Any, context: Any) -> AsyncIterator[bytes]:
            requests = StreamRequests(request, self._idle_timeout(rpc)) if rpc.kind == "stream" else None
            app = FRONT
            if rpc.path == STREAM and requests is not None:
                app = _application(rpc, await requests.first() or b"")
            end_status: Status | None = (requests.end_status if requests is not None else None) or _UNKNOWN
            for name in dict.fromkeys((app, FRONT)):
                if end_status is _UNKNOWN:  # no such application: the front knows the reason
                    end_status = None
                    async for response in _stream_from_application(
                        ray_handler, request if requests is None else requests.all(), context, name
                    ):
                        if isinstance(response, Status):
                            end_status = response
                            continue
                        yield response
                        if requests is not None:
                            requests.count_response()
            end_status = end_status or (requests.end_status if requests is not None else None)
            if end_status is not None:
                _finish(context, self._client_result(end_status))

        return respond

    def _client_result(self, response: bytes | Status) -> bytes | Status:
        """Return the status for the client when Ray has no replica or its queue is full; else ``response``."""
        if response is _UNKNOWN:
            return _STARTING
        return self._full if response is _FULL else response

    def _idle_timeout(self, rpc: Rpc) -> float:
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


async def _call_application(
    ray_handler: Callable[..., Any], data: bytes, context: Any, app: str
) -> bytes | Status | None:
    """Return the response of a replica of ``app``; None if there is none."""
    call_context = _CallContext(context, app)
    try:
        frame = await ray_handler(data, call_context)
        failure = call_context.failure()
        if failure is _UNKNOWN:
            return None
        return parse_frame(frame) if failure is None else failure
    except asyncio.CancelledError:
        raise
    except Exception as error:  # noqa: BLE001 -- nothing of it is for the client
        return _unexpected(error)


def _finish(context: Any, response: bytes | Status) -> bytes:
    if isinstance(response, bytes):
        return response
    context.set_code(response.code)
    context.set_details(response.details)
    return b""


def _application(rpc: Rpc, data: bytes) -> str:
    model = peek_model(data) if rpc.path in (INFER, STREAM) else ""
    return application(model) if model else FRONT


async def _stream_from_application(
    ray_handler: Callable[..., Any], request: Any, context: Any, app: str
) -> AsyncIterator[bytes | Status]:
    """Yield the responses of the replica of ``app``; a status is the last."""
    call_context = _CallContext(context, app)
    try:
        async for frame in ray_handler(request, call_context):
            response = parse_frame(frame)
            yield response
            if isinstance(response, Status):
                return
        failure = call_context.failure()
    except asyncio.CancelledError:
        raise
    except Exception as error:  # noqa: BLE001 -- nothing of it is for the client
        failure = _unexpected(error)
    if failure is not None:
        yield failure


class _CallContext:
    """The context of a call for Ray's handler. It keeps Ray's own status and details from the client."""

    def __init__(self, context: Any, app: str) -> None:
        left = context.time_remaining()
        self._context = context
        self._metadata = add_routing(
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
