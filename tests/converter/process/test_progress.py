"""Progress in pipes and logs: a few lines, with bytes and the time left; a bar on a terminal."""

from __future__ import annotations

import io

import pytest

from converter.process.progress import LineProgress, SilentProgress, for_stream


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_step_prints_a_line_at_its_start_and_then_every_five_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    with LineProgress(stream, clock).step("writing weights", 100_000_000) as advance:
        for _ in range(10):
            clock.now += 1.0
            advance(5_000_000)
    assert stream.getvalue().splitlines() == [
        "bf16-convert: writing weights",
        "bf16-convert: writing weights: 25.0 MB of 100.0 MB, 15 s left",
        "bf16-convert: writing weights: 50.0 MB of 100.0 MB, 10 s left",
    ]


@pytest.mark.parametrize("total", [None, 1000])
def test_a_step_of_unknown_or_larger_length_shows_only_what_is_done(total: int | None) -> None:
    """An ONNX file of a few kB may have gigabytes of external data."""
    stream, clock = io.StringIO(), Clock()
    with LineProgress(stream, clock).step("reading", total) as advance:
        clock.now = 6.0
        advance(1500)
    assert stream.getvalue().splitlines()[-1] == "bf16-convert: reading: 1.5 kB"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "said"), [(io.StringIO(), "bf16-convert: writing"), (Terminal(), "/2.0 MB")])
def test_a_terminal_gets_a_bar_with_bytes_and_another_stream_lines(stream: io.StringIO, said: str) -> None:
    with for_stream(stream) as progress, progress.step("writing weights", 2_000_000) as advance:
        advance(1_000_000)
    assert "writing weights" in stream.getvalue()
    assert said in stream.getvalue()


def test_silent_progress_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with SilentProgress().step("anything", 1) as advance:
        advance(1)
    assert capsys.readouterr() == ("", "")
