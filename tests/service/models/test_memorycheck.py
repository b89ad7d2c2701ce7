"""Whether a container has room for a model. Each test sets the memory; real containers are in tests/compose."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from artifacts import write_mlp

from bf16kit.messages.errors import ConfigError, RuntimeFailure
from bf16kit.system import controlgroup
from bf16kit.system.controlgroup import RESERVE, Memory
from service.models import loading
from service.models.memorycheck import check_room, least_bytes
from service.models.opening import open_artifact
from service.models.policy import Serving


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    path = tmp_path / "m" / "1"
    write_mlp(path)
    return path


def let(monkeypatch: pytest.MonkeyPatch, left: int, limit: int = 100_000_000) -> None:
    monkeypatch.setattr(controlgroup, "memory", lambda: Memory(limit, left))


def test_a_model_that_does_not_fit_is_rejected_with_the_sizes_and_a_remedy(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_artifact(artifact, Serving())
    let(monkeypatch, RESERVE + opened.weight_bytes - 1)
    expected = (
        r"^it needs 67 MB of memory at least, and 67 MB are left of the 100 MB that this container may take; raise"
    )
    with pytest.raises(ConfigError, match=expected):
        loading.load(artifact, Serving(), device="cpu", threads=1)


def test_the_log_states_the_weights_and_the_memory_left_before_a_load(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the last line of the log if the load ends the container."""
    caplog.set_level(logging.INFO)
    opened = open_artifact(artifact, Serving())
    let(monkeypatch, RESERVE + opened.weight_bytes)
    check_room(opened, "cpu")
    assert caplog.messages == [
        f"{artifact}: 0 MB of weights are loaded now; 67 MB are left of the 100 MB that this container may take"
    ]


def test_without_a_limit_nothing_is_logged(artifact: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    check_room(open_artifact(artifact, Serving()), "cpu")
    assert not caplog.messages


def test_mapped_weights_need_no_room(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system can reclaim their pages."""
    opened = open_artifact(artifact, Serving(weights="mapped"))
    let(monkeypatch, 0)
    check_room(opened, "cpu")
    assert least_bytes(opened, "cpu") == 0
    assert least_bytes(open_artifact(artifact, Serving()), "cpu") == opened.weight_bytes > 0


def test_a_lack_of_memory_during_a_load_is_a_runtime_failure(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bf16kit.runtime import loading as runtimes

    def refused(*arguments: object, **named: object) -> None:
        raise MemoryError("no room for 45 MB of weights: 1 MB are left of the 10 MB that this container may take")

    monkeypatch.setattr(runtimes, "load", refused)
    with pytest.raises(RuntimeFailure, match=r"profile cpu cannot be loaded: no room for 45 MB of weights: 1 MB are"):
        loading.load(artifact, Serving(profile="cpu"), device="cpu", threads=1)
