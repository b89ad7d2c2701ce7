"""The converter as a process: what libraries print is hidden, errors name their source, garbage waits, and progress is
a few lines in pipes and logs, a bar on a terminal."""

import contextlib
import gc
import io
import logging
import os
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from bf16kit.converter.process.memory import frozen_heap, keep_few_primitives, release_memory
from bf16kit.converter.process.progress import LineProgress, for_stream
from bf16kit.converter.process.quiet import first_line, prefix_errors, quiet
from bf16kit.messages.errors import Bf16kitError, ConversionError, InputRefused, RuntimeFailure, UsageError


def test_nothing_reaches_the_terminal_and_the_state_is_restored(
    capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    handler = logging.StreamHandler(sys.stderr)  # created before, like torch's, so it holds the real stream
    logger = logging.getLogger("a.library")
    logger.addHandler(handler)
    before = sys.stdout, sys.stderr, logging.root.manager.disable, list(warnings.filters)
    try:
        with contextlib.suppress(ZeroDivisionError), quiet():
            sys.stdout.write("printed")
            sys.stderr.write("printed")
            warnings.warn("warned", UserWarning, stacklevel=1)
            logger.warning("logged")
            raise ZeroDivisionError
    finally:
        logger.removeHandler(handler)
    assert (sys.stdout, sys.stderr, logging.root.manager.disable, list(warnings.filters)) == before
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("\n  what\nand much advice"), "ValueError: what"),
        (KeyError(), "KeyError"),
        (ValueError("conflicts:\n- seq is 7\n- and more"), "ValueError: conflicts: seq is 7"),
        (
            RuntimeError(
                "The following operation failed in the TorchScript interpreter.\nTraceback of TorchScript:"
                "\n    return torch.linear(x)\n           ~~~~~~ <--- HERE\nRuntimeError: mat1 and mat2\n"
            ),
            "RuntimeError: mat1 and mat2",
        ),
    ],
)
def test_an_error_is_shown_as_its_first_telling_line(error: Exception, said: str) -> None:
    assert first_line(error) == said


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (ConversionError("step 'fold': no"), "models/m.onnx: step 'fold': no"),
        (RuntimeFailure("cannot load cpu.onnx"), "models/m.onnx: cannot load cpu.onnx"),
        (InputRefused("no row 9", "row 9"), "models/m.onnx: no row 9"),
        (ConversionError("m.onnx: damaged"), "m.onnx: damaged"),
        (UsageError("--out: no"), "--out: no"),
        (MemoryError(), "models/m.onnx: out of memory; it needs more than this machine has free"),
        (
            MemoryError("no 3 TiB"),
            "models/m.onnx: out of memory; it needs more than this machine has free (MemoryError: no 3 TiB)",
        ),
        (RecursionError(), "models/m.onnx: nested too deeply to be converted"),
    ],
)
def test_an_error_names_its_source(raised: Exception, said: str) -> None:
    with pytest.raises(Bf16kitError) as found, prefix_errors(Path("models/m.onnx")):
        raise raised
    assert str(found.value) == said
    assert isinstance(found.value, type(raised) if isinstance(raised, Bf16kitError) else ConversionError)


class Knot:
    """An object that refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def nothing_set_aside() -> Iterator[None]:
    """Unfreeze all objects, as in a process in which only the conversion sets objects aside."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_set_aside")
def test_objects_are_set_aside_until_the_next_time_and_freed_if_they_are_garbage() -> None:
    with contextlib.suppress(ZeroDivisionError), frozen_heap() as set_aside:
        assert not gc.isenabled()
        kept = Knot()
        set_aside(False)
        assert gc.isenabled()
        assert not any(each is kept for each in gc.get_objects())
        alive = weakref.ref(kept)
        del kept
        release_memory()
        assert alive() is not None, "it was set aside"
        set_aside(True)
        assert alive() is None
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0
    assert gc.isenabled()
    gc.freeze()  # as a calling program may do
    count = gc.get_freeze_count()
    with frozen_heap() as set_aside:
        set_aside(True)
    assert 0 < gc.get_freeze_count() <= count


def test_onednn_keeps_few_kernels_unless_the_environment_sets_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.setenv(name, "7")
    keep_few_primitives()
    assert os.environ[name] == "7"
    monkeypatch.delenv(name)
    keep_few_primitives()
    assert os.environ[name] == "16"


def wait_for(said: str, stream: io.StringIO) -> None:
    """Return once ``stream`` holds ``said``."""
    deadline = time.monotonic() + 60
    while said not in stream.getvalue():
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.01)


def test_a_step_writes_lines_while_it_computes_without_a_word_and_none_afterwards() -> None:
    stream, now = io.StringIO(), iter([0.0, *([20.0] * 10_000)])
    with LineProgress(stream, 0.02, lambda: next(now)).step(
        "reading m", 100_000_000, then="making its graph"
    ) as advance:
        wait_for("bf16-convert: reading m\nbf16-convert: reading m: 20 s\n", stream)
        advance(25_000_000)
        wait_for("bf16-convert: reading m: 25.0 MB of 100.0 MB, 20 s, about 60 s left\n", stream)
        advance(75_000_000)
        wait_for("bf16-convert: reading m: 100.0 MB of 100.0 MB, making its graph, 20 s\n", stream)
    after = stream.getvalue()
    time.sleep(0.1)
    assert stream.getvalue() == after


@pytest.mark.parametrize("total", [None, 1000])
def test_a_step_of_unknown_or_larger_length_shows_only_what_is_done(total: int | None) -> None:
    """An ONNX file of a few kB may have gigabytes of external data."""
    stream = io.StringIO()
    with LineProgress(stream, 0.02).step("reading", total) as advance:
        advance(1500)
        wait_for("bf16-convert: reading: 1.5 kB, 0 s\n", stream)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "said"), [(io.StringIO(), "bf16-convert: measuring\n"), (Terminal(), "1 of 3 runs, 0 s, about 0 s left")]
)
def test_a_terminal_gets_a_bar_with_what_is_done_and_another_stream_lines(stream: io.StringIO, said: str) -> None:
    with for_stream(stream) as progress, progress.step("measuring", 3, "runs") as advance:
        advance(1)
        wait_for(said, stream)
    assert "measuring" in stream.getvalue()
