from __future__ import annotations

import asyncio
import threading
from http import HTTPStatus

from service.http.pages import Page, Route, text
from service.http.rendering import PageRenderer


class Slow:
    """A page that counts its calls and waits for ``go``."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.made = 0

    def __call__(self, accept: str) -> Page:
        self.made += 1
        self.begun.release()
        assert self.go.wait(60)
        return text(HTTPStatus.OK, f"{accept} {self.made}")


def test_waiting_requests_for_one_page_share_a_rendering_and_probes_do_not_wait() -> None:
    slow = Slow()
    rendering = PageRenderer({"/slow": Route(slow), "/livez": Route(lambda _: text(HTTPStatus.OK, "live"), probe=True)})

    async def scenario() -> list[Page]:
        at_work = [asyncio.create_task(rendering.page("/slow", f"first {i}")) for i in range(2)]
        for _ in at_work:
            await asyncio.to_thread(slow.begun.acquire)
        waiting = [asyncio.create_task(rendering.page("/slow", "second")) for _ in range(100)]
        await asyncio.sleep(0)
        assert (await rendering.page("/livez", "")).status == 200
        slow.go.set()
        await asyncio.gather(*at_work)
        return list(await asyncio.gather(*waiting))

    pages = asyncio.run(scenario())
    assert slow.made == 3
    assert {page.body for page in pages} == {b"second 3\n"}
    rendering.close()


def test_a_request_does_not_get_a_page_whose_rendering_had_begun_before() -> None:
    slow = Slow()
    rendering = PageRenderer({"/slow": Route(slow)})

    async def scenario() -> None:
        early = asyncio.create_task(rendering.page("/slow", ""))
        await asyncio.to_thread(slow.begun.acquire)
        late = asyncio.create_task(rendering.page("/slow", ""))
        await asyncio.to_thread(slow.begun.acquire)
        slow.go.set()
        await asyncio.gather(early, late)

    asyncio.run(scenario())
    assert slow.made == 2
    rendering.close()


def test_too_many_different_waiting_pages_are_503() -> None:
    slow = Slow()
    rendering = PageRenderer({"/slow": Route(slow)})

    async def scenario() -> list[int]:
        tasks = [asyncio.create_task(rendering.page("/slow", str(i))) for i in range(2)]
        for _ in tasks:
            await asyncio.to_thread(slow.begun.acquire)
        tasks += [asyncio.create_task(rendering.page("/slow", str(i))) for i in range(2, 50)]
        await asyncio.sleep(0)
        slow.go.set()
        return [page.status for page in await asyncio.gather(*tasks)]

    answers = asyncio.run(scenario())
    assert (answers.count(200), answers.count(503)) == (34, 16)
    rendering.close()
