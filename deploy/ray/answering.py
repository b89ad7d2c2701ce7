"""An actor's side of a call: connects Ray's event loop to servicers that block."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from deploy.ray.calls import RPCS, Rpc, unsteered
from deploy.ray.frames import Frame
from service.transport.direct import DirectCall, DirectResponse, DirectTransport
from service.transport.status import Status


class Answering:
    """Has a method for each RPC, with the name that Ray calls. Subclasses set :attr:`direct`.

    None of them raises, because Ray would send the text of an exception to the client.
    """

    direct: DirectTransport

    def _open(self, rpc: Rpc, context: Any) -> DirectCall | Status:
        metadata, left = unsteered(context.invocation_metadata() or ())
        return self.direct.open(
            rpc.path, metadata, str(context.peer()), None if left is None else time.monotonic() + left
        )

    async def answer_one(self, rpc: Rpc, data: bytes, context: Any) -> Frame:
        """Return the response to ``data``. If the client cancels, this is cancelled, and so is the queued request."""
        call = self._open(rpc, context)
        if isinstance(call, Status):
            return Frame.of(call)
        try:
            loop = asyncio.get_running_loop()
            return Frame.of(await loop.run_in_executor(self.direct.threads, call.respond, data))
        finally:
            call.end()

    async def answer_stream(self, rpc: Rpc, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Frame]:
        """Yield the responses to ``requests``, in their order."""
        call = self._open(rpc, context)
        if isinstance(call, Status):
            yield Frame.of(call)
            return
        feed = _Feed()
        feeding = asyncio.ensure_future(feed.all(requests))
        try:
            loop = asyncio.get_running_loop()
            answers = call.respond_stream(iter(feed))
            while (answer := await loop.run_in_executor(self.direct.streams, next, answers, None)) is not None:
                yield Frame.of(answer)
        finally:
            call.end()
            feed.end()
            feeding.cancel()

    async def answer_watch(self, rpc: Rpc, data: bytes, context: Any) -> AsyncIterator[Frame]:
        """Yield responses as they become available."""
        call = self._open(rpc, context)
        if isinstance(call, Status):
            yield Frame.of(call)
            return
        loop, told = asyncio.get_running_loop(), asyncio.Queue[DirectResponse | None]()

        def send(answer: DirectResponse | None) -> None:
            loop.call_soon_threadsafe(told.put_nowait, answer)

        try:
            call.watch(data, send)
            while (answer := await told.get()) is not None:
                yield Frame.of(answer)
                if isinstance(answer, Status):
                    return
        finally:
            call.end()


class _Feed:
    """Passes requests from an event loop to a thread that waits for each; buffers at most one."""

    def __init__(self) -> None:
        self._come: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._taken = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def all(self, requests: AsyncIterator[bytes]) -> None:
        try:
            async for data in requests:
                self._come.put(data)
                await self._taken.wait()
                self._taken.clear()
        finally:
            self.end()

    def end(self) -> None:
        self._come.put(None)

    def __iter__(self) -> Iterator[bytes]:
        while (data := self._come.get()) is not None:
            self._loop.call_soon_threadsafe(self._taken.set)
            yield data


def _method(rpc: Rpc) -> Callable[..., Any]:
    """Return the method for ``rpc``. Ray finds the call's context by the parameter name ``grpc_context``."""
    if rpc.kind == "unary":

        async def unary(self: Answering, request: bytes, grpc_context: Any) -> Frame:
            return await self.answer_one(rpc, request, grpc_context)

        return unary
    if rpc.kind == "watch":

        async def watch(self: Answering, request: bytes, grpc_context: Any) -> AsyncIterator[Frame]:
            async for frame in self.answer_watch(rpc, request, grpc_context):
                yield frame

        return watch

    async def stream(self: Answering, requests: AsyncIterator[bytes], grpc_context: Any) -> AsyncIterator[Frame]:
        async for frame in self.answer_stream(rpc, requests, grpc_context):
            yield frame

    return stream


for _rpc in RPCS.values():
    setattr(Answering, _rpc.method, _method(_rpc))
