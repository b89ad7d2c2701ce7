"""Reports the phases of a search to the user."""

from __future__ import annotations

from contextlib import ExitStack

from converter.process.progress import Progress


class Phases:
    """Reports to the progress which phase a search is in."""

    def __init__(self, profile: str, progress: Progress) -> None:
        self._profile = profile
        self._progress = progress
        self._stack = ExitStack()

    def __enter__(self) -> Phases:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, phase: str) -> None:
        self._stack.close()
        self._stack.enter_context(self._progress.step(f"searching fp32 islands of {self._profile}: {phase}"))
