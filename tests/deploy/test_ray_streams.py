"""Streams of silent clients at a gRPC server like Ray's proxy; a handler in the place of Ray's responds."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from waiting import until

from deploy.ray.calls import APPLICATION
from deploy.ray.frames import Frame
from deploy.ray.ingress import Ingress
from service.grpc.handlers import SERVICE

STREAM = f"/{SERVICE}/ModelStreamInfer"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_IDLE_SECONDS = 0.5


class Proxy:
    """``asked`` lists the applications that streams went to; responses wait while ``go`` is not set."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go = threading.Event()
        self.ended = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()))

    async def _handler(self, requests: AsyncIterator[bytes], seen: Any) -> AsyncIterator[bytes]:
        self.asked.append(dict(seen.invocation_metadata())[APPLICATION])
        come = asyncio.Queue[bytes | None]()

        async def read() -> None:
            async for data in requests:
                come.put_nowait(data)
            come.put_nowait(None)

        reading = asyncio.ensure_future(read())  # reads ahead of the responses, as replicas do
        while (data := await come.get()) is not None:
            while not self.go.is_set():
                await asyncio.sleep(0.01)
            yield Frame.of(data).SerializeToString()
        await reading
        self.ended += 1

    async def _run(self) -> None:
        ingress = Ingress()
        for path in (STREAM, REFLECTION):
            rays = ingress._method_handlers[path]
            ingress._method_handlers[path] = rays._replace(stream_stream=self._handler)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((ingress,))
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._stop = asyncio.Event()
        self._up.set()
        await self._stop.wait()
        await server.stop(0)

    def start(self) -> None:
        self._thread.start()
        assert self._up.wait(30)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()


@contextmanager
def _calling(proxy: Proxy, path: str) -> Iterator[tuple[Any, list[bytes], threading.Event]]:
    """Yield a call, the list of its requests, to which the test appends, and the event that ends the requests."""
    sent, over = list[bytes](), threading.Event()

    def requests() -> Iterator[bytes]:
        count = 0
        while not over.wait(0.01):
            for data in sent[count:]:
                count += 1
                yield data

    with grpc.insecure_channel(f"127.0.0.1:{proxy.port}") as channel:
        try:
            call: Any = channel.stream_stream(path)
            yield call(requests(), timeout=60), sent, over
        finally:
            over.set()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setenv("BF16KIT_STREAM_IDLE_SECONDS", str(_IDLE_SECONDS))
    monkeypatch.setattr("deploy.ray.ingress.REFLECTION_SECONDS", _IDLE_SECONDS)
    found = Proxy()
    found.go.set()
    found.start()
    yield found
    found.go.set()
    found.stop()


def _refused(call: Any) -> str:
    with pytest.raises(grpc.RpcError) as ended:
        next(call)
    assert ended.value.code() is grpc.StatusCode.CANCELLED
    return str(ended.value.details())


def test_a_stream_without_a_request_is_ended_and_reaches_no_application(proxy: Proxy) -> None:
    with _calling(proxy, STREAM) as (call, _, _):
        assert _refused(call) == "no request arrived on this stream for 0.5 s; open a new stream for the next one"
    assert not proxy.asked


def test_a_stream_that_is_silent_after_a_response_is_ended_at_its_replica_too(proxy: Proxy) -> None:
    with _calling(proxy, STREAM) as (call, sent, _):
        sent.append(b"\x0a\x01m")
        assert next(call) == b"\x0a\x01m"
        assert "for 0.5 s" in _refused(call)
    until(lambda: proxy.ended == 1, 30, "the end of the stream at the replica")
    assert proxy.asked == ["bf16kit.m"]


def test_a_stream_that_waits_for_a_response_is_not_idle(proxy: Proxy) -> None:
    proxy.go.clear()
    with _calling(proxy, STREAM) as (call, sent, over):
        sent.append(b"\x0a\x01m")
        until(lambda: proxy.asked, 30, "the request at the replica")
        time.sleep(3 * _IDLE_SECONDS)  # there is no condition to wait for: nothing must happen
        proxy.go.set()
        assert next(call) == b"\x0a\x01m"
        over.set()
        assert next(call, None) is None
    assert proxy.ended == 1


def test_a_reflection_stream_has_its_own_idle_limit(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    with _calling(proxy, REFLECTION) as (call, _, _):
        assert "for 0.5 s" in _refused(call)
    until(lambda: proxy.ended == 1, 30, "its end at the front")
    assert proxy.asked == ["bf16kit"]
