"""The sessions of ONNX Runtime that this process has open: what is loaded and not freed."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import onnxruntime
import pytest


def recorded_sessions(
    monkeypatch: pytest.MonkeyPatch,
    opens: Callable[[], object] = lambda: None,
    runs: Callable[[Mapping[str, Any]], object] = lambda feeds: None,
) -> Callable[[], int]:
    """Return a function that counts the sessions opened from now on and still open.

    ``opens`` is called before each is opened, and ``runs`` before each run, with its inputs.
    """
    sessions: list[weakref.ref[object]] = []

    class Recorded(onnxruntime.InferenceSession):  # type: ignore[misc]  # it has no types
        def __init__(self, *arguments: Any, **options: Any) -> None:
            opens()
            super().__init__(*arguments, **options)
            sessions.append(weakref.ref(self))

        def run(self, outputs: Any, feeds: Mapping[str, Any], *options: Any) -> Any:
            runs(feeds)
            return super().run(outputs, feeds, *options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Recorded)
    return lambda: sum(session() is not None for session in sessions)
