"""Shows the progress of a conversion: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from bf16kit.messages.wording import size

_INTERVAL = 5.0  # seconds between plain lines

Advance = Callable[[int], None]


class Progress:
    """Receives each step of a conversion and, within it, the bytes done; shows nothing, for programs that call it."""

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Advance]:
        """Open a step named ``name`` of ``total`` bytes (None: unknown); yield the function to call with bytes done."""
        yield lambda _: None


class LineProgress(Progress):
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
                whole = total if total is not None and done <= total else None
                amount = size(done) if whole is None else f"{size(done)} of {size(whole)}"
                left = f", {(now - start) * (whole - done) / done:.0f} s left" if whole and 0 < done < whole else ""
                self._write(f"{name}: {amount}{left}")

        self._write(name)
        yield advance

    def _write(self, line: str) -> None:
        self._stream.write(f"bf16-convert: {line}\n")
        self._stream.flush()


class BarProgress(Progress):
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

    with progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TimeRemainingColumn(),
        console=Console(file=stream),
        redirect_stdout=False,  # `quiet` redirects; with two redirections of one stream, output would be lost
        redirect_stderr=False,
        transient=True,
    ) as bar:
        yield BarProgress(bar)
