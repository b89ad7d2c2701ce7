"""The requests of a stream as Ray's proxy hands them on, and how long it waits for the next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from grpc import StatusCode

from service.transport.status import Status


class Requests:
    """Of one client, which is to answer for each of them. One that waits for no answer and sends nothing for
    ``seconds`` is silent: then there are no more of its requests."""

    def __init__(self, requests: AsyncIterator[bytes], seconds: float) -> None:
        self._requests = requests
        self._seconds = seconds
        self._read: list[bytes] = []  # that was looked at, and is to be handed on
        self._unanswered = 0
        self.silent = False

    @property
    def ending(self) -> Status | None:
        """What a silent client is told: by the code that `bf16-serve` ends its stream with."""
        if not self.silent:
            return None
        return Status(
            StatusCode.CANCELLED,
            f"no request has come in this stream for {self._seconds:g} s; open it again when there is one",
        )

    def answered(self) -> None:
        """The client has taken the answer to one of them."""
        self._unanswered -= 1

    async def first(self) -> bytes | None:
        """Which is handed on all the same; None: there is none."""
        first = await self._next()
        if first is not None:
            self._read.append(first)
        return first

    async def all(self) -> AsyncIterator[bytes]:
        while (data := self._read.pop() if self._read else await self._next()) is not None:
            self._unanswered += 1
            yield data

    async def _next(self) -> bytes | None:
        async def read() -> bytes | None:
            return await anext(self._requests, None)

        coming = asyncio.ensure_future(read())
        try:
            while not (await asyncio.wait({coming}, timeout=self._seconds))[0]:
                if not self._unanswered:
                    self.silent = True
                    return None
            return coming.result()
        finally:
            coming.cancel()
