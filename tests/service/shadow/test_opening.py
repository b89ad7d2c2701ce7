"""Opening an fp32 reference, and showing on the tracker when it runs or is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_mlp

from bf16kit.messages.errors import ConfigError
from bf16kit.system import controlgroup
from service.contract import Array
from service.models.opened import open_artifact
from service.models.serving import Serving
from service.shadow.activity import ActivityTracker
from service.shadow.memory import ReferenceMemory
from service.shadow.opening import TrackedReference, open_reference

NAME = "model 'm' version 1"


class Reading:
    """A reference that reads the tracker while it runs."""

    up = True

    def __init__(self, tracker: ActivityTracker) -> None:
        self.seen: list[dict[str, str]] = []
        self.closed = False
        self._tracker = tracker

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str], *, seconds: float) -> dict[str, Array]:
        self.seen.append(dict(self._tracker.read([NAME])))
        return dict.fromkeys(outputs, feeds["x"])

    def close(self) -> None:
        self.closed = True


def test_the_board_shows_a_running_reference() -> None:
    tracker = ActivityTracker()
    reading = Reading(tracker)
    reference = TrackedReference(NAME, reading, tracker)
    x = np.ones((1, 3), np.float32)
    np.testing.assert_array_equal(reference.run({"x": x}, ("y",), seconds=1.0)["y"], x)
    assert reading.seen == [{NAME: "running"}]
    assert tracker.read([NAME]) == {}
    ups = [reference.up]
    reading.up = False
    assert [*ups, reference.up] == [True, False]
    reference.close()
    assert reading.closed


def test_the_board_shows_a_reference_that_is_being_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mlp(tmp_path / "m" / "1")
    tracker, seen = ActivityTracker(), list[dict[str, str]]()

    class Looking(ReferenceMemory):
        def load(self, *arguments: object) -> object:  # type: ignore[override]  # whatever they are
            seen.append(dict(tracker.read([NAME])))
            return super().load(*arguments)  # type: ignore[arg-type]  # as they came

    opened = open_artifact(tmp_path / "m" / "1", Serving())
    reference = open_reference(NAME, opened, Looking(), tracker)
    assert seen == [{NAME: "loading"}]
    assert tracker.read([NAME]) == {}
    assert reference.run({"x": np.ones((1, 16), np.float32)}, ("y",), seconds=20.0)["y"].shape == (1, 16)
    reference.close()


def test_a_reference_without_room_in_the_container_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mlp(tmp_path / "m" / "1")
    opened = open_artifact(tmp_path / "m" / "1", Serving())
    monkeypatch.setattr(controlgroup, "memory", lambda: controlgroup.Memory(limit=1 << 20, left=100))
    expected = r"its weights are \d+ bytes in fp32, and 0 MB are left of the 1 MB that this container may take; raise"
    with pytest.raises(ConfigError, match=expected):
        open_reference(NAME, opened, ReferenceMemory(), ActivityTracker())
