"""TensorFlow's process as its parent sees it: replies, errors, crashes and timeouts. Other programs replace it."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from savedmodels import stand_in
from waiting import until

from bf16kit.messages.errors import RuntimeFailure, UsageError
from converter.read.tensorflow import process
from converter.read.tensorflow.environment import Environment
from converter.read.tensorflow.process import TensorFlowError, TensorFlowProcess

Start = Callable[..., TensorFlowProcess]
_READY = 'ASK.readline(); reply(versions={"tensorflow": "2.21.0"})\n'


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return a function that starts a program with the given code, and its files in the test's own directory."""
    monkeypatch.setattr(process, "on_disk", lambda: tmp_path)

    def call(code: str, seconds: float = 30.0) -> TensorFlowProcess:
        return TensorFlowProcess(Environment(stand_in(tmp_path / "python", code), {}, True), seconds, memory=1 << 40)

    return call


def test_requests_get_replies_one_by_one_and_closing_removes_the_directory(start: Start) -> None:
    child = start(_READY + 'for line in ASK: reply(echo=json.loads(line)["do"])')
    assert child.versions == {"tensorflow": "2.21.0"}
    assert child.ask("this") == {"echo": "this"}
    assert child.ask("that") == {"echo": "that"}
    pid, directory = child._process.pid, child.directory
    assert directory.is_dir()
    child.close()
    assert not directory.exists()
    assert not Path(f"/proc/{pid}").exists()


def test_the_process_ends_when_its_object_is_deleted(start: Start) -> None:
    child = start(_READY + "ASK.read()")
    pid = child._process.pid
    del child
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_processes_that_it_started_end_with_it(start: Start) -> None:
    child = start(
        "import subprocess\n"
        'other = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)\n'
        "ASK.readline(); reply(pid=other.pid)\nline = ASK.readline(); reply(pid=other.pid); ASK.read()"
    )
    pid = child.ask("which")["pid"]
    child.close()
    until(lambda: not _lives(pid))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def test_an_error_reply_is_raised_with_its_text_and_the_process_continues(start: Start) -> None:
    child = start(_READY + 'ASK.readline(); reply(error="ValueError: no such op"); ASK.readline(); reply(fine=1)')
    with pytest.raises(TensorFlowError, match=r"^ValueError: no such op$"):
        child.ask("translate")
    assert child.ask("again") == {"fine": 1}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("sys.exit(3)", "TensorFlow's process ended with exit code 3"),
        ('print("no libcuda", file=sys.stderr); sys.exit(1)', "exit code 1; its last output: no libcuda"),
        ("os.kill(os.getpid(), 9)", r"was killed by SIGKILL \(out of memory\?\)"),
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
        ("os.abort()", r"was killed by SIGABRT \(out of memory\?\)"),
        (
            'ASK.readline(); print("2026-11-22 loading", flush=True); ASK.read()',
            "sent an invalid reply: 2026-11-22",
        ),
        ("ASK.readline(); reply_list = print([1], flush=True); ASK.read()", "sent an invalid reply"),
        ('print("[" * 100000, flush=True); ASK.read()', "sent an invalid reply"),
        ('while True: sys.stdout.write("x" * 65536)', "sent more than 1048576 bytes"),
    ],
)
def test_the_end_of_the_process_and_invalid_replies_are_reported(
    start: Start, tmp_path: Path, code: str, said: str
) -> None:
    with pytest.raises(TensorFlowError, match=said):
        start(code)
    assert not list(tmp_path.glob("bf16kit-tensorflow-*"))


def test_a_process_that_does_not_reply_is_ended_and_the_time_limit_is_named(start: Start) -> None:
    child = start(_READY + "ASK.read(); time.sleep(600)")
    child._seconds = 0.2
    pid = child._process.pid
    with pytest.raises(
        TensorFlowError, match=r"did not answer within 0.2 s; set the environment variable BF16KIT_TENSORFLOW_SECONDS"
    ):
        child.ask("translate")
    assert not Path(f"/proc/{pid}").exists()


def test_a_process_that_sends_single_bytes_does_not_extend_the_time_limit(start: Start) -> None:
    drips = 'while True: sys.stdout.write(" "); sys.stdout.flush(); time.sleep(0.01)'
    child = start(_READY + "ASK.readline()\n" + drips)  # only after the request: the reply to the start is a line
    child._seconds = 0.3
    with pytest.raises(TensorFlowError, match=r"did not answer within 0\.3 s"):
        child.ask("translate")


def test_a_reply_after_the_time_limit_is_not_read_even_if_it_is_ready(start: Start) -> None:
    """Otherwise the parent would wait for a process that sends bytes without end."""
    child = start(_READY + "ASK.readline(); reply(late=1); ASK.read()")
    assert child._process.stdin is not None
    assert child._process.stdout is not None
    child._process.stdin.write(b"{}\n")
    with selectors.DefaultSelector() as selector:
        selector.register(child._process.stdout, selectors.EVENT_READ)
        assert selector.select(60)
    with pytest.raises(TensorFlowError, match="did not answer within 30 s"):
        child._read_line(time.monotonic() - 1)


def test_a_python_that_cannot_be_started_is_reported(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("no program")
    with pytest.raises(TensorFlowError, match="cannot be started: Permission denied"):
        TensorFlowProcess(Environment(tmp_path / "python", {}, True), 1.0)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_an_invalid_time_limit_is_rejected(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    monkeypatch.setenv(process.SECONDS, text)
    with pytest.raises(UsageError, match=f"{process.SECONDS}={text}: expected a number of seconds above 0"):
        TensorFlowProcess(Environment(tmp_path / "python", {}, True))


# --- outputs ----------------------------------------------------------------------------------------------------------

_ANSWERS = _READY + (
    "import numpy as np\n"
    "for line in ASK:\n    request = json.loads(line)\n    found = {name: np.load(file) for name, file in"
    ' request["feeds"].items()}\n    for name, file in request["answers"].items():\n        '
)


def test_feeds_and_outputs_are_passed_unchanged(start: Start) -> None:
    child = start(_ANSWERS + "np.save(file, found['x'] * 2)\n    reply()")
    feeds = [{"x": np.arange(6, dtype=np.float32).reshape(2, 3)}, {"x": np.ones((0, 3), np.float32)}]
    for feed, answer in zip(feeds, child.outputs(feeds, ("y", "z")), strict=True):
        assert set(answer) == {"y", "z"}
        for array in answer.values():
            np.testing.assert_array_equal(array, feed["x"] * 2)
            assert array.dtype == np.float32


@pytest.mark.parametrize(
    "writes",
    [
        "pass",
        "open(file, 'wb').close()",
        "open(file, 'wb').write(b'no array')",
        "np.save(file, np.array([{}], dtype=object), allow_pickle=True)",
        # a header that claims 4 TB
        "np.lib.format.write_array_header_1_0(open(file, 'wb'),"
        " {'descr': '<f4', 'fortran_order': False, 'shape': (2**40,)})",
    ],
)
def test_invalid_outputs_are_rejected_and_take_no_memory(start: Start, writes: str) -> None:
    child = start(_ANSWERS + writes + "\n    reply()")
    with pytest.raises(RuntimeFailure, match="TensorFlow's answer cannot be read"):
        list(child.outputs([{"x": np.ones(1, np.float32)}], ("y",)))


def test_a_failure_on_a_feed_is_reported(start: Start) -> None:
    child = start(_READY + 'for line in ASK: reply(error="InvalidArgumentError: indices[0] = 9 is not in [0, 4)")')
    with pytest.raises(RuntimeFailure, match=r"TensorFlow failed on it: InvalidArgumentError: indices\[0\] = 9"):
        list(child.outputs([{"x": np.ones(1, np.float32)}], ("y",)))


# --- directories ------------------------------------------------------------------------------------------------------


def test_directories_of_killed_converters_are_removed_and_those_in_use_are_not(start: Start, tmp_path: Path) -> None:
    left = tmp_path / "bf16kit-tensorflow-left"
    left.mkdir()
    (left / "lock").touch()
    (left / "model.onnx").touch()
    first = start(_READY + "ASK.read()")
    assert not left.exists()
    second = start(_READY + "ASK.read()")
    assert first.directory.is_dir()
    assert second.directory.is_dir()
    assert first.directory.stat().st_mode & 0o077 == 0


# --- the real program, without TensorFlow -----------------------------------------------------------------------------


def test_the_real_program_reports_that_tensorflow_is_not_installed() -> None:
    import sys

    with pytest.raises(TensorFlowError, match="ModuleNotFoundError: No module named 'tensorflow'"):
        TensorFlowProcess(Environment(Path(sys.executable), {}, False))
