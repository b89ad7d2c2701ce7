"""Pages that cost something are made on two threads, once for all who wait for the same one."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus

from service.status_http.pages import Page, Route, Routes, text

_log = logging.getLogger(__name__)
THREADS = 2
_LONGEST_PAUSE_SECONDS = 0.2
_WAITING = 32  # different pages; a scraper asks for one
_FAILED = text(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; the server's log has the details")
_BUSY = text(
    HTTPStatus.SERVICE_UNAVAILABLE, "too many pages are asked for; try again", ("Retry-After", "1"), refused="http_busy"
)


class Rendering:
    """:meth:`page` is for the event loop: it never holds it up. A page is as new as the request that asked for it."""

    def __init__(self, pages: Routes) -> None:
        self._pages = pages
        self._threads = ThreadPoolExecutor(THREADS, "http-page")
        self._waiting: dict[tuple[str, str], Future[Page]] = {}  # asked for and not begun

    async def page(self, path: str, accept: str) -> Page:
        """The page at ``path``, which exists, for an Accept header, or for a query where it goes by that; 503 when too
        many wait, 500 when it cannot be made."""
        route = self._pages[path]
        if route.probe:
            return _made(path, route, accept)
        key = path, accept
        job = self._waiting.get(key)
        if job is None:
            if len(self._waiting) >= _WAITING:
                return _BUSY
            # The lookup above and this entry are the loop's alone; the thread only removes, before it reads anything.
            self._waiting[key] = job = Future()
            self._threads.submit(self._make, key, job, route)
        return await asyncio.shield(asyncio.wrap_future(job))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _make(self, key: tuple[str, str], job: Future[Page], route: Route) -> None:
        begun = time.monotonic()
        self._waiting.pop(key, None)
        job.set_result(_made(key[0], route, key[1]))
        # Whoever asks without pause shall not take the processor from inference: a quarter of this thread's time.
        time.sleep(min(3 * (time.monotonic() - begun), _LONGEST_PAUSE_SECONDS))


def _made(path: str, route: Route, accept: str) -> Page:
    try:
        return route.make(accept)
    except Exception:  # noqa: BLE001 -- an empty answer would tell neither a scraper nor the operator
        _log.exception("%s cannot be answered", path)
        return _FAILED
