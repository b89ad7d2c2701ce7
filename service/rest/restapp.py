"""Answers the REST requests: each becomes a call of the same servicers as an RPC, with a permit of the same pool."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from bf16kit.messages.errors import Cancelled, NotFound
from bf16kit.messages.wording import quoted
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.config.tokens import Scope as TokenScope
from bf16kit.service.grpc.admission import MessageBytes
from bf16kit.service.grpc.inference import OtherCall
from bf16kit.service.grpc.status import Status
from bf16kit.service.grpc.transport import Transport
from bf16kit.service.http.httpserver import Connection
from bf16kit.service.http.pageapp import send_response
from bf16kit.service.http.pages import Access
from bf16kit.service.rest.codec import decode, encode

_Answer = TypeVar("_Answer")
_SMALL = 16 << 10  # bytes of a body or of outputs that are converted on the loop's thread; more take another
_PATH = re.compile(
    r"/v2(?:/health/(live|ready)|/models/([^/]+)(?:/versions/([^/]+))?(?:/(ready|infer))?)?/?", re.DOTALL
)
_PROBES = ("ServerLive", "ServerReady", "ModelReady")  # need no token
_JSON_LENGTH = "Inference-Header-Content-Length"
#: gRPC's codes in HTTP, other than 500. Nobody reads 499: the client has left.
_STATUSES = {
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}


class RestApp:
    """An ASGI application for paths that begin with ``/v2``. Its models and limits are those of ``transport``.

    A connection's state has the :class:`~bf16kit.service.http.httpserver.Connection`.
    """

    def __init__(self, transport: Transport, access: Access, max_message_bytes: int) -> None:
        self._pool = transport.pools["inference"]
        self._inference = transport.inference
        self._control = transport.control
        self._access = access
        self._max_bytes = max_message_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._or_error(self._respond(Request(scope, receive), send))
        if response is not None:
            await send_response(scope, send, response)

    async def _or_error(self, responding: Awaitable[_Answer]) -> _Answer | Response:
        try:
            return await responding
        except HTTPException as error:
            return _error(error.status_code, error.detail, error.headers)
        except Exception as error:  # noqa: BLE001 -- the table decides what the client may know
            return _failed(self._pool.status(error))

    async def _respond(self, request: Request, send: Send) -> Response | None:
        """Return the response; None: it was sent, because its bytes count until then."""
        path = request.scope["path"]
        found = _PATH.fullmatch(path)
        health, model, version, verb = ("",) * 4 if found is None else found.groups("")
        rpc = f"Model{(verb or 'metadata').title()}" if model else f"Server{(health or 'metadata').title()}"
        scope: TokenScope = "infer" if rpc == "ModelInfer" else "read"
        if rpc not in _PROBES and (refused := self._access.refusal(request, scope)) is not None:
            self._pool.count_refusal(refused.reason)
            challenge = {name: value for name, value in refused.headers.items() if name == "www-authenticate"}
            return _error(refused.status_code, bytes(refused.body).decode().strip(), challenge)
        if found is None:
            raise NotFound(
                f"{quoted(path)} is not served: REST has health, metadata and infer, and the gRPC port the rest of the"
                " protocol"
            )
        allowed = ("POST",) if rpc == "ModelInfer" else ("GET", "HEAD")
        if request.method not in allowed:
            return _error(405, f"send {allowed[0]} to this path", {"Allow": ", ".join(allowed)})
        if rpc == "ModelInfer":
            await self._infer(request, send, model, version)
            return None
        asked = getattr(pb, f"{rpc}Request")(**({"name": model, "version": version} if model else {}))
        told = MessageToDict(getattr(self._control, rpc)(asked, None), always_print_fields_with_no_presence=True)
        for tensor in (*told.get("inputs", ()), *told.get("outputs", ())):
            tensor["shape"] = [int(size) for size in tensor["shape"]]  # protobuf writes 64-bit integers as text
        return JSONResponse(told, 400 if told.get("ready") is False else 200)

    async def _infer(self, request: Request, send: Send, model: str, version: str) -> None:
        """Answer an inference, which holds its permit until the client has the response."""
        pool, connection = self._pool, request.scope["state"]["connection"]
        client = f"http:{request.client.host if request.client else ''}"  # many connections get no more than one
        permit = pool.admit(client)
        call = OtherCall(client, request.headers, MessageBytes(permit))
        end = partial(self._end_slow, asyncio.get_running_loop(), connection)
        try:
            pool.receive_timeouts.start(call, end)
            body = await self._body(request, call)
            pool.receive_timeouts.clear(call)
            connection.wait_for_server()
            # An error has the same time limit: nothing else ends a connection whose client does not read.
            response = await self._or_error(self._run(request, call, body, model, version))
            pool.send_timeouts.start(call, end)
            await send_response(request.scope, send, response)
        finally:
            pool.receive_timeouts.clear(call)
            pool.send_timeouts.clear(call)
            call.cancellation.cancel()
            permit.release()

    async def _body(self, request: Request, call: OtherCall) -> bytearray:
        """Receive the body. Its size is checked, and its bytes are counted, before there are more of them."""
        coding = request.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise HTTPException(415, f"Content-Encoding is {quoted(coding)}; send the body uncompressed")
        body, most = bytearray(), self._max_bytes
        nbytes = int(request.headers.get("content-length", "0"))
        while nbytes <= most:
            event = await request.receive()
            if event["type"] == "http.disconnect":
                raise Cancelled("the client left before its request was read")
            nbytes = max(nbytes, len(body) + len(event["body"]))
            call.held.reserve(len(body) + len(event["body"]))
            body += event["body"]
            if not event["more_body"]:
                return body
        text = f"the request has {nbytes} bytes or more, expected at most {most} (max_message_bytes)"
        raise HTTPException(413, text, {"Connection": "close"})  # its rest is not received

    async def _run(self, request: Request, call: OtherCall, body: bytearray, model: str, version: str) -> Response:
        answered: Future[pb.ModelInferResponse | Status] = Future()

        def begin() -> Any:
            message, binary = decode(body, request.headers.get(_JSON_LENGTH), model, version, call.held.reserve)
            body.clear()  # the message has a copy, and only one is counted
            self._inference.ModelInfer(message, call, answered.set_result)
            return binary

        quick = len(body) <= _SMALL and not self._inference.reads_shared_memory
        binary = begin() if quick else await asyncio.to_thread(begin)
        leaving = asyncio.create_task(_until_gone(request.receive))
        leaving.add_done_callback(lambda _: call.cancellation.cancel())
        try:
            result = await asyncio.shield(asyncio.wrap_future(answered))
        finally:
            leaving.cancel()
        if isinstance(result, Status):
            return _failed(result)
        counted = sum(map(len, result.raw_output_contents))  # already, for the message, which ends here
        data, length = encode(result, binary) if counted <= _SMALL else await asyncio.to_thread(encode, result, binary)
        call.reserve_more(len(data) - counted)
        if length is None:
            return Response(data, media_type="application/json")
        return Response(data, headers={_JSON_LENGTH: str(length)}, media_type="application/octet-stream")

    def _end_slow(self, loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
        self._pool.count_refusal("too_slow")
        loop.call_soon_threadsafe(connection.evict)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _failed(status: Status) -> Response:
    return _error(_STATUSES.get(status.code.name, 500), status.details)


def _error(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": text}, status, headers)
