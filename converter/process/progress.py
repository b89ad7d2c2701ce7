"""Shows the progress of a conversion: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from bf16kit.messages.wording import size

_INTERVAL = 5.0  # seconds between plain lines
BYTES = ""  # the unit of a step that counts bytes

Advance = Callable[[int], None]


def ignore(_: int) -> None:
    """Take what is done of a step that nobody watches."""


class Progress:
    """Receives each step of a conversion and what is done of it; shows nothing, for programs that call it."""

    @contextmanager
    def step(self, name: str, total: int | None = None, unit: str = BYTES, then: str = "") -> Iterator[Advance]:
        """Open a step of ``total`` bytes, or of another ``unit`` such as "runs" (None: unknown).

        Yields the function to call with the number done. ``then`` says what the step goes on with after them.
        """
        yield ignore


class _Step:
    """What is known of a step while it runs: how much is done, and for how long it has run."""

    def __init__(self, total: int | None, unit: str, then: str, clock: Callable[[], float]) -> None:
        self._total, self._unit, self._then, self._clock = total, unit, then, clock
        self._start, self.done = clock(), 0

    def advance(self, count: int) -> None:
        self.done += count

    def __str__(self) -> str:
        """Say how much is done, the time since the start and, if it can be told, the time left."""
        total, seconds = self._total, self._clock() - self._start
        whole = total if total and self.done <= total else None  # an ONNX file of a few kB may have GB beside it
        parts = []
        if self.done:
            parts += [f"{self._count(self.done)} of {self._count(whole)}" if whole else self._count(self.done)]
            parts[0] += f" {self._unit}" * bool(self._unit)
        if self._then and total and self.done >= total:
            parts += [self._then]
        parts += [f"{seconds:.0f} s"]
        if whole and 0 < self.done < whole:
            parts += [f"about {seconds * (whole - self.done) / self.done:.0f} s left"]
        return ", ".join(parts)

    def _count(self, count: int) -> str:
        return f"{count:,}" if self._unit else size(count)


class LineProgress(Progress):
    """Writes a line when a step begins, and every ``interval`` seconds while it runs."""

    def __init__(
        self, stream: IO[str], interval: float = _INTERVAL, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._interval, self._clock = stream, interval, clock

    @contextmanager
    def step(self, name: str, total: int | None = None, unit: str = BYTES, then: str = "") -> Iterator[Advance]:
        step, ended = _Step(total, unit, then, self._clock), threading.Event()

        def report() -> None:
            while not ended.wait(self._interval):
                self._write(f"{name}: {step}")

        self._write(name)
        reporter = threading.Thread(target=report, daemon=True)  # most steps call libraries that report nothing
        reporter.start()
        try:
            yield step.advance
        finally:
            ended.set()
            reporter.join()

    def _write(self, line: str) -> None:
        self._stream.write(f"bf16-convert: {line}\n")
        self._stream.flush()


class BarProgress(Progress):
    """Shows the progress bar ``bar``, of rich, with what :class:`_Step` says beside it."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    @contextmanager
    def step(self, name: str, total: int | None = None, unit: str = BYTES, then: str = "") -> Iterator[Advance]:
        step = _Step(total, unit, then, time.monotonic)
        task = self._bar.add_task(name, total=total, step=step)

        def advance(count: int) -> None:
            step.advance(count)
            self._bar.advance(task, count)

        try:
            yield advance
        finally:
            self._bar.remove_task(task)


@contextmanager
def for_stream(stream: IO[str]) -> Iterator[Progress]:
    """Yield the progress that suits ``stream``: a bar on a terminal, lines elsewhere."""
    if not stream.isatty():
        yield LineProgress(stream)
        return
    from rich import progress
    from rich.console import Console

    with progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=20),
        progress.TextColumn("{task.fields[step]}"),
        console=Console(file=stream),
        redirect_stdout=False,  # `quiet` redirects; with two redirections of one stream, output would be lost
        redirect_stderr=False,
        transient=True,
    ) as bar:
        yield BarProgress(bar)
