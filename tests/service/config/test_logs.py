"""The log: its lines, and how they are written: to a pipe that is read, that nobody reads, whose reader is gone."""

import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bf16kit.service.config import logs
from bf16kit.service.config.logs import JsonFormatter, LogWriter, TextFormatter


def record(message: str, *args: object, error: BaseException | None = None, **extra: object) -> logging.LogRecord:
    exc_info = (type(error), error, error.__traceback__) if error else None
    made = logging.LogRecord("service.x", logging.INFO, "x.py", 1, message, args, exc_info)
    vars(made).update(extra)
    return made


def failure() -> ValueError:
    try:
        raise ValueError("why\nand how")
    except ValueError as error:
        return error


def parsed(line: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line)
    return found


HOSTILE = "a\n2026-01-01T00:00:00.000Z INFO forged\r\nb\u2028c\u2029d\x85e\x0bf\x1cg\x1b[2Kh\x00i\x08j\udcffk\u202el"


@given(st.text(st.characters(exclude_categories=())))
@example(HOSTILE)
def test_no_text_can_forge_a_second_event_or_command_a_terminal(text: str) -> None:
    for formatter in (TextFormatter(), JsonFormatter()):
        line = formatter.format(record("%s", text, request_id=text))
        assert len(line.splitlines()) == 1
        assert line.isprintable() or text is not HOSTILE
        line.encode("utf-8")  # no lone surrogate
    parsed(line)["request_id"].encode("utf-8")  # not every reader of JSON accepts one
    assert set(parsed(line)) == {"time", "level", "logger", "message", "request_id"}


def test_an_event_has_its_time_in_utc_level_origin_fields_and_traceback() -> None:
    """Other attributes of a record are not logged, and a long id is cut."""
    seen = record(
        "%r is ready", "m", error=failure(), version=3, payload="secret", token="secret", request_id="i" * 999
    )
    line, event = TextFormatter().format(seen), parsed(JsonFormatter().format(seen))
    assert re.match(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO service\.x: 'm' is ready version=3 request_id=i{256} ", line
    )
    assert "ValueError: why | and how" in line
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", event.pop("time"))
    assert "ValueError: why\nand how" in event.pop("exception")
    assert event == {
        "level": "info", "logger": "service.x", "message": "'m' is ready", "version": "3", "request_id": "i" * 256,
    }  # fmt: skip


def test_grpc_does_not_log_what_its_peers_send(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC would log a header with a byte that is not UTF-8, such as a token's, with a traceback."""
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    grpcs = logging.getLogger("grpc._cython.cygrpc")
    logs.silence_grpc()
    logs.silence_grpc()
    assert os.environ["GRPC_VERBOSITY"] == "NONE"
    grpcs.error("Invalid encoding on %s", b"Bearer secret\xff")
    grpcs.error("anything else")
    assert [record.message for record in caplog.records] == ["anything else"]
    monkeypatch.setenv("GRPC_VERBOSITY", "debug")
    logs.silence_grpc()
    assert os.environ["GRPC_VERBOSITY"] == "debug"


# --- written ----------------------------------------------------------------------------------------------------------

_SLOW = 10.0  # seconds: a call that blocks on the pipe takes for ever, and a busy machine takes a second


@pytest.fixture
def pipe() -> Iterator[tuple[int, io.FileIO]]:
    reader, writer = os.pipe()
    with io.FileIO(writer, "w") as file:
        yield reader, file
        os.close(reader)  # ends a thread that is blocked in a write


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    log = logging.getLogger("test.logs")
    log.propagate = False
    log.setLevel(logging.DEBUG)
    yield log
    for handler in log.handlers:
        handler.close()
    log.handlers.clear()


def read_lines(reader: int, last: str) -> list[str]:
    """Return all lines up to one that contains ``last``."""
    content = b""
    while last not in content.decode() or not content.endswith(b"\n"):
        content += os.read(reader, 1 << 16)
    return content.decode().splitlines()


@pytest.mark.long
def test_threads_do_not_wait_for_a_full_pipe_and_the_log_counts_what_was_dropped(
    pipe: tuple[int, io.FileIO], log: logging.Logger
) -> None:
    reader, file = pipe
    writer = LogWriter(file)
    log.addHandler(writer)
    text, count, started = "x" * 1000, 1000, time.monotonic()

    def write(thread: int) -> None:
        for number in range(count):
            log.error("%d-%d %s", thread, number, text)

    threads = [threading.Thread(target=write, args=(thread,), daemon=True) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SLOW)
    assert not any(thread.is_alive() for thread in threads)
    writer.flush()  # waits for a second in vain
    assert time.monotonic() - started < _SLOW
    lines = read_lines(reader, "are lost")
    lost = re.match(r"(\d+) log lines before this one are lost", lines.pop())
    assert lost is not None
    assert 0 < int(lost[1]) == 4 * count - len(lines)
    for name in range(4):
        mine = [int(line.split()[0].partition("-")[2]) for line in lines if line.startswith(f"{name}-")]
        assert mine == list(range(len(mine)))  # in order, the oldest are kept
    log.error("through again")
    assert read_lines(reader, "through") == ["through again"]


def test_a_log_whose_reader_is_gone_costs_no_processor_time_and_counts_the_lines(log: logging.Logger) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with io.FileIO(writer, "w") as file:
        log.addHandler(LogWriter(file))
        for _ in range(10):
            log.error("lost")
        before = time.process_time()
        time.sleep(0.2)  # a writer that tries again and again would use most of it
        assert time.process_time() - before < 0.1
        reader, again = os.pipe()
        os.dup2(again, writer)
        os.close(again)
        log.error("heard")
        heard, note = read_lines(reader, "are lost")
        assert heard == "heard"
        assert note.startswith("10 log lines before this one are lost")
        os.close(reader)


def test_a_pipe_that_another_program_made_non_blocking_loses_no_line(
    pipe: tuple[int, io.FileIO], log: logging.Logger
) -> None:
    reader, file = pipe
    os.set_blocking(file.fileno(), False)
    log.addHandler(LogWriter(file))
    for number in range(500):
        log.debug("%d %s", number, "x" * 1000)
    lines = read_lines(reader, "499 x")
    assert [int(line.split()[0]) for line in lines] == list(range(500))


def run(statements: str, **more: Any) -> subprocess.Popen[str]:
    """Start a process that logs."""
    code = f"import logging, os, signal, sys, warnings\nfrom bf16kit.service.config.logs import configure\n{statements}"
    return subprocess.Popen([sys.executable, "-c", code], text=True, **more)


@pytest.mark.long
@pytest.mark.parametrize("ending", ["sys.exit(3)", "logging.shutdown(); os._exit(3)"])
def test_a_process_whose_log_is_full_ends_with_its_exit_code(ending: str) -> None:
    reader, writer = os.pipe()
    full = "for i in range(3000): logging.debug('x' * 1000); warnings.warn('w' * 1000 + str(i))"
    process = run(f"configure('debug')\n{full}\n{ending}", stderr=writer)
    os.close(writer)
    try:
        assert process.wait(60) == 3
    finally:
        process.kill()
        process.wait()
        os.close(reader)


def test_the_last_lines_and_the_traceback_of_a_process_reach_standard_error() -> None:
    many = "for number in range(1000): logging.debug('line %d', number)"
    last = "logging.info('line last'); raise ValueError('the end')"
    process = run(f"configure('debug')\n{many}\n{last}", stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.count(" root: line ") == 1001
    assert "ValueError: the end" in said


def test_an_error_is_in_the_log_when_the_process_is_killed_right_after_it() -> None:
    killed = "configure('info'); logging.info('last words'); os.kill(os.getpid(), signal.SIGKILL)"
    _, said = run(killed, stderr=subprocess.PIPE).communicate(timeout=60)
    assert "last words" in said


def test_a_closed_standard_error_gets_nothing(tmp_path: Path) -> None:
    """Another file may have its number by now."""
    code = (
        "import logging, os, sys\n"
        "from bf16kit.service.config.logs import configure\n"
        "file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)\n"
        "assert file == 2, file\n"
        "configure('info'); logging.error('x'); logging.shutdown(); os._exit(os.fstat(2).st_size)"
    )
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" "$2" 2>&-', sys.executable, code, tmp_path / "file"], timeout=60, check=False
    )
    assert done.returncode == 0
