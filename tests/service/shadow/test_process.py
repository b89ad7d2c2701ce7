"""The process with the references as whoever leads it sees it, here while it does not run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from openfiles import no_more_files

from service.peers.channel import Body
from service.peers.child import SILENT_SECONDS
from service.peers.peer import Message
from service.process.config import ServerConfig
from service.shadow.counting import CountingBoth
from service.shadow.process import _MOST_SAMPLES, ShadowProcess
from service.telemetry.metrics import Metrics

UP = "bf16kit_drift_reference_up"
Give = Callable[..., "Future[Body]"]


@pytest.fixture
def served() -> list[tuple[str, int]]:
    return [("m", 1), ("other", 1)]


@pytest.fixture
def counting(served: list[tuple[str, int]]) -> CountingBoth:
    return CountingBoth(Metrics(), lambda: None, lambda: served)


@pytest.fixture
def shadow(tmp_path: Path, counting: CountingBoth) -> Iterator[ShadowProcess]:
    process = ShadowProcess(ServerConfig(repository=tmp_path), counting.hear, counting.lost, forgotten=counting.forget)
    yield process
    process.close()


@pytest.fixture
def file() -> Iterator[int]:
    made = os.memfd_create("samples")
    yield made
    os.close(made)


@pytest.fixture
def give(shadow: ShadowProcess, file: int) -> Give:
    """Hands one sample on."""

    def given(model: str = "m", wish: str = "w") -> Future[Body]:
        body = {"model": model, "version": 1, "wish": wish, "nbytes": 10, "samples": [{}]}
        return shadow.ask("samples", body, [file])

    return given


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_waits_for_the_process_is_dropped_when_its_model_goes(shadow: ShadowProcess, give: Give) -> None:
    """It would have a model measured that is not served any more."""
    opened = open_files()
    given = [give(), give("other"), give(wish="newer")]
    assert open_files() == opened + 3
    shadow.forget("m", "w")
    assert given[0].result(0) == {"outcomes": ["dropped"]}
    assert not given[1].done()
    assert not given[2].done(), "of what was loaded in its place"
    shadow.forget("m")
    assert given[2].result(0) == {"outcomes": ["dropped"]}
    assert (open_files(), shadow._held, shadow._unanswered.total()) == (opened + 1, 10, 1)
    assert [each.body["model"] for each in shadow._early] == ["other"]


def test_a_model_that_goes_while_the_process_is_dead_leaves_no_reference_that_is_down(
    shadow: ShadowProcess, give: Give, counting: CountingBoth, served: list[tuple[str, int]]
) -> None:
    give()
    give("other")
    theirs = Metrics()
    for model, version in served:
        theirs.add(model, version).reference_up(True)
    shadow._hear(Message({"metrics": [family.as_json() for family in theirs.snapshot("bf16kit_drift_")]}))
    shadow._bury()

    def up() -> dict[str, float]:
        return {series.labels["model"]: series.value for series in counting.samples([UP])}

    assert up() == {"m": 0, "other": 0}
    served.remove(("m", 1))
    shadow.forget("m", "w")
    assert up() == {"other": 0}
    shadow._bury()  # again, before it has said anything
    assert up() == {"other": 0}


def test_samples_for_which_no_file_is_left_take_no_room(shadow: ShadowProcess, give: Give) -> None:
    with no_more_files():
        for _ in range(_MOST_SAMPLES + 1):
            with pytest.raises(OSError, match="Too many open files"):
                give()
    assert (shadow._held, shadow._unanswered.total()) == (0, 0)
    assert not give().done()


def test_it_may_be_silent_for_longer_than_a_worker(shadow: ShadowProcess) -> None:
    """It runs only when nobody else wants a processor."""
    assert shadow._child._silent_seconds >= 10 * SILENT_SECONDS
