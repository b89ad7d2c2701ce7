"""The requests of a stream as Ray's proxy passes them on, with a timeout for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from grpc import StatusCode

from service.grpc.status import Status


class StreamRequests:
    """The requests of one client's stream.

    A client that sends nothing for ``seconds`` while no response is outstanding is silent: its stream then ends.
    """

    def __init__(self, requests: AsyncIterator[bytes], seconds: float) -> None:
        self._requests = requests
        self._seconds = seconds
        self._read: list[bytes] = []  # looked at by first(), and still to be passed on
        self._outstanding = 0
        self.timed_out = False

    @property
    def end_status(self) -> Status | None:
        """The status for a silent client: the code with which `bf16-serve` ends its stream."""
        if not self.timed_out:
            return None
        return Status(
            StatusCode.CANCELLED,
            f"no request arrived on this stream for {self._seconds:g} s; open a new stream for the next one",
        )

    def count_response(self) -> None:
        """Count a response that the client has received."""
        self._outstanding -= 1

    async def first(self) -> bytes | None:
        """Return the first request, which :meth:`all` still yields; None if there is none."""
        first = await self._next()
        if first is not None:
            self._read.append(first)
        return first

    async def all(self) -> AsyncIterator[bytes]:
        while (data := self._read.pop() if self._read else await self._next()) is not None:
            self._outstanding += 1
            yield data

    async def _next(self) -> bytes | None:
        async def read() -> bytes | None:
            return await anext(self._requests, None)

        coming = asyncio.ensure_future(read())
        try:
            while not (await asyncio.wait({coming}, timeout=self._seconds))[0]:
                if not self._outstanding:
                    self.timed_out = True
                    return None
            return coming.result()
        finally:
            coming.cancel()
