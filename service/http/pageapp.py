"""Answers the requests of the HTTP port: metrics and probes for machines, the status page for people.

Inference over REST, if it is on, is another application's: :mod:`bf16kit.service.rest`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bf16kit.service.http.pages import Access, Refused, Route, Routes

_log = logging.getLogger(__name__)
CHUNK = 16 << 10  # bytes of a response sent at once: as much as a slow reader makes the server hold
_THREADS = 2  # that make pages
_WAITING = 32  # distinct pages; a scraper requests one
_LONGEST_PAUSE_SECONDS = 0.2  # of such a thread after a page
# Requests that the loop begins to answer in one turn. A probe that is its connection's first request goes ahead, so
# that hundreds of busy clients do not delay it.
_REQUESTS_PER_TURN = 16


class PageApp:
    """An ASGI application that answers with these pages. ``on_refused`` is called with the reason of each rejection.

    A connection's state says whether its request is the ``first``, and whether it came with a ``certificate``.
    ``inference`` answers the paths of the inference protocol, if it is set.
    """

    inference: ASGIApp | None = None

    def __init__(self, pages: Routes, access: Access, on_refused: Callable[[str], None]) -> None:
        self._pages = pages
        self._access = access
        self._on_refused = on_refused
        self._threads = ThreadPoolExecutor(_THREADS, "http-page")
        self._waiting: dict[tuple[str, str], Future[Response]] = {}  # pages requested and not begun
        self._turn = asyncio.Semaphore(_REQUESTS_PER_TURN)

    def close(self) -> None:
        """Make no further pages."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # only when the loop ends
            lengths = {name for name, _ in scope["headers"]} & {b"content-length", b"transfer-encoding"}
            if len(lengths) > 1:  # a proxy may see another end of this request, and another request after it
                response: Response = Refused(
                    400, "give Content-Length or Transfer-Encoding, not both", "http_malformed", {"Connection": "close"}
                )
            elif self.inference is not None and f"{scope['path']}/".startswith("/v2/"):
                await self._take_turn()
                await self.inference(scope, receive, send)
                return
            else:
                response = await self._respond(Request(scope))
            if isinstance(response, Refused):
                self._on_refused(response.reason)
            await send_response(scope, send, response)

    async def _take_turn(self) -> None:
        async with self._turn:
            await asyncio.sleep(0)  # the place is free again one turn later

    async def _respond(self, request: Request) -> Response:
        path = request.scope["path"]
        route = self._pages.get(path)
        if route is None or not route.probe or not request.scope["state"]["first"]:
            await self._take_turn()
        if request.method not in ("GET", "HEAD"):
            return Refused(
                405,
                "this port answers GET and HEAD only",
                "http_malformed",
                {"Allow": "GET, HEAD", "Connection": "close"},
            )
        if route is not None and route.probe:
            return self._make(path, route, "")
        if (refusal := self._access.refusal(request, "read" if route is None else route.scope)) is not None:
            return refusal
        if route is None:
            return PlainTextResponse(f"not found; the pages are {', '.join(self._pages)}\n", 404)
        return await self._page(path, route, request)

    async def _page(self, path: str, route: Route, request: Request) -> Response:
        """Make a page on a thread, once for all clients that wait for it. It is never older than its request."""
        query = request.scope["query_string"].decode("latin-1")
        key = path, query if route.takes_query else ", ".join(request.headers.getlist("accept"))
        job = self._waiting.get(key)
        if job is None:
            if len(self._waiting) >= _WAITING:
                return Refused(503, "too many pages are requested; try again", "http_busy", {"Retry-After": "1"})
            self._waiting[key] = job = Future()
            self._threads.submit(self._run_job, key, job, route)
        return await asyncio.shield(asyncio.wrap_future(job))

    def _run_job(self, key: tuple[str, str], job: Future[Response], route: Route) -> None:
        started = time.monotonic()
        self._waiting.pop(key, None)  # only the loop adds entries; whoever comes from now on gets a newer page
        job.set_result(self._make(key[0], route, key[1]))
        # Pages take at most a quarter of these threads' time: clients without pauses must not slow down inference.
        time.sleep(min(3 * (time.monotonic() - started), _LONGEST_PAUSE_SECONDS))

    def _make(self, path: str, route: Route, argument: str) -> Response:
        try:
            return route.make(argument)
        except Exception:  # noqa: BLE001 -- an empty answer would tell neither a scraper nor the operator
            _log.exception("%s cannot be answered", path)
            return PlainTextResponse("internal error; the server's log has the details\n", 500)


async def send_response(scope: Scope, send: Send, response: Response) -> None:
    """Send a response in pieces, each once the client has most of the one before: a slow reader holds no more."""
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    for start in range(0, len(response.body), CHUNK) if scope["method"] != "HEAD" else ():
        piece = bytes(response.body[start : start + CHUNK])
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body"})
