"""An actor's side of a call: connects Ray's event loop to servicers that block."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from deploy.ray.calls import RPCS, Rpc, strip_routing
from deploy.ray.frames import Frame
from service.grpc.direct import DirectCall, DirectResponse, DirectTransport
from service.grpc.status import Status


class RpcMethods:
    """Has a method for each RPC, with the name that Ray calls. Subclasses set :attr:`direct`.

    None of them raises, because Ray would send the text of an exception to the client.
    """

    direct: DirectTransport

    def _open(self, rpc: Rpc, context: Any) -> DirectCall | Status:
        metadata, left = strip_routing(context.invocation_metadata() or ())
        return self.direct.open(
            rpc.path, metadata, str(context.peer()), None if left is None else time.monotonic() + left
        )

    async def respond_unary(self, rpc: Rpc, data: bytes, context: Any) -> Frame:
        """Return the response to ``data``. If the client cancels, this is cancelled, and so is the queued request."""
        call = self._open(rpc, context)
        if isinstance(call, Status):
            return Frame.of(call)
        try:
            loop = asyncio.get_running_loop()
            return Frame.of(await loop.run_in_executor(self.direct.threads, call.respond, data))
        finally:
            call.end()

    async def respond_stream(self, rpc: Rpc, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Frame]:
        """Yield the responses to ``requests``, in their order."""
        call = self._open(rpc, context)
        if isinstance(call, Status):
            yield Frame.of(call)
            return
        feed = _RequestFeed()
        feeding = asyncio.ensure_future(feed.all(requests))
        try:
            loop = asyncio.get_running_loop()
            responses = call.respond_stream(iter(feed))
            while (response := await loop.run_in_executor(self.direct.streams, next, responses, None)) is not None:
                yield Frame.of(response)
        finally:
            call.end()
            feed.end()
            feeding.cancel()

    async def respond_watch(self, rpc: Rpc, data: bytes, context: Any) -> AsyncIterator[Frame]:
        """Yield responses as they become available."""
        call = self._open(rpc, context)
        if isinstance(call, Status):
            yield Frame.of(call)
            return
        loop, responses = asyncio.get_running_loop(), asyncio.Queue[DirectResponse | None]()

        def send(response: DirectResponse | None) -> None:
            loop.call_soon_threadsafe(responses.put_nowait, response)

        try:
            call.watch(data, send)
            while (response := await responses.get()) is not None:
                yield Frame.of(response)
                if isinstance(response, Status):
                    return
        finally:
            call.end()


class _RequestFeed:
    """Passes requests from an event loop to a thread that waits for each; buffers at most one."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._consumed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def all(self, requests: AsyncIterator[bytes]) -> None:
        try:
            async for data in requests:
                self._requests.put(data)
                await self._consumed.wait()
                self._consumed.clear()
        finally:
            self.end()

    def end(self) -> None:
        self._requests.put(None)

    def __iter__(self) -> Iterator[bytes]:
        while (data := self._requests.get()) is not None:
            self._loop.call_soon_threadsafe(self._consumed.set)
            yield data


def _rpc_method(rpc: Rpc) -> Callable[..., Any]:
    """Return the method for ``rpc``. Ray finds the call's context by the parameter name ``grpc_context``."""
    if rpc.kind == "unary":

        async def unary(self: RpcMethods, request: bytes, grpc_context: Any) -> Frame:
            return await self.respond_unary(rpc, request, grpc_context)

        return unary
    if rpc.kind == "watch":

        async def watch(self: RpcMethods, request: bytes, grpc_context: Any) -> AsyncIterator[Frame]:
            async for frame in self.respond_watch(rpc, request, grpc_context):
                yield frame

        return watch

    async def stream(self: RpcMethods, requests: AsyncIterator[bytes], grpc_context: Any) -> AsyncIterator[Frame]:
        async for frame in self.respond_stream(rpc, requests, grpc_context):
            yield frame

    return stream


for _rpc in RPCS.values():
    setattr(RpcMethods, _rpc.method, _rpc_method(_rpc))
