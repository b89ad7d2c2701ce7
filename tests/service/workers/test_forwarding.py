"""Shared memory with several workers: registered in all or in none, and sent to those that start later."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from bf16kit.messages.errors import Overloaded, Unavailable
from bf16kit.service.operations import Region
from bf16kit.service.peers.channel import Body
from bf16kit.service.peers.peer import ENDED
from bf16kit.service.regions import RegionTable
from bf16kit.service.workers.forwarding import FleetRegions

REGION = Region("r", "/mem", 8, 16)


class Worker:
    """A worker with a table of its own, which follows the messages."""

    def __init__(self, directory: Path) -> None:
        self.table = RegionTable("mem", directory)
        self.error: Exception | None = None  # the answer to the next region

    def tell(self, kind: str, body: Mapping[str, Any], files: Sequence[int] = ()) -> None:
        if kind == "forget":
            self.table.unregister(body["name"])
        else:
            self.table.adopt(Region(**body), files[0])

    def ask(self, kind: str, body: Mapping[str, Any], files: Sequence[int]) -> Future[Body]:
        answer: Future[Body] = Future()
        if kind == "adopt" and self.error is not None:
            answer.set_exception(self.error)
        else:
            self.tell(kind, body, files)
            answer.set_result({})
        return answer


@pytest.fixture
def workers(tmp_path: Path) -> list[Worker]:
    (tmp_path / "mem").write_bytes(bytes(range(64)))
    return [Worker(tmp_path), Worker(tmp_path)]


@pytest.fixture
def regions(tmp_path: Path, workers: list[Worker]) -> FleetRegions:
    def ask(kind: str, body: Mapping[str, Any], files: Sequence[int] = ()) -> dict[str, Future[Body]]:
        return {str(at): worker.ask(kind, body, files) for at, worker in enumerate(workers)}

    return FleetRegions(RegionTable("mem", tmp_path), ask)


def test_a_region_that_one_worker_cannot_register_is_in_no_worker(
    regions: FleetRegions, workers: list[Worker], tmp_path: Path
) -> None:
    workers[1].error, later = Overloaded("too many regions", "regions"), Worker(tmp_path)
    with pytest.raises(Overloaded):
        regions.register(REGION)
    regions.tell_all(later)  # type: ignore[arg-type]
    for worker in (*workers, later):
        assert list(worker.table.status("")) == []
    workers[1].error = Unavailable("it has ended", ENDED)  # a dead worker fails no registration
    regions.register(REGION)
    assert list(workers[0].table.status("")) == [REGION]
