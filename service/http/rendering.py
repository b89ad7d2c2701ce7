"""Renders costly pages on two threads, once for all clients that wait for the same page."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus

from service.http.pages import Page, Route, Routes, text

_log = logging.getLogger(__name__)
THREADS = 2
_LONGEST_PAUSE_SECONDS = 0.2
_WAITING = 32  # distinct pages; a scraper requests one
_FAILED = text(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; the server's log has the details")
_BUSY = text(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "too many pages are requested; try again",
    ("Retry-After", "1"),
    rejection="http_busy",
)


class PageRenderer:
    """Renders pages for the event loop, without blocking it. A page is never older than the request for it."""

    def __init__(self, pages: Routes) -> None:
        self._pages = pages
        self._threads = ThreadPoolExecutor(THREADS, "http-page")
        self._waiting: dict[tuple[str, str], Future[Page]] = {}  # requested and not begun

    async def page(self, path: str, accept: str) -> Page:
        """Return the page at ``path``, which must exist.

        ``accept`` is the Accept header, or the query for a route that uses it. 503 if too many pages wait, 500 if
        rendering fails.
        """
        route = self._pages[path]
        if route.probe:
            return _render(path, route, accept)
        key = path, accept
        job = self._waiting.get(key)
        if job is None:
            if len(self._waiting) >= _WAITING:
                return _BUSY
            # Only the loop looks up and adds entries. The thread only removes one, before it reads anything.
            self._waiting[key] = job = Future()
            self._threads.submit(self._render_job, key, job, route)
        return await asyncio.shield(asyncio.wrap_future(job))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _render_job(self, key: tuple[str, str], job: Future[Page], route: Route) -> None:
        started = time.monotonic()
        self._waiting.pop(key, None)
        job.set_result(_render(key[0], route, key[1]))
        # Take at most a quarter of this thread's time, so that clients without pauses do not slow down inference.
        time.sleep(min(3 * (time.monotonic() - started), _LONGEST_PAUSE_SECONDS))


def _render(path: str, route: Route, accept: str) -> Page:
    try:
        return route.make(accept)
    except Exception:  # noqa: BLE001 -- an empty answer would tell neither a scraper nor the operator
        _log.exception("%s cannot be answered", path)
        return _FAILED
