"""Shows the progress of a conversion: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, Any, Protocol

from bf16kit.messages.wording import size

_INTERVAL = 5.0  # seconds between plain lines

Advance = Callable[[int], None]


class Progress(Protocol):
    """Receives each step of a conversion and, within it, the bytes done."""

    def step(self, name: str, total: int | None = None) -> AbstractContextManager[Advance]:
        """Open a step named ``name`` of ``total`` bytes (None: unknown); yield the function to call with bytes done."""
        ...


class SilentProgress:
    """Shows nothing: for tests and for programs that call the converter."""

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Advance]:
        yield lambda _: None


class LineProgress:
    """Writes a line when a step begins, then one every few seconds with bytes and time left."""

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Advance]:
        start = last_written = self._clock()
        done = 0

        def advance(count: int) -> None:
            nonlocal last_written, done
            done += count
            now = self._clock()
            if now - last_written >= _INTERVAL:
                last_written = now
                self._write(f"{name}: {_amount(done, total)}{_time_left(done, total, now - start)}")

        self._write(name)
        yield advance

    def _write(self, line: str) -> None:
        self._stream.write(f"bf16-convert: {line}\n")
        self._stream.flush()


class BarProgress:
    """Shows the progress bar ``bar``, of rich, with bytes and time left."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Advance]:
        task = self._bar.add_task(name, total=total)
        try:
            yield lambda count: self._bar.advance(task, count)
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

    described = (progress.SpinnerColumn(), progress.TextColumn("{task.description}"), progress.BarColumn())
    with progress.Progress(
        *described,
        progress.DownloadColumn(),
        progress.TimeRemainingColumn(),
        console=Console(file=stream),
        redirect_stdout=False,  # `quiet` redirects; with two redirections of one stream, output would be lost
        redirect_stderr=False,
        transient=True,
    ) as bar:
        yield BarProgress(bar)


def _amount(done: int, total: int | None) -> str:
    return size(done) if total is None or done > total else f"{size(done)} of {size(total)}"


def _time_left(done: int, total: int | None, elapsed: float) -> str:
    if total is None or not 0 < done < total:
        return ""
    return f", {elapsed * (total - done) / done:.0f} s left"
